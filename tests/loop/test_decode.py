"""The round: stops, bookkeeping, penalties and counts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import types
from specsample import verify
from specsample.drafter import Drafter
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.testing import hash_model
from specsample.types import ModelOutput, Origin, StopReason
from tests.loop import scene

VOCAB = 32


@dataclasses.dataclass(frozen=True)
class Counting(hash_model.HashModel):
  """A model in which token t is followed by (t + 1) % VOCAB with certainty."""

  vocab_size: int = VOCAB

  def apply(self, params, tokens, cache, features=()):
    output, cache = super().apply(params, tokens, cache, features)
    logits = 50.0 * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)
    return dataclasses.replace(output, logits=logits), cache


TARGET = Counting()
PERFECT = drafters.Chain(model=TARGET, num_draft_tokens=4)
_GREEDY = {
  'model': TARGET,
  'drafter': PERFECT,
  'sampling': specsample.Sampling(temperature=0.0),
}


def generate(prompts, **changes) -> types.Output:
  arguments = _GREEDY | {'max_new_tokens': 10} | changes
  return jax.device_get(scene.generate(prompts, **arguments))


def prefill(prompts, **changes):
  arguments = _GREEDY | {'max_new_tokens': 4} | changes
  return scene.prefill(prompts, **arguments)


class _Forgetful(hash_model.HashModel):
  """A model that takes a tree's shape and reads a chain."""

  def read(self, params, tokens, cache, features=(), parents=None):
    return super().read(params, tokens, cache, features)


def test_a_model_that_ignores_the_shape_of_a_tree_is_refused():
  ngram = drafters.NgramTree(num_branches=2, depth=2, min_ngram=1)
  model = _Forgetful(vocab_size=VOCAB)
  with pytest.raises(ValueError, match=r'\.read takes parents and ignores it'):
    generate([[1, 2, 1]], model=model, drafter=ngram, verify=verify.tree)


def _stop(*eos_ids, sequences=()):
  return {'stop': specsample.Stop(eos_ids=eos_ids, sequences=sequences)}


# The first round emits 2 to 6, so 5, 6, 7 is completed in the second.
_OF_TWO_ROUNDS = _stop(sequences=((5, 6, 7), (20,)))
_NO_DRAFT = {'drafter': drafters.NoDraft()}


@pytest.mark.slow(but=('prompt0-changes0-tokens0-EOS',))
@pytest.mark.parametrize(
  ('prompt', 'changes', 'tokens', 'reason'),
  [
    ([1], _stop(4, 30), [2, 3, 4], 'EOS'),
    # It wins over the limit.
    ([1], _stop(3) | {'max_new_tokens': 2}, [2, 3], 'EOS'),
    ([1], _OF_TWO_ROUNDS, [2, 3, 4, 5, 6, 7], 'SEQUENCE'),
    ([1], _OF_TWO_ROUNDS | _NO_DRAFT, [2, 3, 4, 5, 6, 7], 'SEQUENCE'),
    # A sequence that begins in the prompt does not count.
    (
      [0, 1],
      _stop(sequences=((1, 2),)) | {'max_new_tokens': 4},
      [2, 3, 4, 5],
      'MAX_NEW_TOKENS',
    ),
    ([1], {'max_length': 8}, [2, 3, 4, 5, 6, 7, 8], 'CACHE_FULL'),
    ([1, 2, 3], {'max_length': 8}, [4, 5, 6, 7, 8], 'CACHE_FULL'),
    (
      [1, 2],
      {'model': dataclasses.replace(TARGET, max_length=6)},
      [3, 4, 5, 6],
      'CACHE_FULL',
    ),
  ],
)
def test_a_row_ends_where_its_first_reason_is(prompt, changes, tokens, reason):
  output = generate([prompt], **changes)
  assert scene.rows(output) == [tokens]
  assert not output.tokens[0, len(tokens) :].any()
  assert StopReason(output.stop_reason[0]).name == reason


def test_drafts_that_are_cut_by_an_end_are_not_counted_as_accepted():
  output = generate([[1]], **_stop(4, 30))
  assert output.rounds[0] == 1
  assert output.proposed[0].tolist() == [0, 0, 0, 0, 1]
  assert output.accepted[0].tolist() == [0, 0, 0, 1, 0]


