"""Operations by formula, against those that XLA counts in the same program."""

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample.cost import work
from specsample.cpu import native
from specsample.models import transformer
from specsample.training import dflash
from specsample.training import eagle
from specsample.training import heads
from specsample.training import operations
from specsample.training import step

# Wide enough for products to outweigh everything else.
_TARGET = transformer.Transformer(
  vocab_size=512,
  num_layers=2,
  dim=128,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  mlp_dim=256,
  max_length=64,
)
_SOME = {'model': _TARGET, 'num_draft_tokens': 3, 'draft_vocab_size': 256}
_OBJECTIVES = {
  'medusa': heads.HeadsObjective(drafter=drafters.Medusa(**_SOME)),
  'eagle3': eagle.FeatureObjective(
    drafter=drafters.Eagle3(feature_layers=(-1, 0, 1), **_SOME), num_steps=3
  ),
  'mtp': eagle.FeatureObjective(
    drafter=drafters.MTP(num_modules=2, **_SOME), num_steps=3
  ),
  'dspark': dflash.DSparkObjective(
    drafter=drafters.DSpark(
      feature_layers=(-1, 0), num_layers=2, rank=32, **_SOME
    ),
    num_blocks=8,
  ),
}
_TOKENS = np.random.default_rng(0).integers(512, size=(2, 64))
_BATCH = {'tokens': _TOKENS, 'mask': np.ones(_TOKENS.shape, bool)}
# Its vectors are kept, and drafts are made at half of the places.
_KEPT = {
  'tokens': _TOKENS,
  'mask': np.tile(np.arange(64) // 32 == 1, (2, 1)),
  'places': np.tile(np.arange(31, 63), (2, 1)),
  'hidden': np.zeros((2, 64, 128), np.float32),
  'features': np.zeros((2, 64, 2 * 128), np.float32),
}


def _params(drafter):
  target = _TARGET.abstract_params()
  return {'target': target, 'drafter': drafter.abstract_params()}


def _of_xla(objective, params, batch):
  """Returns the operations of the loss and its gradient that XLA counts."""
  is_own = objective.drafter.is_trained()
  part = lambda wanted: jax.tree.map(
    lambda x, own: x if own == wanted else None, params['drafter'], is_own
  )

  def loss(trained, frozen, target):
    return objective(
      {'target': target, 'drafter': step.join(trained, frozen)}, batch
    )[0]

  program = jax.jit(jax.value_and_grad(loss)).lower(
    part(True), part(False), params['target']
  )
  return program.compile().cost_analysis()['flops']


@pytest.mark.parametrize(
  ('name', 'batch'),
  [('medusa', _BATCH), ('eagle3', _BATCH), ('mtp', _KEPT), ('dspark', _KEPT)],
)
def test_they_are_those_of_a_program_without_loops(name, batch, monkeypatch):
  # XLA counts nothing in a call of C++.
  monkeypatch.setattr(native, 'is_available', lambda: False)
  objective = _OBJECTIVES[name]
  params = _params(objective.drafter)
  found = operations.count(objective, params, batch)
  expected = _of_xla(objective, params, batch)
  assert found == pytest.approx(expected, rel=0.07)


def test_a_target_that_is_trained_takes_three_times_as_many():
  objective = heads.HeadsObjective(
    drafter=drafters.Medusa(model=_TARGET, num_draft_tokens=3),
    target_weight=1.0,
  )
  found = operations.count(
    objective, _params(objective.drafter), _BATCH, trains_target=True
  )
  of_target = work.DecoderShape(
    num_layers=2,
    dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=256,
    vocab_size=512,
  ).work(64, batch=2, context=64)
  # Three heads have two matrices each, and the target's unembedding.
  of_heads = 2 * 128 * 3 * (2 * 128 * 128 + 128 * 512)
  assert found == pytest.approx(3 * (of_target.flops + of_heads), rel=0.01)
