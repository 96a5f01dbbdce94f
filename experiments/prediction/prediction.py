"""The prediction of a speedup for each setting."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import gin

from experiments.prediction import passes as passes_lib
from experiments.timing import this_machine
from specsample import checks
from specsample import cost
from specsample.cost import chips
from specsample.models import transformer

# Share of a device's memory; the rest is for what a step computes.
_SHARE = 0.9
_CPU = 'cpu'
# The least value of each kind of setting.
_SETTINGS = {
  'num_draft_tokens': 1,
  'acceptances': 0,
  'batch_sizes': 1,
  'contexts': 0,
}


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
  """The settings, of which every combination is predicted.

  Attributes:
    target, draft: shapes of models, or passes that were timed.
    chip: a name in `chips.CHIPS`, or 'cpu' for this machine, measured.
    devices: how many devices both models are sharded over.
    num_draft_tokens: K, drafted one after the other.
    acceptances: acceptance rates of a draft after drafts that were all kept
      (`cost.expected_tokens`).
    batch_sizes, contexts: numbers of rows, and of tokens in the cache of each.
    overhead_ms: time of the rest of a round.
    weights: 'int8' for 8 bits per weight, None for the model's own.
  """

  target: transformer.Transformer | passes_lib.Timed
  draft: transformer.Transformer | passes_lib.Timed
  chip: str
  devices: int = 1
  num_draft_tokens: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
  acceptances: Sequence[float] = (0.6, 0.7, 0.8, 0.9)
  batch_sizes: Sequence[int] = (1, 8, 32, 128)
  contexts: Sequence[int] = (512, 4096)
  overhead_ms: float = 0.0
  weights: str | None = None

  def __post_init__(self):
    """Refuses empty or impossible settings, and chips without figures."""
    names = (*chips.CHIPS, _CPU)
    if self.chip not in names:
      raise ValueError(
        f'Prediction.chip is {self.chip!r}: give one of {", ".join(names)}'
      )
    if self.devices < 1 or (self.chip == _CPU and self.devices > 1):
      raise ValueError(
        f'Prediction.devices is {self.devices}: give at least 1, and exactly 1 '
        f'for chip {_CPU!r}, which is measured'
      )
    for name, least in _SETTINGS.items():
      values = getattr(self, name)
      is_list = isinstance(values, Sequence) and not isinstance(values, str)
      if not is_list or not values or min(values) < least:
        raise ValueError(
          f'Prediction.{name} is {values!r}: give numbers of at least {least}, '
          f'such as ({max(least, 1)},)'
        )
    checks.field(self, 'overhead_ms', self.overhead_ms >= 0, 'at least 0')
    is_known = self.weights in (None, 'int8')
    checks.field(self, 'weights', is_known, "'int8' or None")

  def networks(self) -> tuple[passes_lib.Passes, passes_lib.Passes]:
    """Returns the target and the drafter; measures the CPU if it is the chip.

    Raises:
      ValueError: a model is of a kind whose cost is not known.
    """
    is_cpu = self.chip == _CPU
    chip = this_machine.chip() if is_cpu else chips.CHIPS[self.chip]
    return self._network(self.target, chip), self._network(self.draft, chip)

  def _network(self, model, chip) -> passes_lib.Passes:
    if isinstance(model, passes_lib.Timed):
      return model
    decoder = passes_lib.decoder(model, self.weights)
    return passes_lib.OnChips(decoder=decoder, chip=chip, devices=self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One setting of predict.json; times are in milliseconds."""

  target: str  # its shape in words
  draft: str
  chip: str  # or 'timed passes'
  devices: int | None  # None for timed passes
  batch_size: int
  context: int
  acceptance: float
  num_draft_tokens: int
  tokens_per_round: float
  pass_ms: float  # of the target, over a token of each row
  draft_ms: float  # of all draft tokens of a round
  verify_ms: float  # of the target's pass over K + 1 tokens of each row
  overhead_ms: float
  ms_per_token: float  # mean time that a row waits for a token
  speedup: float
  # Two formulas in which a pass over K + 1 tokens costs as much as over one:
  leviathan_speedup: float  # c is the ratio of the two models' pass times
  memory_bound_speedup: float | None  # MBSU, c by parameters; None if unknown
  # The limit on the target's passes; None if they were timed.
  pass_bound: str | None  # over a token of each row
  verify_bound: str | None  # over K + 1
  fits: bool | None  # into the memory; None if that is not known


