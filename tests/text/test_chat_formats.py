"""The chat formats of gpt-oss, Gemma 4 and Qwen3, rendered as by transformers.

The templates are small ones of our own, with what the published ones are made
of: channels, tool calls, developer messages, thoughts that earlier turns lose.
"""

import itertools
import pathlib

import pytest
import tokenizers
import transformers

from specsample import text as text_lib

_FOLDER = pathlib.Path(__file__).parent / 'templates'
# The control tokens of each format, and what a user may set.
_FORMATS = {
  'harmony': (
    '<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> '
    '<|call|>',
    ({}, {'reasoning_effort': 'high', 'model_identity': 'Grüße'}),
  ),
  'gemma_4': (
    '<bos> <|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> '
    '<|tool_call> <tool_call|> <|"|> <|tool_response> <tool_response|>',
    ({}, {'enable_thinking': True}, {'enable_thinking': False}),
  ),
  'qwen3': (
    '<|im_start|> <|im_end|>',
    ({}, {'enable_thinking': False}, {'preserve_thinking': True}),
  ),
}
_TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'weather',
      'description': 'Tells the weather.\nOnly of <Earth>.',
      'parameters': {
        'type': 'object',
        'properties': {
          'place': {'type': 'string', 'description': 'a town & its country'},
          'days': {'type': ['integer', 'null'], 'default': 1},
          'units': {'type': 'string', 'enum': ['C', 'F']},
          'hours': {'type': 'array', 'items': {'type': 'integer'}},
          'at': {'type': 'object', 'properties': {'x': {'type': 'number'}}},
        },
        'required': ['place'],
      },
    },
  }
]


def _user(content):
  return {'role': 'user', 'content': content}


def _assistant(content, **others):
  return {'role': 'assistant', 'content': content, **others}


def _call(place='Ålesund', **others):
  arguments = {'place': place, 'days': 2, 'hours': [6, 18], 'at': {'x': 0.5}}
  function = {'name': 'weather', 'arguments': arguments}
  return {
    'role': 'assistant',
    'content': None,
    'tool_calls': [{'type': 'function', 'id': '1', 'function': function}],
    **others,
  }


_ANSWER = {'role': 'tool', 'name': 'weather', 'content': '{"sky": "grey"}'}
_CONVERSATIONS = (
  [_user('Hello!')],
  [{'role': 'system', 'content': ' Be brief.\n'}, _user('And 1 < 2?')],
  [{'role': 'developer', 'content': 'Rhyme, "always".'}, _user('日本語 🤗')],
  [_user('a'), _assistant('b'), _user(' c\n'), _assistant('d'), _user('e')],
  # Thoughts of an earlier turn, by each name for them, and of the last one.
  [_user('2+2'), _assistant('4', reasoning_content='\neasy\n'), _user('3+3')],
  [_user('2+2'), _assistant('4', thinking='Sum: 4.'), _user('3+3')],
  [_user('2+2'), _assistant('4', reasoning='It is 4.')],
  [_user('2+2'), _assistant('<think>\nA sum.\n</think>\n\n4'), _user('Why?')],
  # Tools: called, answered, and called again with thoughts.
  [_user('Rain?'), _call(thinking='Ask.'), _ANSWER],
  [
    {'role': 'system', 'content': 'Use tools.'},
    _user('Rain?'),
    _call(),
    _ANSWER,
    _assistant('Grey.', reasoning_content='It says so.'),
    _user('And in Rome?'),
    _call('Rome', reasoning_content='Ask again.'),
    _ANSWER | {'content': 'sun & <heat>'},
  ],
)


@pytest.fixture(scope='module', params=list(_FORMATS))
def format_(request):
  """A format's name, our tokenizer and that of transformers."""
  control, _ = _FORMATS[request.param]
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(control.split())
  template = (_FOLDER / f'{request.param}.jinja').read_text(encoding='utf-8')
  names = {'bos_token': '<bos>'} if '<bos>' in control else {}
  ours = text_lib.Tokenizer(
    backend=backend, named_tokens=names, chat_template=template
  )
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, chat_template=template, **names
  )
  return request.param, ours, theirs


