"""Settings that must match across the starts of a training run.

A run may continue under other code, on other machines and with other versions:
these are recorded for each part of it. Whatever shapes the curve has to agree:
the target, its chat template and weights, the objective, the drafter, the data,
and every setting of `training.Training` except those that only say how long the
run is (`epochs`, `answer_tokens`, `decay`, `patience`), how often something is
done (`evaluate_every`, `checkpoint_seconds`), or where the target's vectors
come from (`cache_hidden`).
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
from typing import Any

from experiments.training import training as training_lib
from experiments.training_data import template

_FREE = (
  *('epochs', 'answer_tokens', 'decay', 'patience'),
  *('evaluate_every', 'checkpoint_seconds', 'cache_hidden'),
)
# Fields that hold the target, or a component that is listed separately.
_ELSEWHERE = ('target', 'objective', 'drafter', 'model')
# Longer values are not repeated in a message.
_LONGEST = 40


class Agreement:
  """The header of a run's journal, and how two headers are compared."""

  def __init__(self, training: training_lib.Training, data: Sequence[str]):
    """Lists the settings and their defaults, and the digests of the data."""
    objective = training.objective
    target = training.target
    of_target = dataclasses.asdict(template.Template.of(target.tokenizer))
    self.header: dict[str, Any] = {
      'target': target.fingerprint,
      'weights': None if target.exact_fingerprint is None else 'int8',
      'chat template': json.loads(json.dumps(of_target)),
      'data': list(data),
      'objective': type(objective).__name__,
      'drafter': type(objective.drafter).__name__,
    }
    self._defaults: dict[str, Any] = {}
    for component in (training, objective, objective.drafter):
      for name, value, default in _settings(component):
        self.header[name] = value
        self._defaults[name] = default

  def differences(
    self, found: dict[str, Any], expected: dict[str, Any]
  ) -> list[str]:
    """Returns the differences from another part of the run, in words.

    A setting that did not exist when the run began must have its default. A
    setting that no longer exists is not compared.
    """
    names = []
    for name, value in expected.items():
      before = found[name] if name in found else self._defaults.get(name, _NONE)
      if before != value:
        known = (before is not _NONE) and max(
          len(repr(before)), len(repr(value))
        ) <= _LONGEST
        names.append(
          f'{name} (it has {before!r}, this run has {value!r})'
          if known
          else name
        )
    return names


_NONE = object()


def _settings(component: Any) -> Iterator[tuple[str, Any, Any]]:
  """Yields each setting's name in gin, its value and its default, as JSON."""
  free = _FREE if isinstance(component, training_lib.Training) else ()
  for field in dataclasses.fields(component):
    if field.name in _ELSEWHERE or field.name in free:
      continue
    value = getattr(component, field.name)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    name = f'{type(component).__name__}.{field.name}'
    is_missing = default is dataclasses.MISSING
    yield name, _to_json(value), _NONE if is_missing else _to_json(default)


def _to_json(value: Any) -> Any:
  """Returns a value as the journal reads it back.

  A function becomes its name, and a component its `repr`.
  """
  name = lambda x: getattr(x, '__name__', None) or repr(x)
  return json.loads(json.dumps(value, default=name))
