"""Invalid logits stop their row and don't bias the tokens before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop import decode
from specsample.models import attention
from specsample.testing import chi_square
from specsample.types import DraftKind, StopReason
from tests.loop import scene
from tests.loop.scene import CHAIN
from tests.loop.scene import NGRAM
from tests.loop.scene import VOCAB

_RULES = {
  'chain': verify.chain,
  'block': verify.block,
  'coupled': verify.coupled,
}


def _generate(prompts, **changes):
  return scene.generate(prompts, **({'max_new_tokens': 40} | changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Breaks(testing.HashModel):
  """Returns bad logits after one token."""

  value: float = float('nan')
  behind: int = 5

  def read(self, params, tokens, cache, features=(), parents=None):
    output, new = super().read(params, tokens, cache, features, parents)
    bad = (tokens == self.behind)[..., None]
    logits = jnp.where(bad, self.value, output.logits)
    return dataclasses.replace(output, logits=logits), new


# Invalid logits are found before the rule, so one pair tests the other values.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'rule', 'value'),
  [
    (drafters.NoDraft(), 'chain', float('nan')),
    (CHAIN, 'chain', float('nan')),
    (NGRAM, 'coupled', float('nan')),
    (CHAIN, 'block', float('inf')),
    (CHAIN, 'block', float('-inf')),
  ],
)
def test_they_stop_their_row_only(drafter, rule, value):
  model = _Breaks(vocab_size=VOCAB, seed=3, value=value)
  prompts = [[5], [5, 1], [1, 2, 3]]
  settings = {'drafter': drafter, 'verify': _RULES[rule]}
  output = _generate(prompts, model=model, **settings)
  good = _generate(prompts, **settings)
  without = _generate([[1], *prompts[1:]], model=model, **settings)
  assert scene.rows(without)[1:] == scene.rows(output)[1:]
  assert without.lengths[0] > 0 and max(output.lengths) > 1
  assert output.lengths[0] == 0
  assert output.stop_reason[0] == StopReason.INVALID_LOGITS
  for row, reference, reason in zip(
    scene.rows(output), scene.rows(good), output.stop_reason, strict=True
  ):
    assert 5 not in row[:-1]
    if row and row[-1] == 5:
      assert reason == StopReason.INVALID_LOGITS
    if drafter is not CHAIN and row:  # drafts are judged as before
      assert row == reference[: len(row)]


_LLAMA = testing.tiny_llama(vocab_size=8)
_LATENT = attention.Latent(kv_rank=8, rope_dim=4, head_dim=8, value_dim=8)


@pytest.mark.slow(but=('True-latent vectors',))
@pytest.mark.nightly(only=('False-of int8', 'True-of int8'))
@pytest.mark.parametrize(
  'model',
  [
    _LLAMA,
    dataclasses.replace(_LLAMA, has_int8_cache=True),
    dataclasses.replace(_LLAMA, latent=_LATENT, num_kv_heads=4),
  ],
  ids=['keys and values', 'of int8', 'latent vectors'],
)
@pytest.mark.parametrize('is_kept', [False, True])
def test_a_rejected_draft_is_seen_by_nothing(model, is_kept):
  """The draft's own keys and values are NaN, now and in the next round."""
  bad = 5
  params = model.init(jax.random.key(0))
  params |= {'embedding': params['embedding'].at[:, bad].set(jnp.nan)}
  bias = np.zeros(model.vocab_size, np.float32)
  bias[bad] = 1e9 if is_kept else -np.inf
  run = {
    'prompts': [[1, 2, 3]],
    'params': {'target': params},
    'model': model,
    'sampling': specsample.Sampling(logit_bias=bias),
    'max_new_tokens': 6,
  }
  plain = _generate(drafter=drafters.NoDraft(), **run)
  given = drafters.Given(num_draft_tokens=2)
  decoder, state = scene.prefill(drafter=given, **run)
  wrong = (int(plain.tokens[0, 0]) + 1) % bad
  state = decode.advance(
    decoder,
    {'target': params},
    given.give(state, np.asarray([[bad, wrong] if is_kept else [wrong, bad]])),
    max_rounds=9,
  )
  output = decode.finish(state, max_new_tokens=6)
  assert scene.rows(output) == scene.rows(plain)
  ends = StopReason.INVALID_LOGITS if is_kept else StopReason.MAX_NEW_TOKENS
  assert output.stop_reason[0] == plain.stop_reason[0] == ends
  assert output.lengths[0] == (1 if is_kept else 6)


