"""Makes the dialogues that drafters are trained on.

  python -m experiments.make_data --out=data/smollm2 --tokens=2000000
  python -m experiments.make_data --out=data/smollm2 --tokens=30000000
  python -m experiments.make_data --out=... --prompts=own.jsonl --exclude=test
  python -m experiments.make_data --out=... --answers=written.jsonl.gz

The target writes user turns itself, from the start of its chat template, and
answers them; --prompts gives it real turns to answer. --answers takes
conversations whose answers were written elsewhere. The second command continues
where the first one ended; repeating a command resumes it after an interruption.
"""

# Only the wiring is here: experiments/training_data/ reads files, makes shards
# and keeps them.

import collections
from collections.abc import Callable, Sequence
import hashlib
import json
import time
from typing import Any

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import distributed
from experiments.command import frame
from experiments.command import progress
from experiments.decoding import conversations as conversations_lib
from experiments.training_data import data_folder
from experiments.training_data import features
from experiments.training_data import filling as filling_lib
from experiments.training_data import filters
from experiments.training_data import synthesis as synthesis_lib
from experiments.training_data.dialogues import Dialogue
from specsample import files

frame.define_flags('configs/runs/data.gin', on_hosts=True, recipe='')
_OUT = flags.DEFINE_string(
  'out', None, 'Folder of the data, here or in a bucket (gs://).', required=True
)
_TOKENS = flags.DEFINE_integer(
  'tokens',
  2_000_000,
  'Answer tokens to have in the folder at the end, or a few more.',
  lower_bound=1,
)
_PROMPTS = flags.DEFINE_string(
  'prompts',
  None,
  "A file of user turns to answer: conversations in ShareGPT's or OpenAI's "
  "format (each user turn is answered), Spec-Bench's jsonl, JSON lines with a "
  'prompt field, or plain text with one prompt per line.',
)
_ANSWERS = flags.DEFINE_string(
  'answers',
  None,
  "A file of conversations with answers, in ShareGPT's or OpenAI's format.",
)
_ANSWERS_BY = flags.DEFINE_enum(
  'answers_by',
  data_folder.TARGET,
  [data_folder.TARGET, data_folder.OTHERS],
  'Who wrote the answers of --answers: the target (in any engine), or others. '
  "Drafters learn the target's distribution over the texts of others too.",
)
_EXCLUDE = flags.DEFINE_string(
  'exclude',
  None,
  'A test set, in the formats of --prompts. A user turn is left out if it '
  'shares 13 words in a row with one of its turns or, where both have fewer, '
  'all words.',
)


def main() -> None:
  """Checks everything, then makes the shards that are missing."""
  with cli.bad_input():
    if _PROMPTS.value is not None and _ANSWERS.value is not None:
      raise ValueError(
        '--prompts and --answers are both given: make the data in two folders, '
        'because train takes several'
      )
    out = files.at(_OUT.value)
    forced = _ANSWERS.value is not None
    file = _read(_ANSWERS if forced else _PROMPTS)
    excluded = _excluded()
    distributed.check_same(
      {
        'the file': repr(file and conversations_lib.digest(file.conversations)),
        '--exclude': repr(_digest(excluded)),
      }
    )
    synthesis = synthesis_lib.Synthesis()
    synthesis.check()
    keep_hidden = synthesis.keep_hidden and not forced
    if keep_hidden:
      features.path(out, 0)  # raises an error if they cannot be kept there
    settings = synthesis.settings(_ANSWERS_BY.value if forced else None)
    identity = data_folder.Identity(
      target=synthesis.target.fingerprint,
      vocab_size=synthesis.target.model.vocab_size,
      settings=settings | {'exclude': _digest(excluded)},
    )
    cli.make_folder(out)
    notes = {'file': file.to_json()} if file else {}
    folder = data_folder.Folder(out, identity, notes)
    filling = filling_lib.Filling(folder, file)
  exclusion = filters.Exclusion(excluded)
  from_file = synthesis.user_turns == synthesis.prompts_per_shard
  if not forced:
    # The folder's settings do not know of it: --tokens may be raised later.
    synthesis = synthesis.for_tokens(_TOKENS.value)

  def make(given, watch):
    if not forced:
      known = filling.known
      return synthesis.make(filling.number, given, known, exclusion, watch)
    by_target = _ANSWERS_BY.value == data_folder.TARGET
    with cli.bad_input():
      return synthesis.force(given, by_target, filling.known, exclusion, watch)

  _fill(
    filling,
    make,
    count=synthesis.prompts_per_shard,
    only_given=file is not None and (forced or from_file),
    keep_hidden=keep_hidden,
  )


