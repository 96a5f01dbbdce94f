"""Drafting as text: the output is the target's own, whatever is drafted."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

import specsample
from specsample import testing
from specsample import text
from specsample import verify
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.vocabularies import slem

# The same text takes a few long tokens or many short ones.
_LONG = ('a', 'b', 'ab', 'ba', 'aba')
_LONG_MERGES = [('a', 'b'), ('b', 'a'), ('ab', 'a')]
_SHORT = ('b', 'a')


def _tokenizer(names, merges=()):
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={name: i for i, name in enumerate(names)}, merges=list(merges)
    )
  )
  backend.decoder = tokenizers.decoders.Fuse()
  return text.Tokenizer(backend=backend, named_tokens={})


def _loaded(names, merges=(), **settings):
  model = testing.HashModel(vocab_size=len(names), **settings)
  return specsample.Loaded(model, {}, _tokenizer(names, merges))


_TARGET = _loaded(_LONG, _LONG_MERGES)
_DRAFT = _loaded(_SHORT)
_PROMPTS = [[0, 1, 2], [4], [3, 3, 0, 1, 1]]


def _generate(target=_TARGET, draft=_DRAFT, prompts=_PROMPTS, **settings):
  arguments = {
    'num_draft_tokens': 3,
    'verify': verify.chain,
    'sampling': specsample.Sampling(),
    'max_new_tokens': 10,
  }
  output = slem.generate(
    target, draft, prompts, jax.random.key(0), **(arguments | settings)
  )
  return jax.device_get(output)


def _plain(prompts=_PROMPTS, **settings):
  arguments = {'verify': verify.chain, 'sampling': specsample.Sampling()}
  return jax.device_get(
    specsample.generate(
      {'target': {}},
      *specsample.pad_prompts(prompts),
      jax.random.key(0),
      model=_TARGET.model,
      drafter=specsample.drafters.NoDraft(),
      max_new_tokens=10,
      **(arguments | settings),
    )
  )


def test_greedy_output_is_the_targets():
  output = _generate()
  np.testing.assert_array_equal(output.tokens, _plain().tokens)
  # With five tokens, some drafts are right by chance.
  assert specsample.stats.summarize(output).tokens_per_round > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reordered(testing.HashModel):
  """The same model with other ids: token i was order[i] before."""

  order: tuple[int, ...]

  def apply(self, params, tokens, cache, features=(), parents=None):
    order = jnp.asarray(self.order)
    output, cache = super().apply(
      params, order[tokens], cache, features, parents
    )
    return dataclasses.replace(output, logits=output.logits[..., order]), cache


def test_drafts_of_the_same_model_are_all_kept_whatever_its_ids():
  order, letters = (3, 0, 4, 2, 1), 'vwxyz'
  target = _loaded(tuple(letters))
  draft = specsample.Loaded(
    _Reordered(vocab_size=5, order=order),
    {},
    _tokenizer([letters[i] for i in order]),
  )
  output = _generate(target, draft)
  np.testing.assert_array_equal(output.tokens, _plain().tokens)
  # Ten tokens: four in each of two rounds, and two in the last one.
  assert output.accepted.tolist() == [[0, 1, 0, 2]] * 3


def test_tokens_are_distributed_as_the_targets():
  sampling = specsample.Sampling(temperature=1.0)
  rows = 3000
  output = _generate(
    prompts=[[0, 1]] * rows,
    num_draft_tokens=2,
    sampling=sampling,
    max_new_tokens=3,
  )
  table = conditional_lib.from_model(_TARGET.model, {}, (0, 1), sampling)
  law = conditional_lib.joint_law(table, 3)
  found = collections.Counter(map(tuple, output.tokens.tolist()))
  counts = np.zeros(125)
  for tokens, count in found.items():
    counts[np.ravel_multi_index(tokens, (5, 5, 5))] = count
  result = chi_square.test([(counts, law)])
  assert result.passed, result
  assert specsample.stats.summarize(output).tokens_per_round > 1.05


def test_coupled_output_is_plain_sampling_in_any_batch():
  settings = {
    'sampling': specsample.Sampling(temperature=1.0),
    'verify': verify.coupled,
  }
  output, plain = _generate(**settings), _plain(**settings)
  np.testing.assert_array_equal(output.tokens, plain.tokens)
  alone = _generate(prompts=_PROMPTS[2:], request_ids=[2], **settings)
  np.testing.assert_array_equal(alone.tokens[0], plain.tokens[2])
  assert alone.rounds[0] == output.rounds[2]


def test_whether_a_row_drafts_depends_on_no_other_row():
  # The row's text has too many short tokens for its own room, but not for the
  # buffer that the longer row needs.
  row, longer = [4] * 63, [0] * 200
  settings = {
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 16,
  }
  alone = _generate(prompts=[row], request_ids=[3], **settings)
  both = _generate(prompts=[longer, row], request_ids=[0, 3], **settings)
  np.testing.assert_array_equal(both.tokens[1], alone.tokens[0])
  np.testing.assert_array_equal(both.proposed[1], alone.proposed[0])


def test_a_stop_token_ends_a_row():
  stop = specsample.Stop(eos_ids=(int(_plain().tokens[0, 4]),))
  output, plain = _generate(stop=stop), _plain(stop=stop)
  np.testing.assert_array_equal(output.tokens, plain.tokens)
  assert output.stop_reason.tolist() == plain.stop_reason.tolist()
  assert specsample.StopReason.EOS in output.stop_reason


@pytest.mark.parametrize(
  ('ids', 'written', 'expected'),
  [
    # Encoded as the tokenizer goes on.
    ([3], 'b', [1]),
    ([0, 0], 'ab', [2]),
    # The tokenizer would merge the last id into 'ab', but that id stays.
    ([0], 'ba', [3]),
    ([1, 0], 'b', [1]),
    # Two tokens that the tokenizer would have merged into one.
    ([0, 1], 'ab', [2]),
  ],
)
def test_ids_that_follow_leave_those_before_as_they_are(ids, written, expected):
  tokenizer = _TARGET.tokenizer
  found = slem.following(tokenizer, ids, written)
  assert found == expected
  assert tokenizer.decode([*ids, *found]) == tokenizer.decode(ids) + written


def test_a_number_a_row_and_more_than_there_is_room_for_are_taken():
  target = _loaded(_LONG, _LONG_MERGES, max_length=16)
  output = _generate(target, max_new_tokens=np.asarray([3, 2**31 - 1, 5]))
  assert output.lengths.tolist() == [3, 15, 5]
  assert output.tokens.shape[1] < 1000  # not what was asked for


def test_without_room_the_target_goes_on_alone():
  draft = _loaded(_SHORT, max_length=8)
  output = _generate(draft=draft)
  np.testing.assert_array_equal(output.tokens, _plain().tokens)
  # The draft model has room for five letters and three drafts.
  assert output.proposed[1].sum() > output.proposed[1, 1:].sum() > 0
  message = 'takes at most 3 tokens, too few for 3 draft tokens'
  with pytest.raises(ValueError, match=message):
    _generate(draft=_loaded(_SHORT, max_length=3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Silent(testing.HashModel):
  """A model without a distribution."""

  def unembed(self, params, hidden):
    return jnp.full_like(super().unembed(params, hidden), jnp.nan)


def test_a_draft_model_without_a_distribution_changes_nothing():
  draft = specsample.Loaded(_Silent(vocab_size=2), {}, _DRAFT.tokenizer)
  output = _generate(draft=draft)
  np.testing.assert_array_equal(output.tokens, _plain().tokens)
  assert output.proposed[:, 1:].sum() == 0


@pytest.mark.parametrize(
  ('models', 'message'),
  [
    ({'draft': _loaded(_SHORT, max_length=3)}, 'at most 3 tokens, too few'),
    (
      {'draft': specsample.Loaded(_DRAFT.model, {}, None)},
      'without a tokenizer',
    ),
    (
      {'target': specsample.Loaded(_TARGET.model, {}, None)},
      'without a tokenizer',
    ),
  ],
)
def test_refuses_before_anything_is_compiled(models, message, num_compiled):
  before = num_compiled()
  with pytest.raises(ValueError, match=message):
    # A number of tokens that no other test has compiled.
    _generate(max_new_tokens=77, **models)
  assert num_compiled() == before
