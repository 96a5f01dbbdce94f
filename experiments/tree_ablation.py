"""Compares draft trees, and chooses one for this machine.

  python -m experiments.tree_ablation
  python -m experiments.tree_ablation --limit=2 --out=results/trees
  python -m experiments.tree_ablation --gin_bindings='Ablation.num_nodes = (9,)'

Counts how often the child of each rank is kept, times trees of several sizes,
chooses for each drafter the tree with the highest predicted speedup, and
measures them all. Prints a table, and writes result.json, results.csv,
trees.json, trees.csv and trees.png to --out. The journal there lets the same
command resume after an interruption.
"""

# Only the wiring is here: experiments/trees/ measures and reports.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import mesh
from experiments.command import progress
from experiments.command import run_flags
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import table as table_lib
from experiments.trees import comparison
from experiments.trees import report
from experiments.trees import stages

config.define_flags('configs/runs/tree_ablation.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out()
_PROMPTS = run_flags.prompts()
# In the default file these have one padded length: one compilation per method.
_LIMIT = run_flags.limit(4)


def main() -> None:
  """Measures what is not in the journal yet, then reports everything."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _compare()


def _compare() -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    ablation = comparison.Ablation()
    evaluation_lib.refuse_unused(ablation.evaluation)
    tokens = [ablation.evaluation.encode(path, prompt) for prompt in prompts]
    ablation.check(tokens)
    header = evaluation_lib.header(ablation.evaluation, prompts, tokens)
    cli.make_folder(out)
    journal = journal_lib.Journal(out, header)
  compared = stages.run(ablation, prompts, tokens, journal, progress.bar)
  table = table_lib.Table.of(
    compared.evaluation, prompts_lib.name(path), len(prompts), journal
  )
  rows = report.write(out, compared, table)
  report.show(out, rows, table)


if __name__ == '__main__':
  cli.run(main, 'interrupted: run the same command again to continue')
