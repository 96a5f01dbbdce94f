"""One prompt decoded round by round, as who shows it sees it."""

import time

from experiments import generation
from experiments import methods
import specsample


def test_time_of_showing_is_none_of_decoding(checkpoint):
  target = specsample.load(checkpoint)
  method = methods.Method(drafter=specsample.drafters.NoDraft())
  state = generation.begin(
    target,
    method,
    target.tokenizer.encode('Hello'),
    sampling=specsample.Sampling(),
    max_new_tokens=3,
    seed=0,
  )
  rounds = generation.rounds(target, method, state)
  first = next(rounds)
  start = time.perf_counter()
  time.sleep(0.1)
  shown = time.perf_counter() - start
  second = next(rounds)
  elapsed = time.perf_counter() - start
  assert 0 < second.seconds - first.seconds < elapsed - shown
