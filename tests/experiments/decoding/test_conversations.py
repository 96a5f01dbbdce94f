"""Files of conversations: their formats, and what is left out."""

import dataclasses
import gzip
import json

import pytest

from experiments.decoding import prompts as prompts_lib

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


def _openai(*messages, **more):
  return {
    'messages': [{'role': role, 'content': text} for role, text in messages],
    **more,
  }


def _read(folder, *records, name='file.jsonl'):
  path = folder / name
  if name.startswith('array'):
    path.write_text(json.dumps(records, indent=1))
  else:
    path.write_text('\n'.join(map(json.dumps, records)))
  return prompts_lib.read_conversations(str(path))


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
  assert first == prompts_lib.Prompt(
    'a_0',
    prompts_lib.NO_CATEGORY,
    'One?',
    1,
    next_turns=('Three?',),
    system='Be brief.',
    answers=('Two.', 'Four.'),
  )
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
  plain = tmp_path / 'plain.txt'
  plain.write_text('[one]\n\ntwo\n')
  file = prompts_lib.read_conversations(str(plain))
  assert [x.turns for x in file.conversations] == [('[one]',), ('two',)]
  assert [x.line for x in file.conversations] == [1, 3]


_USER, _GPT = ('user', 'One?'), ('assistant', 'Two.')
_NO_TEXT = 'no text, or more than text'


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
    ([_USER, ('nobody', 'x')], 1, 'cut short (unknown role)'),
    ([_USER, (['user'], 'x')], 1, 'cut short (unknown role)'),
    ([_USER, ('assistant', None)], 1, f'cut short ({_NO_TEXT})'),
    ([_USER, ('assistant', '\ud800')], 1, 'cut short (broken characters)'),
    (
      [_USER, ('assistant', [{'type': 'image_url', 'image_url': 'x'}])],
      1,
      f'cut short ({_NO_TEXT})',
    ),
  ],
)
def test_what_is_unfit_ends_a_conversation(tmp_path, messages, kept, left_out):
  file = _read(
    tmp_path, _openai(*messages, finish_reason='stop'), _openai(_USER)
  )
  assert file.left_out == {left_out: 1}
  *found, _ = file.conversations
  assert [len(x.messages) for x in found] == ([] if kept is None else [kept])
  # A record's finish reason is about its last answer, not an earlier one.
  if 'cut' in left_out:
    assert found[0].finish_reason is None


def test_an_assistants_tool_call_ends_a_conversation(tmp_path):
  record = _openai(_USER, _GPT)
  record['messages'][1]['tool_calls'] = [{'id': 'x'}]
  file = _read(tmp_path, record)
  assert file.left_out == {'cut short (tool call)': 1}
  assert file.conversations[0].messages == (_USER,)


@pytest.mark.parametrize('value', [-1, 'hot', True, float('nan')])
def test_a_temperature_that_is_none_is_named(tmp_path, value):
  with pytest.raises(ValueError, match=r'line 2: "temperature" is .*: it must'):
    _read(tmp_path, _openai(_USER), _openai(_USER, temperature=value))


@pytest.mark.parametrize('name', ['lines.jsonl', 'array.json'])
def test_a_file_that_is_cut_off_is_refused(tmp_path, name):
  _read(tmp_path, _openai(_USER, _GPT), _openai(_USER, _GPT), name=name)
  path = tmp_path / name
  whole = path.read_bytes()
  for size in range(len(whole) - 40, len(whole)):
    path.write_bytes(whole[:size])
    place = ', line 2' if 'lines' in name else ''
    with pytest.raises(ValueError, match=rf'{name}{place}: .*\(character'):
      prompts_lib.read_conversations(str(path))


@pytest.mark.parametrize('name', ['lines.jsonl', 'array.json'])
def test_a_compressed_file_is_read_if_it_is_whole(tmp_path, name):
  records = [_openai(('user', f'Who{i}'), _GPT) for i in range(2000)]
  dumped = [json.dumps(x) for x in records]
  text = f'[{",".join(dumped)}]' if 'array' in name else '\n'.join(dumped)
  # Two concatenated gzip files, which gzip reads as one.
  data = gzip.compress(text[:900].encode()) + gzip.compress(text[900:].encode())
  path = tmp_path / f'{name}.gz'
  path.write_bytes(data)
  assert len(prompts_lib.read_conversations(str(path)).conversations) == 2000
  path.write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match=r'gz: it is damaged .*; get it again'):
    prompts_lib.read_conversations(str(path))


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
def test_a_file_without_conversations_is_refused(tmp_path, text, message):
  path = tmp_path / 'file.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=rf'file\.json.*{message}') as error:
    prompts_lib.read_conversations(str(path))
  assert '\n' not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r'nowhere: No such file.*readable'):
    prompts_lib.read_conversations(str(tmp_path / 'nowhere'))


def test_a_digest_depends_on_all_that_dialogues_are_made_of(tmp_path):
  records = [
    _openai(_USER, _GPT),
    _openai(_USER, _GPT, temperature=0),
    _openai(_USER, _GPT, finish_reason='stop'),
    _openai(_USER, _GPT, num_tokens=7),
    _openai(_USER),
  ]
  found = _read(tmp_path, *records).conversations
  digests = [prompts_lib.digest([x]) for x in found]
  assert len(set(digests)) == len(records)
  again = _read(tmp_path, *records).conversations
  assert [prompts_lib.digest([x]) for x in again] == digests


@pytest.mark.parametrize('message', [None, 'Two.', 3, ['x']])
def test_a_message_that_is_no_object_ends_a_conversation(tmp_path, message):
  record = {
    'messages': [{'role': 'user', 'content': 'One?'}, message],
    'finish_reason': 'stop',
  }
  file = _read(tmp_path, record)
  assert file.left_out == {'cut short (unknown role)': 1}
  (found,) = file.conversations
  assert (found.messages, found.finish_reason) == ((_USER,), None)
