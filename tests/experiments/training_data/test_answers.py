"""Dialogues made of answers, chat templates, and filters of texts."""

import dataclasses
import math
import string

import numpy as np
import pytest
import tokenizers

from experiments.decoding import prompts as prompts_lib
from experiments.training_data import answers
from experiments.training_data import chat
from experiments.training_data import data_folder
from experiments.training_data import filters
from specsample import text as text_lib

# An answer is rendered with its end.
_TEMPLATE = (
  '{% for m in messages %}{{ m.role }}: {{ m.content }}'
  "{{ eos_token if m.role == 'assistant' else '' }}\n"
  '{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}'
)
# Earlier answers are rendered without their beginning.
_FORGETFUL = _TEMPLATE.replace(
  'm.content }}', "m.content if loop.last else m.content.split('=')[-1] }}"
)
_MESSAGES = (
  ('user', 'One?'),
  ('assistant', '1 = two'),
  ('user', 'Three?'),
  ('assistant', 'four'),
)


@pytest.fixture(scope='module')
def tokenizer():
  """A tokenizer of one token per character and a control token, the end."""
  vocabulary = {c: i for i, c in enumerate('é' + string.printable)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.add_special_tokens(['<|end|>'])
  backend.decoder = tokenizers.decoders.Fuse()
  return text_lib.Tokenizer(
    backend=backend, named_tokens={'eos_token': '<|end|>'}
  )


@pytest.fixture
def make(tokenizer):
  """A function that makes dialogues under a chat template and settings."""

  def of(*found, template=_TEMPLATE, by_target=True, known=(), **settings):
    vocab_size = settings.pop('vocab_size', tokenizer.vocab_size)
    defaults = {
      'max_prompt_tokens': 100,
      'max_answer_tokens': 50,
      'max_turns': 8,
      'min_ascii_share': 0.0,
    }
    return answers.make(
      found,
      limits=chat.Limits(
        tokenizer=dataclasses.replace(tokenizer, chat_template=template),
        excluded=filters.Exclusion(['Who is excluded?']),
        **defaults | settings,
      ),
      vocab_size=vocab_size,
      by_target=by_target,
      known=set(known),
      watch=lambda *_: None,
    )

  return of


def _conversation(*messages, **more):
  of_role = lambda role: tuple(
    text for one, text in messages or _MESSAGES if one == role
  )
  first, *others = of_role('user')
  found = prompts_lib.Prompt(
    id='x',
    category=prompts_lib.NO_CATEGORY,
    text=first,
    line=1,
    next_turns=tuple(others),
    answers=of_role('assistant'),
    **more,
  )
  assert found.messages == tuple(messages or _MESSAGES)
  return found


def _texts(tokenizer, dialogue):
  decode = lambda ids: tokenizer.decode(ids, skip_special=False)
  found = [decode(dialogue.tokens[slice(*x)]) for x in dialogue.answers]
  return decode(dialogue.tokens), found


def test_all_answers_of_a_conversation_are_in_one_dialogue(make, tokenizer):
  (found,), ends = make(_conversation(temperature=0.0))
  text, texts = _texts(tokenizer, found)
  assert text == (
    'user: One?\nassistant: 1 = two<|end|>\n'
    'user: Three?\nassistant: four<|end|>'
  )
  assert texts == ['1 = two<|end|>', 'four<|end|>']
  assert ends == {'kept, with its end': 2}
  assert found.temperature == 0.0
  assert found.source == data_folder.Source.ENGINE
  assert found.turn == filters.digest('One?')
  # The texts of others are never greedy.
  (found,), _ = make(_conversation(temperature=0.0), by_target=False)
  assert math.isnan(found.temperature)
  assert found.source == data_folder.Source.TEXT
  (found,), _ = make(_conversation())
  assert math.isnan(found.temperature)


def test_answer_that_is_rendered_anew_begins_another_dialogue(make, tokenizer):
  (first, second), ends = make(_conversation(), template=_FORGETFUL)
  assert _texts(tokenizer, first) == (
    'user: One?\nassistant: 1 = two<|end|>',
    ['1 = two<|end|>'],
  )
  assert _texts(tokenizer, second) == (
    'user: One?\nassistant:  two<|end|>\nuser: Three?\nassistant: four<|end|>',
    ['four<|end|>'],
  )
  assert first.turn == second.turn
  assert ends == {'kept, with its end': 2}


@pytest.mark.parametrize(
  ('what', 'ended'),
  [
    ({}, True),
    ({'finish_reason': 'stop'}, True),
    ({'finish_reason': 'length'}, False),
    ({'num_tokens': 5}, True),  # including the end
    ({'num_tokens': 4}, False),
    ({'num_tokens': 9}, False),  # the answer was written in other tokens
    ({'num_tokens': 4, 'finish_reason': 'stop'}, True),
  ],
)
def test_whether_an_answer_has_its_end(make, tokenizer, what, ended):
  messages = (('user', 'One?'), ('assistant', 'four'))
  # A template without an end gets the tokenizer's.
  for template in (_TEMPLATE, _TEMPLATE.replace('eos_token', "''")):
    (found,), ends = make(_conversation(*messages, **what), template=template)
    _, (answer,) = _texts(tokenizer, found)
    assert answer == ('four<|end|>' if ended else 'four')
    end = 'kept, with its end' if ended else 'kept, without its end'
    assert ends == {end: 1}


def test_answer_of_as_many_tokens_as_the_limit_has_no_end(make):
  messages = (('user', 'One?'), ('assistant', 'four'))
  answer = _conversation(*messages, num_tokens=5)
  for limit, size in ((5, 4), (6, 5)):
    (found,), _ = make(answer, max_answer_tokens=limit)
    assert data_folder.num_answer_tokens([found]) == size


_BROKEN = 'control tokens or broken characters'


@pytest.mark.parametrize(
  ('turn', 'answer', 'settings', 'why'),
  [
    ('Who is excluded?', 'four', {}, 'turn excluded'),
    ('a<|end|>', 'four', {}, f'turn with {_BROKEN}'),
    ('Three?', 'f<|end|>', {}, f'answer with {_BROKEN}'),
    ('b' * 90, 'four', {}, 'turn too long'),
    ('é' * 5 + 'a', 'four', {'min_ascii_share': 0.5}, 'turn of another script'),
  ],
)
def test_turn_that_is_unfit_ends_a_conversation(
  make, tokenizer, turn, answer, settings, why
):
  late = (*_MESSAGES[:2], ('user', turn), ('assistant', answer))
  first = (('user', turn), ('assistant', answer), *_MESSAGES)
  found, ends = make(_conversation(*late), _conversation(*first), **settings)
  assert [_texts(tokenizer, x)[1] for x in found] == [['1 = two<|end|>']]
  assert ends == {
    'kept, with its end': 1,
    f'not gone on with, {why}': 1,
    f'dropped, {why}': 1,
  }


def test_limits_of_tokens_and_turns(make, tokenizer):
  (found,), ends = make(_conversation(), max_turns=1)
  assert _texts(tokenizer, found)[1] == ['1 = two<|end|>']
  assert ends == {'kept, with its end': 1}
  # The context has the whole answer, but only its first tokens are learned.
  (found,), ends = make(_conversation(), max_answer_tokens=5)
  assert _texts(tokenizer, found) == (
    'user: One?\nassistant: 1 = two<|end|>\n'
    'user: Three?\nassistant: four<|end|>',
    ['1 = t', 'four<|end|>'],
  )
  assert ends == {'kept, cut at the limit': 1, 'kept, with its end': 1}


def test_looping_answer_of_the_target_is_cut(make):
  looping = (('user', 'Go'), ('assistant', 'abcdefgh' * 8), *_MESSAGES[2:])
  settings = {'max_answer_tokens': 90, 'max_prompt_tokens': 200}
  (found,), ends = make(_conversation(*looping), **settings)
  assert data_folder.num_answer_tokens([found]) == 32
  assert ends == {'kept, cut at a loop': 1}
  (found,), ends = make(_conversation(*looping), by_target=False, **settings)
  assert data_folder.num_answer_tokens([found]) == 65 + 5


def test_what_is_dropped_or_refused_is_named(make):
  again = _conversation(('user', 'one'), ('assistant', 'x'))
  found, ends = make(_conversation(), again)
  assert len(found) == 1
  assert ends['dropped, turn known'] == 1
  known = {filters.digest('One?')}
  assert make(_conversation(), known=known) == ([], {'dropped, turn known': 1})
  unanswered = _conversation(('user', 'One?'))
  assert make(unanswered) == ([], {'dropped, no answer': 1})
  message = r'gives token \d+, but the model has 20'
  with pytest.raises(ValueError, match=message):
    make(_conversation(), vocab_size=20)


def test_shard_keeps_several_answers(make):
  made, _ = make(_conversation(), _conversation(('user', 'a'), _MESSAGES[1]))
  found = data_folder.decode(data_folder.encode(made))
  assert [x.answers for x in found] == [x.answers for x in made]
  assert [len(x.answers) for x in found] == [2, 1]
  for one, other in zip(found, made, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    assert (one.source, one.turn) == (other.source, other.turn)
    assert math.isnan(one.temperature)
  assert data_folder.decode(data_folder.encode([])) == []


def test_template_is_what_a_chat_writes_around_a_turn(tokenizer):
  tokenizer = dataclasses.replace(tokenizer, chat_template=_TEMPLATE)
  found = chat.Template.of(tokenizer)
  for turn in ('Why?', 'x'):
    rendered = tokenizer.encode_chat([{'role': 'user', 'content': turn}])
    assert [*found.before, *tokenizer.encode(turn), *found.after] == rendered
    assert [*found.opened(tokenizer, turn), *found.after] == rendered


def test_control_tokens_of_the_template_are_tokens(tokenizer):
  template = 'u:{{ messages[0].content | trim }}<|end|>a: '
  found = chat.Template.of(
    dataclasses.replace(tokenizer, chat_template=template)
  )
  assert tokenizer.decode(found.before) == 'u:'
  assert [*found.after] == [*tokenizer.eos_ids, *tokenizer.encode('a: ')]


@pytest.mark.parametrize(
  ('template', 'message'),
  [
    (
      '{% for i in [1, 2] %}u:{{ messages[0].content }}\na:{% endfor %}',
      "does not write a user's turn once",
    ),
    ('{{ messages[0].content }}a: ', 'with text before and after it'),
    (None, 'no chat template'),
  ],
)
def test_template_without_a_place_for_a_turn_is_refused(
  tokenizer, template, message
):
  with pytest.raises(ValueError, match=message):
    chat.Template.of(dataclasses.replace(tokenizer, chat_template=template))


_LONG = (
  'A farmer has seventeen sheep, and all but nine of them run away in the night'
)


@pytest.mark.parametrize(
  ('one', 'other', 'is_same'),
  [
    ('What is the capital of France?', 'what is the capital of france', True),
    ('What is it?', ' What is  IT?!\n', True),
    ('the capital of France?', 'the capital of Spain?', False),
    ('the capital of France?', '', False),
    ('the capital of France?', '?', False),
    # Texts without words.
    ('1 + ?', '1 - 2', False),
    ('🙂', '🙁', False),
  ],
)
def test_words_tell_texts_apart(one, other, is_same):
  assert (filters.digest(one) == filters.digest(other)) == is_same


def test_repeated_share_by_hand():
  # 1234 2341 3412 4123 1234 2341: two of six have occurred before.
  tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1]
  assert filters.repeated_share(tokens) == pytest.approx(2 / 6)
  assert filters.repeated_share([1, 2, 3]) == 0


@pytest.mark.parametrize('period', [1, 2, 7, 30])
def test_period_is_a_loop(period):
  rng = np.random.default_rng(period)
  start = rng.integers(1000, size=50).tolist()
  assert not filters.loops(start)
  looping = start + start[:period] * (120 // period)
  assert filters.loops(looping)
  assert filters.loop(start) is None
  size = filters.loop(looping)
  assert 50 < size <= len(looping) and size % 8 == 0
  assert filters.loops(looping[:size]) and not filters.loops(
    looping[: size - 8]
  )


def test_text_that_repeats_little_is_none():
  rng = np.random.default_rng(0)
  # A list in which every line begins with the same four words.
  lines = rng.integers(1000, size=(9, 12))
  lines[:, :4] = [1, 2, 3, 4]
  assert not filters.loops(lines.ravel().tolist())
  assert not filters.loops([5] * 20)  # too short to tell


@pytest.mark.parametrize(
  ('text', 'is_excluded'),
  [
    ('who am I', True),  # the same words
    ('Who am I, and who are you?', False),  # contains a short excluded text
    (_LONG.upper(), True),
    (f'Please solve this. {_LONG}. How many are left?', True),
    (' '.join(_LONG.split()[:13]), True),
    (' '.join(_LONG.split()[:12]), False),
    (' '.join(reversed(_LONG.split())), False),
    ('', False),
  ],
)
def test_text_of_the_test_set_is_excluded(text, is_excluded):
  assert (text in filters.Exclusion(['Who am I?', _LONG])) == is_excluded
  assert text not in filters.Exclusion([])
