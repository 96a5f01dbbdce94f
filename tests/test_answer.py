"""Text in, text out."""

import re

import jax
import pytest

import specsample as ss
from specsample import drafters

_PROMPT = 'Name three colours.'


@pytest.fixture(scope='module')
def lookup():
  """A choice that drafts, and that needs no measurement."""
  drafter = drafters.Ngram(num_draft_tokens=3, min_ngram=1)
  return ss.Choice(drafter=drafter, reason='for a test')


def _plain(loaded, tokens, max_new_tokens):
  """Returns the text of the tokens that `generate` returns without drafts."""
  prompts, lengths = ss.pad_prompts([tokens])
  output = ss.generate(
    {'target': loaded.params},
    prompts,
    lengths,
    jax.random.key(0),
    model=loaded.model,
    drafter=drafters.NoDraft(),
    verify=ss.verify.chain,
    sampling=ss.Sampling(),
    max_new_tokens=max_new_tokens,
    stop=ss.Stop(eos_ids=loaded.tokenizer.eos_ids),
  )
  return loaded.tokenizer.decode(output.tokens[0, : output.lengths[0]])


def test_text_is_that_of_the_targets_own_tokens(smollm2, lookup):
  tokens = smollm2.tokenizer.encode_chat([{'role': 'user', 'content': _PROMPT}])
  answer = ss.generate_text(smollm2, _PROMPT, choice=lookup, max_new_tokens=24)
  pieces = list(answer)
  assert len(pieces) > 1
  assert ''.join(pieces) == answer.text == _plain(smollm2, tokens, 24)
  assert answer.output.lengths.tolist() == [24]
  assert next(answer, None) is None


def test_prompt_is_continued_when_it_is_no_chat(smollm2, lookup):
  answer = ss.generate_text(
    smollm2, _PROMPT, choice=lookup, max_new_tokens=8, chat=False
  )
  tokens = smollm2.tokenizer.encode(_PROMPT)
  assert answer.text == _plain(smollm2, tokens, 8)


def test_text_ends_before_a_stop_text_in_the_midst_of_tokens(smollm2, lookup):
  ask = lambda **settings: ss.generate_text(
    smollm2, _PROMPT, choice=lookup, max_new_tokens=24, **settings
  )
  whole = ask().text
  stop = whole[9:14]  # begins and ends within tokens
  assert whole.index(stop) == 9
  answer = ask(stop=[stop, 'never'])
  assert ''.join(answer) == answer.text == whole[:9]
  assert answer.output.lengths[0] < 24


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'prompt': []}, 'messages'),
    ({'prompt': 5}, 'messages'),
    ({'prompt': [{'role': 'user', 'content': 'Hi'}], 'chat': False}, 'chat is'),
    ({'prompt': '', 'chat': False}, 'at least one token'),
    ({'stop': ['']}, 'none that is empty'),
    ({'max_new_tokens': 0}, 'max_new_tokens is 0'),
    ({'loaded': None}, 'give what specsample.load returned'),
  ],
)
def test_argument_that_does_not_fit_is_refused(smollm2, lookup, change, words):
  given = {'loaded': smollm2, 'prompt': 'Hi', 'choice': lookup} | change
  with pytest.raises(ValueError, match=re.escape(words)):
    ss.generate_text(given.pop('loaded'), given.pop('prompt'), **given)