def rows(prediction: Prediction) -> list[Row]:
  """Returns a row for every combination of the settings.

  Raises:
    ValueError: an acceptance is not a probability, a model has no known cost,
      or passes over that many tokens were not timed.
  """
  networks = prediction.networks()
  return [
    _row(prediction, networks, *setting)
    for setting in itertools.product(
      prediction.batch_sizes,
      prediction.contexts,
      prediction.acceptances,
      prediction.num_draft_tokens,
    )
  ]


def _description(
  model: transformer.Transformer | passes_lib.Timed, weights: str | None
) -> str:
  """Returns what a model is, in words: a shape has no name."""
  if isinstance(model, passes_lib.Timed):
    times = ', '.join(f'{n}: {ms:g}' for n, ms in model.ms.items())
    return f'timed passes, milliseconds by tokens {times}'
  number = passes_lib.decoder(model).num_weights()
  stored = f', weights in {weights}' if weights else ''
  return (
    f'{number / 1e9:.3g} billion weights ({model.num_layers} layers of width '
    f'{model.dim}, {model.dtype}{stored})'
  )


def _row(prediction, networks, batch, context, acceptance, num_drafts):
  target, draft = networks
  predicted = cost.Round(
    tokens_per_round=cost.expected_tokens(acceptance, num_drafts),
    draft_seconds=num_drafts * draft.seconds(1, batch, context),
    verify_seconds=target.seconds(num_drafts + 1, batch, context),
    overhead_seconds=prediction.overhead_ms / 1e3,
    pass_seconds=target.seconds(1, batch, context),
  )
  tokens = predicted.tokens_per_round
  weights = [network.num_weights() for network in networks]
  held = [network.held_bytes(batch, context) for network in networks]
  fits = None
  if None not in held:
    fits = sum(held) <= _SHARE * target.chip.hbm_bytes
  on_chips = isinstance(target, passes_lib.OnChips)
  return Row(
    target=_description(prediction.target, prediction.weights),
    draft=_description(prediction.draft, prediction.weights),
    chip=prediction.chip if on_chips else 'timed passes',
    devices=prediction.devices if on_chips else None,
    batch_size=batch,
    context=context,
    acceptance=acceptance,
    num_draft_tokens=num_drafts,
    tokens_per_round=tokens,
    pass_ms=1e3 * predicted.pass_seconds,
    draft_ms=1e3 * predicted.draft_seconds,
    verify_ms=1e3 * predicted.verify_seconds,
    overhead_ms=prediction.overhead_ms,
    ms_per_token=1e3 * predicted.seconds_per_token,
    speedup=predicted.speedup,
    leviathan_speedup=cost.leviathan_speedup(
      acceptance,
      num_drafts,
      draft.seconds(1, batch, context) / predicted.pass_seconds,
    ),
    memory_bound_speedup=None
    if None in weights
    else cost.memory_bound_speedup(tokens, num_drafts, weights[1] / weights[0]),
    pass_bound=target.bound(1, batch, context),
    verify_bound=target.bound(num_drafts + 1, batch, context),
    fits=fits,
  )


def best(found: Sequence[Row]) -> list[Row]:
  """Returns the row of the best K for each of the other settings, in order."""
  groups: dict[Any, list[Row]] = {}
  for row in found:
    key = (row.batch_size, row.context, row.acceptance)
    groups.setdefault(key, []).append(row)
  return [max(group, key=lambda row: row.speedup) for group in groups.values()]
