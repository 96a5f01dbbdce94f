"""Compilation of prefill and round for TPUs that are not attached.

Only shapes are needed: nothing is allocated and no weight is read.
"""

from collections.abc import Callable
import dataclasses
import re
import time
from typing import Annotated, Any

import gin
import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from experiments.command import mesh as mesh_lib
from experiments.reporting import tables
from experiments.tpu import hlo
from experiments.tpu import libtpu
import specsample
from specsample import files
from specsample import settings
from specsample import sharding
from specsample import stopping
from specsample.cost import chips
from specsample.drafter import Drafter
from specsample.drafters import tli
from specsample.drafters import trainable
from specsample.drafters import wrapper
from specsample.loop import decode
from specsample.loop import request as request_lib
from specsample.loop import step as step_lib
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Params, Verifier

_GIB = 1 << 30
# Finds how much memory a program needs (26.44G) in an error of the compiler.
_NEEDED = re.compile(r'(?:temporaries \(|Used )([\d.]+)([KMGT]?)')
_UNITS = {'': 1, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
# Assumed of a `VocabMap`: at most 8 pieces per token, and a BOS token before
# each text.
_NUM_PIECES = 8
_PREFIX_SIZE = 1


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CompileTpu(settings.Settings):
  """The program to compile, and the mesh to compile it for."""

  model: transformer.Transformer
  drafter: Drafter
  # The model of params['drafter']; TLI and trained drafters know their own.
  draft_model: transformer.Transformer | None = None
  verify: Verifier = specsample.verify.chain
  sampling: specsample.Sampling = specsample.Sampling()
  # As in `specsample.load`.
  weights: Annotated[str, settings.one_of('int8')] | None = None
  batch_size: settings.Count = 1
  prompt_length: settings.Count = 128
  max_length: int = 2048  # prompt and output; the capacity of the caches
  topologies: tuple[str, ...] = ()
  # The size of the mesh's data axis; the rest divides the model.
  data: settings.Count = 1
  # Slices of the topology; `data` is divided over them.
  num_slices: settings.Count = 1
  explicit: bool = True
  rules: sharding.Rules = sharding.DEFAULT_RULES

  def _check(self):
    super()._check()
    mesh_lib.check_rules('CompileTpu.rules', self.rules)

  @property
  def decoder(self) -> specsample.Decoder:
    """What the loop is compiled for."""
    return specsample.Decoder(self.model, self.drafter, self.verify)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Target:
  """A topology's chip and mesh, and a batch for it."""

  topology: str
  chip: chips.Chip
  mesh: jax.sharding.Mesh
  request: request_lib.Request  # on the host


def target(topology: str, config: CompileTpu) -> Target:
  """Returns the mesh of a topology and the checked arguments of a batch."""
  tpu, chip = libtpu.parse(topology)
  try:
    devices = topologies.get_topology_desc(
      platform='tpu',
      topology_name=topology,
      num_slices=config.num_slices,
      **tpu.options,
    ).devices
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f'the compiler does not accept topology {topology!r}: {error}: '
      f'choose another shape, such as {topology.partition(":")[0]}:'
      f'{tpu.example}'
    ) from error
  mesh = sharding.make_mesh(
    config.data,
    len(devices) // config.data,
    num_slices=config.num_slices,
    explicit=config.explicit,
    devices=devices,
  )
  return on(mesh, config, topology=topology, chip=chip)


