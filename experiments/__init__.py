"""The commands, and a folder for each part of their work."""


def __getattr__(name):
  # For configurations and scripts that are older than the folders.
  from experiments.command import moved  # noqa: PLC0415

  now = moved.to(name)
  if now is None:
    raise AttributeError(f'experiments has no {name!r}')
  folder, _, module = now.rpartition('.')
  raise ImportError(
    f'experiments.{name} is now {now}: write "from {folder} import {module}"'
  )
