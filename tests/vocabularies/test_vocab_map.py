"""Maps between vocabularies, for tokenizers small enough to write down."""

import types

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from specsample import text
from specsample.vocabularies import token_bytes
from specsample.vocabularies import vocab_map
from specsample.vocabularies.vocab_map import Kind

_LETTERS = 'acehnot é'
_MERGES = [('t', 'h'), ('th', 'e'), (' ', 'the'), ('a', 't'), ('c', 'at')]
_BYTE_LETTER = {token: letter for letter, token in token_bytes._BYTE_OF.items()}


def _finish(backend, control, bos=None):
  added = [tokenizers.AddedToken(c, special=True) for c in control]
  backend.add_special_tokens(added)
  named = {}
  if bos is not None:
    named['bos_token'] = bos
    backend.post_processor = processors.TemplateProcessing(
      single=[bos, '$A'], special_tokens=[(bos, backend.token_to_id(bos))]
    )
  return text.Tokenizer(backend=backend, named_tokens=named)


def _byte_level(merges=_MERGES, control=('<end>',), bos=None):
  """Returns a tokenizer of all bytes and the merges, as GPT-2 writes them."""
  write = lambda t: ''.join(_BYTE_LETTER[byte] for byte in t)
  to_bytes = lambda t: t if isinstance(t, bytes) else t.encode()
  pairs = [(write(to_bytes(a)), write(to_bytes(b))) for a, b in merges]
  names = [*sorted(_BYTE_LETTER.values()), *(a + b for a, b in pairs)]
  backend = tokenizers.Tokenizer(
    models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs)
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  return _finish(backend, control, bos)


def _sentence_piece(
  merges=_MERGES, control=('<end>',), bos=None, leading_space=False
):
  """Returns a tokenizer of letters and merges, with bytes for all else."""
  write = lambda t: t.replace(' ', '▁')
  pairs = [(write(a), write(b)) for a, b in merges]
  names = [
    *(f'<0x{byte:02X}>' for byte in range(256)),
    *map(write, _LETTERS),
    *(a + b for a, b in pairs),
  ]
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={name: i for i, name in enumerate(names)},
      merges=pairs,
      byte_fallback=True,
    )
  )
  prepend = [normalizers.Prepend('▁')] * leading_space
  backend.normalizer = normalizers.Sequence(
    [*prepend, normalizers.Replace(' ', '▁')]
  )
  steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  steps += [decoders.Strip(' ', 1, 0)] * leading_space
  backend.decoder = decoders.Sequence(steps)
  return _finish(backend, control, bos)


def _words(names):
  vocab = {name: i for i, name in enumerate(names)}
  return text.Tokenizer(
    backend=tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=names[0])),
    named_tokens={},
  )


def _map(draft, target, padding=(0, 0), **kwargs):
  draft, target = (
    types.SimpleNamespace(
      tokenizer=tokenizer,
      model=types.SimpleNamespace(vocab_size=tokenizer.vocab_size + more),
    )
    for tokenizer, more in zip((draft, target), padding, strict=True)
  )
  return vocab_map.map_vocabulary(draft, target, **kwargs)


def _id(tokenizer, name):
  found = tokenizer.backend.token_to_id(name)
  assert found is not None, name
  return found


def _pieces_of(found, i):
  return [int(piece) for piece in found.pieces[i] if piece >= 0]


@pytest.mark.parametrize('leading_space', [False, True])
def test_tokens_of_one_text_are_shared_however_they_are_written(leading_space):
  own, other = _byte_level(), _sentence_piece(leading_space=leading_space)
  # They share all bytes, the merges and the control token. In `other`, é is
  # two bytes, and every other letter exists besides its byte.
  found = _map(own, other)
  assert found.kind is Kind.D2T and found.num_draft_tokens == found.num_shared
  assert found.num_shared == 256 + len(_MERGES) + 1
  assert found.draft_ids[_id(other, '▁the')] == _id(own, 'Ġthe')
  assert found.draft_ids[_id(other, 'a')] == _id(own, 'a')
  assert found.draft_ids[_id(other, '<0x61>')] == -1
  assert found.draft_ids[_id(other, '<0xC3>')] == _id(own, 'Ã')
  assert _pieces_of(found, _id(other, '<0x61>')) == [_id(own, 'a')]
  assert _pieces_of(found, _id(other, 'é')) == [_id(own, 'Ã'), _id(own, '©')]
  # The other direction has the same pairs.
  back = _map(other, own)
  assert back.kind is Kind.INTERSECTION and back.num_shared == found.num_shared
  pairs = {i: j for i, j in enumerate(found.draft_ids.tolist()) if j >= 0}
  assert {j: i for i, j in pairs.items()} == {
    i: j for i, j in enumerate(back.draft_ids.tolist()) if j >= 0
  }


