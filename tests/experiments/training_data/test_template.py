"""The text that a chat template writes around a user's turn."""

import dataclasses

import pytest
import tokenizers

from experiments import methods
from experiments.decoding import prompts
from experiments.evaluation import evaluation
from experiments.training_data import template
import specsample
from specsample import testing
from specsample.text import tokenizer_files


@pytest.fixture(scope='module')
def tokenizer(checkpoint):
  return tokenizer_files.load(checkpoint)


def test_around_a_turn_it_is_the_chat(tokenizer):
  found = template.Template.of(tokenizer)
  for turn in ('Why?', 'x'):
    chat = tokenizer.encode_chat([{'role': 'user', 'content': turn}])
    assert [*found.before, *tokenizer.encode(turn), *found.after] == chat
    assert [*found.opened(tokenizer, turn), *found.after] == chat


def test_control_tokens_of_the_template_are_tokens(tokenizer):
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  backend.add_special_tokens(['<|end|>'])
  with_end = dataclasses.replace(
    tokenizer,
    backend=backend,
    chat_template='{{ messages[0].content | trim }}<|end|>a: ',
  )
  with pytest.raises(ValueError, match='with text before and after it'):
    template.Template.of(with_end)
  found = template.Template.of(
    dataclasses.replace(with_end, chat_template=f'u:{with_end.chat_template}')
  )
  assert tokenizer.decode(found.before) == 'u:'
  assert [*found.after] == [*tokenizer.eos_ids, *tokenizer.encode('a: ')]


def test_an_evaluation_gives_the_template_its_variables(tokenizer):
  template = '{{ messages[0].content }}{% if not think %}<{% endif %}'
  thinking = dataclasses.replace(tokenizer, chat_template=template)
  target = specsample.Loaded(testing.tiny_llama(), {}, thinking)
  method = methods.Method(specsample.drafters.NoDraft())
  prompt = prompts.Prompt('1', '', 'Why?', 1)
  texts = {}
  for think in (False, True):
    evaluated = evaluation.Evaluation(
      target=target,
      methods={methods.BASELINE: method},
      chat_variables={'think': think},
    )
    texts[think] = tokenizer.decode(evaluated.encode('a file', prompt))
  assert texts == {False: 'Why?<', True: 'Why?'}


def test_a_turn_that_is_written_twice_has_no_place(tokenizer):
  twice = '{% for i in [1, 2] %}u:{{ messages[0].content }}\na:{% endfor %}'
  with pytest.raises(ValueError, match="does not write a user's turn once"):
    template.Template.of(dataclasses.replace(tokenizer, chat_template=twice))


def test_a_model_without_a_template_is_refused(tokenizer):
  with pytest.raises(ValueError, match='no chat template'):
    template.Template.of(dataclasses.replace(tokenizer, chat_template=None))
