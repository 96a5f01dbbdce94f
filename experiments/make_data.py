"""Makes dialogues to train drafters on, by the target alone.

  python -m experiments.make_data --out=data/smollm2 --tokens=2000000
  python -m experiments.make_data --out=data/smollm2 --tokens=30000000
  python -m experiments.make_data --out=... --prompts=own.jsonl --exclude=test

The model writes user turns after its chat template and answers them; --prompts
adds turns from a file. The second command goes on from where the first one
ended, as the same command does after an interruption. This file only wires:
synthesis.py samples, shard.py filters, data_folder.py keeps; batches.py reads.
"""

from collections.abc import Sequence
import hashlib
import json
import time

from absl import flags

from experiments import cli
from experiments import config
from experiments import data_folder
from experiments import dialogues as dialogues_lib
from experiments import environment
from experiments import features
from experiments import filters
from experiments import mesh
from experiments import progress
from experiments import prompts as prompts_lib
from experiments import synthesis as synthesis_lib
from specsample import files

config.define_flags('configs/runs/data.gin')
flags.adopt_module_key_flags(config)
_OUT = flags.DEFINE_string(
  'out', None, 'Folder of the data, here or in a bucket (gs://).', required=True
)
_TOKENS = flags.DEFINE_integer(
  'tokens',
  2_000_000,
  'Tokens of answers to have in the folder at the end, or a few more.',
  lower_bound=1,
)
_PROMPTS = flags.DEFINE_string(
  'prompts',
  None,
  "User turns to answer besides: Spec-Bench's jsonl (first turns), JSON lines "
  'with a prompt field, or plain text with a prompt a line.',
)
_EXCLUDE = flags.DEFINE_string(
  'exclude',
  None,
  'A test set, in the same formats: no user turn may share 13 words in a row '
  'with one of its prompts or, where both have fewer, all words.',
)


def main() -> None:
  """Checks everything, then makes the shards that are missing."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _make_data()


def _make_data() -> None:
  with cli.bad_input():
    out = files.at(_OUT.value)
    prompts = _read(_PROMPTS.value)
    excluded = [prompt.text for prompt in _read(_EXCLUDE.value)]
    synthesis = synthesis_lib.Synthesis()
    synthesis.check()
    if synthesis.keep_hidden:
      features.path(out, 0)  # says if there is no place for them
    settings = synthesis.settings() | {
      'prompts': _digest([prompt.text for prompt in prompts]),
      'exclude': _digest(excluded),
    }
    identity = data_folder.Identity(
      target=synthesis.target.fingerprint,
      vocab_size=synthesis.target.model.vocab_size,
      settings=settings,
    )
    cli.make_folder(out)
    folder = data_folder.Folder(out, identity)
    _fill(folder, synthesis, prompts, filters.Exclusion(excluded))


def _fill(
  folder: data_folder.Folder,
  synthesis: synthesis_lib.Synthesis,
  prompts: Sequence[prompts_lib.Prompt],
  excluded: filters.Exclusion,
) -> None:
  """Makes shards until there are enough tokens."""
  wanted = _TOKENS.value
  number, num_tokens = 0, 0
  known: set[int] = set()

  def read() -> bool:
    """Takes in the next shard, if it is there and needed."""
    nonlocal number, num_tokens
    with cli.bad_input():
      found = folder.read(number) if num_tokens < wanted else None
    if found is None:
      return False
    number += 1
    num_tokens += dialogues_lib.answer_tokens(found)
    known.update(dialogue.turn for dialogue in found)
    return True

  while read():
    pass
  with progress.meter(wanted, num_tokens, 'tokens') as meter:
    while num_tokens < wanted:
      watch = lambda count: meter(num_tokens + count, f'shard {number}')
      begin = time.monotonic()
      found, ends = synthesis.make(number, prompts, known, excluded, watch)
      if not found:
        cli.fail(
          f'none of {synthesis.user_turns} dialogues passed the filters '
          f'({ends}): see what the model writes, by '
          'python -m experiments.generate --chat'
        )
      seconds = round(time.monotonic() - begin, 1)
      with cli.bad_input():
        if synthesis.keep_hidden:
          features.write(files.at(_OUT.value), number, found)
        folder.add(number, found, {'seconds': seconds, 'ends': ends})
      while read():
        pass
  print(f'{num_tokens:,} tokens of answers in {number} shards: {_OUT.value}')
  left = len(prompts) - number * synthesis.prompts_per_shard
  if left > 0:
    print(f'{left:,} prompts have had no turn yet: raise --tokens')


def _read(path: str | None) -> list[prompts_lib.Prompt]:
  return [] if path is None else prompts_lib.read(config.find(path))


def _digest(texts: Sequence[str]) -> str | None:
  """What tells one list of texts from another, None of an empty one."""
  encoded = json.dumps(list(texts)).encode()
  return hashlib.sha256(encoded).hexdigest() if texts else None


if __name__ == '__main__':
  cli.run(main, 'interrupted: the same command goes on from here')