@pytest.mark.parametrize('leading_space', [False, True])
def test_a_token_of_the_target_alone_is_spelled(leading_space):
  target = _byte_level([*_MERGES, (' ', 'c'), (' the', ' c')])
  draft = _sentence_piece(leading_space=leading_space)
  found = _map(draft, target)
  long = _id(target, 'ĠtheĠc')
  assert found.draft_ids[long] == -1
  spelled = [_id(draft, name) for name in ('▁the', '▁', 'c')]
  assert _pieces_of(found, long) == spelled
  cut = _map(draft, target, max_pieces=2)
  assert _pieces_of(cut, long) == spelled[-2:]
  assert cut.pieces.shape == (target.vocab_size, 2)


def test_bytes_of_a_character_are_pieces_of_their_own():
  # The target has a token for a space and the first half of é.
  target = _byte_level([*_MERGES, (b' ', b'\xc3')])
  found = _map(_sentence_piece(), target)
  draft = _sentence_piece()
  assert _pieces_of(found, _id(target, 'ĠÃ')) == [
    _id(draft, '▁'),
    _id(draft, '<0xC3>'),
  ]
  # If there is no token for a byte, nothing is fed for it.
  few = _words(['the', ' ', 'a', 'é'])
  found = _map(few, target)
  assert _pieces_of(found, _id(target, 'ĠÃ')) == [1]
  assert _pieces_of(found, _id(target, '©')) == []


def test_control_tokens_are_shared_by_name_only():
  target = _byte_level(control=('<end>', '<turn>'))
  # To the draft model, '<turn>' is plain text.
  draft = _words(['<turn>', 't', 'h', 'e', '<', 'u', 'r', 'n', '>'])
  draft.backend.add_special_tokens(
    [tokenizers.AddedToken('<end>', special=True)]
  )
  found = _map(draft, target)
  assert found.draft_ids[_id(target, '<end>')] == _id(draft, '<end>')
  assert found.draft_ids[_id(target, '<turn>')] == -1
  assert _pieces_of(found, _id(target, '<turn>')) == []


def test_a_text_begins_with_the_draft_models_bos_once():
  plain, with_bos = _byte_level(), _sentence_piece(bos='<end>')
  other = _byte_level(control=('<s>',), bos='<s>')
  bos = _id(with_bos, '<end>')
  # The target's texts have no BOS, so the draft model's is read before them.
  assert _map(with_bos, _byte_level(control=())).prefix == (bos,)
  # They have a BOS of another name, which is read as the draft model's.
  found = _map(with_bos, other)
  assert found.prefix == ()
  assert _pieces_of(found, _id(other, '<s>')) == [bos]
  assert found.draft_ids[_id(other, '<s>')] == -1
  # The draft model reads no BOS.
  found = _map(plain, other)
  assert found.prefix == () and _pieces_of(found, _id(other, '<s>')) == []
  # Both have the same BOS.
  found = _map(plain, with_bos)
  assert _pieces_of(found, bos) == [_id(plain, '<end>')]


def test_kinds():
  words = [f'word{i}' for i in range(10)]
  assert _map(_words(words), _words(words)).kind is Kind.IDENTITY
  padded = _map(_words(words), _words(words), padding=(0, 6))
  assert padded.kind is Kind.PADDING
  assert padded.draft_ids.tolist() == [*range(10), *[-1] * 6]
  assert _map(_words(words[:8]), _words(words)).kind is Kind.PADDING
  d2t = _map(_words(words[2:8]), _words(words))
  assert d2t.kind is Kind.D2T
  assert d2t.draft_ids.tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, -1, -1]
  some = _map(_words([*words[2:8], 'other']), _words(words))
  assert some.kind is Kind.INTERSECTION and some.num_shared == 6


def test_a_tokenizer_is_identical_to_itself_with_all_its_bytes():
  found = _map(_sentence_piece(), _sentence_piece())
  assert found.kind is Kind.IDENTITY
  assert found.draft_ids.tolist() == list(range(found.num_target_tokens))


@pytest.mark.parametrize('num_shared', [0, 1])
def test_too_few_shared_tokens_are_refused(num_shared):
  target = _words([f'word{i}' for i in range(30)])
  names = [f'other{i}' for i in range(20 - num_shared)]
  draft = _words([*names, *(f'word{i}' for i in range(num_shared))])
  message = (
    f'20 tokens and the target has 30, but only {num_shared} of them .* slem'
  )
  with pytest.raises(ValueError, match=message):
    _map(draft, target)


def test_what_cannot_be_spelled_is_refused():
  draft = _words(['the', 'cat'])
  draft.backend.decoder = decoders.WordPiece()
  with pytest.raises(ValueError, match=r'WordPiece.*slem\.generate'):
    _map(draft, _words(['the', 'cat']))
  with pytest.raises(ValueError, match='max_pieces is 0'):
    _map(_words(['the']), _words(['the']), max_pieces=0)
