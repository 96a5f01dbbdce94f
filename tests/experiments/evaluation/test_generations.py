"""generations.jsonl: pieces of text and the origin of each."""

import json
import re

import pytest
import tokenizers

from experiments.decoding import prompts
from experiments.evaluation import generations as generations_lib
from experiments.reporting import rows
from specsample import stats
from specsample import text

_END = '<|end|>'


@pytest.fixture(scope='module')
def tokenizer():
  """A byte tokenizer: non-ASCII characters take two tokens or more."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate([*alphabet, 'Ġthe'])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([_END])
  return text.Tokenizer(backend=backend, named_tokens={'eos_token': _END})


def _generation(tokens, origins, prompt=0):
  counts = stats.Stats(len(tokens), 2, (0, 2), (1, 1))
  return rows.Generation(
    batch=0,
    category='a',
    prompt_tokens=1,
    tokens=tokens,
    log_probs=[-1.0] * len(tokens),
    seconds=1.0,
    stats=counts,
    origins=origins,
    emit_rounds=list(range(len(tokens))),
    prompt=prompt,
  )


def test_a_character_is_the_piece_of_its_last_token(tokenizer):
  tokens = tokenizer.encode('aé€')
  assert text.pieces(tokenizer, tokens) == ['a', '', 'é', '', '', '€']


@pytest.mark.parametrize('cut', [0, 1, 2, 3])
def test_pieces_join_to_the_text(tokenizer, cut):
  tokens = tokenizer.encode('a ñ€ the 😀')
  tokens = tokens[: len(tokens) - cut]
  pieces = text.pieces(tokenizer, tokens)
  assert len(pieces) == len(tokens)
  assert ''.join(pieces) == tokenizer.decode(tokens)


def test_no_tokens_are_no_pieces(tokenizer):
  assert text.pieces(tokenizer, []) == []


def test_file_says_who_wrote_what(tokenizer, tmp_path):
  asked = [
    prompts.Prompt('81', 'qa', 'Why?\u2028\ud800', 1),
    prompts.Prompt('b', 'qa', '</script>', 2),
    prompts.Prompt('c', 'math', '1 + 1', 3),
  ]
  tokens = [*tokenizer.encode('né'), tokenizer.backend.token_to_id(_END)]
  generations = {'x': [_generation(tokens, [1, 2, 3, 1], i) for i in range(3)]}
  generations_lib.write(tmp_path, tokenizer, asked, generations)
  expected = {
    'pieces': ['n', '', 'é', ''],
    'origins': ['accepted', 'correction', 'bonus', 'accepted'],
    'rounds': [0, 1, 2, 3],
    'probs': [0.368] * 4,  # exp(-1)
  }
  path = tmp_path / 'generations.jsonl'
  assert generations_lib.read(path, 5) == [
    {
      'id': prompt.id,
      'category': prompt.category,
      'text': prompt.text,
      'methods': {'x': expected},
    }
    for prompt in asked
  ]
  # One prompt per category.
  assert [one['id'] for one in generations_lib.read(path, 1)] == ['81', 'c']


@pytest.mark.parametrize(
  ('line', 'number'),
  [
    ('{"schema": 4}\n', 1),
    ('{"schema": 6}\n', 1),
    ('{"rows": []}\n', 1),
    ('[]\n', 1),
    ('{"schema": 5}\n{"id": "a"}\n', 2),
    ('{"schema": 5}\n{"id": "a", "cat', 2),
  ],
)
def test_another_file_is_refused_by_name_and_line(tmp_path, line, number):
  path = tmp_path / 'generations.jsonl'
  path.write_text(line)
  expected = re.escape(f'{path}, line {number}, cannot be read')
  with pytest.raises(ValueError, match=expected):
    generations_lib.read(path, 3)


def test_every_line_is_json(tokenizer, tmp_path):
  asked = [prompts.Prompt('1', 'a', 'x\ny', 1)]
  tokens = tokenizer.encode('z')
  generations_lib.write(
    tmp_path, tokenizer, asked, {'m': [_generation(tokens, [3])]}
  )
  first, line, rest = (tmp_path / generations_lib.NAME).read_text().split('\n')
  assert (json.loads(first), rest) == ({'schema': 5}, '')
  assert json.loads(line)['methods']['m']['pieces'] == ['z']
