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
import contextlib
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
from experiments.decoding import prompts as prompts_lib
from experiments.training_data import answers as answers_lib
from experiments.training_data import data_folder
from experiments.training_data import filters
from experiments.training_data import synthesis as synthesis_lib
from experiments.training_data.data_folder import Dialogue
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
  with contextlib.ExitStack() as stack:
    with cli.bad_input():
      if _PROMPTS.value is not None and _ANSWERS.value is not None:
        raise ValueError(
          '--prompts and --answers are both given: make the data in two '
          'folders, because train takes several'
        )
      forced = _ANSWERS.value is not None
      file = _read(_ANSWERS if forced else _PROMPTS)
      if file:
        cli.say(file.summary())
      test_set = _read(_EXCLUDE)
      excluded = (
        [turn for x in test_set.conversations for turn in x.turns]
        if test_set
        else []
      )
      conversations = file.conversations if file else []
      distributed.check_same(
        {
          'the file': prompts_lib.digest(conversations),
          '--exclude': repr(_digest(excluded)),
        }
      )
      synthesis = synthesis_lib.Synthesis()
      synthesis.check()
      settings = synthesis.settings(_ANSWERS_BY.value if forced else None)
      settings['exclude'] = _digest(excluded)
      out = files.at(_OUT.value)
      cli.make_folder(out)
      manifest = stack.enter_context(
        data_folder.opened(out, synthesis.target, settings)
      )
      if file:
        manifest['file'] = file.to_json()
      _check_file(manifest, file)
    exclusion = filters.Exclusion(excluded)
    from_file = synthesis.user_turns == synthesis.prompts_per_shard
    if not forced:
      # The folder's settings do not know of it: --tokens may be raised later.
      synthesis = synthesis.for_tokens(_TOKENS.value)

    def make(number, given, known, watch):
      if not forced:
        return synthesis.make(number, given, known, exclusion, watch)
      dialogues, ends = answers_lib.make(
        given,
        limits=synthesis.limits(exclusion),
        vocab_size=synthesis.target.model.vocab_size,
        by_target=_ANSWERS_BY.value == data_folder.TARGET,
        known=known,
        watch=watch,
      )
      return dialogues, {'ends': ends}

    _fill(
      manifest,
      make,
      conversations=conversations,
      count=synthesis.prompts_per_shard,
      only_given=file is not None and (forced or from_file),
    )


def _fill(
  manifest: data_folder.Manifest,
  make: Callable[..., tuple[list[Dialogue], dict[str, Any]]],
  conversations: Sequence[prompts_lib.Prompt],
  count: int,
  only_given: bool,
) -> None:
  """Makes shards until there are enough tokens, or the file ends.

  `make` returns the dialogues of a shard, and notes about them, given its
  number, its conversations, `count` of those in the file, the digests of all
  user turns so far, and a `synthesis.Watch`.
  """
  folder, wanted = files.at(_OUT.value), _TOKENS.value
  shards = manifest['shards']
  with cli.bad_input():
    found = data_folder.read_shards(folder, manifest)
  known = {dialogue.turn for shard in found for dialogue in shard}
  used = sum(shard.get('origin', {}).get('count', 0) for shard in shards)
  ends: collections.Counter[str] = collections.Counter()
  begun, before = len(shards), data_folder.listed_tokens(manifest)
  with progress.meter(wanted, before, 'tokens') as meter:
    while (done := data_folder.listed_tokens(manifest)) < wanted:
      given = conversations[used : used + count]
      if only_given and not given:
        break
      name = f'shard {len(shards)}'

      def watch(count, stage, done=done, name=name):
        meter(done + count, f'{name}: {stage}' if stage else name)

      begin = time.monotonic()
      with cli.bad_input():
        dialogues, notes = make(len(shards), given, known, watch)
      ends.update(notes['ends'])
      if not dialogues and not only_given:
        cli.fail(
          f'no dialogue of {name} passed the filters ({notes["ends"]}): see '
          'what the model writes with python -m experiments.generate '
          '--interactive'
        )
      notes['seconds'] = round(time.monotonic() - begin, 3)
      if given:
        categories = collections.Counter(x.category for x in given)
        notes['categories'] = dict(sorted(categories.items()))
        notes['origin'] = _origin(conversations, used, len(given))
      with cli.bad_input():
        data_folder.add(folder, manifest, dialogues, notes)
      known.update(dialogue.turn for dialogue in dialogues)
      used += len(given)
  _report(manifest, begun, before, ends, len(conversations) - used)


def _report(manifest, begun, before, ends, num_left) -> None:
  """Says what the folder has, and what was made beyond shard `begun`."""
  if ends:
    cli.say('; '.join(f'{n:,} {how}' for how, n in sorted(ends.items())))
  num_tokens, shards = data_folder.listed_tokens(manifest), manifest['shards']
  if not num_tokens:
    cli.fail(
      'no conversation in the file passed the filters: give another file'
    )
  print(
    f'{num_tokens:,} tokens of answers in {len(shards)} shards: {_OUT.value}'
  )
  if num_tokens < _TOKENS.value:
    print('the file is used up: append conversations to it for more tokens')
  elif num_left:
    print(f'{num_left:,} conversations are left: raise --tokens')
  num_rows = sum(shard.get('rows', 0) for shard in shards[begun:])
  if num_rows:
    seconds = sum(shard['seconds'] for shard in shards[begun:])
    print(
      f'{(num_tokens - before) / seconds:,.0f} answer tokens per second; '
      f'{num_rows / seconds:,.0f} rows per second including the prompts'
    )


def _origin(conversations, first: int, count: int) -> dict[str, Any]:
  """Returns which conversations of the file a shard is made from."""
  digest = prompts_lib.digest(conversations[first : first + count])
  return {'first': first, 'count': count, 'digest': digest}


def _check_file(manifest, file) -> None:
  """Refuses a file without the conversations that shards were made from.

  So the file may grow at its end, and only there.
  """
  for number, shard in enumerate(manifest['shards']):
    if 'origin' not in shard:
      continue
    if file is None:
      raise ValueError(
        f'shard {number} was made from a file of prompts: give it again with '
        '--prompts, or give another --out'
      )
    first, count = shard['origin']['first'], shard['origin']['count']
    if shard['origin'] != _origin(file.conversations, first, count):
      raise ValueError(
        f'shard {number} was made from other conversations than {file.path} '
        'has there, but a file may only grow at its end: give the file as it '
        'was, or another --out'
      )


def _read(flag: flags.FlagHolder[str | None]) -> prompts_lib.File | None:
  """Reads the file of a flag, if one is given."""
  if flag.value is None:
    return None
  try:
    return prompts_lib.read_conversations(config.find(flag.value))
  except ValueError as error:
    raise ValueError(f'--{flag.name}: {error}') from error


def _digest(texts: Sequence[str]) -> str | None:
  """Returns a digest of a list of texts; None if it is empty."""
  encoded = json.dumps(list(texts)).encode()
  return hashlib.sha256(encoded).hexdigest() if texts else None


if __name__ == '__main__':
  frame.run(main, resumes=True)