@pytest.mark.slow
@pytest.mark.parametrize('has_int8_cache', [False, True])
def test_padding_without_numbers_is_seen_by_nothing(has_int8_cache):
  """Beside a prompt of several chunks, a short one is fed NaN padding."""
  model = dataclasses.replace(_LLAMA, has_int8_cache=has_int8_cache)
  params = model.init(jax.random.key(0))
  params |= {'embedding': params['embedding'].at[:, 0].set(jnp.nan)}
  bias = np.zeros(model.vocab_size, np.float32)
  bias[0] = -np.inf  # never emitted
  generate = lambda prompts: _generate(
    prompts,
    params={'target': params},
    model=model,
    drafter=drafters.NoDraft(),
    sampling=specsample.Sampling(logit_bias=bias),
    max_new_tokens=6,
  )
  short, long = [1, 2, 3, 4, 5], [1 + i % 7 for i in range(150)]
  output = generate([short, long])
  assert output.lengths.tolist() == [6, 6]
  assert scene.rows(output)[0] == scene.rows(generate([short]))[0]


def _first_tokens(target, drafter, rule):
  """Returns counts of first tokens, the law without bad logits, the output."""
  num_rows = 4096
  output = _generate(
    [[1, 0, 1]] * num_rows,
    model=target,
    drafter=drafter,
    verify=rule,
    max_new_tokens=4,
  )
  whole = testing.HashModel(vocab_size=3)
  law = testing.conditional.from_model(whole, {}, (1, 0, 1))(0, 0)[0]
  first = np.asarray(output.tokens)[:, 0]
  return np.bincount(first, minlength=3), law, output


def _drafter(model):
  return drafters.Chain(
    model=dataclasses.replace(model, noise=0.6), num_draft_tokens=3
  )


_WHOLE = testing.HashModel(vocab_size=3)
_TREE = drafters.Tree(
  drafter=_drafter(_WHOLE),
  topology=tree.k_ary((2, 1, 1)),
  kind=DraftKind.SAMPLED,
)


# Logits are bad after one first token: 0, which the drafter overrates, or 2,
# which it underrates, so that block verification keeps it whatever follows.
@pytest.mark.slow
@pytest.mark.nightly(but=('Block-Chain-0', 'Block-Chain-2', 'Traversal-*'))
@pytest.mark.parametrize(
  ('rule', 'drafter', 'behind'),
  [
    (verify.block, _drafter(_WHOLE), 0),
    (verify.block, _drafter(_WHOLE), 2),
    (verify.coupled, _drafter(_WHOLE), 0),
    (verify.traversal, _TREE, 0),
    (verify.multi_path_block, _TREE, 0),
  ],
  ids=lambda value: str(value) if value in (0, 2) else type(value).__name__,
)
def test_what_comes_before_them_is_distributed_as_ever(rule, drafter, behind):
  breaks = _Breaks(vocab_size=3, behind=behind)
  counts, law, _ = _first_tokens(breaks, drafter, rule)
  assert chi_square.test([(counts, law)]).passed, (counts, law)


@pytest.mark.slow
@pytest.mark.parametrize('rule', [verify.chain, verify.block])
def test_a_drafter_without_a_distribution_changes_nothing(rule):
  drafter = _drafter(_Breaks(vocab_size=3, behind=2))
  counts, law, output = _first_tokens(_WHOLE, drafter, rule)
  assert chi_square.test([(counts, law)]).passed, (counts, law)
  assert set(output.stop_reason.tolist()) == {StopReason.MAX_NEW_TOKENS}
  assert specsample.stats.summarize(output).tokens_per_round > 1


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_row_without_an_allowed_token_stops(temperature):
  # Only ids 0 and 1 are tokens of this model, and the bias forbids both.
  model = testing.HashModel(vocab_size=VOCAB, padding=VOCAB - 2)
  forbidden = np.where(np.arange(VOCAB) < 2, -np.inf, 0)
  output = _generate(
    [[1], [1]],
    model=model,
    drafter=NGRAM,
    sampling=specsample.Sampling(
      temperature=temperature,
      logit_bias=np.stack([forbidden, np.zeros(VOCAB)]),
    ),
  )
  assert output.lengths.tolist() == [0, 40]
  assert output.stop_reason.tolist() == [
    StopReason.INVALID_LOGITS,
    StopReason.MAX_NEW_TOKENS,
  ]
