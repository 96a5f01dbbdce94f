"""Prompt lookup: which occurrence is continued, and how far."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling


def propose(sequence, num_draft_tokens=4, padding=8, **kwargs):
  drafter = drafters.Ngram(num_draft_tokens=num_draft_tokens, **kwargs)
  tokens = jnp.asarray([list(sequence) + [0] * padding])
  length = jnp.asarray([len(sequence)])
  draft, _ = drafter.propose({}, None, None, tokens, length, ())
  return draft.tokens[0].tolist()


def test_continues_the_longest_match():
  # The longest match, 9 1 2, is further back than the latest match of 1 2.
  sequence = [9, 1, 2, 5, 6, 7, 8, 1, 2, 3, 9, 1, 2]
  assert propose(sequence, max_ngram=3) == [5, 6, 7, 8]
  assert propose(sequence, max_ngram=2) == [3, 9, 1, 2]


def test_latest_of_equal_matches_wins():
  assert propose([1, 2, 3, 4, 1, 2, 5, 6, 1, 2])[:2] == [5, 6]


def test_without_a_match_nothing_is_drafted():
  assert propose([1, 2, 3, 4]) == [-1] * 4
  assert propose([1, 2, 1], min_ngram=2) == [-1] * 4
  assert propose([1, 2, 1], min_ngram=1) == [2, 1, 2, 1]
  assert propose([1], min_ngram=1) == [-1] * 4


def test_copy_goes_on_into_its_own_draft():
  assert propose([7, 1, 2, 3, 1, 2, 3], num_draft_tokens=5) == [1, 2, 3, 1, 2]
  assert propose([4, 4, 4], num_draft_tokens=3) == [4, 4, 4]


def test_padding_is_never_read():
  assert propose([0, 3, 5, 0], min_ngram=1, padding=20) == [3, 5, 0, 3]
  assert propose([3, 0], min_ngram=1, padding=20) == [-1] * 4


def brute_force(sequence, num_draft_tokens, max_ngram, min_ngram):
  for n in range(min(max_ngram, len(sequence) - 1), min_ngram - 1, -1):
    for start in range(len(sequence) - 1, n - 1, -1):
      if sequence[start - n : start] == sequence[-n:]:
        extended = list(sequence)
        for i in range(num_draft_tokens):
          extended.append(extended[start + i])
        return extended[len(sequence) :]
  return [-1] * num_draft_tokens


@pytest.mark.parametrize('seed', range(40))
def test_equals_a_search_by_hand(seed):
  rng = np.random.default_rng(seed)
  sequence = rng.integers(0, 3, size=rng.integers(1, 20)).tolist()
  sizes = {'max_ngram': int(rng.integers(2, 6)), 'min_ngram': 2}
  expected = brute_force(sequence, 4, **sizes)
  assert propose(sequence, **sizes) == expected


def test_refuses_an_empty_range():
  with pytest.raises(ValueError, match='min_ngram is 3 and max_ngram 2'):
    drafters.Ngram(num_draft_tokens=2, max_ngram=2, min_ngram=3)


def _branches(sequence, **kwargs):
  drafter = drafters.NgramTree(**kwargs)
  tokens = jnp.asarray([list(sequence) + [0] * 8])
  draft, _ = drafter.propose(
    {}, None, None, tokens, jnp.asarray([len(sequence)]), ()
  )
  assert drafter.topology.parents == tuple(draft.parents[0].tolist())
  return np.asarray(draft.tokens[0]).reshape(-1, drafter.depth).tolist()


def test_branches_continue_other_occurrences():
  # 9 1 2 is the longest match. Matches of 1 2 follow, the latest first, except
  # the one whose continuation begins with the same token as another's.
  sequence = [1, 2, 8, 1, 2, 3, 4, 9, 1, 2, 5, 6, 1, 2, 3, 7, 9, 1, 2]
  found = _branches(sequence, num_branches=4, depth=3, max_ngram=3)
  assert found == [[5, 6, 1], [3, 7, 9], [8, 1, 2], [-1, -1, -1]]


def test_the_first_branch_is_the_chain():
  rng = np.random.default_rng(0)
  for _ in range(20):
    sequence = rng.integers(0, 3, size=15).tolist()
    first, *others = _branches(sequence, num_branches=3, depth=4)
    assert first == propose(sequence)
    firsts = [path[0] for path in [first, *others] if path[0] >= 0]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize('name', ['num_branches', 'depth'])
def test_refuses_an_empty_tree(name):
  settings = {'num_branches': 2, 'depth': 2, name: 0}
  with pytest.raises(ValueError, match=f'{name} is 0: give an integer of at'):
    drafters.NgramTree(**settings)


_widths_read: list[int] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(testing.HashModel):
  """The same model, but it records how many tokens each pass reads."""

  def read(self, params, tokens, *args, **kwargs):
    width = tokens.shape[1]
    jax.debug.callback(lambda: _widths_read.append(width))
    return super().read(params, tokens, *args, **kwargs)


@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    (drafters.Ngram(num_draft_tokens=3), verify.chain),
    (drafters.NgramTree(num_branches=2, depth=2), verify.tree),
  ],
)
def test_where_no_row_has_a_match_the_target_reads_one_token(drafter, rule):
  model, params = _Watched(vocab_size=6), {'target': {}}
  state = decode.prefill(
    Decoder(model, drafter, rule),
    params,
    np.asarray([[1, 2, 3], [4, 0, 0]]),
    np.asarray([3, 1]),
    jax.random.key(0),
    sampling=Sampling(temperature=1.0),
    max_new_tokens=40,
  )
  seen = set()
  for _ in range(16):
    undrafted = np.asarray(state.proposed)[:, 0]
    jax.effects_barrier()
    _widths_read.clear()
    state = decode.advance(
      Decoder(model, drafter, rule), params, state, max_rounds=1
    )
    is_drafted = bool(np.any(state.proposed[:, 0] == undrafted))
    jax.effects_barrier()
    assert _widths_read == [1 + is_drafted * drafter.num_draft_tokens]
    seen.add(is_drafted)
  assert seen == {False, True}
