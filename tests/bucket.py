"""A stand-in for a bucket of gs://, made of a local folder."""

import os
import pathlib
from typing import ClassVar

import fsspec
from fsspec.implementations import local


class FileSystem(local.LocalFileSystem):
  """Files of gs:// below `root`.

  `served` are the parts that were read, `error` is what every question raises.
  """

  protocol = ('gs', 'gcs')
  root: ClassVar[pathlib.Path]
  served: ClassVar[list[tuple[str, int, int]]]
  error: ClassVar[Exception | None]

  def __init__(self, **kwargs):
    super().__init__(auto_mkdir=True, **kwargs)

  @classmethod
  def _strip_protocol(cls, path):
    name = os.fspath(path)
    if name.startswith('gs://'):
      name = str(cls.root / name.removeprefix('gs://'))
    return super()._strip_protocol(name)

  def isdir(self, path):
    """Whether there is a folder."""
    if self.error is not None:
      raise self.error
    return super().isdir(path)

  def cat_file(self, path, start=None, end=None, **kwargs):
    """Serves a part of a file."""
    self.served.append((os.path.basename(path), start, end))
    return super().cat_file(path, start, end, **kwargs)


def make(root: pathlib.Path) -> type[FileSystem]:
  """Lets gs://NAME be the folder NAME in `root`; returns the file system."""
  FileSystem.root = root
  FileSystem.served = []
  FileSystem.error = None
  for scheme in ('gs', 'gcs'):
    fsspec.register_implementation(scheme, FileSystem, clobber=True)
  return FileSystem
