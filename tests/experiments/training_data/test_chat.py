"""The text that a chat template writes around a user's turn."""

import dataclasses

import pytest
import tokenizers

from experiments.training_data import chat
from specsample.text import tokenizer_files


@pytest.fixture(scope='module')
def tokenizer(checkpoint):
  return tokenizer_files.load(checkpoint)


def test_around_a_turn_it_is_the_chat(tokenizer):
  found = chat.Template.of(tokenizer)
  for turn in ('Why?', 'x'):
    rendered = tokenizer.encode_chat([{'role': 'user', 'content': turn}])
    assert [*found.before, *tokenizer.encode(turn), *found.after] == rendered
    assert [*found.opened(tokenizer, turn), *found.after] == rendered


def test_control_tokens_of_the_template_are_tokens(tokenizer):
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  backend.add_special_tokens(['<|end|>'])
  with_end = dataclasses.replace(
    tokenizer,
    backend=backend,
    chat_template='{{ messages[0].content | trim }}<|end|>a: ',
  )
  with pytest.raises(ValueError, match='with text before and after it'):
    chat.Template.of(with_end)
  found = chat.Template.of(
    dataclasses.replace(with_end, chat_template=f'u:{with_end.chat_template}')
  )
  assert tokenizer.decode(found.before) == 'u:'
  assert [*found.after] == [*tokenizer.eos_ids, *tokenizer.encode('a: ')]


def test_a_turn_that_is_written_twice_has_no_place(tokenizer):
  twice = '{% for i in [1, 2] %}u:{{ messages[0].content }}\na:{% endfor %}'
  with pytest.raises(ValueError, match="does not write a user's turn once"):
    chat.Template.of(dataclasses.replace(tokenizer, chat_template=twice))


def test_a_model_without_a_template_is_refused(tokenizer):
  with pytest.raises(ValueError, match='no chat template'):
    chat.Template.of(dataclasses.replace(tokenizer, chat_template=None))
