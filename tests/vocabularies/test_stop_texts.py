"""Stops at texts: the row ends where its decoded text first has one."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers

import specsample
from specsample import drafters
from specsample import text as text_lib
from specsample import verify
from specsample.loop import decode
from specsample.testing import hash_model
from specsample.types import StopReason
from specsample.vocabularies import token_bytes

_LETTER = {byte: letter for letter, byte in token_bytes._BYTE_OF.items()}
# Texts in several tokens each, parts of characters, and a control token.
_PIECES = (
  *('B', 'l', 'ue', 'Blue', ' Blue', 'Bl', ' B', 'lue', 'e\n', '\n', '\n\nB'),
  *('é', 'né', 'ue né', '日本', ' '),
)
_BYTES = (*'日'.encode(), *'é'.encode())
_CONTROL = '<|end|>'
_NUM_TOKENS = len(_PIECES) + len(set(_BYTES)) + 1
_TEXTS = (
  *(('Blue',), (' Blue',), ('\n\n',), ('e\n\nB',), ('日',), ('é',)),
  *(
    ('ue né', 'lu'),
    ('B' * 3, 'Bluelue', '\nl'),
    (_CONTROL, 'BlueB'),
    ('l', 'Bl'),
  ),
)


def _tokenizer(kind):
  """Returns a tokenizer of these pieces: as bytes, or as SentencePiece's."""
  of_bytes = {bytes([byte]) for byte in _BYTES}
  if kind == 'bytes':
    spelled = [piece.encode() for piece in _PIECES] + sorted(of_bytes)
    names = [''.join(_LETTER[byte] for byte in text) for text in spelled]
    decoder = tokenizers.decoders.ByteLevel()
  else:
    names = [piece.replace(' ', '▁') for piece in _PIECES]
    names += [f'<0x{one[0]:02X}>' for one in sorted(of_bytes)]
    decoder = tokenizers.decoders.Sequence(
      [
        tokenizers.decoders.Replace('▁', ' '),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
      ]
    )
  vocab = {name: i for i, name in enumerate(names)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  backend.decoder = decoder
  backend.add_special_tokens([_CONTROL])
  assert backend.get_vocab_size() == _NUM_TOKENS
  return text_lib.Tokenizer(backend=backend, named_tokens={})


_TARGET = hash_model.HashModel(vocab_size=_NUM_TOKENS + 3, padding=3, seed=5)
_DRAFT = dataclasses.replace(_TARGET, noise=0.3)
_PROMPTS = [[i, 0, 1] for i in range(16)]


def _settings(stop, max_new_tokens):
  return {
    'model': _TARGET,
    'drafter': drafters.Chain(model=_DRAFT, num_draft_tokens=3),
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=1.3),
    'max_new_tokens': max_new_tokens,
    'stop': stop,
  }


def _generate(stop=specsample.Stop(), max_new_tokens=40):
  output = specsample.generate(
    {'target': {}, 'drafter': {}},
    *specsample.pad_prompts(_PROMPTS),
    jax.random.key(2),
    **_settings(stop, max_new_tokens),
  )
  output = jax.device_get(output)
  rows = zip(output.tokens, output.lengths, strict=True)
  return [row[:length].tolist() for row, length in rows], output


def _until(tokenizer, row, texts):
  """Returns how many tokens the row has when its text first has a stop."""
  decode = lambda n: ''.join(
    # Several decoders make all bytes of a run invalid, if one is; a stream not.
    text_lib.pieces(tokenizer, row[:n], skip_special=False)
  )
  found = (
    n for n in range(1, len(row) + 1) if any(t in decode(n) for t in texts)
  )
  return next(found, None)


@pytest.mark.parametrize('kind', ['bytes', 'sentencepiece'])
def test_a_row_ends_where_its_text_first_has_a_stop(kind):
  tokenizer = _tokenizer(kind)
  whole, _ = _generate()
  num_ended = 0
  for texts in _TEXTS:
    stop = specsample.Stop(texts=specsample.StopTexts(tokenizer, texts))
    found, output = _generate(stop)
    for row, full, reason in zip(found, whole, output.stop_reason, strict=True):
      end = _until(tokenizer, full, texts)
      assert row == full[:end], (texts, end)
      expected = (
        StopReason.MAX_NEW_TOKENS if end is None else StopReason.SEQUENCE
      )
      assert end == len(full) or reason == expected
      num_ended += end is not None
  assert num_ended > 4 * len(_TEXTS)


