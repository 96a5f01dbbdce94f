"""Times of rounds of trees that are cut to given numbers of nodes."""

import dataclasses

import jax

from specsample import drafters
from specsample import tree
from specsample.choosing import tree_rounds
from specsample.testing import hash_model

_MODEL = hash_model.HashModel(vocab_size=32)
_widths: list[int] = []


@dataclasses.dataclass(frozen=True)
class _Watched(hash_model.HashModel):
  """A model that notes how many tokens each pass of a round reads."""

  def read(self, params, tokens, *args, **kwargs):
    jax.debug.callback(lambda: _widths.append(tokens.shape[1]), ordered=True)
    return super().read(params, tokens, *args, **kwargs)


def test_rounds_read_as_many_nodes_as_they_are_timed_for():
  drafter = drafters.Tree(
    drafter=drafters.Chain(model=_MODEL, num_draft_tokens=2),
    topology=tree.Topology((0, 0, 0, 2, 1)),
  )
  found = tree_rounds.seconds(
    {'target': {}, 'drafter': {}},
    _Watched(vocab_size=32),
    drafter,
    (0, 1, 3, 5),
    length=4,
    batch=2,
    rounds=2,
    repeats=3,
  )
  assert list(found) == ['plain', '0', '1', '3', '5']
  assert all(len(seconds) == 3 for seconds in found.values())
  of_rounds = _widths[1:]  # the first pass is the prompt's
  assert of_rounds == [1, 1, 1, 1, 2, 2, 4, 4, 6, 6] * (3 + 1)
