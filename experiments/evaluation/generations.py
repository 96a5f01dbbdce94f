"""The file generations.jsonl: the text and origin of every emitted token.

It has one line per prompt, and one for each later turn of it, with the text of
each method token by token. It holds text, not ids, so that its readers need no
tokenizer.
"""

import collections
from collections.abc import Mapping, Sequence
import json
import math
import pathlib
from typing import Any

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import files as reporting_files
from experiments.reporting import result_file
from experiments.reporting import rows
import specsample
from specsample import files
from specsample import text as text_lib

NAME = 'generations.jsonl'


def write(
  out: pathlib.PurePath,
  tokenizer: text_lib.Tokenizer,
  prompts: Sequence[prompts_lib.Prompt],
  generations: Mapping[str, Sequence[rows.Generation]],
) -> None:
  """Writes generations.jsonl, of the first samples."""
  found: dict[tuple[int, int], dict[str, Any]] = collections.defaultdict(dict)
  for name, runs in generations.items():
    for run in runs:
      if not run.sample:
        found[run.prompt, run.turn][name] = _text(tokenizer, run)
  lines = [json.dumps({'schema': result_file.SCHEMA})]
  for (number, turn), methods in sorted(found.items(), key=lambda x: x[0]):
    prompt = prompts[number]
    one = {
      'id': prompt.id + (f', {rows.turn_category(turn)}' if turn else ''),
      'category': prompt.category,
      'text': [prompt.text, *prompt.next_turns][turn],
      'methods': methods,
    }
    lines.append(json.dumps(one))
  reporting_files.write(out / NAME, '\n'.join([*lines, '']).encode())


def read(path: pathlib.PurePath, limit: int) -> list[dict[str, Any]]:
  """Reads the first `limit` lines of each category from generations.jsonl."""
  found: list[dict[str, Any]] = []
  counts: collections.Counter[str] = collections.Counter()
  with files.at(path).open('rb') as file:
    for number, line in enumerate(file, 1):
      try:
        record = json.loads(line)
        if number == 1:
          if record['schema'] != result_file.SCHEMA:
            raise ValueError(f'schema {record["schema"]} is not known')
          continue
        if set(record) != {'id', 'category', 'text', 'methods'}:
          raise ValueError(f'it has {", ".join(record)}')
        counts[record['category']] += 1
        if counts[record['category']] <= limit:
          found.append(record)
      except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
          f'{path}, line {number}, cannot be read ({error}): run the '
          'evaluation again if its journal is there, or move the file away'
        ) from error
  return found


def _text(tokenizer, generation) -> dict[str, Any]:
  """Returns the text of a method; the pieces, joined, are the text.

  The piece of a token that has no text of its own is empty: an end-of-text
  token, or one whose character a later token completes.
  """
  origins = map(specsample.Origin, generation.origins)
  return {
    'pieces': text_lib.pieces(tokenizer, generation.tokens),
    'origins': [origin.name.lower() for origin in origins],
    # The round, from 0, that emitted each token.
    'rounds': generation.emit_rounds,
    # The target's own probability of each token, before temperature and the
    # like; empty if the rule does not compute it.
    'probs': [float(f'{math.exp(x):.3g}') for x in generation.log_probs],
  }
