"""Measures what a round of each length costs, for `policies.Fastest`.

  python -m experiments.length_costs --out=results/length_costs
  python -m experiments.length_costs --prompts=questions.jsonl --limit=8
  python -m experiments.length_costs --gin_file=MY.gin

For every adaptive method of a configuration, prints the milliseconds of a round
of 0, 1, ... K drafts, measured in the loop that decodes, and the binding that
passes these costs to `Fastest`. Writes costs.json to --out.
"""

# Only the wiring is here: experiments/evaluation/costs_by_length.py measures.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import mesh
from experiments.command import progress
from experiments.command import run_flags
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import costs_by_length
from experiments.evaluation import evaluation as evaluation_lib

config.define_flags('configs/runs/adaptive.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out('costs.json')
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit(4)


def main() -> None:
  """Measures, prints and writes the costs."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _measure()


def _measure() -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    evaluation = evaluation_lib.Evaluation()
    evaluation_lib.refuse_unused(evaluation)
    tokens = [evaluation.encode(path, prompt) for prompt in prompts]
    work = costs_by_length.work(evaluation)
    for method in work.values():
      evaluation.setup(method).check(tokens)
    cli.make_folder(out)
    costs = costs_by_length.measure(evaluation, work, tokens, progress.bar)
  costs_by_length.write(out, costs)
  costs_by_length.show(out, costs)


if __name__ == '__main__':
  cli.run(main)
