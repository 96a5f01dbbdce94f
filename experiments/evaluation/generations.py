"""The file generations.jsonl: the text and origin of every emitted token.

It has one line per prompt, and one for each later turn of it. It holds text,
not ids, so that its readers need no tokenizer.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import files as reporting_files
from experiments.reporting import result_file
from experiments.reporting import rows
import specsample
from specsample import files
from specsample import text as text_lib

NAME = 'generations.jsonl'


@dataclasses.dataclass(frozen=True)
class Text:
  """The text of a method, token by token.

  The pieces, joined, are the text. The piece of a token that has no text of its
  own is empty: an end-of-text token, or one whose character a later token
  completes.
  """

  pieces: list[str]
  origins: list[str]  # 'accepted', 'correction', ..., as in types.Origin
  rounds: list[int]  # the round, from 0, that emitted each token
  # The target's own probability of each token, before temperature and the like;
  # empty if the rule does not compute it.
  probs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt, and the text with which each method continued it."""

  id: str
  category: str
  text: str
  methods: dict[str, Text]


def write(
  out: pathlib.PurePath,
  tokenizer: text_lib.Tokenizer,
  prompts: Sequence[prompts_lib.Prompt],
  generations: Mapping[str, Sequence[rows.Generation]],
) -> None:
  """Writes generations.jsonl, of the first samples."""
  found: dict[tuple[int, int], dict[str, Text]] = collections.defaultdict(dict)
  for name, runs in generations.items():
    for run in runs:
      if not run.sample:
        found[run.prompt, run.turn][name] = _text(tokenizer, run)
  lines = [json.dumps({'schema': result_file.SCHEMA})]
  for (number, turn), methods in sorted(found.items(), key=lambda x: x[0]):
    prompt = prompts[number]
    one = Prompt(
      prompt.id + (f', {rows.turn_category(turn)}' if turn else ''),
      prompt.category,
      [prompt.text, *prompt.next_turns][turn],
      methods,
    )
    lines.append(json.dumps(dataclasses.asdict(one)))
  reporting_files.write(out / NAME, '\n'.join([*lines, '']).encode())


def read(path: pathlib.PurePath, limit: int) -> list[Prompt]:
  """Reads the first `limit` prompts of each category from generations.jsonl."""
  found: list[Prompt] = []
  counts: collections.Counter[str] = collections.Counter()
  with files.at(path).open('rb') as file:
    for number, line in enumerate(file, 1):
      try:
        record = json.loads(line)
        if number == 1:
          if record['schema'] != result_file.SCHEMA:
            raise ValueError(f'schema {record["schema"]} is not known')
          continue
        texts = {name: Text(**x) for name, x in record['methods'].items()}
        prompt = Prompt(**record | {'methods': texts})
        counts[prompt.category] += 1
        if counts[prompt.category] <= limit:
          found.append(prompt)
      except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
          f'{path}, line {number}, cannot be read ({error}): run the '
          'evaluation again if its journal is there, or move the file away'
        ) from error
  return found


def _text(tokenizer, generation):
  return Text(
    pieces=text_lib.pieces(tokenizer, generation.tokens),
    origins=[
      specsample.Origin(origin).name.lower() for origin in generation.origins
    ],
    rounds=generation.emit_rounds,
    probs=[float(f'{math.exp(x):.3g}') for x in generation.log_probs],
  )
