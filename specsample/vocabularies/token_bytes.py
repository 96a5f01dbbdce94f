"""What the tokens of a vocabulary stand for, whatever they are called.

A byte-level vocabulary writes ' the' as 'Ġthe', SentencePiece as '▁the', and
bytes that are no text as '<0x0A>' or as letters of their own.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any

import tokenizers

from specsample import text

_BYTE_TOKEN = re.compile('<0x([0-9A-Fa-f]{2})>')
# Of what a decoder does, that between texts and nothing to a token itself.
_OF_WHOLE_TEXTS = ('Fuse', 'Strip')
# Before a token, for tokenizers that begin a text with a space of their own.
_ANCHORS = ('\n', 'a', '.')


@dataclasses.dataclass(frozen=True)
class Token:
  """One token: what it is called and what it stands for."""

  name: str
  text: bytes  # may be a part of a character; of a control token its name
  is_control: bool  # is never made of text, as one that ends a turn
  is_fallback: bool  # a byte of what the vocabulary has no token for


def of(tokenizer: text.Tokenizer) -> dict[int, Token]:
  """The tokens by their ids.

  Raises:
    ValueError: the tokenizer joins tokens in a way that is not known here.
  """
  backend = tokenizer.backend
  steps = _decoder(backend)
  added = backend.get_added_tokens_decoder()
  tokens = {}
  for name, i in backend.get_vocab().items():
    if i in added:  # stands for what it is called
      tokens[i] = Token(name, name.encode(), added[i].special, False)
    else:
      stands_for, is_fallback = _decoded(name, steps)
      tokens[i] = Token(name, stands_for, False, is_fallback)
  return tokens


def canonical(tokens: dict[int, Token]) -> dict[tuple[bytes, bool], int]:
  """The id of each (text, is_control), of several that a text is made of."""
  ids: dict[tuple[bytes, bool], int] = {}
  for i in sorted(tokens, key=lambda i: (tokens[i].is_fallback, i)):
    ids.setdefault((tokens[i].text, tokens[i].is_control), i)
  return ids


def spell(
  tokenizer: text.Tokenizer,
  tokens: dict[int, Token],
  texts: Sequence[bytes],
) -> list[list[int]]:
  """Each of some texts in a tokenizer's own tokens, as within a longer text.

  Bytes that are no character become tokens of one byte each; what the
  vocabulary has no token for is left out.
  """
  # Bytes of no character are lone surrogates, which stand apart.
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
  """The steps of a backend's decoder."""
  # Written out without the vocabulary, which may have 100 MB.
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
        f'a tokenizer decodes by {step}, of which it is not known what a '
        'token stands for: draft with slem.generate, which goes over text'
      )
  return steps


def _decoded(name, steps):
  """What a token of that name stands for, and whether it is a byte's."""
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
  """GPT-2's letters of the bytes: themselves, or the next from U+0100 on."""
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = [byte for byte in range(256) if byte not in printable]
  letters = {chr(byte): byte for byte in printable}
  return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
