"""Files of prompts and of conversations: formats, and what is left out."""

import dataclasses
import gzip
import json

import pytest

from experiments.decoding import prompts

_SHAREGPT = {
  'id': 'a_0',
  'conversations': [
    {'from': 'system', 'value': 'Be brief.'},
    {'from': 'human', 'value': 'One?'},
    {'from': 'gpt', 'value': 'Two.'},
    {'from': 'user', 'value': 'Three?'},
    {'from': 'bing', 'value': 'Four.'},
  ],
}
_MESSAGES = (
  ('system', 'Be brief.'),
  ('user', 'One?'),
  ('assistant', 'Two.'),
  ('user', 'Three?'),
  ('assistant', 'Four.'),
)
# As either format is read.
_CONVERSATION = prompts.Prompt(
  id='a_0',
  category=prompts.NO_CATEGORY,
  text='One?',
  line=1,
  next_turns=('Three?',),
  system='Be brief.',
  answers=('Two.', 'Four.'),
)


def _openai(*messages, **more):
  return {
    'messages': [{'role': role, 'content': text} for role, text in messages],
    **more,
  }


def _write(folder, name, text):
  path = folder / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return str(path)


def _read(folder, *records, name='file.jsonl'):
  text = '\n'.join(map(json.dumps, records))
  if name.startswith('array'):
    text = json.dumps(records, indent=1)
  return prompts.read_conversations(_write(folder, name, text))


def test_spec_bench_gives_all_turns(tmp_path):
  records = [
    {'question_id': 81, 'category': 'writing', 'turns': ['one', 'two']},
    {'question_id': 82, 'category': 3, 'turns': ['three']},
  ]
  text = '\n'.join(map(json.dumps, records))
  assert prompts.read(_write(tmp_path, 'bench.jsonl', text)) == [
    prompts.Prompt('81', 'writing', 'one', 1, next_turns=('two',)),
    prompts.Prompt('82', '3', 'three', 2),
  ]


def test_prompt_field_is_read_with_and_without_the_rest(tmp_path):
  text = (
    '\ufeff{"prompt": "a\\nb", "id": "x", "category": "c"}\n\n{"prompt": "d"}\n'
  )
  # Read as JSON lines because of its first character.
  assert prompts.read(_write(tmp_path, 'questions', text)) == [
    prompts.Prompt('x', 'c', 'a\nb', 1),
    prompts.Prompt('3', 'none', 'd', 3),
  ]


def test_each_line_of_plain_text_is_a_prompt(tmp_path):
  text = 'first\r\n\n  second \n{"third"}'
  path = _write(tmp_path, 'plain.txt', text)
  lines = [('first', 1), ('second', 3), ('{"third"}', 4)]
  read = lambda **limit: [(x.text, x.line) for x in prompts.read(path, **limit)]
  assert read() == read(limit=9) == lines
  assert read(limit=2) == lines[:2]


def test_users_turns_of_a_chat_are_prompts(tmp_path, capsys):
  text = json.dumps([_SHAREGPT, _openai(*_MESSAGES[1:3])])
  assert prompts.read(_write(tmp_path, 'chats.json', text)) == [
    _CONVERSATION,
    prompts.Prompt('2', 'none', 'One?', 2, answers=('Two.',)),
  ]
  assert not capsys.readouterr().err


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
def test_record_without_a_prompt_is_named(tmp_path, form, record, message):
  good = ['{"prompt": "a", "category": null}'] * 6
  text = '\n'.join([*good, record])
  if 'array' in form:
    text = f'[{",".join([*good, record])}]'
  path = _write(tmp_path, form, text)
  place = 'record 7' if 'array' in form else 'line 7'
  with pytest.raises(ValueError, match=f'{form}, {place}: ') as error:
    prompts.read(path)
  assert message in str(error.value)
  assert '\n' not in str(error.value)
  assert len(str(error.value)) < len(path) + 250


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (b'{"prompt": "cut', 'line 7: Unterminated string'),
    (b'just text', 'line 7: Expecting value (character 1 of what should be'),
    (b'{', '(character 2 of what should be JSON)'),
    (b'{"prompt": ' + b'[' * 10**5, 'line 7: it is nested too deeply'),
    (b'caf\xe9', 'line 7 is not UTF-8: convert the file, '),
  ],
  ids=lambda text: str(text[:40]),
)
def test_line_that_is_not_json_is_named(tmp_path, line, message):
  data = b'{"prompt": "a"}\n' * 6 + line
  with pytest.raises(ValueError, match=r'broken\.jsonl') as error:
    prompts.read(_write(tmp_path, 'broken.jsonl', data))
  assert message in str(error.value)
  assert 'line 7' in str(error.value)


