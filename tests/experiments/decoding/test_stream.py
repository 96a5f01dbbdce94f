"""One prompt decoded a few rounds at a time, as a caller displays it."""

import time

import pytest

from experiments import methods
from experiments.decoding import stream
import specsample


@pytest.fixture(scope='module')
def chunks(checkpoint):
  """The function that decodes a prompt of the tiny model."""
  target = specsample.load(checkpoint)

  def decode(drafter, prompt, max_new_tokens, chunk_seconds=0.0):
    decoder = stream.OneRow(
      target=target,
      method=methods.Method(drafter=drafter),
      sampling=specsample.Sampling(),
      stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
      max_new_tokens=max_new_tokens,
      chunk_seconds=chunk_seconds,
    )
    tokens = target.tokenizer.encode(prompt)
    decoder.compile(tokens)
    found = stream.chunks(decoder, lambda: decoder.begin(tokens))
    return (one for _, one in found)

  return decode


def test_time_of_showing_is_none_of_decoding(chunks):
  found = chunks(specsample.drafters.NoDraft(), 'Hello', 3)
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


def test_drafted_and_kept_tokens_add_up(chunks):
  drafter = specsample.drafters.Ngram(num_draft_tokens=4)
  found = list(chunks(drafter, 'The rain in Spain', 96))
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


def test_a_chunk_holds_the_rounds_that_fit_into_its_time(chunks):
  none = specsample.drafters.NoDraft()
  single = list(chunks(none, 'Hello', 24))
  found = list(chunks(none, 'Hello', 24, chunk_seconds=60.0))
  assert [len(one.tokens) for one in found] == [1, 23]
  assert [one.tokens[0] for one in single] == found[0].tokens + found[1].tokens
  assert found[-1].stats == single[-1].stats
