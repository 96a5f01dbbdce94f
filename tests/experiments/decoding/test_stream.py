"""One row, decoded a few rounds at a time: a prompt, or the turns of a chat."""

import dataclasses
import io
import itertools
import signal
import time

import pytest
import tokenizers

from experiments import methods
from experiments.decoding import conversing
from experiments.decoding import display
from experiments.decoding import stream
import specsample
from specsample import drafters
from specsample.loop import decode
from specsample.loop import turns

_NEW_TOKENS = 24


@pytest.fixture(scope='module')
def target(checkpoint):
  """The tiny model."""
  return specsample.load(checkpoint)


def _row(target, drafter, **settings):
  settings = {'max_new_tokens': _NEW_TOKENS, 'chunk_seconds': 0.0} | settings
  return stream.OneRow(
    target=target,
    method=methods.Method(drafter=drafter),
    sampling=specsample.Sampling(),
    stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
    **settings,
  )


def _chunks(target, drafter, prompt, **settings):
  decoder = _row(target, drafter, **settings)
  tokens = target.tokenizer.encode(prompt)
  decoder.compile(tokens)
  found = stream.chunks(decoder, lambda: decoder.begin(tokens))
  return (one for _, one in found)


def _conversation(target, drafter, max_length=384):
  decoder = _row(target, drafter, max_length=max_length)
  decoder.compile([0])
  return conversing.Conversation(decoder)


def _views(target):
  return display.views(target.tokenizer, None)


def _programs():
  compiled = (decode._advance, decode._prefill, turns._extend)
  return [program._cache_size() for program in compiled]


def _whole(target, turns_, answers):
  """Returns a conversation's tokens, with the answers as they were emitted."""
  tokens, text = [], ''
  for turn, answer in itertools.zip_longest(turns_, answers, fillvalue=[]):
    text += f'user: {turn}\nassistant: '
    tokens += target.tokenizer.encode(text) + answer
    text = '\n'
  return tokens


def test_time_of_showing_is_none_of_decoding(target):
  found = _chunks(target, drafters.NoDraft(), 'Hello', max_new_tokens=3)
  first = next(found)
  start = time.perf_counter()
  time.sleep(0.1)
  shown = time.perf_counter() - start
  second = next(found)
  elapsed = time.perf_counter() - start
  assert 0 < second.seconds - first.seconds < elapsed - shown
  # `first_seconds` covers the prefill and the first round.
  assert first.first_seconds > first.seconds
  assert second.first_seconds == first.first_seconds


@pytest.mark.slow
def test_drafted_and_accepted_tokens_add_up(target):
  drafter = drafters.Ngram(num_draft_tokens=4)
  prompt = 'The rain in Spain'
  found = list(_chunks(target, drafter, prompt, max_new_tokens=96))
  metrics = stream.metrics(found[-1])
  origins = [origin for one in found for origin in one.origins]
  assert len(found) == metrics['rounds']
  assert 0 < metrics['kept'] == origins.count(specsample.Origin.ACCEPTED)
  assert metrics['kept'] <= metrics['drafted'] <= 4 * metrics['rounds']
  num_plain = origins.count(specsample.Origin.PLAIN)
  assert metrics['plain_rounds'] == num_plain / metrics['rounds']
  assert metrics['tokens_per_second'] == pytest.approx(
    1e3 / metrics['ms_per_token']
  )


def test_chunk_holds_the_rounds_that_fit_into_its_time(target):
  none = drafters.NoDraft()
  single = list(_chunks(target, none, 'Hello'))
  found = list(_chunks(target, none, 'Hello', chunk_seconds=60.0))
  assert [len(one.tokens) for one in found] == [1, _NEW_TOKENS - 1]
  assert [one.tokens[0] for one in single] == found[0].tokens + found[1].tokens
  assert found[-1].stats == single[-1].stats


