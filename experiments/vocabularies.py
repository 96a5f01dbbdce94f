r"""Compares two ways to draft in another vocabulary: shared tokens and text.

  python -m experiments.vocabularies
  python -m experiments.vocabularies --out=results/vocabularies
  python -m experiments.vocabularies --prompts=questions.jsonl --limit=8 \
    --gin_bindings='Comparison.num_draft_tokens = 4'

Prints what the two vocabularies share and the tokens per round of both ways,
TLI and SLEM, and writes vocabularies.json to --out. Exits with code 1 if a
greedy output is not the target's own. Prompts are continued as plain text, in
one batch.
"""

# Only the wiring is here: experiments/evaluation/two_vocabularies.py compares.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import progress
from experiments.command import run_flags
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import two_vocabularies

config.define_flags('configs/runs/vocabularies.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out('vocabularies.json')
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit(8)

_DIFFERS = 1


def main() -> None:
  """Loads, maps, decodes and reports."""
  config.parse()
  environment.set_up()
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    comparison = two_vocabularies.Comparison()
    evaluation = comparison.evaluation
    tokens = [evaluation.encode(path, prompt) for prompt in prompts]
    comparison.check(tokens)
    cli.make_folder(out)
  rows = list(two_vocabularies.rows(comparison, tokens, progress.bar))
  two_vocabularies.write(out, comparison.shared, rows)
  for line in two_vocabularies.lines(comparison.shared, rows):
    print(line)
  print(f'\nvocabularies.json is in {out}')
  different = [row.way for row in rows if row.equals_target is False]
  if different:
    cli.fail(
      f'{", ".join(different)}: the output differs from the target',
      code=_DIFFERS,
    )


if __name__ == '__main__':
  cli.run(main)