@pytest.mark.slow(but=('1',))
@pytest.mark.parametrize('max_new_tokens', range(1, 8))
def test_drafts_are_clamped_to_what_remains(max_new_tokens):
  output = generate([[1], [7, 8]], max_new_tokens=max_new_tokens)
  assert output.lengths.tolist() == [max_new_tokens] * 2
  assert (output.stop_reason == StopReason.MAX_NEW_TOKENS).all()
  first = min(4, max_new_tokens - 1)
  assert output.proposed[0, first] >= 1
  drafted = (output.proposed * np.arange(5)).sum(axis=1)
  assert (drafted + output.rounds == max_new_tokens).all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Drafter):
  """Drafts the same tokens every round, as a point mass."""

  tokens: tuple[int, ...]

  @property
  def num_draft_tokens(self):
    return len(self.tokens)

  def init(self, params, batch_size, max_length):
    return jnp.zeros(batch_size, jnp.int32)

  def observe(self, params, tokens, count, output, verdict, state):
    return state + count

  def propose(self, params, draw, warp, tokens, length, state):
    drafted = jnp.broadcast_to(
      jnp.asarray(self.tokens), (tokens.shape[0], len(self.tokens))
    )
    kind = types.DraftKind.POINT_MASS
    return types.Draft(tokens=drafted, probs=None, kind=kind), state


def test_origin_and_round_of_every_token():
  # 2 and 3 are right; 9 is corrected to 4; then 2 is corrected to 5. There is
  # no room for a draft of the last token.
  output = generate([[1]], drafter=Given(tokens=(2, 3, 9)), max_new_tokens=5)
  assert output.tokens[0].tolist() == [2, 3, 4, 5, 6]
  names = [Origin(origin).name for origin in output.origin[0]]
  assert names == [*2 * ['ACCEPTED'], *2 * ['CORRECTION'], 'PLAIN']
  assert output.emit_round[0].tolist() == [0, 0, 0, 1, 2]
  assert output.proposed[0].tolist() == [1, 1, 0, 1]
  assert output.accepted[0].tolist() == [2, 0, 1, 0]
  stats = specsample.stats.summarize(output)
  assert stats.tokens_per_round == pytest.approx(5 / 3)
  assert stats.acceptance_by_position == (0.5, 1.0, 0.0)
  # A bonus follows a whole draft.
  output = generate([[1]], drafter=Given(tokens=(2, 3)), max_new_tokens=3)
  names = [Origin(origin).name for origin in output.origin[0]]
  assert names == [*2 * ['ACCEPTED'], 'BONUS']


def test_prefill_counts_every_prompt_token_but_the_pending():
  prompts = [[1] * 300, [2], [3] * 129]
  _, state = prefill(prompts, drafter=Given(tokens=(1,)))
  assert state.draft.tolist() == [299, 0, 128]
  assert state.cache.length.tolist() == [299, 0, 128]


def test_chunked_prefill_equals_one_pass():
  model = hash_model.HashModel(vocab_size=VOCAB)
  prompts = [list(np.arange(n) % VOCAB) for n in (300, 128, 129, 2)]
  padded, lengths = specsample.pad_prompts(prompts)
  _, state = prefill(prompts, model=model, drafter=drafters.NoDraft())
  _, cache = model.apply({}, padded, model.init_cache(4, padded.shape[1]))
  for row, length in enumerate(lengths):
    np.testing.assert_array_equal(
      state.cache.hashes[row, :length], cache.hashes[row, :length]
    )


@pytest.mark.slow
def test_cache_smaller_than_the_bucket_holds_whole_chunks():
  model = hash_model.HashModel(vocab_size=VOCAB)
  prompts = [list(np.arange(300) % VOCAB)]
  short = generate(prompts, model=model, max_length=303)
  long = generate(prompts, model=model)
  assert short.lengths[0] == 3
  np.testing.assert_array_equal(short.tokens[0, :3], long.tokens[0, :3])


