// Work of one call on the threads of XLA.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Calls run(first, last) on parts of [0, count) until all are done. `run` is
// copied: a task may begin after the call has returned.
//
// The caller works too, and waits for pieces that were begun, not for tasks that
// were scheduled: XLA runs several calls at once, and threads that wait for
// tasks which no thread is free to run would wait forever.
template <typename Run>
void Parallel(xla::ffi::ThreadPool pool, int64_t count, bool is_small, Run run) {
  int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads < 2 || is_small) return run(int64_t{0}, count);
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  int64_t size = std::max<int64_t>(1, count / (threads * 4));
  int64_t pieces = (count + size - 1) / size;
  auto work = [=] {
    for (int64_t i; (i = state->next.fetch_add(1)) < pieces; state->done++)
      run(i * size, std::min(count, (i + 1) * size));
  };
  for (int64_t t = 1; t < threads; t++) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; state->done.load() < pieces; spins++)
    if (spins > 1000) std::this_thread::yield();
}