def _fill(
  filling: filling_lib.Filling,
  make: Callable[..., tuple[list[Dialogue], dict[str, Any]]],
  count: int,
  only_given: bool,
  keep_hidden: bool,
) -> None:
  """Makes shards until there are enough tokens.

  Args:
    filling: the folder and the file.
    make: makes the dialogues of the next shard, and notes about them, from its
      conversations and a callback that takes the number of tokens so far and
      what is under way.
    count: the number of conversations of the file per shard.
    only_given: whether the data end with the file.
    keep_hidden: whether dialogues come with hidden vectors to keep.
  """
  wanted = _TOKENS.value
  with cli.bad_input():
    filling.read(wanted)
  seconds, num_tokens, num_rows = 0.0, 0, 0
  ends: collections.Counter[str] = collections.Counter()
  with progress.meter(wanted, filling.num_tokens, 'tokens') as meter:
    while filling.num_tokens < wanted and (filling.left or not only_given):
      before, number = filling.num_tokens, filling.number
      given = filling.given(count)

      def watch(count, stage, before=before, shard=f'shard {number}'):
        meter(before + count, f'{shard}: {stage}' if stage else shard)

      begin = time.monotonic()
      found, notes = make(given, watch)
      elapsed = time.monotonic() - begin
      seconds += elapsed
      num_rows += notes.get('rows', 0)
      ends.update(notes['ends'])
      if not found and not only_given:
        cli.fail(
          f'no dialogue of shard {number} passed the filters '
          f'({notes["ends"]}): see what the model writes with python -m '
          'experiments.generate --interactive'
        )
      with cli.bad_input():
        if keep_hidden and found:
          features.write(files.at(_OUT.value), number, found)
        filling.add(found, given, {'seconds': round(elapsed, 1), **notes})
        num_tokens += filling.num_tokens - before
        filling.read(wanted)  # there may be later shards, if one was deleted
  if ends:
    cli.say('; '.join(f'{n:,} {how}' for how, n in sorted(ends.items())))
  if not filling.num_tokens:
    cli.fail(
      'no conversation in the file passed the filters: give another file'
    )
  print(
    f'{filling.num_tokens:,} tokens of answers in {filling.number} shards: '
    f'{_OUT.value}'
  )
  if filling.num_tokens < wanted:
    print('the file is used up: append conversations to it for more tokens')
  elif filling.left:
    print(f'{filling.left:,} conversations are left: raise --tokens')
  if num_rows:
    print(
      f'{num_tokens / seconds:,.0f} answer tokens per second; '
      f'{num_rows / seconds:,.0f} rows per second including the prompts'
    )


def _read(
  flag: flags.FlagHolder[str | None],
) -> conversations_lib.File | None:
  """Reads a flag's file and reports on stderr what is left out."""
  if flag.value is None:
    return None
  file = _file(flag.name, flag.value)
  cli.say(file.summary())
  return file


def _file(flag: str, path: str) -> conversations_lib.File:
  try:
    return conversations_lib.read(config.find(path))
  except ValueError as error:
    raise ValueError(f'--{flag}: {error}') from error


def _excluded() -> list[str]:
  """Returns the user turns of the test set."""
  if _EXCLUDE.value is None:
    return []
  file = _file('exclude', _EXCLUDE.value)
  return [turn for x in file.conversations for turn in x.turns]


def _digest(texts: Sequence[str]) -> str | None:
  """Returns a digest of a list of texts; None if it is empty."""
  encoded = json.dumps(list(texts)).encode()
  return hashlib.sha256(encoded).hexdigest() if texts else None


if __name__ == '__main__':
  frame.run(main, resumes=True)
