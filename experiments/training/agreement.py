"""Settings that must match across the starts of a training run.

A run may continue under other code, on other machines and with other versions:
these are recorded for each part of it. Whatever shapes the curve has to agree:
the target, its chat template and weights, the objective, the drafter, the data,
and every setting of `training.Training` except those that only say how long the
run is (`epochs`, `answer_tokens`, `decay`, `patience`), how often something is
done (`evaluate_every`, `checkpoint_seconds`), or where the target's vectors
come from (`cache_hidden`).
"""

from collections.abc import Sequence
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


def header(
  training: training_lib.Training, data: Sequence[str]
) -> dict[str, Any]:
  """Returns the header of a run's journal, with the data's digests, as JSON.

  The settings have their names in gin. A function becomes its name, and a
  component its `repr`.
  """
  objective = training.objective
  target = training.target
  settings = {
    'objective': type(objective).__name__,
    'drafter': type(objective.drafter).__name__,
  }
  components: tuple[Any, ...] = (training, objective, objective.drafter)
  for component in components:
    free = _FREE if component is training else ()
    for field in dataclasses.fields(component):
      if field.name not in (*_ELSEWHERE, *free):
        name = f'{type(component).__name__}.{field.name}'
        settings[name] = getattr(component, field.name)
  found = {
    'target': target.fingerprint,
    'weights': None if target.exact_fingerprint is None else 'int8',
    'chat template': dataclasses.asdict(template.Template.of(target.tokenizer)),
    'data': list(data),
    'settings': settings,
  }
  name_of = lambda x: getattr(x, '__name__', None) or repr(x)
  return json.loads(json.dumps(found, default=name_of))
