"""The metrics of a run for TensorBoard, in addition to the journal."""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import pathlib
from typing import Any

from specsample import files

# observe(kind, values) is called for each report and evaluation of a step.
Observe = Callable[[str, dict[str, Any]], None]


def check(folder: pathlib.PurePath) -> None:
  """Refuses a folder that `writer` cannot write to."""
  if importlib.util.find_spec('tensorboardX') is None:
    raise ValueError(
      '--tensorboard needs the package tensorboardX: pip install '
      "'specsample[tensorboard]', or leave the flag out"
    )
  if files.is_remote(folder):
    raise ValueError(
      f'--tensorboard writes to a local folder, but {folder} is in a bucket: '
      'give another --out, or leave the flag out'
    )


@contextlib.contextmanager
def writer(folder: pathlib.PurePath) -> Iterator[Observe]:
  """Writes event files to a local folder while the context lasts.

  The package tensorboardX writes them, without TensorFlow. `tensorboard
  --logdir=FOLDER` shows them, even while the run goes on.
  """
  check(folder)
  import tensorboardX  # noqa: PLC0415 (an extra, which most runs do without)

  # Hides what earlier starts wrote: a kill may have lost the last events.
  with tensorboardX.SummaryWriter(
    str(folder), flush_secs=10, purge_step=0
  ) as events:

    def observe(kind, values):
      for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        for i, number in enumerate(numbers, 1):
          if number is not None:
            tag = f'{kind}/{name}' + (f'/{i}' if value is numbers else '')
            events.add_scalar(tag.replace(' ', '_'), number, values['step'])

    yield observe
