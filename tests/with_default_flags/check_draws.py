"""The probabilities that drafters report, in the executables that users run."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.certificate import sampled
from experiments.certificate import sampled_cases
import specsample
from specsample import testing
from specsample.drafters import wrapper
from specsample.testing import trained

_DRAWS = {draw.name: draw for draw in sampled_cases.draws()}


@pytest.mark.nightly(but=('Chain + block, mixed batch',))
@pytest.mark.parametrize(
  'name',
  [
    'Chain + block, mixed batch',
    'Hydra + coupled, mixed batch',
    'Tree, without replacement + traversal, mixed batch',
  ],
)
def test_compiled_loop_follows_the_target(name):
  record = sampled.measure(_DRAWS[name], num_rows=8192, seed=2)
  assert record['passed'], record


@dataclasses.dataclass(frozen=True)
class _Watched(wrapper.Wrapper):
  """A drafter that records what its draws are given, and what it returns."""

  drafter: specsample.Drafter
  drawn: collections.deque = dataclasses.field(compare=False, hash=False)
  returned: collections.deque = dataclasses.field(compare=False, hash=False)

  def propose(self, params, draw, warp, tokens, length, state):
    def watched(probs, position, node=None):
      jax.debug.callback(lambda *x: self.drawn.append(x), probs, position)
      return draw(probs, position, node)

    draft, state = self.drafter.propose(
      params, watched, warp, tokens, length, state
    )
    jax.debug.callback(lambda *x: self.returned.append(x), draft.probs, length)
    return draft, state


@pytest.mark.nightly(but=('MTP',))
@pytest.mark.parametrize('name', [kind.name for kind in trained.CASES])
def test_draws_in_bfloat16_are_from_the_probabilities_it_returns(name):
  """They are equal bit for bit, because a verifier divides by them."""
  scene = trained.scene(name, vocab_size=8)
  model, drafter, params = scene.model, scene.drafter, scene.params
  if not isinstance(model, testing.HashModel):  # a HashModel has no dtype
    model = dataclasses.replace(model, dtype='bfloat16')
    drafter = dataclasses.replace(drafter, model=model)
    cast = lambda x: x.astype('bfloat16') if x.dtype == jnp.float32 else x
    params = jax.tree.map(cast, params)
  drawn, returned = collections.deque(), collections.deque()
  watched = _Watched(drafter, drawn, returned)
  prompts = np.arange(4 * 6).reshape(4, 6) % model.vocab_size
  decoder = specsample.Decoder(model, watched, specsample.verify.block)
  state = specsample.prefill(
    decoder,
    params,
    prompts,
    np.asarray([6, 2, 5, 1]),
    jax.random.key(0),
    sampling=specsample.Sampling(temperature=0.8, top_p=0.9),
    max_new_tokens=8,
  )
  specsample.advance(decoder, params, state, max_rounds=1)
  jax.effects_barrier()
  ((probs, length),) = returned
  probs, length = np.asarray(probs), np.asarray(length)
  assert len(drawn) == probs.shape[1] == drafter.num_draft_tokens
  rows = np.arange(len(prompts))
  for given, position in drawn:
    expected = probs[rows, np.asarray(position) - length]
    assert np.asarray(given).tobytes() == expected.tobytes()