_MODEL = hash_model.HashModel(vocab_size=VOCAB)
_CLOSE = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.2), num_draft_tokens=3
)
# Accepted paths are not always the first nodes.
_TREE = drafters.Tree(
  drafter=dataclasses.replace(_CLOSE, num_draft_tokens=2),
  topology=tree.Topology((0, 0, 0, 2, 1, 2)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    # The target reads fewer than K draft tokens.
    (
      drafters.Adaptive(
        drafter=_CLOSE, policies=(policies.TokenProbability(0.2),), widths=(1,)
      ),
      verify.chain,
    ),
    (
      drafters.Adaptive(
        drafter=_TREE, policies=(policies.TopNodes(3),), widths=(3,)
      ),
      verify.tree,
    ),
  ],
  ids=['chain', 'tree'],
)
def test_log_probs_are_the_unwarped_targets(drafter, rule):
  model = _MODEL
  prompt = [3, 1, 4]
  output = generate(
    [prompt],
    model=model,
    drafter=drafter,
    verify=rule,
    sampling=specsample.Sampling(
      temperature=1.0,
      top_k=4,
      presence_penalty=0.5,
      logit_bias=np.arange(model.vocab_size) / 4,
    ),
  )
  assert output.rounds[0] < 10
  sequence = jnp.asarray([prompt + output.tokens[0].tolist()])
  scored: ModelOutput
  scored, _ = model.apply({}, sequence, model.init_cache(1, sequence.size))
  log_probs = jax.nn.log_softmax(scored.logits[0, 2:-1])
  expected = log_probs[np.arange(10), output.tokens[0]]
  np.testing.assert_allclose(output.log_probs[0], expected, rtol=1e-6)


def test_done_rows_stay_as_they_are():
  settings = _stop(5) | {'max_new_tokens': 30}
  output, alone = generate([[1], [3]], **settings), generate([[3]], **settings)
  rows = zip(jax.tree.leaves(output), jax.tree.leaves(alone), strict=True)
  for both, one in rows:
    np.testing.assert_array_equal(both[1], one[0])


def test_a_row_that_is_cancelled_stays_as_it_is():
  decoder, state = prefill([[1], [3]], max_new_tokens=30)
  go_on = functools.partial(specsample.advance, decoder, scene.PARAMS)
  state = go_on(state, max_rounds=1)
  before = int(state.length[1])
  state = dataclasses.replace(state, done=state.done.at[1].set(True))
  state = go_on(state, max_rounds=30)
  assert state.done.tolist() == [True, True]
  assert state.length.tolist() == [31, before]


def _lowered(decoder, state, params=scene.PARAMS):
  stop = specsample.Stop().conditions(VOCAB)
  return decode._advance.lower(decoder, params, state, stop, 4, 99)


def test_a_profile_can_tell_the_parts_of_a_round():
  ngram = drafters.Ngram(num_draft_tokens=2)
  lowered = _lowered(*prefill([[1, 2, 3]], drafter=ngram))
  text = lowered.as_text(debug_info=True)
  parts = re.findall(r'"jit\(_advance\)/while/body/(\w+)/', text)
  # A round has no operation outside of the three parts.
  assert set(parts) == {'draft', 'verify', 'commit'}
  # N-gram lookup compares tokens and needs no softmax.
  of_softmax = re.findall(r'while/body/(\w+)/[^"]*\bexp"', text)
  assert 'verify' in of_softmax and 'draft' not in of_softmax


@pytest.mark.slow
def test_a_round_of_a_tree_copies_no_cache():
  target = testing.tiny_llama(vocab_size=VOCAB)
  drafter = drafters.NgramTree(num_branches=2, depth=3)
  decoder = Decoder(target, drafter, verify.tree)
  params = {'target': jax.eval_shape(target.init, jax.random.key(0))}
  state = jax.eval_shape(
    lambda params, prompt: specsample.prefill(
      decoder,
      params,
      prompt,
      jnp.asarray([3]),
      jax.random.key(0),
      sampling=specsample.Sampling(),
      max_new_tokens=997,
    ),
    params,
    jax.ShapeDtypeStruct((1, 3), np.int32),
  )
  rounds = _lowered(decoder, state, params)
  program = rounds.compile().as_text()
  slots = state.cache.keys[0].shape[2]  # no other array has as many
  found = re.findall(rf'\w+\[1,\d+,{slots},\d+\]\S* (\S+)\(', program)
  assert 'copy' not in found and len(found) > 4
