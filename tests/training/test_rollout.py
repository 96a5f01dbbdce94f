"""Groups of samples, with the log-probabilities that they were drawn with."""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import textwrap
import time

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.loop import decode
from specsample.loop import refill
from specsample.testing import grammar
from specsample.testing import hash_model
from specsample.testing import trained

_V = 12
_MODEL = trained.tiny_llama(vocab_size=_V)
_DRAFT = trained.tiny_llama(vocab_size=_V, num_layers=1)
_CHAIN = drafters.Chain(model=_DRAFT, num_draft_tokens=3)
_SUFFIX = drafters.Suffix(num_draft_tokens=3, min_kept=0.0)
_PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
_G, _M, _P = 3, 10, 8
_PLAIN = specsample.Sampling(temperature=1.0)
_STOP = specsample.Stop(eos_ids=(7,))


@functools.cache
def _params():
  keys = jax.random.split(jax.random.key(0))
  larger = lambda model, key: jax.tree.map(lambda x: 1.5 * x, model.init(key))
  return {
    'target': larger(_MODEL, keys[0]),
    'drafter': larger(_DRAFT, keys[1]),
  }


def _rollout(params=None, prompts=_PROMPTS, key=5, **kwargs):
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
  params = _params() if params is None else params
  return specsample.rollout(
    params, prompts, jax.random.key(key), **(settings | kwargs)
  )


@pytest.mark.slow
def test_a_sample_is_that_of_its_request_id():
  found = _rollout()
  assert found.tokens.shape == (3, _G, _M)
  prompts, lengths = specsample.pad_prompts(np.repeat(_PROMPTS[:1], _G, axis=0))
  expected = specsample.generate(
    _params(),
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


@pytest.mark.slow
def test_samples_do_not_depend_on_the_rows_they_ran_in():
  found = _rollout()
  for sizes in ({'batch_size': 1}, {'batch_size': 9, 'fewest_rows': 2}):
    other = _rollout(**sizes)
    np.testing.assert_array_equal(found.tokens, other.tokens)


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


@pytest.mark.slow
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
def test_log_probs_are_those_of_a_plain_pass(drafter, rule):
  found = _rollout(sampling=_PENALISED, drafter=drafter, verify=rule)
  tokens = found.documents()['tokens']
  logits, _ = _MODEL.apply(
    _params()['target'], tokens, _MODEL.init_cache(len(tokens), 0)
  )
  logits = np.asarray(logits.logits, np.float32).reshape(3, _G, -1, _V)
  for n, g in np.ndindex(3, _G):
    prompt, length = _PROMPTS[n], found.lengths[n, g]
    drawn = found.tokens[n, g, :length]
    own = logits[n, g, len(prompt) - 1 :][:length]
    of_model = jax.nn.log_softmax(own)[np.arange(length), drawn]
    warped = np.log(_warped(_PENALISED, prompt, drawn, own))
    for values, expected in (
      (found.model_log_probs, of_model),
      (found.warped_log_probs, warped),
    ):
      np.testing.assert_allclose(values[n, g, :length], expected, atol=1e-5)
      assert not values[n, g, length:].any()
  assert np.abs(found.warped_log_probs - found.model_log_probs).max() > 0.1


@pytest.mark.slow
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
  assert [size for size in passes if size > 1] == [_P, _P]
  assert len({row.tobytes() for row in found.tokens[0]}) == _G


def _num_compiled():
  """Counts all executables of the batch, those that write its rows too."""
  parts = (
    *(decode._advance, decode._emitted, decode._prefill),
    *(refill._empty, refill._replace, refill._row_keys, refill._keep_rows),
  )
  return [part._cache_size() for part in parts]


@pytest.mark.slow
def test_other_weights_prompts_and_keys_compile_nothing():
  history = specsample.History(vocab_size=_V, capacity=512, every=16)
  either = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)

  def run(params, prompts, key):
    whole = params | {'drafter': {'trained': params['drafter']}}
    return _rollout(
      whole,
      prompts,
      key,
      drafter=either,
      history=history,
      fewest_rows=2,
      sampling=specsample.Sampling(temperature=1 + key / 8),
    )

  step = jax.jit(
    lambda params: jax.tree.map(lambda x: 0.9 * x, params), donate_argnums=0
  )
  params = jax.tree.map(jnp.copy, _params())
  run(params, _PROMPTS, 0)
  before = _num_compiled()
  expected = run(step(jax.tree.map(jnp.copy, params)), [[3] * 8, [2], [1]], 1)
  # The old weights are given away, as a training step does.
  found = run(step(params), [[3] * 8, [2], [1]], 2)
  assert jax.tree.leaves(params)[0].is_deleted()
  assert _num_compiled() == before
  assert np.any(found.tokens != expected.tokens)