def test_compressed_file_is_read_whatever_its_name(tmp_path):
  data = gzip.compress(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
  path = _write(tmp_path, 'prompts.jsonl', data)
  assert [prompt.text for prompt in prompts.read(path)] == ['a', 'b']
  _write(tmp_path, 'prompts.jsonl', data[:-9])
  with pytest.raises(ValueError, match=r'jsonl: it is damaged .*get it'):
    prompts.read(path)
  path = _write(tmp_path, 'more.jsonl.gz', gzip.compress(b'["a"]\n'))
  assert prompts.name(path) == 'more'
  # By its name the file holds JSON lines, so its line is not a prompt's text.
  with pytest.raises(ValueError, match=r'line 1: expected a JSON object'):
    prompts.read(path)


def test_missing_and_empty_files_are_refused(tmp_path):
  for read in (prompts.read, prompts.read_conversations):
    with pytest.raises(ValueError, match=r'nowhere: No such file'):
      read(str(tmp_path / 'nowhere'))
  with pytest.raises(ValueError, match='Is a directory'):
    prompts.read(str(tmp_path))
  for text in ('', ' \n\n'):
    with pytest.raises(ValueError, match=r'no prompt .*the file is empty'):
      prompts.read(_write(tmp_path, 'empty.jsonl', text))


@pytest.mark.parametrize('name', ['lines.jsonl', 'lines', 'array.json'])
def test_both_formats_are_read_from_lines_and_arrays(tmp_path, name):
  record = _openai(
    *_MESSAGES, temperature=0, source='chat', finish_reason='length'
  )
  record['messages'][1]['content'] = [
    {'type': 'text', 'text': 'On'},
    {'type': 'text', 'text': 'e?'},
  ]
  file = _read(tmp_path, _SHAREGPT, record, name=name)
  first, second = file.conversations
  assert first == _CONVERSATION
  assert second == dataclasses.replace(
    first,
    id='2',
    line=2,
    category='chat',
    temperature=0,
    finish_reason='length',
  )
  assert first.turns == ('One?', 'Three?')
  assert first.messages == _MESSAGES
  assert (file.num_turns, file.left_out) == (4, {})
  assert file.summary().endswith(
    '2 conversations, 4 user turns; all of them are used'
  )


def test_all_turns_of_a_file_of_prompts_are_the_users(tmp_path):
  file = _read(
    tmp_path,
    {'question_id': 81, 'category': 'writing', 'turns': ['one', 'two']},
    {'prompt': 'three', 'source': 'own'},
  )
  assert [x.turns for x in file.conversations] == [('one', 'two'), ('three',)]
  assert [x.category for x in file.conversations] == ['writing', 'own']
  assert [x.id for x in file.conversations] == ['81', '2']
  plain = _write(tmp_path, 'plain.txt', '[one]\n\ntwo\n')
  file = prompts.read_conversations(plain)
  assert [x.turns for x in file.conversations] == [('[one]',), ('two',)]
  assert [x.line for x in file.conversations] == [1, 3]


_USER, _GPT = ('user', 'One?'), ('assistant', 'Two.')
_NO_TEXT = 'no text, or more than text'


_CALL = {'role': 'assistant', 'content': 'Two.', 'tool_calls': [{'id': 'x'}]}
_IMAGE = ('assistant', [{'type': 'image_url', 'image_url': 'x'}])


@pytest.mark.parametrize(
  ('messages', 'kept', 'left_out'),
  [
    ([_GPT], None, 'skipped (no turn of a user)'),
    ([], None, 'skipped (no turn of a user)'),
    ([('user', ' ')], None, 'skipped (empty turn)'),
    ([_GPT, _USER, _GPT], 2, 'begin with an answer, which is left out'),
    ([_USER, _USER], 1, 'cut short (roles out of order)'),
    ([_USER, _GPT, _GPT], 2, 'cut short (roles out of order)'),
    ([_USER, _GPT, ('system', 'x')], 2, 'cut short (roles out of order)'),
    ([_USER, ('assistant', '')], 1, 'cut short (empty turn)'),
    ([_USER, ('tool', 'x')], 1, 'cut short (unknown role)'),
    ([_USER, (['user'], 'x')], 1, 'cut short (unknown role)'),
    ([_USER, ('assistant', None)], 1, f'cut short ({_NO_TEXT})'),
    ([_USER, ('assistant', '\ud800')], 1, 'cut short (broken characters)'),
    ([_USER, _IMAGE], 1, f'cut short ({_NO_TEXT})'),
    # Messages as they are in the file.
    ([_USER, _CALL], 1, 'cut short (tool call)'),
    ([_USER, None], 1, 'cut short (unknown role)'),
    ([_USER, 'Two.'], 1, 'cut short (unknown role)'),
    ([_USER, ['x']], 1, 'cut short (unknown role)'),
  ],
)
def test_what_is_unfit_ends_a_conversation(tmp_path, messages, kept, left_out):
  record = {
    'messages': [
      {'role': one[0], 'content': one[1]} if isinstance(one, tuple) else one
      for one in messages
    ],
    'finish_reason': 'stop',
  }
  file = _read(tmp_path, record, _openai(_USER))
  assert file.left_out == {left_out: 1}
  *found, _ = file.conversations
  assert [len(x.messages) for x in found] == ([] if kept is None else [kept])
  # A record's finish reason is about its last answer, not an earlier one.
  if 'cut' in left_out:
    assert found[0].finish_reason is None


@pytest.mark.parametrize('value', [-1, 'hot', True, float('nan')])
def test_temperature_that_is_none_is_named(tmp_path, value):
  with pytest.raises(ValueError, match=r'line 2: "temperature" is .*: it must'):
    _read(tmp_path, _openai(_USER), _openai(_USER, temperature=value))


@pytest.mark.parametrize('name', ['lines.jsonl', 'array.json'])
def test_file_that_is_cut_off_is_refused(tmp_path, name):
  _read(tmp_path, _openai(_USER, _GPT), _openai(_USER, _GPT), name=name)
  path = tmp_path / name
  whole = path.read_bytes()
  for size in range(len(whole) - 40, len(whole)):
    path.write_bytes(whole[:size])
    place = ', line 2' if 'lines' in name else ''
    with pytest.raises(ValueError, match=rf'{name}{place}: .*\(character'):
      prompts.read_conversations(str(path))


@pytest.mark.parametrize('name', ['lines.jsonl', 'array.json'])
def test_compressed_conversations_are_read_if_they_are_whole(tmp_path, name):
  records = [_openai(('user', f'Who{i}'), _GPT) for i in range(2000)]
  dumped = [json.dumps(x) for x in records]
  text = f'[{",".join(dumped)}]' if 'array' in name else '\n'.join(dumped)
  # Two concatenated gzip files, which gzip reads as one.
  data = gzip.compress(text[:900].encode()) + gzip.compress(text[900:].encode())
  path = tmp_path / f'{name}.gz'
  path.write_bytes(data)
  assert len(prompts.read_conversations(str(path)).conversations) == 2000
  path.write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match=r'gz: it is damaged .*; get it again'):
    prompts.read_conversations(str(path))


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'there is no prompt .*the file is empty'),
    ('[]', 'there is no prompt and no conversation with a user turn'),
    ('[{"mess', r'Unterminated string'),
    ('{"mess', r'line 1: Unterminated string'),
    ('{"messages": []}', r'\(1 skipped \(no turn of a user\)\)'),
    ('{"messages": "x"}', 'line 1: "messages" must be a list of messages'),
    ('{"text": "x"}', 'line 1: it has neither "prompt" nor "turns"'),
    ('{"prompt": " "}', 'line 1: the prompt is .*not empty'),
  ],
)
def test_file_without_conversations_is_refused(tmp_path, text, message):
  path = tmp_path / 'file.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=rf'file\.json.*{message}') as error:
    prompts.read_conversations(str(path))
  assert '\n' not in str(error.value)


def test_digest_depends_on_all_that_dialogues_are_made_of(tmp_path):
  records = [
    _openai(_USER, _GPT),
    _openai(_USER, _GPT, temperature=0),
    _openai(_USER, _GPT, finish_reason='stop'),
    _openai(_USER, _GPT, num_tokens=7),
    _openai(_USER),
  ]
  found = _read(tmp_path, *records).conversations
  digests = [prompts.digest([x]) for x in found]
  assert len(set(digests)) == len(records)
  again = _read(tmp_path, *records).conversations
  assert [prompts.digest([x]) for x in again] == digests
