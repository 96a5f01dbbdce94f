"""The loops that are timed: parts of a round, and whole rounds of trees."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.timing import round_times
import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample.choosing import loops
from specsample.choosing import tree_rounds
from specsample.types import Draft, DraftKind
from specsample.verify import chain

_MODEL = testing.tiny_llama(vocab_size=37)


class _Unreadable:
  vocab_size, max_length = 37, 64
  init_cache = apply = None


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'verify', 'num_products'),
  [
    (drafters.NoDraft(), chain, 1),
    (drafters.Ngram(num_draft_tokens=2), chain, 1),
    # The bounds, and all logits where these are not enough.
    (drafters.NoDraft(), specsample.verify.certified, 2),
  ],
)
def test_a_timed_pass_of_the_target_unembeds(drafter, verify, num_products):
  # The compiler found that nobody reads the logits of a pass without drafts.
  target = _MODEL.init(jax.random.key(0))
  params = {'target': target, 'shadow': _MODEL.shadow(target)}
  prompts, lengths = specsample.pad_prompts([[1, 2, 3]])
  decoder = specsample.Decoder(_MODEL, drafter, verify)
  state = specsample.prefill(
    decoder,
    params,
    prompts,
    lengths,
    jax.random.key(0),
    sampling=specsample.Sampling(),
    max_new_tokens=8,
    log_probs=False,
  )
  lowered = loops.drafted_rounds.lower(decoder, params, state, rounds=2)
  # One for each width; a round runs one of them.
  num_widths = len(decoder.widths)
  assert _num_unembeddings(lowered) == num_products * num_widths
  _, draft = lowered.out_info
  lowered = loops.target_rounds.lower(decoder, params, state, draft, rounds=2)
  assert _num_unembeddings(lowered) == num_products * num_widths


@pytest.mark.parametrize(
  ('model', 'drafter', 'widths'),
  [
    (_MODEL, drafters.NoDraft(), (0,)),
    (_MODEL, drafters.Chain(model=_MODEL, num_draft_tokens=3), (3,)),
    (_MODEL, drafters.Ngram(num_draft_tokens=3), (0, 3)),
    # Without `read`, the model has no passes of several widths.
    (_Unreadable(), drafters.Ngram(num_draft_tokens=3), (3,)),
  ],
)
def test_the_widths_are_those_of_passes(model, drafter, widths):
  assert specsample.Decoder(model, drafter, chain).widths == widths


@pytest.mark.parametrize(
  'drafter',
  [
    drafters.Ngram(num_draft_tokens=4),
    drafters.NgramTree(num_branches=2, depth=2),
  ],
)
def test_a_draft_of_a_width_is_read_in_a_pass_over_it(drafter):
  topology = getattr(drafter, 'topology', None)
  draft = Draft(
    tokens=np.full((2, 4), -1, np.int32),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=None if topology is None else np.asarray([topology.parents] * 2),
  )
  for width in range(5):
    found = loops.of_width(draft, width=width)
    assert loops.most_drafts(found) == width
    assert found.tokens.shape == draft.tokens.shape


@pytest.mark.slow
def test_the_widest_row_decides_how_wide_a_round_is():
  repeats, others = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9]
  drafter = drafters.Ngram(num_draft_tokens=3)
  decoder = specsample.Decoder(_MODEL, drafter, chain)
  params = {'target': _MODEL.init(jax.random.key(0))}

  def first_width(prompts):
    tokens, lengths = specsample.pad_prompts(prompts)
    state = specsample.prefill(
      decoder,
      params,
      tokens,
      lengths,
      jax.random.key(0),
      sampling=specsample.Sampling(),
      max_new_tokens=8,
    )
    decode_one = functools.partial(
      specsample.advance, decoder, params, max_rounds=1
    )
    found = round_times.widths_of_rounds(decode_one, state, 20, (0, 3))
    # With eight new tokens at most, all rows are done before the last round.
    assert set(found) <= {0, 3} and 2 <= len(found) <= 8
    return found[0]

  assert first_width([others, others]) == 0
  assert first_width([others, repeats]) == 3


def _num_unembeddings(lowered) -> int:
  """Counts the products whose results span the vocabulary."""
  lines = lowered.compile().as_text().splitlines()
  results = [line.partition(' dot(')[0] for line in lines if ' dot(' in line]
  return sum(f',{_MODEL.vocab_size}]' in result for result in results)


_widths: list[int] = []


@dataclasses.dataclass(frozen=True)
class _Watched(testing.HashModel):
  """A model that notes how many tokens each pass of a round reads."""

  def read(self, params, tokens, *args, **kwargs):
    jax.debug.callback(lambda: _widths.append(tokens.shape[1]), ordered=True)
    return super().read(params, tokens, *args, **kwargs)


@pytest.mark.slow
def test_rounds_read_as_many_nodes_as_they_are_timed_for():
  drafter = drafters.Tree(
    drafter=drafters.Chain(
      model=testing.HashModel(vocab_size=32), num_draft_tokens=2
    ),
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
