"""Numbers of a run as TensorBoard shows them, beside the journal."""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import pathlib
from typing import Any

from specsample import files

# observe((kind, step), values), as what is journalled is told.
Observe = Callable[[tuple, dict[str, Any]], None]


def observe_nothing(key: tuple, values: dict[str, Any]) -> None:
  """Where nobody looks."""


def check(folder: pathlib.PurePath) -> None:
  """Refuses a folder that `writer` cannot write to.

  Raises:
    ValueError: the package is missing, or the folder is of a bucket.
  """
  if importlib.util.find_spec('tensorboardX') is None:
    raise ValueError(
      '--tensorboard needs the package tensorboardX: pip install '
      "'specsample[tensorboard]', or leave the flag out"
    )
  if files.is_remote(folder):
    raise ValueError(
      f'--tensorboard writes to a local folder, and {folder} is of a bucket: '
      'give another --out, or leave the flag out'
    )


@contextlib.contextmanager
def writer(folder: pathlib.PurePath) -> Iterator[Observe]:
  """Writes event files to a local folder while the context lasts.

  Package tensorboardX writes them, without TensorFlow; `tensorboard
  --logdir=FOLDER` shows them, while the run goes on too.

  Raises:
    ValueError: see `check`.
  """
  check(folder)
  import tensorboardX  # noqa: PLC0415 (an extra, which most runs do without)

  # What earlier runs wrote there is not shown: a killed one lost its last.
  with tensorboardX.SummaryWriter(
    str(folder), flush_secs=10, purge_step=0
  ) as events:

    def observe(key, values):
      kind, step = key
      for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        for i, number in enumerate(numbers, 1):
          if number is not None:
            tag = f'{kind}/{name}' + (f'/{i}' if value is numbers else '')
            events.add_scalar(tag.replace(' ', '_'), number, step)

    yield observe
