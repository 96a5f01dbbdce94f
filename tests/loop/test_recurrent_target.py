"""The loop over a target with recurrent layers: no draft leaves a trace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import checks
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafter import Drafter
from specsample.drafters import fields
from specsample.loop import decode
from specsample.loop import turns
from specsample.loop.decoder import Decoder
from specsample.models import gated_delta
from specsample.models import replicated
from specsample.types import Draft, DraftKind
from tests.loop import scene

_LLAMA = testing.tiny_llama(vocab_size=24, num_layers=3, max_length=512)
_MODEL = dataclasses.replace(
  _LLAMA,
  delta=gated_delta.Delta(
    layers=(0, 2),
    num_key_heads=2,
    num_value_heads=4,
    key_dim=8,
    value_dim=6,
  ),
  has_output_gate=True,
  rotary_dim=4,
)
_K = 4
# Prompts of 1, 3, K + 1 and 130 tokens: less than a convolution sees, as many
# as a round reads, and more than a chunk of the prefill.
_PROMPTS = tuple(
  tuple(np.random.default_rng(n).integers(24, size=n).tolist())
  for n in (1, 3, _K + 1, 130)
)
_NUM_NEW = 60
_NGRAM = drafters.Ngram(num_draft_tokens=_K, min_ngram=1)


@functools.cache
def _params():
  params = _MODEL.init(jax.random.key(0))
  return testing.with_noise(params, jax.random.key(1), 0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Oracle(Drafter):
  """Drafts the text that plain decoding gives, with some tokens changed."""

  text: tuple[tuple[int, ...], ...]  # each row's whole text
  period: int = 0  # every which token is wrong; 0 for none
  num_draft_tokens: int = _K

  def propose(self, params, draw, warp, tokens, length, state):
    """See `Drafter`."""
    del params, draw, warp, tokens
    places = length[:, None] + jnp.arange(_K)
    text = jnp.asarray(self.text)
    found = jnp.take_along_axis(text, places % text.shape[1], axis=1)
    if self.period:
      found = jnp.where(places % self.period, found, (found + 1) % 24)
    return Draft(tokens=found, probs=None, kind=DraftKind.POINT_MASS), state


def _generate(prompts, drafter, rule=verify.chain, num_new=_NUM_NEW):
  output = scene.generate(
    prompts,
    {'target': _params()},
    model=_MODEL,
    drafter=drafter,
    verify=rule,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=num_new,
  )
  return jax.device_get(output)


@functools.cache
def _text(prompts):
  """Returns the whole text of each row under plain greedy decoding."""
  plain = _generate(prompts, drafters.NoDraft()).tokens
  rows = [[*p, *row.tolist()] for p, row in zip(prompts, plain, strict=True)]
  width = max(map(len, rows))
  return plain, tuple(tuple(row + [0] * (width - len(row))) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('prompts', 'period'),
  [(_PROMPTS[:1], 3), (_PROMPTS[:3], 0), (_PROMPTS[:3], 1), (_PROMPTS[2:], 3)],
)
def test_text_is_that_of_plain_decoding(prompts, period):
  expected, text = _text(prompts)
  assert len({*expected[0].tolist()}) > 3
  output = _generate(prompts, _Oracle(text=text, period=period))
  np.testing.assert_array_equal(output.tokens, expected)
  if period == 1:
    assert not output.accepted[:, 1:].any()
  else:
    assert (output.rounds < _NUM_NEW).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter',
  [
    _NGRAM,
    drafters.Skip(model=_MODEL, layers=(1,), num_draft_tokens=2),
    drafters.Tree(
      drafter=drafters.Skip(model=_MODEL, layers=(1,), num_draft_tokens=3),
      topology=tree.k_ary((2, 2, 1)),
      kind=DraftKind.POINT_MASS,
    ),
  ],
  ids=['ngram', 'skip', 'tree'],
)
def test_text_of_drafters_is_that_of_plain_decoding(drafter):
  rule = verify.tree if isinstance(drafter, drafters.Tree) else verify.chain
  expected, _ = _text(_PROMPTS[:3])
  output = _generate(_PROMPTS[:3], drafter, rule)
  np.testing.assert_array_equal(output.tokens, expected)


@pytest.mark.slow
def test_the_state_after_rounds_is_that_of_a_prefill():
  _, text = _text(_PROMPTS[1:3])
  tokens, lengths = specsample.pad_prompts(_PROMPTS[1:3])
  drafter = _Oracle(text=text, period=3)
  decoder = Decoder(_MODEL, drafter, verify.chain)
  begin = functools.partial(
    decode.prefill,
    decoder,
    {'target': _params()},
    key=jax.random.key(0),
    sampling=specsample.Sampling(temperature=0.0),
  )
  state = begin(tokens, lengths, max_new_tokens=60)
  state = decode.advance(decoder, {'target': _params()}, state, max_rounds=9)
  length = np.asarray(state.length)
  assert (length > lengths + 9).all()
  fresh = begin(
    np.asarray(state.tokens)[:, : length.max()], length, max_new_tokens=1
  )
  for found, expected in zip(
    jax.tree.leaves(state.cache.states),
    jax.tree.leaves(fresh.cache.states),
    strict=True,
  ):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_rows_depend_on_their_text_alone():
  tokens, lengths = specsample.pad_prompts([_PROMPTS[i] for i in (0, 1, 3)])
  testing.assert_batch_invariant(
    {'target': _params()},
    tokens,
    lengths,
    jax.random.key(0),
    model=_MODEL,
    drafter=_NGRAM,
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=12,
  )


@pytest.mark.slow
def test_a_row_goes_on_with_more_text():
  run = {'model': _MODEL, 'drafter': _NGRAM, 'max_length': 256}
  run |= {'sampling': specsample.Sampling(temperature=0.0)}
  more, params = _PROMPTS[3][:40], {'target': _params()}
  decoder, state = scene.prefill([_PROMPTS[2]], params, max_new_tokens=7, **run)
  advance = functools.partial(decode.advance, decoder, params, max_rounds=99)
  state = advance(state)
  text = np.asarray(state.tokens)[0, : int(state.length[0])].tolist()
  state = turns.extend(
    decoder,
    params,
    state,
    np.asarray([more]),
    np.asarray([len(more)]),
    max_new_tokens=20,
  )
  state = advance(state)
  plain = _generate([[*text, *more]], drafters.NoDraft(), num_new=20)
  end = int(state.length[0])
  found = np.asarray(state.tokens)[0, end - 20 : end]
  np.testing.assert_array_equal(found, plain.tokens[0])


_TWO = {'model': _MODEL, 'num_draft_tokens': 2}


@pytest.mark.parametrize(
  'draft',
  [
    lambda: drafters.Chain(**_TWO),
    lambda: drafters.Chain(**_TWO | {'model': replicated.Replicated(_MODEL)}),
    lambda: drafters.PARD(**_TWO, mask_token_id=3),
    lambda: drafters.TLI(**_TWO, vocab_size=24),
    lambda: drafters.Skip(**_TWO, layers=(0, 1)),
    lambda: drafters.DraftModel(**_TWO, layers=(1, 2)),
  ],
)
def test_recurrent_draft_models_are_refused(draft):
  with pytest.raises(ValueError, match='its state cannot go back to the token'):
    draft()


@pytest.mark.slow
def test_layers_of_trained_drafters_have_attention():
  checks.draft_model(fields.plain_shape(_MODEL))
  drafter = drafters.MTP(model=_MODEL, num_draft_tokens=2)
  assert drafter.shape.delta is None
  params = drafter.init_params(jax.random.key(2), _params())
  target, drafted = {'target': _params()}, {'drafter': params}
  tokens, lengths = specsample.pad_prompts(_PROMPTS[:3])
  testing.assert_greedy_equal(
    target | drafted,
    *(tokens, lengths),
    model=_MODEL,
    drafter=drafter,
    verify=verify.chain,
    max_new_tokens=20,
  )