def test_rendering_equals_transformers(format_):
  name, ours, theirs = format_
  _, flags = _FORMATS[name]
  with_tools = ({}, {'tools': _TOOLS})
  for case in itertools.product(_CONVERSATIONS, flags, with_tools, (0, 1)):
    messages, variables, tools, prompt = case
    given = variables | tools
    expected = theirs.apply_chat_template(
      messages, add_generation_prompt=bool(prompt), tokenize=False, **given
    )
    assert ours.chat(messages, bool(prompt), given) == expected
    assert ours.encode_chat(messages, bool(prompt), given) == theirs.encode(
      expected, add_special_tokens=False
    )


def test_an_answer_ends_where_its_format_says(format_):
  name, ours, _ = format_
  ends = {
    # <|end|> ends a message: after the thoughts comes another channel.
    'harmony': {'<|return|>', '<|call|>'},
    'gemma_4': {'<turn|>'},
    'qwen3': {'<|im_end|>'},
  }[name]
  assert {ours.backend.id_to_token(i) for i in ours.eos_ids} == ends


def test_a_flag_reaches_the_template(format_):
  name, ours, _ = format_
  given, end = {
    'harmony': ({'reasoning_effort': 'low'}, 'Reasoning: low'),
    'gemma_4': ({'enable_thinking': True}, '<|think|>'),
    'qwen3': ({'enable_thinking': False}, '<think>\n\n</think>'),
  }[name]
  assert end not in ours.chat([_user('Hello!')])
  assert end in ours.chat([_user('Hello!')], variables=given)
  assert 'weather' in ours.chat([_user('Hello!')], variables={'tools': _TOOLS})


def test_thoughts_are_left_out_once_the_user_goes_on(format_):
  _, ours, _ = format_
  for thoughts in ('reasoning_content', 'thinking', 'reasoning'):
    turn = [_user('Rain?'), _call(**{thoughts: 'I ask.'}), _ANSWER]
    assert 'I ask.' in ours.chat(turn)
    answered = [*turn, _assistant('Grey.', **{thoughts: 'I see.'})]
    assert 'I see.' not in ours.chat([*answered, _user('So?')])


def test_an_answer_becomes_a_message_without_its_thoughts(format_):
  name, ours, _ = format_
  begin, middle, end = {
    'harmony': (
      '<|channel|>analysis<|message|>',
      '<|end|><|start|>assistant<|channel|>final<|message|>',
      '<|return|>',
    ),
    'gemma_4': ('<|channel>thought\n', '\n<channel|>', '<turn|>'),
    'qwen3': ('<think>\n', '\n</think>\n\n', '<|im_end|>'),
  }[name]
  message = lambda text: ours.message(ours.encode(text, parse_special=True))
  said = message(f'{begin}A sum.{middle}It is 4.{end}')
  assert said == _assistant('It is 4.', reasoning_content='A sum.')
  assert message(f'{begin}A su') == _assistant('', reasoning_content='A su')
  assert message(f'{begin}{middle}It is 4.{end}') == _assistant('It is 4.')
  assert message(f'It is 4.{end}') == _assistant('It is 4.')
  # The template of harmony refuses the thoughts as content.
  next_turn = ours.chat([_user('2+2'), said, _user('Why?')])
  assert 'It is 4.' in next_turn
  assert 'A sum.' not in next_turn


def test_nothing_in_a_message_or_variable_opens_a_turn(format_):
  name, ours, theirs = format_
  control, _ = _FORMATS[name]
  ids = theirs.convert_tokens_to_ids(control.split())

  def turns(said):
    function = _TOOLS[0]['function'] | {'description': said, 'name': said}
    tokens = ours.encode_chat(
      [_user('Rain?'), _call(said, thinking=said), _ANSWER | {'content': said}],
      variables={'reasoning_effort': said, 'tools': [{'function': function}]},
    )
    return [token for token in tokens if token in ids]

  assert turns(control) == turns('harmless')
