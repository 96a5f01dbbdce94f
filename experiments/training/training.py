"""The settings of a training run, and what follows from them."""

from collections.abc import Sequence
import dataclasses
import json
from typing import Annotated, Any, cast, NamedTuple

import gin
import jax
import jax.numpy as jnp
import optax

from experiments.training_data import batches as batches_lib
from experiments.training_data import chat
import specsample
from specsample import checks
from specsample import drafters
from specsample import settings as settings_lib
from specsample import sharding
from specsample.drafters import trainable
from specsample.training import losses
from specsample.training import objective as objective_lib
from specsample.training import slots

# Lets gin bind them, as in DraftObjective.teacher_loss = @losses.jsd
for _loss in (
  losses.forward_kl,
  losses.reverse_kl,
  losses.jsd,
  losses.total_variation,
  losses.negative_log_acceptance,
  losses.hybrid,
):
  gin.external_configurable(_loss, module='losses')
# HeadsObjective.slot_weights = @slots.d_pace
gin.external_configurable(slots.d_pace, module='slots')

# What may change between two starts of a run: how long it is, how often
# something is done, and where the target's vectors come from.
_FREE = (
  *('epochs', 'answer_tokens', 'decay'),
  *('evaluate_every', 'checkpoint_seconds', 'cache_hidden'),
)
# Fields that hold the target, or a component that is listed separately.
_ELSEWHERE = ('target', 'objective', 'drafter', 'model')
_Steps = Annotated[int, settings_lib.at_least(0)]
_INSIDE = settings_lib.rule(lambda x: 0 < x < 1, 'a number above 0 and below 1')


class Plan(NamedTuple):
  """The step at which the decay begins, and the last step."""

  decay_start: int
  num_steps: int


def plan(steps: float, *, unit: int, decay: float, taken: int = 0) -> Plan:
  """Plans a run of about `steps` steps, both numbers multiples of `unit`.

  `decay` is the share of the steps in which the rate falls, above 0 and below
  1. They come after the steps that have been `taken` at the full rate, even if
  that makes the run longer than wanted.
  """
  start = max(taken, max(1, round(steps * (1 - decay) / unit)) * unit)
  # Depends on the start alone, so that equal starts have equal ends.
  fall = max(1, round(start * decay / (1 - decay) / unit)) * unit
  return Plan(start, start + fall)


