"""Chat templates, rendered as by `transformers`, and stopped by the sandbox."""

import os

import pytest
import tokenizers
import transformers

from specsample.text import chat
from specsample.text import templates

_CHAT = (
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': ' "Grüße" & <b>?\n'},
  {'role': 'assistant', 'content': 'Hi'},
  {'role': 'user', 'content': 'And 1 < 2?'},
)
_NAMED_TOKENS = {'bos_token': '<s>', 'eos_token': '</s>'}
_TEMPLATES = {
  'chatml': (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  'blocks': """
    {%- set ns = namespace(count=0) %}
    {{- bos_token }}
    {% for message in messages if message.role != 'system' %}
      {%- set ns.count = ns.count + 1 %}
      {% if ns.count > 2 %}{% break %}{% endif %}
[{{ loop.index }}] {{ message['content'] | trim }} {{ message | tojson }}
      {% generation %}
{{ message.role | upper }}{{ eos_token }}
      {% endgeneration %}
    {% endfor %}
  """,
  'questions': (
    '{% if tools is none and documents is none %}plain{% endif %}'
    '{{ tools is defined }}{{ undefined_name is defined }}'
    "{{ messages[1:] | map(attribute='role') | join(',') }}"
    '{{ messages | tojson(indent=2, sort_keys=true) }}'
  ),
  'date': "{{ strftime_now('%Y') }}-{{ messages | length }}",
}


@pytest.fixture(scope='module')
def reference():
  """A tokenizer of transformers, for its rendering."""
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
    **_NAMED_TOKENS,
  )


@pytest.mark.parametrize('add_generation_prompt', [False, True])
@pytest.mark.parametrize('name', list(_TEMPLATES))
def test_rendering_equals_transformers(reference, name, add_generation_prompt):
  expected = reference.apply_chat_template(
    list(_CHAT),
    chat_template=_TEMPLATES[name],
    add_generation_prompt=add_generation_prompt,
    tokenize=False,
  )
  assert _render(_TEMPLATES[name], _CHAT, add_generation_prompt) == expected


def _render(
  template, messages=_CHAT, add_generation_prompt=True, variables=None
):
  return chat.render(
    template,
    messages,
    add_generation_prompt=add_generation_prompt,
    named_tokens=_NAMED_TOKENS,
    variables=variables,
  )


@pytest.mark.parametrize('variables', [{}, {'think': False, 'unused': 'a'}])
def test_variables_are_what_a_template_asks_for(reference, variables):
  template = (
    '{{ bos_token }}{{ messages | length }}'
    '{% if think is defined and think is false %}<think></think>{% endif %}'
  )
  expected = reference.apply_chat_template(
    list(_CHAT), chat_template=template, tokenize=False, **variables
  )
  found = _render(template, variables=variables)
  assert found == expected
  assert found.endswith('<think></think>') == bool(variables)


@pytest.mark.parametrize('name', ['messages', 'eos_token'])
def test_variables_that_are_set_already_are_refused(name):
  with pytest.raises(ValueError, match=f'variables has {name}, which every'):
    _render(_TEMPLATES['chatml'], variables={name: 'x', 'think': True})


@pytest.mark.parametrize(
  'attack',
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    '{{ messages.__class__.__base__ }}',
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ '{0.__class__}'.format(messages) + messages.append(1) }}",
    "{{ messages.append({'role': 'system', 'content': 'obey'}) }}",
    "{{ messages[0].update(content='obey') }}",
    '{% set x = messages.pop() %}{{ x }}',
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
  ],
)
def test_the_sandbox_stops(attack):
  with pytest.raises(ValueError, match='does not render'):
    _render(attack)


def test_the_sandbox_hides_attributes_from_format():
  assert _render("{{ '{0.__class__}'.format(1) }}x") == 'x'


@pytest.mark.parametrize(
  ('template', 'words'),
  [
    ('{% for i in range(10**12) %}{% endfor %}', 'Range too big'),
    ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'recursion'),
    ('{{ 1 // 0 }}', 'by zero'),
    ("{{ 'x' * 10**10 }}", 'MemoryError'),
    ('{{ (10**9 * [1]) | length }}', 'MemoryError'),
    ("{{ '%2000000000d' % 1 }}", 'MemoryError'),
  ],
)
def test_what_cannot_be_rendered_is_refused(template, words):
  with pytest.raises(ValueError, match=f'does not render.*{words}'):
    _render(template)


_DOUBLED = (
  "{% set n = namespace(x='x') %}{% for i in range(40) %}"
  '{% set n.x = n.x ~ n.x %}{% endfor %}'
)


@pytest.mark.slow(but=('{{ 10 [*][*] (10[*][*]9) }}',))
@pytest.mark.parametrize(
  'template',
  [
    '{{ 10 ** (10**9) }}',
    '{% set x = 2 ** (2**36) %}',
    '{% set n = namespace(x=9) %}{% for i in range(99999) %}'
    '{% set n.x = n.x * n.x %}{% endfor %}',
    '{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}'
    '{% endmacro %}{{ f(50) }}',
    _DOUBLED,
    _DOUBLED.replace('~', '+'),
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ ('x\\n' * 10**6) | indent(10**6) }}",
    '{{ [1] | batch(10**9, 1) | list }}',
    '{{ messages | tojson(indent=10**9) }}',
  ],
)
def test_what_would_not_end_is_refused(monkeypatch, template):
  monkeypatch.setattr(templates, '_SECONDS', 1)
  words = 'MemoryError|more than 1 s|too large|exceed'
  with pytest.raises(ValueError, match=f'does not render.*({words})'):
    _render(template)
  assert _render('{{ messages | length }}') == str(len(_CHAT))


def test_a_process_of_its_own_renders_after_a_fork():
  assert _render('x') == 'x'
  read, write = os.pipe()
  if not os.fork():
    try:
      os.write(write, _render('{{ messages | length }}').encode())
    finally:
      os._exit(0)
  os.wait()
  assert os.read(read, 9) == str(len(_CHAT)).encode()
  assert _render('y') == 'y'


def test_long_chats_stay_within_the_bounds():
  messages = [{'role': 'user', 'content': 'x' * 1000}] * 10_000
  assert len(_render(_TEMPLATES['chatml'], messages)) > 10**7


@pytest.mark.parametrize(
  ('messages', 'words'),
  [
    ([], 'messages is empty'),
    ([{'role': 'user'}], "'content': ..."),
    ([{'role': 'user', 'content': None}], "'content': None"),
    ([{'content': 'a', 'tool_calls': [1]}], "expected {'role': ..."),
    ([{'role': 'user', 'content': 3}], 'content 3'),
    ([{'role': 3, 'content': 'a'}], 'role 3'),
    ([{'role': 'user', 'content': 'a', 'date': {1}}], 'a message has {1}'),
    (['hello'], "'hello'"),
  ],
)
def test_messages_of_another_form_are_named(messages, words):
  with pytest.raises(ValueError, match=words):
    _render(_TEMPLATES['chatml'], messages)


def test_a_template_can_refuse():
  template = "{{ raise_exception('roles must alternate') }}"
  with pytest.raises(ValueError, match='roles must alternate'):
    _render(template)


def test_a_template_that_is_none_is_named():
  with pytest.raises(ValueError, match='does not render'):
    _render('{% for message in %}')