def test_stop_texts_share_executables_and_refilled_rows_stop_too():
  tokenizer = _tokenizer('bytes')
  before = decode._advance._cache_size()
  for texts in (('lue',), ('Bl', '\n'), ('é',), ('ue n',), ('\n\nB', 'e')) * 2:
    stop = specsample.Stop(texts=specsample.StopTexts(tokenizer, texts))
    whole, _ = _generate(stop, max_new_tokens=24)
  assert decode._advance._cache_size() - before <= 1
  refilled = specsample.generate_all(
    {'target': {}, 'drafter': {}},
    _PROMPTS,
    jax.random.key(2),
    **_settings(stop, max_new_tokens=24),
    batch_size=4,
  )
  assert [one.tokens[0, : one.lengths[0]].tolist() for one in refilled] == whole


def _ends(stop, ids, vocab_size):
  """Returns after how many of the ids each stop text is complete."""
  classes, moves, _ = stop.table(vocab_size)
  now, ends = 0, []
  for n, token in enumerate(ids, 1):
    now, ended = divmod(int(moves[now, classes[token]]), 2)
    ends += [n] if ended else []
  return ends


def test_every_spelling_in_a_real_vocabulary_is_found(smollm2):
  tokenizer, size = smollm2.tokenizer, smollm2.model.vocab_size
  stop = specsample.StopTexts(tokenizer, ['Blue 日本', '🦤.'])
  rng = np.random.default_rng(0)
  texts = (
    'The sky is Blue 日本語 Blue 日本',
    'Blu\n\nBlue 日🦤 Blue 🦤.🦤.',
    'Blue',
  )
  spelled = token_bytes.from_tokenizer(tokenizer)
  by_bytes = token_bytes.canonical(spelled)
  for text in texts:
    expected = stop.before(text)
    for _ in range(20):
      cuts = np.flatnonzero(rng.random(len(text.encode())) < rng.random())
      parts = np.split(np.frombuffer(text.encode(), np.uint8), cuts)
      ids = [
        by_bytes[key]
        for part in parts
        for key in _pieces_of(part.tobytes(), by_bytes)
      ]
      assert tokenizer.decode(ids) == text
      ends = _ends(stop, ids, size)
      assert bool(ends) == (expected != text)
      if ends:
        until = tokenizer.decode(ids[: ends[0]])
        assert stop.before(until) == expected
        assert stop.before(tokenizer.decode(ids[: ends[0] - 1])) != expected


def _pieces_of(part, by_bytes):
  """Divides bytes into the longest tokens, from the left."""
  while part:
    size = next(
      n for n in range(len(part), 0, -1) if (part[:n], False) in by_bytes
    )
    yield part[:size], False
    part = part[size:]


@pytest.mark.parametrize(
  ('texts', 'text', 'expected'),
  [
    (['b'], 'abcb', 'a'),
    (['b'], 'xyz', 'xyz'),
    (['abcde', 'cd'], 'abcde', 'ab'),  # 'cd' ends first
    (['cd', 'bcd'], 'abcd', 'a'),
    (['日'], '本日本', '本'),
  ],
)
def test_a_text_is_cut_before_the_stop_that_ends_first(texts, text, expected):
  stop = specsample.StopTexts(_tokenizer('bytes'), texts)
  assert stop.before(text) == expected


@pytest.mark.parametrize('texts', ['Blue', [], [''], [3], None, ['a\ud800']])
def test_texts_that_are_none_are_refused(texts):
  with pytest.raises(ValueError, match=r'texts? (is|has) .*: give|surrogate'):
    specsample.StopTexts(_tokenizer('bytes'), texts)


def test_what_is_no_tokenizer_or_decodes_in_an_unknown_way_is_refused():
  with pytest.raises(ValueError, match=r'tokenizer is .*load\(\.\.\.\)'):
    specsample.StopTexts(3, ['Blue'])
  with pytest.raises(
    ValueError, match=r'texts is of type list: give StopTexts'
  ):
    specsample.Stop(texts=['Blue'])
  tokenizer = _tokenizer('bytes')
  tokenizer.backend.decoder = tokenizers.decoders.WordPiece()
  stop = specsample.StopTexts(tokenizer, ['Blue'])
  with pytest.raises(ValueError, match=r'stop at token ids, with Stop'):
    stop.table(_NUM_TOKENS)
