"""The bytes that the tokens of a vocabulary stand for, whatever their names.

A byte-level vocabulary writes ' the' as 'Ġthe', and SentencePiece as '▁the'.
Bytes that are not text are written as '<0x0A>' or as letters of their own.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any

import tokenizers

from specsample import text

_BYTE_TOKEN = re.compile('<0x([0-9A-Fa-f]{2})>')
# Decoder steps that act between whole texts and leave single tokens unchanged.
_OF_WHOLE_TEXTS = ('Fuse', 'Strip')
# Put before a text, for tokenizers that begin a text with a space of their own.
_ANCHORS = ('\n', 'a', '.')


@dataclasses.dataclass(frozen=True)
class Token:
  """A token's name and the bytes that it stands for."""

  name: str
  text: bytes  # may be part of a character; for a control token, its name
  is_control: bool  # never made from text, like a token that ends a turn
  is_fallback: bool  # stands for one byte of text that has no token


def from_tokenizer(tokenizer: text.Tokenizer) -> dict[int, Token]:
  """Returns the tokens of a tokenizer by their ids."""
  backend = tokenizer.backend
  steps = _decoder(backend)
  added = backend.get_added_tokens_decoder()
  tokens = {}
  for name, i in backend.get_vocab().items():
    if i in added:  # stands for its own name
      tokens[i] = Token(name, name.encode(), added[i].special, False)
    else:
      stands_for, is_fallback = _decoded(name, steps)
      tokens[i] = Token(name, stands_for, False, is_fallback)
  return tokens


def canonical(tokens: dict[int, Token]) -> dict[tuple[bytes, bool], int]:
  """Returns the id that each (text, is_control) is encoded as.

  If several tokens stand for the same text, it is the lowest of their ids, and
  that of a byte fallback only if there is no other.
  """
  ids: dict[tuple[bytes, bool], int] = {}
  for i in sorted(tokens, key=lambda i: (tokens[i].is_fallback, i)):
    ids.setdefault((tokens[i].text, tokens[i].is_control), i)
  return ids


def spell(
  tokenizer: text.Tokenizer,
  tokens: dict[int, Token],
  texts: Sequence[bytes],
) -> list[list[int]]:
  """Returns each text in the tokenizer's own tokens, as within a longer text.

  Bytes that do not form a character become tokens of one byte each; bytes that
  the vocabulary has no token for are left out.
  """
  # Bytes that form no character are lone surrogates, which are split off.
  parts = [
    re.findall(
      '[\udc80-\udcff]|[^\udc80-\udcff]+', t.decode('utf-8', 'surrogateescape')
    )
    for t in texts
  ]
  runs = sorted({run for of_text in parts for run in of_text})
  to_bytes = lambda run: run.encode('utf-8', 'surrogateescape')
  is_text = lambda run: not '\udc80' <= run[0] <= '\udcff'
  stands_for = lambda ids: b''.join(
    tokens[i].text if i in tokens and not tokens[i].is_control else b'?'
    for i in ids
  )
  spelled: dict[str, list[int]] = {}
  for anchor in ('', *_ANCHORS):
    missing = [run for run in runs if is_text(run) and run not in spelled]
    before = tokenizer.encode_all([anchor])[0]
    encoded = tokenizer.encode_all([anchor + run for run in missing])
    for run, ids in zip(missing, encoded, strict=True):
      own = ids[len(before) :]
      if ids[: len(before)] == before and stands_for(own) == to_bytes(run):
        spelled[run] = own
  by_text = canonical(tokens)
  for run in runs:
    if run not in spelled:
      found = (by_text.get((bytes([b]), False)) for b in to_bytes(run))
      spelled[run] = [i for i in found if i is not None]
  return [[i for run in of_text for i in spelled[run]] for of_text in parts]


def _decoder(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
  """Returns the steps of a backend's decoder."""
  # Serialised without the vocabulary, which may take 100 MB.
  empty = tokenizers.Tokenizer(tokenizers.models.BPE())
  if backend.decoder is not None:
    empty.decoder = backend.decoder
  decoder = json.loads(empty.to_str())['decoder']
  if decoder is None:
    return []
  steps = decoder['decoders'] if decoder['type'] == 'Sequence' else [decoder]
  known = ('ByteLevel', 'ByteFallback', 'Metaspace', *_OF_WHOLE_TEXTS)
  for step in steps:
    is_replace = step['type'] == 'Replace' and 'String' in step['pattern']
    if step['type'] not in known and not is_replace:
      raise ValueError(
        f'a tokenizer decodes with {step}, so it is not known what its tokens '
        'stand for: draft with slem.generate, which exchanges text, or stop at '
        'token ids, with Stop(sequences=...)'
      )
  return steps


def _decoded(name, steps):
  """Returns what a name stands for, and whether it is a byte fallback."""
  for step in steps:
    kind = step['type']
    if kind == 'Replace':
      name = name.replace(step['pattern']['String'], step['content'])
    elif kind == 'Metaspace':
      name = name.replace(step['replacement'], ' ')
    elif kind == 'ByteFallback' and (match := _BYTE_TOKEN.fullmatch(name)):
      return bytes([int(match[1], 16)]), True
    elif kind == 'ByteLevel' and all(c in _BYTE_OF for c in name):
      return bytes(_BYTE_OF[c] for c in name), False
  return name.encode(), False


def _byte_letters() -> dict[str, int]:
  """Maps GPT-2's letters to bytes: those of printable bytes are themselves.

  The other bytes have the letters from U+0100 on, in their order.
  """
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = [byte for byte in range(256) if byte not in printable]
  letters = {chr(byte): byte for byte in printable}
  return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