def rate(
  peak: float, plan: Plan, warmup: int, first: int = 0
) -> optax.Schedule:
  """Returns the learning rate as a function of the step; the first step is 0.

  It is 0 before step `first`, then rises to `peak` over `warmup` steps, stays
  constant, and falls towards 0 over the last steps of the plan, a tenth of all
  by default (Hägele et al., 2405.18392). Up to the decay nothing depends on the
  length of the run, so that a run can be made longer: it then continues from
  where the decay began, and drops the steps of the decay.
  """
  decay_start, num_steps = plan

  def schedule(step):
    rise = jnp.clip((step - first + 1) / max(warmup, 1), 0, 1)
    # The first step of the decay is already below the full rate, and the last
    # one is still above 0.
    fall = (step - decay_start + 1) / (num_steps - decay_start + 1)
    return peak * rise * (1 - jnp.sqrt(jnp.clip(fall, 0, 1)))

  return schedule


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Training(settings_lib.Settings):
  """The settings of a run with AdamW."""

  target: specsample.Loaded
  objective: objective_lib.Objective  # holds the drafter
  # The length of the run: epochs over all data, or tokens of answers; one of
  # the two is None. Both include the decay.
  epochs: settings_lib.Positive | None = 4.0
  answer_tokens: settings_lib.Count | None = None
  # The share of the steps over which the rate falls to 0.
  decay: Annotated[float, _INSIDE] = 0.1
  batch_size: settings_lib.Count = 8
  # The gradient is accumulated over this many parts of a batch, one after the
  # other, which takes less memory.
  accumulation_steps: settings_lib.Count = 1
  # Longer examples are truncated.
  max_length: settings_lib.Count = 256
  width_multiple: settings_lib.Count = 32  # batch widths are multiples of it
  # The length of rows that hold several examples each, at least `max_length`;
  # None for one example per row.
  packed_length: settings_lib.Count | None = None
  # This many batches are sorted by length together, so that rows of one example
  # are alike; 1 for random batches, which packed rows fill as well.
  sorted_batches: settings_lib.Count = batches_lib.SORTED_BATCHES
  seed: int = 0  # of the order, the initial weights and all sampling
  # A drafter, by the name or folder that `load_drafter` takes, with whose
  # weights the run begins; None for random ones. The number of drafts and the
  # drafted tokens may differ, and the kinds of block drafters.
  begin_with: str | None = None
  learning_rate: settings_lib.Positive = 1e-3
  warmup_steps: _Steps = 100  # over which the rate rises
  weight_decay: float = 0.0
  b2: float = 0.99
  clip_norm: settings_lib.Positive = 1.0  # largest norm of the gradient
  # Medusa-2: the target is trained too, at this rate, once the heads have been
  # trained for a while. None leaves the target and its distribution unchanged.
  target_learning_rate: settings_lib.Positive | None = None
  target_first_step: _Steps = 1000  # its rate is 0 before, then warms up
  # Shards 0, n, 2 n, ... of each folder are held out. Evaluations use at most
  # this many greedy answers per folder.
  held_out_every: int = 16
  held_out_answers: settings_lib.Count = 256
  # The decoding loop itself runs on this many held-out prompts at temperature
  # 0, each cut to its last `decoded_prompt_tokens` tokens.
  decoded_prompts: settings_lib.Count = 32
  decoded_prompt_tokens: settings_lib.Count = 128
  decoded_new_tokens: settings_lib.Count = 64
  # Whether the target's vectors are computed once and kept beside the data, if
  # the disk has room for them (`features.fit`); otherwise each step does it.
  cache_hidden: bool = True
  # DistillSpec: the share of steps on answers that the draft model writes.
  on_policy_share: settings_lib.Share = 0.0
  on_policy_temperature: settings_lib.Positive = 1.0
  report_every: settings_lib.Count = 50  # steps between two lines of metrics
  # Steps between two evaluations; there is one after the last step too.
  evaluate_every: settings_lib.Count = 500
  checkpoint_seconds: float = 60.0

  def _check(self):
    if (self.epochs is None) == (self.answer_tokens is None):
      raise ValueError(
        f'Training.epochs is {self.epochs} and Training.answer_tokens is '
        f'{self.answer_tokens}: give one of them, and None for the other'
      )
    checks.seed('Training.seed', self.seed)
    if self.batch_size % self.accumulation_steps:
      raise ValueError(
        f'Training.batch_size is {self.batch_size} and accumulation_steps is '
        f'{self.accumulation_steps}: give a divisor of the batch size'
      )
    self._check_packed()
    self._check_divided()
    if self.trains_target and self.cache_hidden:
      raise ValueError(
        'Training.cache_hidden is True and target_learning_rate is '
        f'{self.target_learning_rate}: the vectors of a target that is trained '
        'change, so set cache_hidden = False'
      )
    if self.trains_target and self.target.exact_fingerprint is not None:
      raise ValueError(
        f'Training.target_learning_rate is {self.target_learning_rate}, but '
        'the weights of the target are int8 and cannot be trained: load it '
        'with weights = None, or set target_learning_rate = None'
      )
    drafter = self.objective.drafter
    checks.instance(
      'Training.objective.drafter',
      drafter,
      trainable.Trainable,
      'give one that specsample.save_drafter can save, such as DraftModel',
    )
    if self.on_policy_share and not isinstance(drafter, drafters.DraftModel):
      raise ValueError(
        f'Training.on_policy_share is {self.on_policy_share}, but '
        f'{type(drafter).__name__} is not a model that could write answers: '
        'set it to 0, or train a DraftModel'
      )
    if self.on_policy_share and self.objective.token_weight:
      raise ValueError(
        f'Training.on_policy_share is {self.on_policy_share} and token_weight '
        f'is {self.objective.token_weight}: the text of the draft model is not '
        'an example, so set token_weight = 0 and teacher_weight = 1'
      )

  def _check_packed(self):
    """Refuses packed rows that are too short, too long, or written anew."""
    length = self.packed_length
    if length is None:
      return
    if length < self.max_length:
      raise ValueError(
        f'Training.packed_length is {length} and max_length is '
        f'{self.max_length}: a row must have room for the longest example, so '
        f'give packed_length = {self.max_length} or more'
      )
    context = self.target.model.max_length
    if length > context:
      raise ValueError(
        f'Training.packed_length is {length}, but the target reads at most '
        f'{context} tokens: give packed_length = {context} or less'
      )
    if self.on_policy_share:
      raise ValueError(
        f'Training.packed_length is {length} and on_policy_share is '
        f'{self.on_policy_share}: the draft model writes one answer per row: '
        'set packed_length = None'
      )

  def _check_divided(self):
    """Refuses batches whose rows and tokens the mesh cannot divide."""
    parts, rows = sharding.token_parts(), sharding.batch_parts()
    if parts > 1 and self.batch_size % rows:
      raise ValueError(
        f'Training.batch_size is {self.batch_size}, but with Mesh.sequence '
        f'{rows} devices have one row each at a time: give a multiple of {rows}'
      )
    for name in ('max_length', 'width_multiple', 'packed_length'):
      value = getattr(self, name)
      if value is not None and value % parts:
        raise ValueError(
          f'Training.{name} is {value}, but Mesh.sequence divides each row '
          f'over {parts} devices: give a multiple of {parts}'
        )

  @property
  def drafter(self) -> trainable.Trainable:
    """The drafter that is trained."""
    return cast(trainable.Trainable, self.objective.drafter)

  @property
  def trains_target(self) -> bool:
    """Whether the target changes too."""
    return self.target_learning_rate is not None

  def optimizer(self, plan: Plan) -> optax.GradientTransformation:
    """Returns the optimizer of the whole tree of parameters."""

    def adam(peak, first=0):
      schedule = rate(peak, plan, self.warmup_steps, first)
      return optax.adamw(schedule, b2=self.b2, weight_decay=self.weight_decay)

    clip = optax.clip_by_global_norm(self.clip_norm)
    if self.target_learning_rate is None:
      return optax.chain(clip, adam(self.learning_rate))
    rates = {
      'drafter': adam(self.learning_rate),
      'target': adam(self.target_learning_rate, self.target_first_step),
    }
    return optax.chain(clip, optax.partition(rates, _label))

  def batches(
    self, examples: Sequence[batches_lib.Example]
  ) -> batches_lib.Batches:
    """Returns the batches of an endless run."""
    return batches_lib.Batches(
      examples=examples,
      batch_size=self.batch_size,
      max_length=self.max_length,
      width_multiple=self.width_multiple,
      packed_length=self.packed_length,
      num_parts=self.accumulation_steps,
      sorted_batches=self.sorted_batches,
      seed=self.seed,
    )

  def num_steps(self, batches: batches_lib.Batches) -> float:
    """Returns the number of steps wanted, given the batches of the data."""
    epochs = self.epochs
    if epochs is None:
      assert self.answer_tokens is not None
      epochs = self.answer_tokens / batches.answer_tokens
    return epochs * batches.per_epoch

  def settings(self) -> dict[str, Any]:
    """Returns all settings by their names in gin, as JSON."""
    objective = self.objective
    found: dict[str, Any] = {
      'objective': type(objective).__name__,
      'drafter': type(objective.drafter).__name__,
    }
    components: tuple[Any, ...] = (self, objective, objective.drafter)
    for component in components:
      for field in dataclasses.fields(component):
        if field.name not in _ELSEWHERE:
          name = f'{type(component).__name__}.{field.name}'
          found[name] = getattr(component, field.name)
    name_of = lambda x: getattr(x, '__name__', None) or repr(x)
    return json.loads(json.dumps(found, default=name_of))

  def header(self, data: Sequence[str]) -> dict[str, Any]:
    """Returns what has to agree between the starts of a run, as JSON.

    Code, versions and machines may differ, and so may the settings that do not
    shape the curve. `data` are digests.
    """
    target = self.target
    free = [f'{type(self).__name__}.{name}' for name in _FREE]
    return {
      'target': target.fingerprint,
      'weights': None if target.exact_fingerprint is None else 'int8',
      'chat template': chat.Template.of(target.tokenizer).to_json(),
      'data': list(data),
      'settings': {k: v for k, v in self.settings().items() if k not in free},
    }


def _label(params):
  """Labels every parameter 'drafter' or 'target'."""
  return {
    name: jax.tree.map(lambda _, name=name: name, tree)
    for name, tree in params.items()
  }
