"""`compile_tpu`'s numbers for these devices, against known values."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.tpu import compilation
import specsample
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import tree
from specsample.cost import chips
from specsample.loop.decoder import Decoder
from specsample.models import transformer

_K = 4
_TARGET = transformer.Transformer(
  vocab_size=512,
  num_layers=2,
  dim=256,
  num_heads=8,
  num_kv_heads=8,
  head_dim=32,
  mlp_dim=768,
  max_length=256,
)
_DRAFT = dataclasses.replace(_TARGET, num_layers=1, dim=128, mlp_dim=384)
_CONFIG = compilation.CompileTpu(
  model=_TARGET,
  draft_model=_DRAFT,
  drafter=drafters.Chain(model=_DRAFT, num_draft_tokens=_K),
  sampling=specsample.Sampling(temperature=1.0, top_p=0.8),
  prompt_length=16,
  max_length=64,
)
_CHIP = chips.CHIPS['v5e']


def _target(config, chip):
  mesh = sharding.make_mesh(config.data, 8 // config.data)
  return compilation.on(mesh, config, topology='cpu', chip=chip)


@pytest.fixture(scope='module')
def compiled():
  """What is compiled for one row on a mesh of 1 x 8, and the HLO."""
  return compilation.run(_target(_CONFIG, _CHIP), _CONFIG, lambda step: None)


@pytest.mark.slow
def test_the_arguments_are_those_of_generate(compiled):
  counted, _ = compiled
  params = {'target': _TARGET, 'drafter': _DRAFT}
  with jax.set_mesh(sharding.make_mesh(1, 8)):
    placed = {
      name: sharding.place(
        jax.jit(model.init)(jax.random.key(0)), model.param_axes()
      )
      for name, model in params.items()
    }
    state = specsample.prefill(
      Decoder(_TARGET, _CONFIG.drafter, _CONFIG.verify),
      placed,
      np.zeros((1, 16), np.int32),
      np.full((1,), 16, np.int32),
      jax.random.key(0),
      sampling=_CONFIG.sampling,
      max_new_tokens=64,
      max_length=64,
    )
  held = sum(
    leaf.addressable_shards[0].data.nbytes
    for leaf in jax.tree.leaves((placed, state))
  )
  # The stop has room for eight end tokens. A few numbers that a round hands on
  # as they are are no arguments of the program.
  assert abs(counted.argument_gib * 2**30 - held) <= 4 * 8


@pytest.mark.slow
def test_operations_are_those_of_the_products(compiled):
  counted, _ = compiled
  per_token = lambda model: (
    model.num_layers
    * (
      4 * model.dim * model.num_heads * model.head_dim
      + 3 * model.dim * model.mlp_dim
    )
    + model.dim * model.vocab_size
  )
  # The draft model reads two tokens in its first pass, then one in each turn of
  # a loop, of which XLA counts one turn.
  products = (_K + 1) * per_token(_TARGET) + 3 * per_token(_DRAFT)
  assert 1 <= 8 * counted.gflops * 1e9 / (2 * products) < 1.25


@pytest.mark.slow
def test_a_layer_is_summed_twice_a_pass_and_a_lookup_once(compiled):
  counted, _ = compiled
  sums = lambda model: 2 * model.num_layers + 1
  num_sums = sums(_TARGET) + _K * sums(_DRAFT)
  # Drawing a token takes more, but small ones.
  assert num_sums < counted.collectives
  rows = (_K + 1) * sums(_TARGET) * _TARGET.dim
  rows += (_K + 1) * sums(_DRAFT) * _DRAFT.dim  # its first pass reads two
  assert 1 <= counted.gb_sent * 1e9 / (2 * 4 * rows) < 1.25


@pytest.mark.slow
def test_no_vocabulary_is_gathered_and_no_host_asked(compiled):
  counted, text = compiled
  assert counted.vocab_gathers == counted.host_transfers == 0
  # The logits are there, divided over 8 devices.
  assert 'f32[5,64]' in text


@pytest.mark.slow
def test_what_does_not_fit_is_not_compiled():
  chip = dataclasses.replace(_CHIP, hbm_bytes=1 << 10)
  counted, text = compilation.run(
    _target(_CONFIG, chip), _CONFIG, lambda step: None
  )
  assert not counted.fits
  assert counted.argument_gib > counted.hbm_gib == 2**-20
  assert counted.collectives is None
  assert text is None


def _argument_bytes(drafter, **changes):
  """Returns a device's argument bytes in the prefill, which isn't compiled."""
  config = dataclasses.replace(
    _CONFIG, drafter=drafter, **{'draft_model': None} | changes
  )
  target = _target(config, dataclasses.replace(_CHIP, hbm_bytes=1))
  compiled, _ = compilation.run(target, config, lambda step: None)
  return compiled.argument_gib * 2**30


@pytest.mark.slow
def test_a_drafter_around_others_brings_the_parameters_within():
  medusa = drafters.Medusa(model=_TARGET, num_draft_tokens=2)
  of_medusa = _argument_bytes(medusa)
  assert of_medusa > _argument_bytes(drafters.NoDraft())
  branching = drafters.Tree(drafter=medusa, topology=tree.Topology((0, 0, 1)))
  around = drafters.Recording(
    drafter=drafters.Adaptive(drafter=branching, policies=(policies.SVIP(),)),
    model=_TARGET,
  )
  of_around = _argument_bytes(around, verify=specsample.verify.tree)
  assert of_around == of_medusa


@pytest.mark.slow
def test_tli_brings_its_map_beside_the_draft_model():
  of_chain = _argument_bytes(_CONFIG.drafter, draft_model=_DRAFT)
  tli = drafters.TLI(
    model=_DRAFT, vocab_size=_TARGET.vocab_size, num_draft_tokens=_K
  )
  # The token itself and 8 pieces; each device has the whole map.
  of_map = 4 * (_TARGET.vocab_size * (1 + 8) + 1)
  assert _argument_bytes(tli) == of_chain + of_map


def test_rows_fill_up_a_batch():
  config = dataclasses.replace(_CONFIG, batch_size=3, data=2)
  assert _target(config, _CHIP).request.tokens.shape[0] == 4
