"""Traces of one generation of each method, for people to look at.

docs/performance.md says how to look at them.
"""

import pathlib
import urllib.parse

import jax

from experiments.command import cli
from experiments.command import progress
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import suite
from specsample import files


def check(root: str, part: evaluation_lib.Part) -> pathlib.Path:
  """Creates the part's folder in --profile_dir, and returns it."""
  path = suite.folder(files.at(root), part.name)
  folder, evaluation = str(path), part.evaluation
  if evaluation.learners:
    raise ValueError(
      f'--profile_dir={folder}: methods that learn, as '
      f'{", ".join(evaluation.learners)}, cannot be profiled: leave them out'
    )
  if files.is_remote(path):
    raise ValueError(
      f'--profile_dir={folder} is in a bucket: give a local folder, and copy '
      'it there later'
    )
  cli.make_folder(path, 'profile_dir')
  return pathlib.Path(folder)


def write(folder: pathlib.Path, part: evaluation_lib.Part) -> None:
  """Decodes a typical batch with each method, and traces it in FOLDER/method.

  The batch is decoded once before that, so that nothing is compiled in the
  trace.
  """
  evaluation = part.evaluation
  prompts = evaluation.typical(part.tokens)
  options = jax.profiler.ProfileOptions()
  # One line per call of a Python function would hide the others.
  options.python_tracer_level = 0
  with progress.bar(len(evaluation.methods)) as step:
    for name, method in evaluation.methods.items():
      step(f'profile, {name}')
      generate = lambda method=method: jax.block_until_ready(
        evaluation.decode(method, prompts, range(len(prompts)))[0]
      )
      generate()
      of_method = folder / urllib.parse.quote(name, safe=' ,+=')
      with jax.profiler.trace(str(of_method), profiler_options=options):
        generate()
