"""Chat templates: jinja2 programs that come with a model, run in a sandbox."""

from collections.abc import Mapping, Sequence
import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


def render(
  template: str,
  messages: Sequence[Mapping[str, str]],
  *,
  add_generation_prompt: bool,
  named_tokens: Mapping[str, str],
  variables: Mapping[str, Any] | None = None,
) -> str:
  """Renders messages {'role': ..., 'content': ...} as `transformers` does.

  Args:
    template: a jinja2 template.
    messages: at least one.
    add_generation_prompt: whether the text ends where the answer begins.
    named_tokens: 'bos_token' and so on, those that the model has.
    variables: what else a template asks for by name, such as Qwen3's
      {'enable_thinking': False}; others are ignored.

  Raises:
    ValueError: if a message has another form or the template refuses it, or a
      variable is already set here.
  """
  if isinstance(messages, str | Mapping | int):
    raise ValueError(f'messages is {messages!r}: give a list of messages')
  if not messages:
    raise ValueError('messages is empty: give at least one message')
  own = {
    'messages': [_plain(message) for message in messages],
    'add_generation_prompt': add_generation_prompt,
    # Templates that support tools and documents check whether they are None.
    'tools': None,
    'documents': None,
    **named_tokens,
  }
  variables = variables or {}
  if not isinstance(variables, Mapping):
    raise ValueError(f'variables is {variables!r}: give a dict')
  taken = sorted(own.keys() & variables.keys())
  if taken:
    raise ValueError(
      f'variables has {", ".join(taken)}, which every chat template is already '
      'given: leave it out'
    )
  try:
    return _compile(template).render(own, **variables)
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(
      f'the chat template does not render these messages: {error}'
    ) from error


def _plain(message):
  """Copies a message to plain strings, whatever object the caller passed."""
  if not isinstance(message, Mapping) or set(message) != {'role', 'content'}:
    raise ValueError(
      f"message {message!r}: expected {{'role': ..., 'content': ...}}"
    )
  for key, value in message.items():
    if not isinstance(value, str):
      raise ValueError(f'{key} {value!r} of a message must be a string')
  return {key: str(value) for key, value in message.items()}


class _Generation(jinja2.ext.Extension):
  """The tag {% generation %}: renders its content; only training reads it."""

  tags = {'generation'}  # noqa: RUF012 (jinja2's own type)

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=8)
def _compile(template):
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise
  environment.globals['strftime_now'] = _strftime_now
  return environment.from_string(template)


def _to_json(value, ensure_ascii=False, indent=None, separators=None):
  # jinja2's own filter escapes HTML markup.
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators
  )


def _raise(message):
  raise jinja2.TemplateError(message)


def _strftime_now(form):
  return datetime.datetime.now().strftime(form)
