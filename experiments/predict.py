"""Predicts speedups on other chips, over K, batch size and context length.

  python -m experiments.predict
  python -m experiments.predict --gin_bindings="Prediction.chip = 'h200'"
  python -m experiments.predict --compiled=results/chen --compiled=results/plain

Prints a table, and writes predict.json, predict.csv and predict.png to --out.
--compiled names folders that `compile_tpu` wrote, for the pair with its drafts
and for the target alone; from their numbers the command also predicts the
table of the paper in the configuration. docs/cost.md says what is counted.
"""

# Only the wiring is here: experiments/prediction/ computes and writes.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import run_flags
from experiments.prediction import paper_table
from experiments.prediction import prediction as prediction_lib
from experiments.prediction import report

config.define_flags('configs/runs/predict.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out()
_COMPILED = flags.DEFINE_multi_string(
  'compiled',
  [],
  'A folder with a compile.json of `compile_tpu`; repeatable.',
)


def main() -> None:
  """Computes everything, then writes and prints it."""
  config.parse()
  environment.set_up()
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    prediction = prediction_lib.Prediction()
    compiled = paper_table.read(_COMPILED.value)
    table = paper_table.Table().rows(compiled) if compiled else []
    rows = prediction_lib.rows(prediction)
    cli.make_folder(out)
    report.write(out, rows, table)
  report.show(out, rows, table)


if __name__ == '__main__':
  cli.run(main)