@pytest.mark.slow
@pytest.mark.nightly(only=('skip',))
@pytest.mark.parametrize('name', ['ngram', 'skip', 'recording'])
def test_turn_is_answered_as_the_whole_conversation_is(target, greedy, name):
  skip = drafters.Skip(model=target.model, layers=(0,), num_draft_tokens=2)
  drafter = {
    'ngram': drafters.Ngram(num_draft_tokens=4),
    'skip': skip,
    'recording': drafters.Recording(drafter=skip, model=target.model),
  }[name]
  conversation = _conversation(target, drafter)
  programs = _programs()
  said, answers, read = ('Hello!', 'And then?', 'Why?'), [], []
  for turn in said:
    rounds = list(conversation.answer(turn))
    answers.append([token for one in rounds for token in one.tokens])
    read.append(conversation.num_read)
    assert rounds[-1].stats.tokens == _NEW_TOKENS
  assert _programs() == programs
  for i, answer in enumerate(answers):
    whole = _whole(target, said[: i + 1], answers[:i])
    assert answer == greedy(whole, _NEW_TOKENS)[0]
    # Only the new tokens, unless the drafter has to take part in every round.
    known = len(_whole(target, said[:i], answers[:i]))
    assert read[i] == len(whole) - (known if name != 'recording' else 0)


def test_answer_that_is_cut_is_what_the_next_turn_reads(target, greedy):
  conversation = _conversation(target, drafters.NoDraft())
  rounds = itertools.islice(conversation.answer('Hello!'), 5)
  cut = [token for one in rounds for token in one.tokens]
  rounds = conversation.answer('And then?')
  answer = [token for one in rounds for token in one.tokens]
  whole = _whole(target, ['Hello!', 'And then?'], [cut])
  assert answer == greedy(whole, _NEW_TOKENS)[0]


def test_turn_cannot_write_control_tokens(target):
  own = target.tokenizer
  backend = tokenizers.Tokenizer.from_str(own.backend.to_str())
  backend.add_special_tokens(['[bold]'])
  target = dataclasses.replace(
    target, optional_tokenizer=dataclasses.replace(own, backend=backend)
  )
  conversation = _conversation(target, drafters.NoDraft())
  # Otherwise there is a token for each character.
  for text in ('user: a [bold] b\nassistant: ', '\nuser: c\nassistant: '):
    list(conversation.answer(text.partition(': ')[2].partition('\n')[0]))
    assert conversation.num_read == len(text)


def test_turn_without_room_is_left_out(target):
  conversation = _conversation(target, drafters.NoDraft(), max_length=160)
  first = [one.tokens for one in conversation.answer('Hello!')]
  with pytest.raises(ValueError, match='room'):
    list(conversation.answer('x' * 300))
  again = _conversation(target, drafters.NoDraft(), max_length=160)
  assert [one.tokens for one in again.answer('Hello!')] == first
  expected = [one.tokens for one in again.answer('Why?')]
  assert [one.tokens for one in conversation.answer('Why?')] == expected


def test_turn_that_is_not_utf8_is_named_and_left_out(
  target, monkeypatch, capsys
):
  conversation = _conversation(target, drafters.NoDraft())
  typed = io.TextIOWrapper(io.BytesIO(b'caf\xe9\nWhy?\n'), encoding='utf-8')
  monkeypatch.setattr('sys.stdin', typed)
  conversing.hold(conversation, '', _views(target))
  refused, answered = capsys.readouterr().err.splitlines()
  assert refused.startswith('the turn is not UTF-8 at character 4: convert it')
  assert 'max_new_tokens' in answered


class _Pressing(io.StringIO):
  """A standard output during whose fourth write Ctrl-C is pressed."""

  def __init__(self, times):
    super().__init__()
    self._times = times
    self._count = 0

  def write(self, text):
    """See `io.TextIOBase`."""
    self._count += 1
    for _ in range(self._times * (self._count == 4)):
      signal.raise_signal(signal.SIGINT)
    return super().write(text)


@pytest.mark.parametrize(
  ('times', 'reasons'),
  [
    (0, ['max_new_tokens', 'max_new_tokens']),
    (1, ['interruption', 'max_new_tokens']),
    (2, ['interruption']),
  ],
)
def test_ctrl_c_ends_the_answer_and_a_second_one_the_chat(
  target, monkeypatch, capsys, times, reasons
):
  conversation = _conversation(target, drafters.NoDraft())
  monkeypatch.setattr('sys.stdin', io.StringIO('Hello!\nWhy?\n'))
  monkeypatch.setattr('sys.stdout', _Pressing(times))
  handler = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    conversing.hold(conversation, '', _views(target))
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
  finally:
    signal.signal(signal.SIGINT, handler)
  notes = capsys.readouterr().err.splitlines()
  assert [note.rpartition(': ')[2].rstrip(')') for note in notes] == reasons
