"""Rows that are refilled on a mesh get the tokens of one device."""

import dataclasses

import jax
import numpy as np

from experiments.methods import random_weights
import specsample
from specsample import drafters
from specsample import sharding
from specsample import verify
from specsample.models import transformer

_TARGET = transformer.Transformer(
  vocab_size=64,
  num_layers=1,
  dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
  max_length=128,
)
_DRAFT = dataclasses.replace(_TARGET, num_heads=2, mlp_dim=8)
_PARAMS = {
  'target': random_weights.params(_TARGET),
  'drafter': random_weights.params(_DRAFT),
}
_PROMPTS = [[i + 1] * (1 + 17 * i % 50) for i in range(11)]
_MOST = np.asarray([3, 11, 1, 7, 11, 2, 5, 11, 4, 6, 2])


@dataclasses.dataclass(frozen=True)
class _Texts:
  """Ends with a token below 16 behind one of at least 56."""

  def table(self, vocab_size):
    ids = np.arange(vocab_size)
    moves = np.asarray([[0, 0, 2], [0, 1, 2]], np.int32)
    return np.select([ids < 16, ids >= 56], [1, 2]).astype(np.int32), moves, 2


_STOP = specsample.Stop(eos_ids=(7,), sequences=((9, 9), (1,)), texts=_Texts())


def _generate_all(params, **kwargs):
  return list(
    specsample.generate_all(
      params,
      _PROMPTS,
      jax.random.key(1),
      model=_TARGET,
      drafter=drafters.Chain(model=_DRAFT, num_draft_tokens=2),
      verify=verify.chain,
      sampling=specsample.Sampling(
        temperature=np.linspace(0, 1, 11), repetition_penalty=1.3
      ),
      max_new_tokens=_MOST,
      stop=_STOP,
      **kwargs,
    )
  )


def test_every_output_is_that_of_one_device():
  expected = _generate_all(_PARAMS, batch_size=3)
  assert sum(specsample.stats.summarize(output).kept for output in expected)
  axes = {'target': _TARGET.param_axes(), 'drafter': _DRAFT.param_axes()}
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    params = sharding.place(_PARAMS, axes)
    # Four parts divide neither the batch nor the group.
    found = _generate_all(params, batch_size=5, group_size=2)
  for output, alone in zip(found, expected, strict=True):
    rounded = {
      'log_probs': alone.log_probs,
      'warped_log_probs': alone.warped_log_probs,
    }
    for name, values in rounded.items():
      # Sums over a sharded axis are taken in another order.
      np.testing.assert_allclose(getattr(output, name), values, atol=1e-4)
    same = dataclasses.replace(output, **rounded)
    jax.tree.map(np.testing.assert_array_equal, same, alone)
  reasons = [specsample.StopReason(x.stop_reason[0]).name for x in expected]
  assert set(reasons) == {'EOS', 'SEQUENCE', 'MAX_NEW_TOKENS'}
  assert {len(output.tokens[0]) for output in found} == set(_MOST.tolist())
