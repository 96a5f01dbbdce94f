"""A stand-in for a gs:// bucket, backed by a local folder."""

import os
import pathlib
from typing import ClassVar

import fsspec
from fsspec.implementations import local


class FileSystem(local.LocalFileSystem):
  """A file system that serves gs:// paths from `root`.

  `served` lists the byte ranges that were read; `error`, if set, is raised by
  every query.
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
    """Returns whether the folder exists."""
    if self.error is not None:
      raise self.error
    return super().isdir(path)

  def cat_file(self, path, start=None, end=None, **kwargs):
    """Serves a byte range of a file."""
    self.served.append((os.path.basename(path), start, end))
    return super().cat_file(path, start, end, **kwargs)


def make(root: pathlib.Path) -> type[FileSystem]:
  """Maps gs://NAME to the folder NAME in `root`; returns the file system."""
  FileSystem.root = root
  FileSystem.served = []
  FileSystem.error = None
  for scheme in ('gs', 'gcs'):
    fsspec.register_implementation(scheme, FileSystem, clobber=True)
  return FileSystem
