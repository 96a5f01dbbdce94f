"""Runs of commands that tests interrupt."""

import pathlib
import subprocess
import time


def wait(
  out: pathlib.Path, entry: bytes, count: int, process: subprocess.Popen
) -> None:
  """Waits until a run's journal has `count` entries, and two checkpoints."""
  journal, folder = out / 'journal.jsonl', out / 'checkpoints'
  deadline = time.monotonic() + 300
  is_there = lambda: (
    journal.exists()
    and journal.read_bytes().count(entry) >= count
    and len([x for x in folder.iterdir() if x.name.isdigit()]) >= 2
  )
  while not is_there():
    assert process.poll() is None, process.stderr.read().decode()
    assert time.monotonic() < deadline
    time.sleep(0.002)
