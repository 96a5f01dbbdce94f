"""Makes prompts about texts that the target wrote, for make_data to answer.

  python -m experiments.make_prompts --data=data/smollm2 --out=prompts.jsonl
  python -m experiments.make_prompts --data=... --out=... --count=500
  python -m experiments.make_data --prompts=prompts.jsonl --out=data/texts

Left to itself, a model mostly asks short questions. Here its own answers become
texts that it has to summarise, or to answer questions from: the prompts have a
few hundred tokens, and their answers repeat parts of them.
"""

import json

from absl import flags

from experiments.command import cli
from experiments.command import frame
from experiments.reporting import files
from experiments.training_data import data_folder
from experiments.training_data import text_prompts
from specsample import files as library_files

frame.define_flags('configs/runs/prompts.gin')
_DATA = flags.DEFINE_string(
  'data', None, 'Folder that make_data wrote with the target.', required=True
)
_OUT = flags.DEFINE_string(
  'out', None, 'The file of prompts, JSON lines.', required=True
)
_COUNT = flags.DEFINE_integer(
  'count', 10_000, 'How many prompts.', lower_bound=1
)


def main() -> None:
  """Reads the data and writes the prompts, whole or not at all."""
  with cli.bad_input():
    prompts = text_prompts.Prompts()
    data = data_folder.load(_DATA.value, prompts.target)
    kept, _ = data.numbers(prompts.held_out_every)
    dialogues = [dialogue for n in kept for dialogue in data.shards[n]]
    made = prompts.make(dialogues, _COUNT.value)
    lines = [json.dumps(x, ensure_ascii=False) for x in made]
    out = library_files.at(_OUT.value)
    cli.make_folder(out.parent)
    files.write(out, ('\n'.join(lines) + '\n').encode())
  print(f'{len(lines):,} prompts: {out}')


if __name__ == '__main__':
  frame.run(main)
