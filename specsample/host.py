"""The machine and the code of this process, as measurements record them."""

import hashlib
import os
import pathlib
import platform


def num_cores() -> int:
  """Returns how many of the machine's processors this process may use."""
  if platform.system() == 'Linux':
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def source(*folders: pathlib.Path) -> str:
  """Returns a digest of the folders' Python and C++ files.

  Unlike a commit or a version, it tells two states of uncommitted files apart.
  """
  digest = hashlib.sha256()
  for folder in folders:
    paths = (
      path for end in ('py', 'cc', 'h') for path in folder.rglob(f'*.{end}')
    )
    for path in sorted(paths):
      content = hashlib.sha256(path.read_bytes()).hexdigest()
      digest.update(f'{path.relative_to(folder)} {content}\n'.encode())
  return digest.hexdigest()
