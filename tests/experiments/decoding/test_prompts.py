import gzip
import json

import pytest

from experiments.decoding import prompts


def _write(folder, name, text):
  path = folder / name
  path.write_text(text, encoding='utf-8')
  return str(path)


def test_spec_bench_gives_all_turns(tmp_path):
  records = [
    {'question_id': 81, 'category': 'writing', 'turns': ['one', 'two']},
    {'question_id': 82, 'category': 'qa', 'turns': ['three']},
  ]
  text = '\n'.join(json.dumps(record) for record in records)
  assert prompts.read(_write(tmp_path, 'bench.jsonl', text)) == [
    prompts.Prompt('81', 'writing', 'one', 1, next_turns=('two',)),
    prompts.Prompt('82', 'qa', 'three', 2),
  ]


def test_prompt_field_with_and_without_the_rest(tmp_path):
  text = (
    '\ufeff{"prompt": "a\\nb", "id": "x", "category": "c"}\n\n{"prompt": "d"}\n'
  )
  # Read as JSON lines because of its first character.
  assert prompts.read(_write(tmp_path, 'questions', text)) == [
    prompts.Prompt('x', 'c', 'a\nb', 1),
    prompts.Prompt('3', 'none', 'd', 3),
  ]


def test_plain_text_is_a_prompt_a_line(tmp_path):
  path = _write(tmp_path, 'plain.txt', 'first\r\n\n  second \n{"third"}')
  read = prompts.read(path)
  assert [prompt.text for prompt in read] == ['first', 'second', '{"third"}']
  assert [prompt.line for prompt in read] == [1, 3, 4]


def test_limit_takes_the_first(tmp_path):
  path = _write(tmp_path, 'plain.txt', 'a\nb\nc')
  assert [p.text for p in prompts.read(path, limit=2)] == ['a', 'b']
  assert len(prompts.read(path, limit=9)) == 3


@pytest.mark.parametrize('form', ['lines.jsonl', 'array.json'])
@pytest.mark.parametrize(
  ('record', 'message'),
  [
    ('["prompt"]', 'expected a JSON object'),
    ('{"text": "a"}', 'neither "prompt" nor "turns"'),
    ('{"messages": "x"}', '"messages" must be a list of messages'),
    ('{"prompt": "  "}', 'is not empty'),
    ('{"prompt": 3}', 'must be a text'),
    ('{"turns": []}', 'at least one text'),
    ('{"turns": "a"}', 'at least one text'),
    ('{"turns": [null]}', 'must be a text'),
    ('{"turns": ["a", " "]}', "turn 2 is ' ': it must be a text"),
    ('{"turns": ["a", "\\ud800"]}', 'turn 2 has half of a surrogate pair'),
    ('{"prompt": "a", "category": "turn 2"}', "other than 'overall' and 't"),
    ('{"prompt": "\\ud800"}', 'surrogate'),
    ('{"prompt": "a", "category": "overall"}', "other than 'overall'"),
    ('{"prompt": "a", "category": true}', '"category" is True'),
    (json.dumps({'prompt': ['a' * 10**5]}), "the prompt is ['aaaa"),
    (json.dumps({'prompt': 'a', 'category': [1] * 10**5}), 'is [1, 1, '),
  ],
  ids=lambda text: repr(text[:40]),
)
def test_a_record_without_a_prompt_is_named(tmp_path, form, record, message):
  good = ['{"prompt": "a", "category": null}'] * 6
  text = '\n'.join([*good, record])
  if 'array' in form:
    text = f'[{",".join([*good, record])}]'
  path = tmp_path / form
  path.write_text(text)
  place = 'record 7' if 'array' in form else 'line 7'
  with pytest.raises(ValueError, match=f'{form}, {place}: ') as error:
    prompts.read(str(path))
  assert message in str(error.value)
  assert '\n' not in str(error.value)
  assert len(str(error.value)) < len(str(path)) + 250


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"prompt": "cut', 'Unterminated string'),
    ('just text', 'Expecting value (character 1 of what should be'),
    ('{', '(character 2 of what should be JSON)'),
    ('{"prompt": ' + '[' * 10**5, 'it is nested too deeply'),
  ],
  ids=lambda text: text[:40],
)
def test_a_line_that_is_not_json_is_named(tmp_path, line, message):
  path = _write(tmp_path, 'broken.jsonl', '{"prompt": "a"}\n' * 6 + line)
  with pytest.raises(ValueError, match=r'broken\.jsonl, line 7: ') as error:
    prompts.read(path)
  assert message in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
  path = tmp_path / 'latin.txt'
  path.write_bytes(b'a\n' * 6 + b'caf\xe9\n')
  message = r'latin\.txt: line 7 is not UTF-8: convert the file, .*iconv'
  with pytest.raises(ValueError, match=message):
    prompts.read(str(path))


def test_a_category_may_be_a_number(tmp_path):
  path = _write(tmp_path, 'a.jsonl', '{"prompt": "a", "category": 3}')
  assert [x.category for x in prompts.read(path)] == ['3']


def test_the_users_turns_of_a_chat_are_prompts(tmp_path, capsys):
  chat = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'one'},
    {'role': 'assistant', 'content': 'two'},
    {'role': 'user', 'content': 'three'},
  ]
  shared = [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]
  text = json.dumps([{'messages': chat}, {'id': 'x', 'conversations': shared}])
  assert prompts.read(_write(tmp_path, 'chats.json', text)) == [
    prompts.Prompt(
      *('1', 'none', 'one', 1),
      next_turns=('three',),
      system='Be brief.',
      answers=('two',),
    ),
    prompts.Prompt('x', 'none', 'a', 2, answers=('b',)),
  ]
  assert not capsys.readouterr().err


def test_a_compressed_file_is_read_whatever_its_name(tmp_path):
  data = gzip.compress(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
  path = tmp_path / 'prompts.jsonl'
  path.write_bytes(data)
  assert [prompt.text for prompt in prompts.read(str(path))] == ['a', 'b']
  path.write_bytes(data[:-9])
  with pytest.raises(ValueError, match=r'jsonl: it is damaged .*get it'):
    prompts.read(str(path))


def test_a_compressed_file_is_called_as_it_would_be_without(tmp_path):
  path = tmp_path / 'prompts.jsonl.gz'
  path.write_bytes(gzip.compress(b'["a"]\n'))
  assert prompts.name(str(path)) == 'prompts'
  # By its name the file holds JSON lines, so its line is not a prompt's text.
  with pytest.raises(ValueError, match=r'line 1: expected a JSON object'):
    prompts.read(str(path))


def test_missing_and_empty_files(tmp_path):
  with pytest.raises(ValueError, match=r'nowhere\.jsonl: No such file'):
    prompts.read(str(tmp_path / 'nowhere.jsonl'))
  with pytest.raises(ValueError, match='Is a directory'):
    prompts.read(str(tmp_path))
  for text in ('', ' \n\n'):
    with pytest.raises(ValueError, match=r'no prompt .*the file is empty'):
      prompts.read(_write(tmp_path, 'empty.jsonl', text))


def test_the_default_prompts_are_varied():
  read = prompts.read('experiments/data/prompts.jsonl')
  assert len(read) == 12
  assert len({prompt.id for prompt in read}) == 12
  assert len({prompt.category for prompt in read}) == 6