def on(
  mesh: jax.sharding.Mesh,
  config: CompileTpu,
  *,
  topology: str,
  chip: chips.Chip,
) -> Target:
  """Does the same as `target` for a mesh that already exists."""
  with jax.set_mesh(mesh), sharding.rules(config.rules):
    num_parts = sharding.batch_parts()
  # Not under the mesh: nothing can be put on devices that are not attached.
  rows = -(-config.batch_size // num_parts) * num_parts
  params = {'target': config.model.abstract_params()}
  request = request_lib.check(
    config.decoder,
    params | _abstract_shadow(config, params['target']),
    np.zeros((rows, config.prompt_length), np.int32),
    np.full((rows,), config.prompt_length, np.int32),
    jax.random.key(0),
    sampling=config.sampling,
    max_new_tokens=config.max_length,
    max_length=config.max_length,
    log_probs=not isinstance(config.verify, specsample.verify.Certified),
  )
  return Target(topology=topology, chip=chip, mesh=mesh, request=request)


def _column(title: str, form: str = '') -> Any:
  return tables.shown(title, form=form, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What the compiler says about a topology: per device, and of one round.

  The arguments are weights, caches and the rest of the state. If a program does
  not fit, the sizes are those that it would need, as far as they are known, and
  there is nothing else.
  """

  topology: str = tables.shown('topology')
  mesh: dict[str, int]
  fits: bool = tables.shown('fits')
  hbm_gib: float = tables.shown('memory, GiB', form='.2f')
  argument_gib: float = tables.shown('arguments, GiB', form='.2f')
  # Of the round; the peak is the larger of the round's and the prefill's.
  temporary_gib: float | None = _column('temporary, GiB', '.2f')
  peak_gib: float | None = _column('peak, GiB', '.2f')
  collectives: int | None = _column('collectives')
  vocab_gathers: int | None = _column('vocabulary gathers')
  host_transfers: int | None = _column('host transfers')
  weight_copies: int | None = _column('copies of weights')
  # As XLA counts them: one turn of each loop.
  gflops: float | None = _column('GFLOPs', '.1f')
  # With the cheapest branch of each conditional, then with the costliest.
  least_gb_moved: float | None = _column('least GB moved', '.3f')
  gb_moved: float | None = _column('GB moved', '.3f')
  gb_sent: float | None = _column('GB sent', '.4f')
  roofline_ms: float | None = _column('at least, ms', '.2f')
  compile_seconds: float = tables.shown('compiled in, s', form='.0f')


class _DoesNotFitError(Exception):
  """Has the bytes of the arguments, and of the peak; None if it is unknown."""


def run(
  target: Target, config: CompileTpu, step: Callable[[str], None]
) -> tuple[Compiled, str | None]:
  """Compiles the prefill and a round; nothing is run.

  Returns what is known about the programs, and the HLO of the round; None
  instead of the HLO if the compiler cannot fit a program into memory. `step` is
  called with a description of each program before it is compiled.
  """
  start = time.perf_counter()
  text = None
  try:
    with jax.set_mesh(target.mesh), sharding.rules(config.rules):
      prefill_peak, program = _compile_both(target, config, step)
    text = program.as_text()
    found = _found(program, text, prefill_peak, target.chip, config)
  except _DoesNotFitError as error:
    argument_bytes, peak = error.args
    found = {
      'fits': False,
      'argument_gib': argument_bytes / _GIB,
      'peak_gib': None if peak is None else peak / _GIB,
    }
  compiled = Compiled(
    topology=target.topology,
    mesh=dict(target.mesh.shape),
    hbm_gib=target.chip.hbm_bytes / _GIB,
    compile_seconds=round(time.perf_counter() - start, 1),
    **found,
  )
  return compiled, text


def _compile_both(target, config, step):
  """Returns the peak memory of the prefill, and the compiled round."""
  params = _params(config)
  step(f'{target.topology}: prefill')
  axes = request_lib.axes(target.request)
  request = _structs(target.request, sharding.of_tree(axes))
  decode.check_rule(config.decoder, params, request)
  lowered = decode._prefill.lower(config.decoder, params, request)
  prefill = _compile(lowered, (params, request), target.chip)
  step(f'{target.topology}: round')
  state = _structs(lowered.out_info, prefill.output_shardings)
  stop = stopping.Stop().conditions(config.model.vocab_size)

  def next_state(params, state, stop):
    return step_lib.step(config.decoder, params, state, stop)[1]

  lowered = jax.jit(next_state, donate_argnums=1).lower(params, state, stop)
  compiled = _compile(lowered, (params, state), target.chip)
  return _peak(prefill.memory_analysis()), compiled


def _compile(lowered, arguments, chip):
  argument_bytes = files.bytes_per_device(arguments)
  if argument_bytes > chip.hbm_bytes:
    # The compiler would spend a long time looking for ways to save memory.
    raise _DoesNotFitError(argument_bytes, None)
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    needed = _NEEDED.search(str(error))
    peak = int(float(needed[1]) * _UNITS[needed[2]]) if needed else None
    raise _DoesNotFitError(argument_bytes, peak) from error


def _found(compiled, text, prefill_peak, chip, config):
  """Returns the fields of `Compiled` that a round's program has."""
  memory = compiled.memory_analysis()
  program = hlo.Program(text)
  peak = max(_peak(memory), prefill_peak)
  flops = compiled.cost_analysis()['flops']
  moved, sent = program.memory_bytes(), program.sent_bytes()
  return {
    'fits': peak <= chip.hbm_bytes,
    'argument_gib': memory.argument_size_in_bytes / _GIB,
    'temporary_gib': memory.temp_size_in_bytes / _GIB,
    'peak_gib': peak / _GIB,
    'collectives': program.collectives(),
    'vocab_gathers': program.vocab_gathers(config.model.vocab_size),
    'host_transfers': program.host_transfers(),
    'weight_copies': program.weight_copies(),
    'gflops': flops / 1e9,
    'least_gb_moved': program.memory_bytes(min) / 1e9,
    'gb_moved': moved / 1e9,
    'gb_sent': sent / 1e9,
    'roofline_ms': 1e3 * chip.seconds(flops, moved, sent),
  }


def _peak(memory):
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
  )


def _params(config) -> Params:
  def of(owner):
    params, axes = owner.abstract_params(), owner.param_axes()
    if config.weights is not None:
      axes = int8.axes(axes, params)
      params = jax.eval_shape(int8.weights, params)
    return _structs(params, sharding.of_tree(axes))

  params = {'target': of(config.model)}
  shadow = _abstract_shadow(config, params['target'])
  axes = {name: config.model.shadow_axes() for name in shadow}
  params |= _structs(shadow, sharding.of_tree(axes))
  drafter = config.drafter
  # Wrappers of another drafter have no parameters of their own.
  while isinstance(drafter, wrapper.Wrapper):
    drafter = drafter.drafter
  if isinstance(drafter, tli.TLI):
    params['drafter'] = _vocab_map(drafter) | {'model': of(drafter.model)}
  elif isinstance(drafter, trainable.Trainable):
    # In the dtypes that `load_drafter` returns.
    params['drafter'] = of(trainable.InDtype(drafter))
  elif config.draft_model is not None:
    params['drafter'] = of(config.draft_model)
  return params


def _abstract_shadow(config, target) -> Params:
  """Returns the shapes of the table that `verify.Certified` needs."""
  if not isinstance(config.verify, specsample.verify.Certified):
    return {}
  return {'shadow': jax.eval_shape(config.model.shadow, target)}


def _vocab_map(drafter: tli.TLI) -> Params:
  """Returns what a `VocabMap` adds to the parameters of the draft model."""
  size = drafter.vocab_size
  table = lambda *sizes: jax.ShapeDtypeStruct(
    sizes, jnp.int32, sharding=sharding.from_axes(*[None] * len(sizes))
  )
  return {
    'draft_ids': table(size),
    'pieces': table(size, _NUM_PIECES),
    'prefix': table(_PREFIX_SIZE),
  }


def _structs(tree, shardings):
  struct = lambda x, place: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=place
  )
  return jax.tree.map(struct, tree, shardings)
