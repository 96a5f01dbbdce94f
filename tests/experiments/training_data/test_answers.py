"""Dialogues with answers that were written elsewhere."""

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
    *('x', prompts_lib.NO_CATEGORY, first, 1),
    next_turns=tuple(others),
    system=next(iter(of_role('system')), None),
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


def test_an_answer_that_is_rendered_anew_begins_another_dialogue(
  make, tokenizer
):
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


def test_a_template_without_an_end_gets_the_tokenizers(make, tokenizer):
  template = _TEMPLATE.replace('eos_token', "''")
  found, _ = make(_conversation(), template=template)
  assert [_texts(tokenizer, x)[1] for x in found] == [
    ['1 = two<|end|>'],
    ['four<|end|>'],
  ]


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
  (found,), ends = make(_conversation(*messages, **what))
  _, (answer,) = _texts(tokenizer, found)
  assert answer == ('four<|end|>' if ended else 'four')
  assert ends == {'kept, with its end' if ended else 'kept, without its end': 1}


def test_an_answer_of_as_many_tokens_as_the_limit_has_no_end(make):
  messages = (('user', 'One?'), ('assistant', 'four'))
  answer = _conversation(*messages, num_tokens=5)
  (found,), _ = make(answer, max_answer_tokens=5)
  assert data_folder.num_answer_tokens([found]) == 4
  (found,), _ = make(answer, max_answer_tokens=6)
  assert data_folder.num_answer_tokens([found]) == 5


def test_texts_of_others_are_never_greedy(make):
  (found,), _ = make(_conversation(temperature=0.0), by_target=False)
  assert math.isnan(found.temperature)
  assert found.source == data_folder.Source.TEXT
  (found,), _ = make(_conversation())
  assert math.isnan(found.temperature)


@pytest.mark.parametrize(
  ('turn', 'answer', 'settings', 'why'),
  [
    ('Who is excluded?', 'four', {}, 'turn excluded'),
    (
      'a<|end|>',
      'four',
      {},
      'turn with control tokens or broken characters',
    ),
    (
      'Three?',
      'f<|end|>',
      {},
      'answer with control tokens or broken characters',
    ),
    ('b' * 90, 'four', {}, 'turn too long'),
    ('é' * 5 + 'a', 'four', {'min_ascii_share': 0.5}, 'turn of another script'),
  ],
)
def test_a_turn_that_is_unfit_ends_a_conversation(
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


def test_a_looping_answer_of_the_target_is_cut(make):
  looping = (('user', 'Go'), ('assistant', 'abcdefgh' * 8), *_MESSAGES[2:])
  settings = {'max_answer_tokens': 90, 'max_prompt_tokens': 200}
  (found,), ends = make(_conversation(*looping), **settings)
  assert data_folder.num_answer_tokens([found]) == 32
  assert ends == {'kept, cut at a loop': 1}
  (found,), ends = make(_conversation(*looping), by_target=False, **settings)
  assert data_folder.num_answer_tokens([found]) == 65 + 5


def test_a_first_turn_is_taken_once(make):
  again = _conversation(('user', 'one'), ('assistant', 'x'))
  found, ends = make(_conversation(), again)
  assert len(found) == 1
  assert ends['dropped, turn known'] == 1
  known = {filters.digest('One?')}
  found, ends = make(_conversation(), known=known)
  assert (found, ends) == ([], {'dropped, turn known': 1})


def test_a_conversation_without_an_answer_is_counted(make):
  assert make(_conversation(('user', 'One?'))) == (
    [],
    {'dropped, no answer': 1},
  )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(make):
  with pytest.raises(
    ValueError, match=r'gives token \d+, but the model has 20'
  ):
    make(_conversation(), vocab_size=20)


def test_a_shard_keeps_several_answers(make):
  made, _ = make(_conversation(), _conversation(('user', 'a'), _MESSAGES[1]))
  found = data_folder.decode(data_folder.encode(made))
  assert [x.answers for x in found] == [x.answers for x in made]
  assert [len(x.answers) for x in found] == [2, 1]
  for one, other in zip(found, made, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    assert (one.source, one.turn) == (other.source, other.turn)
    assert math.isnan(one.temperature)
  assert data_folder.decode(data_folder.encode([])) == []
