"""Groups of samples, with the log-probabilities that they were drawn with."""

from collections.abc import Callable
import dataclasses

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.testing import grammar
from specsample.testing import hash_model
from specsample.testing import tiny

_V = 12
_MODEL = tiny.tiny_llama(vocab_size=_V)
_DRAFT = tiny.tiny_llama(vocab_size=_V, num_layers=1)
_CHAIN = drafters.Chain(model=_DRAFT, num_draft_tokens=3)
_SUFFIX = drafters.Suffix(num_draft_tokens=3, min_kept=0.2)
_PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
_G, _M, _P = 3, 10, 8
_PLAIN = specsample.Sampling(temperature=1.0)
_STOP = specsample.Stop(eos_ids=(7,))


def _params(seed=0):
  keys = jax.random.split(jax.random.key(seed))
  larger = lambda model, key: jax.tree.map(lambda x: 1.5 * x, model.init(key))
  return {
    'target': larger(_MODEL, keys[0]),
    'drafter': larger(_DRAFT, keys[1]),
  }


_PARAMS = _params()


def _rollout(params=_PARAMS, prompts=_PROMPTS, key=5, **kwargs):
  settings = {
    'model': _MODEL,
    'drafter': _CHAIN,
    'verify': verify.chain,
    'sampling': _PLAIN,
    'num_samples': _G,
    'max_prompt_length': _P,
    'max_new_tokens': _M,
    'batch_size': 4,
    'stop': _STOP,
  }
  return specsample.rollout(
    params, prompts, jax.random.key(key), **(settings | kwargs)
  )


def test_a_sample_is_that_of_its_request_id():
  found = _rollout()
  assert found.tokens.shape == (3, _G, _M)
  prompts, lengths = specsample.pad_prompts(np.repeat(_PROMPTS[:1], _G, axis=0))
  expected = specsample.generate(
    _PARAMS,
    prompts,
    lengths,
    jax.random.key(5),
    request_ids=np.arange(_G),
    model=_MODEL,
    drafter=_CHAIN,
    verify=verify.chain,
    sampling=_PLAIN,
    max_new_tokens=_M,
    stop=_STOP,
  )
  for name in ('tokens', 'lengths', 'stop_reason', 'rounds', 'accepted'):
    np.testing.assert_array_equal(
      getattr(found, name)[0], getattr(expected, name), name
    )
  assert len({row.tobytes() for row in found.tokens.reshape(-1, _M)}) > _G
  assert specsample.stats.summarize(found).kept


def test_samples_do_not_depend_on_the_rows_they_ran_in():
  found = _rollout()
  for sizes in ({'batch_size': 1}, {'batch_size': 9, 'fewest_rows': 2}):
    other = _rollout(**sizes)
    np.testing.assert_array_equal(found.tokens, other.tokens)


def _assert_are_the_targets(found, sampling):
  """Compares both log-probabilities with those of a plain pass."""
  tokens = found.documents()['tokens']
  logits, _ = _MODEL.apply(
    _PARAMS['target'], tokens, _MODEL.init_cache(len(tokens), 0)
  )
  logits = np.asarray(logits.logits, np.float32).reshape(3, _G, -1, _V)
  for n, prompt in enumerate(_PROMPTS):
    for g in range(_G):
      length = found.lengths[n, g]
      drawn = found.tokens[n, g, :length]
      own = logits[n, g, len(prompt) - 1 :][:length]
      of_model = jax.nn.log_softmax(own)[np.arange(length), drawn]
      np.testing.assert_allclose(
        found.model_log_probs[n, g, :length], of_model, atol=1e-5
      )
      warped = _warped(sampling, prompt, drawn, own)
      np.testing.assert_allclose(
        found.warped_log_probs[n, g, :length], np.log(warped), atol=1e-5
      )
      for values in (found.model_log_probs, found.warped_log_probs):
        assert not values[n, g, length:].any()


def _warped(sampling, prompt, drawn, logits):
  """Returns the probability of each drawn token, one prefix after another."""
  count = lambda tokens: np.bincount(tokens, minlength=_V)
  probs = []
  for i, token in enumerate(drawn):
    counts = specsample.types.TokenCounts(
      prompt=count(prompt), generated=count(drawn[:i])
    )
    now = specsample.sampling.after(sampling, jnp.asarray(drawn[:i]))
    nothing = np.zeros(0, np.int32)
    probs.append(specsample.sampling.warp(now, counts, logits[i], nothing))
    probs[-1] = probs[-1][token]
  return np.asarray(probs)


_PENALISED = specsample.Sampling(
  temperature=0.7,
  top_k=6,
  top_p=0.9,
  presence_penalty=0.5,
  repetition_penalty=1.3,
  logit_bias=np.arange(_V, dtype=np.float32) / 8,
)


@pytest.mark.parametrize('sampling', [_PLAIN, _PENALISED])
@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    (_CHAIN, verify.block),
    (
      drafters.Tree(
        drafter=_CHAIN, topology=specsample.tree.Topology((0, 0, 1, 3))
      ),
      verify.tree,
    ),
  ],
  ids=['chain', 'tree'],
)
def test_log_probs_are_those_of_a_plain_pass(sampling, drafter, rule):
  found = _rollout(sampling=sampling, drafter=drafter, verify=rule)
  _assert_are_the_targets(found, sampling)
  differ = np.abs(found.warped_log_probs - found.model_log_probs).max() > 0.1
  assert differ == (sampling is _PENALISED)


def test_under_a_constraint_they_are_those_of_the_tokens_left():
  sampling = specsample.Sampling(
    temperature=1.0,
    constraint=specsample.Constraint(automaton=grammar.OneForbidden(_V)),
  )
  found = _rollout(sampling=sampling)
  assert (found.warped_log_probs > found.model_log_probs).any()
  assert np.all(found.warped_log_probs >= found.model_log_probs - 1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counting(hash_model.HashModel):
  """A model that says how many tokens each of its passes reads."""

  passes: Callable[[int], None]

  def apply(self, params, tokens, cache, features=(), parents=None):
    io_callback(lambda: self.passes(tokens.shape[1]), None)
    return super().apply(params, tokens, cache, features, parents)


def test_samples_of_a_prompt_share_its_prefill():
  passes = []
  found = _rollout(
    {'target': {}},
    [[1, 2, 3], [4, 5]],
    model=_Counting(vocab_size=_V, passes=passes.append),
    drafter=drafters.NoDraft(),
    stop=specsample.Stop(),
  )
  jax.effects_barrier()
  assert [size for size in passes if size > 1] == [32, 32]
  assert len({row.tobytes() for row in found.tokens[0]}) == _G
