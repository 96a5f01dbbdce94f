"""The process in which chat templates are rendered.

`templates` starts it by the path of this file, so that it imports nothing but
jinja2. It reads requests and writes answers, one line of JSON each, and ends
with its input. A template that asks for too much ends the process alone.
"""

import datetime
import functools
import json
import math
import sys
import time

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

if sys.platform != 'win32':  # where nothing is limited
  import resource

_ERRORS = (
  *(jinja2.TemplateError, TypeError, ValueError, LookupError),
  *(ArithmeticError, AttributeError, RecursionError, MemoryError),
)


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


def _limit(soft):
  """Sets soft limits, each where the system has it."""
  for kind, value in soft.items():
    try:
      _, hard = resource.getrlimit(kind)
      resource.setrlimit(kind, (value, hard))
    except (OSError, ValueError):  # macOS knows no limit of memory
      pass


def _answer(request):
  try:
    # Counted from the start of the process, in whole seconds; the signal ends
    # it, whatever it is computing.
    used = math.ceil(time.process_time())
    if sys.platform != 'win32':
      _limit({resource.RLIMIT_CPU: used + request['seconds']})
    text = _compile(request['template']).render(**request['variables'])
    return json.dumps({'text': text})
  except _ERRORS as error:
    return json.dumps({'error': str(error) or type(error).__name__})


def main() -> None:
  """Answers requests until there are no more."""
  if sys.platform != 'win32':
    # It writes no files.
    _limit({resource.RLIMIT_AS: int(sys.argv[1]), resource.RLIMIT_FSIZE: 0})
  for line in sys.stdin:
    print(_answer(json.loads(line)), flush=True)


if __name__ == '__main__':
  main()