@pytest.mark.slow
def test_a_history_of_the_epoch_before_saves_rounds():
  history = specsample.History(vocab_size=_V, capacity=2048, every=16)
  settings = {
    'params': {'target': _params()['target']},
    'drafter': _SUFFIX,
    # Many samples of a prompt begin alike.
    'sampling': specsample.Sampling(temperature=0.4),
    'stop': specsample.Stop(),
  }
  first, second = (
    _rollout(key=key, history=history, **settings) for key in (0, 1)
  )
  alone = _rollout(key=1, **settings)
  assert second.rounds.sum() < 0.8 * alone.rounds.sum()
  assert second.rounds.sum() < first.rounds.sum()


def _wider():
  return trained.tiny_llama(vocab_size=_V, dim=32).init(jax.random.key(0))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'params': lambda own: own | {'target': _wider()}},
      r"params\['target'\] are not those .*embedding has shape \(32, 12\)",
    ),
    (
      {'params': lambda own: own | {'drafter': own['target']}},
      r'parameter layers.1.* is unknown',
    ),
    ({'prompts': [[1], [2] * 9]}, 'prompt 1 has 9 tokens, but max_prompt_len'),
    ({'prompts': []}, 'there is no prompt'),
    ({'prompts': [[1], [_V]]}, 'prompt 1: a prompt token has id 12'),
    ({'num_samples': 0}, 'num_samples is 0'),
    ({'fewest_rows': 0}, 'fewest_rows is 0'),
    ({'max_new_tokens': [3, 4]}, r'max_new_tokens is \[3, 4\]'),
    ({'max_new_tokens': 249}, '249, but the model takes 256'),
    ({'verify': verify.Certified()}, 'log_probs is True'),
  ],
)
def test_refuses_before_anything_is_compiled(changes, message):
  change = changes.get('params', lambda own: own)
  arguments = changes | {'params': change(_params())}
  before = _num_compiled()
  with pytest.raises(ValueError, match=message):
    _rollout(**arguments)
  assert _num_compiled() == before


@pytest.mark.slow
def test_a_lossy_rule_is_named_in_the_output():
  assert _rollout().lossless
  typical = _rollout(verify=verify.Typical(epsilon=0.9, delta=0.9))
  assert not typical.lossless


@pytest.mark.slow
def test_a_score_is_differentiable_and_that_of_the_weights_given():
  found = _rollout(sampling=specsample.Sampling(temperature=0.7))
  target = _params()['target']
  for temperature, expected in (
    (1.0, found.model_log_probs),
    (0.7, found.warped_log_probs),
  ):
    scored = found.score(target, _MODEL, temperature)
    np.testing.assert_allclose(scored, expected, atol=1e-5)

  def mean(target):
    return jnp.mean(found.score(target, _MODEL))

  gradient = jax.jit(jax.grad(mean))(target)
  move = lambda size: jax.tree.map(lambda x, d: x + size * d, target, gradient)
  slope = (mean(move(2e-3)) - mean(move(-2e-3))) / 4e-3
  squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient))
  np.testing.assert_allclose(slope, squares, rtol=0.05)


def test_a_score_takes_a_temperature_per_prompt():
  temperatures = np.asarray([0.5, 1.0, 2.0], np.float32)
  found = _rollout(sampling=specsample.Sampling(temperature=temperatures))
  score = lambda temperature: found.score(
    _params()['target'], _MODEL, temperature
  )
  for scored in (score(temperatures), jax.jit(score)(temperatures)):
    np.testing.assert_allclose(scored, found.warped_log_probs, atol=1e-5)


@pytest.mark.parametrize('temperature', [0, -1.0, [1.0, 0.0, 1.0], [1.0] * 2])
def test_a_score_refuses_a_temperature_that_draws_nothing(temperature):
  message = 'give a number above 0, or one for each of 3 prompts'
  with pytest.raises(ValueError, match=message):
    _rollout().score(_params()['target'], _MODEL, temperature)


@pytest.mark.slow
def test_the_loop_of_the_page_raises_the_reward():
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'rollouts.md'
  _, begin, rest = page.read_text('utf-8').partition('    import specsample')
  code = textwrap.dedent((begin + rest).partition('\n## ')[0])
  rewards = []

  def reward(rollouts):
    """Rewards the share of token 3."""
    is_there = (rollouts.tokens == 3) & rollouts.mask
    rewards.append(np.sum(is_there, axis=-1) / rollouts.lengths)
    return rewards[-1]

  optimizer = optax.adamw(0.02)  # whose update reads the parameters
  names = {
    'jax': jax,
    'jnp': jnp,
    'optax': optax,
    'params': {'target': _params()['target']},
    'model': _MODEL,
    'prompts': _PROMPTS[:2],
    'key': jax.random.key(0),
    'stop': _STOP,
    'reward': reward,
    'num_steps': 8,
    'optimizer': optimizer,
    'state': optimizer.init(_params()['target']),
  }
  exec(code, names)
  means = [float(x.mean()) for x in rewards]
  assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.2, means


@pytest.mark.slow
def test_seconds_say_when_each_sample_was_there():
  begin = time.perf_counter()
  found = _rollout(batch_size=1)
  total = time.perf_counter() - begin
  # One row draws the samples one after another.
  ends = np.ravel(found.seconds)
  assert found.seconds.shape == (3, _G)
  assert (np.diff(ends, prepend=0, append=total) > 0).all()
