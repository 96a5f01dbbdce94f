"""Compilation of prefill and decoding loop for TPUs that are not attached.

Only shapes are needed: nothing is allocated and no weight is read.
"""

from collections.abc import Callable
import dataclasses
import re
import time
from typing import Any

import gin
import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from experiments.command import mesh as mesh_lib
from experiments.tpu import hlo_counts
from experiments.tpu import program as compiled_lib
from experiments.tpu import topologies as topologies_lib
import specsample
from specsample import checks
from specsample import files
from specsample import sharding
from specsample.cost import chips
from specsample.drafters import tli
from specsample.drafters import trainable
from specsample.drafters import wrapper
from specsample.loop import decode
from specsample.loop import request as request_lib
from specsample.loop import stopping
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Drafter, Params, Verifier

# Finds how much memory a program needs (26.44G) in an error of the compiler.
_NEEDED = re.compile(r'(?:temporaries \(|Used )([\d.]+)([KMGT]?)')
_UNITS = {'': 1, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
# Assumed of a `VocabMap`: at most 8 pieces per token, and a BOS token before
# each text.
_NUM_PIECES = 8
_PREFIX_SIZE = 1


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CompileTpu:
  """The program to compile, and the mesh to compile it for."""

  model: transformer.Transformer
  drafter: Drafter
  # The model of params['drafter']; TLI and trained drafters know their own.
  draft_model: transformer.Transformer | None = None
  verify: Verifier = specsample.verify.chain
  sampling: specsample.Sampling = specsample.Sampling()
  weights: str | None = None  # 'int8', as in `specsample.load`
  batch_size: int = 1
  prompt_length: int = 128
  max_length: int = 2048  # prompt and output; the capacity of the caches
  topologies: tuple[str, ...] = ()
  data: int = 1  # size of the mesh's data axis; the rest divides the model
  num_slices: int = 1  # slices of the topology; `data` is divided over them
  explicit: bool = True
  rules: sharding.Rules = sharding.DEFAULT_RULES

  def __post_init__(self):
    """Raises ValueError for counts below 1, unknown weights or bad rules."""
    checks.counts(self, ('batch_size', 'prompt_length', 'data', 'num_slices'))
    is_known = self.weights in (None, 'int8')
    checks.field(self, 'weights', is_known, "'int8' or None")
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
  tpu = topologies_lib.parse(topology)
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
  return on(mesh, config, topology=topology, chip=tpu.chip)


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


def run(
  target: Target, config: CompileTpu, step: Callable[[str], None]
) -> tuple[compiled_lib.Compiled, str | None]:
  """Compiles the prefill and the decoding loop; nothing is run.

  Args:
    target: the topology and batch to compile for.
    config: what to compile.
    step: called with a description of each program before it is compiled.

  Returns:
    What is known about the programs, and the HLO of the loop; None instead of
    the HLO if the compiler cannot fit a program into memory.
  """
  start = time.perf_counter()
  elapsed = lambda: round(time.perf_counter() - start, 1)
  with jax.set_mesh(target.mesh), sharding.rules(config.rules):
    params = _params(config)
    step(f'{target.topology}: prefill')
    axes = request_lib.axes(target.request)
    request = _structs(target.request, sharding.of_tree(axes))
    decode.check_rule(config.decoder, params, request)
    lowered = decode._prefill.lower(config.decoder, params, request)
    prefill = _compile(lowered, (params, request), target.chip)
    if isinstance(prefill, _TooLarge):
      return prefill.compiled(target, config, elapsed()), None
    step(f'{target.topology}: decoding loop')
    state = _structs(lowered.out_info, prefill.output_shardings)
    lowered = decode._advance.lower(
      config.decoder,
      params,
      state,
      stopping.Stop().conditions(config.model.vocab_size),
      jax.ShapeDtypeStruct((), jnp.int32),
      None,
    )
    loop = _compile(lowered, (params, state), target.chip)
    if isinstance(loop, _TooLarge):
      return loop.compiled(target, config, elapsed()), None
  seconds = elapsed()
  text = loop.as_text()
  counts = hlo_counts.count(text, config.model.vocab_size)
  memory = loop.memory_analysis()
  peak = max(_peak(memory), _peak(prefill.memory_analysis()))
  compiled = compiled_lib.Compiled(
    **_of(target, config),
    argument_bytes=memory.argument_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    peak_bytes=peak,
    fits=peak <= target.chip.hbm_bytes,
    collectives=[dataclasses.asdict(one) for one in counts.collectives],
    host_transfers=counts.host_transfers,
    vocab_all_gathers=counts.vocab_all_gathers,
    flops_per_round=counts.flops,
    bytes_per_round=counts.memory_bytes,
    least_bytes_per_round=counts.least_memory_bytes,
    weight_copies_per_round=counts.weight_copies,
    roofline_seconds_per_round=target.chip.seconds(
      counts.flops, counts.memory_bytes, counts.sent_bytes
    ),
    compile_seconds=seconds,
  )
  return compiled, text


def _of(target, config) -> dict[str, Any]:
  """Returns the fields that say what was compiled, and for which devices."""
  return {
    'model': repr(config.model),
    'weights': config.weights,
    'drafter': repr(config.drafter),
    'topology': target.topology,
    'devices': target.mesh.size,
    'mesh': dict(target.mesh.shape),
    'batch_size': config.batch_size,
    'max_length': config.max_length,
    'num_draft_tokens': config.drafter.num_draft_tokens,
    'hbm_bytes_per_device': target.chip.hbm_bytes,
  }


@dataclasses.dataclass(frozen=True)
class _TooLarge:
  """A program that needs more memory than a device has."""

  argument_bytes: int
  peak_bytes: int | None

  def compiled(self, target, config, seconds):
    peak = self.peak_bytes
    return compiled_lib.Compiled(
      **_of(target, config),
      argument_bytes=self.argument_bytes,
      temp_bytes=None if peak is None else peak - self.argument_bytes,
      peak_bytes=peak,
      fits=False,
      compile_seconds=seconds,
    )


def _compile(lowered, arguments, chip):
  argument_bytes = files.bytes_per_device(arguments)
  if argument_bytes > chip.hbm_bytes:
    # The compiler would spend a long time looking for ways to save memory.
    return _TooLarge(argument_bytes, None)
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    needed = _NEEDED.search(str(error))
    peak = int(float(needed[1]) * _UNITS[needed[2]]) if needed else None
    return _TooLarge(argument_bytes, peak)


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
