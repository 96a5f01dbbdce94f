"""Data sets on the hub, read with the library `datasets` if it is installed."""

from collections.abc import Iterable
import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Subset:
  """A split of a data set, as the hub names it."""

  repository: str
  subset: str | None
  split: str
  revision: str | None = None  # a branch, tag or commit; None for the newest

  def rows(self) -> Iterable[dict[str, Any]]:
    """Returns the rows, downloaded or from the hub's cache.

    Raises:
      ValueError: the library is missing or cannot get the data.
    """
    try:
      # Imported by name: it is heavy, and neither tests nor checks need it.
      datasets = importlib.import_module('datasets')
    except ImportError as error:
      raise ValueError(
        f"{error}: pip install 'specsample[data]', or read a file"
      ) from error
    try:
      return datasets.load_dataset(
        self.repository, self.subset, split=self.split, revision=self.revision
      )
    # Errors of the network, the hub and its cache have no common base class.
    except Exception as error:
      raise ValueError(f'{type(error).__name__}: {error}') from error

  def __str__(self) -> str:
    """Returns the name that messages and results show."""
    parts = (self.repository, self.subset, self.split, self.revision)
    return 'hub: ' + ', '.join(part for part in parts if part is not None)
