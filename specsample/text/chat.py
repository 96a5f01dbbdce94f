"""Chats as text: messages are checked here, and `templates` renders them.

The text of an answer becomes a message again, its thoughts apart.
"""

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any

from specsample.text import templates

# The names under which messages have thoughts. Templates read the first, and
# that of gpt-oss the second.
_THOUGHTS = ('reasoning_content', 'thinking', 'reasoning')
# The marks around thoughts: those of Qwen and DeepSeek, whose chat template may
# already write the first one, and those of Gemma 4.
_MARKS = (('<think>', '</think>'), ('<|channel>thought', '<channel|>'))
# gpt-oss writes a message for each channel; one with a recipient calls a tool.
_CHANNEL = re.compile(
  r'<\|channel\|>(analysis|commentary|final)(?: *<\|constrain\|>\w+)?'
  r'<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)',
  re.DOTALL,
)


def render(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool,
  named_tokens: Mapping[str, str],
  variables: Mapping[str, Any] | None = None,
  spell: Callable[[str], str] = str,
) -> str:
  """Renders messages as `transformers` does.

  Args:
    template: a jinja2 template.
    messages: at least one {'role': ..., 'content': ...}, with what else the
      template reads, such as 'tool_calls', which may stand in for content, or
      'reasoning_content' (thoughts), also named 'thinking' or 'reasoning'. All
      of it is plain data, as of JSON; what is None is left out.
    add_generation_prompt: whether the text ends where the answer begins.
    named_tokens: 'bos_token' and so on, those that the model has.
    variables: plain data that a template asks for by name: 'tools', Qwen3's
      {'enable_thinking': False}, gpt-oss's {'reasoning_effort': 'high'};
      others are ignored.
    spell: returns what the template sees of each text in a message or variable.
  """
  if isinstance(messages, str | Mapping | int):
    raise ValueError(f'messages is {messages!r}: give a list of messages')
  if not messages:
    raise ValueError('messages is empty: give at least one message')
  own = {
    'messages': [_message(message, spell) for message in messages],
    'add_generation_prompt': add_generation_prompt,
    **named_tokens,
  }
  # Templates that support these two check whether they are None.
  optional = {'tools': None, 'documents': None}
  variables = checked(variables)
  taken = sorted(own.keys() & variables.keys())
  if taken:
    raise ValueError(
      f'variables has {", ".join(taken)}, which every chat template is already '
      'given: leave it out'
    )
  given = {
    name: _plain(f'variable {name}', value, spell)
    for name, value in (optional | dict(variables)).items()
  }
  try:
    return templates.render(template, {**own, **given})
  except ValueError as error:
    raise ValueError(
      f'the chat template does not render these messages: {error}'
    ) from error


def checked(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
  """Returns variables of a template; raises ValueError if not a dict."""
  if not isinstance(variables, Mapping | None):
    raise ValueError(f'variables is {variables!r}: give a dict')
  return variables or {}


def _message(message, spell):
  """Returns a copy of a message, with its thoughts under the names for them."""
  found = {}
  if isinstance(message, Mapping):
    found = {key: value for key, value in message.items() if value is not None}
  role, content = found.get('role'), found.get('content')
  if role is None or (content is None and not found.get('tool_calls')):
    raise ValueError(
      f"message {message!r}: expected {{'role': ..., 'content': ...}}"
    )
  if not isinstance(role, str):
    raise ValueError(f'role {role!r} of a message must be a string')
  if not isinstance(content, str | list | tuple | None):
    raise ValueError(
      f'content {content!r} of a message must be a string or a list of parts'
    )
  found = _plain('a message', found, spell)
  thoughts = [found[name] for name in _THOUGHTS if name in found]
  if thoughts:
    found = {'thinking': thoughts[0], **found, 'reasoning_content': thoughts[0]}
  return found


def _plain(name, value, spell):
  """Copies plain data, so that a template sees none of the caller's objects."""
  if isinstance(value, str):
    return spell(str(value))
  if isinstance(value, Mapping):
    return {
      _plain(name, key, spell): _plain(name, item, spell)
      for key, item in value.items()
    }
  if isinstance(value, list | tuple):
    return [_plain(name, item, spell) for item in value]
  if value is None or type(value) in (bool, int, float):
    return value
  raise ValueError(
    f'{name} has {value!r}: give strings, numbers, lists and dicts'
  )


def split_thoughts(text: str) -> tuple[str, str]:
  """Returns an answer's thoughts and what it says, each '' if there is none.

  Control tokens are spelled out in it. An answer that was cut short among its
  thoughts says nothing.
  """
  if '<|channel|>' in text:
    messages = _CHANNEL.findall(text)
    thoughts = [text for channel, text in messages if channel == 'analysis']
    said = [text for channel, text in messages if channel != 'analysis']
    return '\n'.join(thoughts), '\n'.join(said)
  for begin, end in _MARKS:
    before, found, after = text.partition(end)
    if found or text.lstrip().startswith(begin):
      return before.replace(begin, '', 1).strip(), after
  return '', text
