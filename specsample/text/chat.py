"""Chat templates: jinja2 programs that come with a model, run in a sandbox.

The sandbox keeps a template from the files and objects of this process. The
steps that it takes and the text that it writes are bounded here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Rounds of loops and calls of macros: more than any chat takes, in a second.
_MOST_STEPS = 1_000_000
# More than any model reads.
_MOST_CHARACTERS = 100_000_000
# The names under which messages have thoughts. Templates read the first, and
# that of gpt-oss the second.
_THOUGHTS = ('reasoning_content', 'thinking', 'reasoning')
# The name of a rendering's `_Steps`, which no template can write.
_STEPS = 'steps of this rendering'


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

  Raises:
    ValueError: if a message has another form, the template refuses it or does
      not come to an end, or a variable is already set here.
  """
  if isinstance(messages, str | Mapping | int):
    raise ValueError(f'messages is {messages!r}: give a list of messages')
  if not messages:
    raise ValueError('messages is empty: give at least one message')
  own = {
    'messages': [_message(message, spell) for message in messages],
    'add_generation_prompt': add_generation_prompt,
    _STEPS: _Steps(),
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
    for name, value in {**optional, **variables}.items()
  }
  try:
    return _joined(_compile(template).generate(own, **given))
  except (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError),
  ) as error:
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


class _Generation(jinja2.ext.Extension):
  """The tag {% generation %}: renders its content; only training reads it."""

  tags = {'generation'}  # noqa: RUF012 (jinja2's own type)

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(line)


def _joined(pieces: Iterable[str]) -> str:
  """Joins what a template writes, as long as it is not too much."""
  kept, size = [], 0
  for piece in pieces:
    size += len(piece)
    _check_size(size)
    kept.append(piece)
  return ''.join(kept)


def _check_size(size: int) -> None:
  if size > _MOST_CHARACTERS:
    raise jinja2.TemplateError(
      f'it writes more than {_MOST_CHARACTERS:,} characters, which no model '
      "reads: give the model its authors' template"
    )


class _Steps:
  """Counts the steps of one rendering."""

  def __init__(self):
    self._count = 0

  def take(self, count: int = 1) -> bool:
    """Counts steps; raises TemplateError if there are too many."""
    self._count += count
    if self._count > _MOST_STEPS:
      raise jinja2.TemplateError(
        f'it takes more than {_MOST_STEPS:,} steps, and might never end: give '
        "the model its authors' template"
      )
    return True


def _counted(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
  """Adds a step to each round of a loop and to each call of a macro."""
  nodes = jinja2.nodes
  kinds = (nodes.For, nodes.Macro, nodes.CallBlock)
  found: list[Any] = list(tree.find_all(kinds))
  for node in found:
    node.body.insert(0, nodes.ExprStmt(_step()))
    if isinstance(node, nodes.For) and node.test is not None:
      # Items that the condition leaves out count too.
      node.test = nodes.And(_step(), node.test)
  return tree


def _step():
  count = jinja2.nodes.EnvironmentAttribute('take_step')
  context = jinja2.nodes.ContextReference()
  return jinja2.nodes.Call(count, [context], [], None, None)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """A sandbox in which texts and lists cannot be multiplied without end."""

  intercepted_binops = frozenset('*')

  def call_binop(self, context, operator, left, right):
    """See `SandboxedEnvironment`."""
    for one, times in ((left, right), (right, left)):
      if isinstance(one, str | list | tuple) and isinstance(times, int):
        _check_size(len(one) * times)
    return super().call_binop(context, operator, left, right)

  @staticmethod
  def take_step(context: jinja2.runtime.Context) -> bool:
    """Counts a step of the rendering."""
    return context[_STEPS].take()


@jinja2.pass_context
def _range(context, *args):
  found = jinja2.sandbox.safe_range(*args)
  context[_STEPS].take(len(found))
  return found


@functools.lru_cache(maxsize=8)
def _compile(template):
  environment = _Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise
  environment.globals['strftime_now'] = _strftime_now
  environment.globals['range'] = _range
  return environment.from_string(_counted(environment.parse(template)))


def _to_json(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  # jinja2's own filter escapes HTML markup.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise(message):
  raise jinja2.TemplateError(message)


def _strftime_now(form):
  return datetime.datetime.now().strftime(form)
