"""The output of a benchmark: a terminal summary and benchmark.json."""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Any

from experiments.reporting import result_file
from experiments.timing import benchmarking


def write(out: pathlib.PurePath, measured: benchmarking.Measured) -> None:
  """Writes benchmark.json."""
  result_file.write(out / 'benchmark.json', content(measured))


def content(measured: benchmarking.Measured) -> dict[str, Any]:
  """Returns what was measured, in JSON's types, and what follows from it.

  `t_ratio` is t(n) / t(1). `loop_overhead_ms` is what the loop adds to a pass:
  a round of autoregressive decoding, the median, less t(1). The parts of a
  round of the first method are repeated beside `methods`, for readers that
  compare one speculative method between runs.
  """
  first = next(iter(measured.methods.values()))
  base = measured.t_ms['1']
  return dataclasses.asdict(measured) | {
    't_ratio': {n: ms / base for n, ms in measured.t_ms.items()},
    'loop_overhead_ms': measured.ar_round_ms - base,
    'draft_ms': first.draft_ms,
    'verify_ms': first.verify_ms,
    'overhead_percent': first.overhead_percent,
  }


def lines(measured: benchmarking.Measured) -> Iterator[str]:
  """Yields the summary, one fact per line."""
  yield f'a pass of the target, ms: {_of_passes(measured.t_ms)}'
  yield (
    f'autoregressive: {measured.ar_tokens_per_s:.1f} tokens/s, '
    f'{measured.ar_ms_per_token:.2f} ms per token without the prefill, '
    f'{measured.percent_of_roofline:.0f}% of the roofline '
    f'(memory: {measured.memory_gb_per_s:.1f} GB/s)'
  )
  if measured.transformers_tokens_per_s is not None:
    ratio = measured.ar_tokens_per_s / measured.transformers_tokens_per_s
    yield (
      f'transformers: {measured.transformers_tokens_per_s:.1f} tokens/s; '
      f'autoregressive is {ratio:.2f}x that'
    )
  for name, method in measured.methods.items():
    yield from _of_method(name, method)
  device = ''
  if measured.peak_device_bytes is not None:
    device = f', of the device {measured.peak_device_bytes / 1e6:.0f}'
  yield (
    f'memory, MB: weights {measured.weight_bytes / 1e6:.0f}, cache '
    f'{measured.cache_bytes / 1e6:.0f}, peak of the process '
    f'{measured.peak_rss_bytes / 1e6:.0f} (before the model was loaded '
    f'{measured.baseline_rss_bytes / 1e6:.0f}){device}'
  )
  for name, other in measured.others.items():
    yield f'{name}: a pass, ms: {_of_passes(other.t_ms)}'
    yield (
      f'  memory, MB: weights {other.weight_bytes / 1e6:.0f}, cache '
      f'{other.cache_bytes / 1e6:.0f}'
    )


def _of_passes(t_ms):
  base = t_ms['1']
  return ', '.join(
    f't({n}) {ms:.1f}' + (f' ({ms / base:.2f}x)' if n != '1' else '')
    for n, ms in t_ms.items()
  )


def _of_method(name, method):
  synthetic = ''
  if method.synthetic:
    synthetic = ' [SYNTHETIC acceptance: no text, a hardware study]'
  yield (
    f'{name}, K = {method.num_draft_tokens}, {method.verifier}: '
    f'{method.tokens_per_s:.1f} tokens/s ({method.speedup:.2f}x), '
    f'{method.tokens_per_round:.2f} tokens per round, '
    f'{method.plain_rounds:.0%} of the rounds without a draft{synthetic}'
  )
  yield (
    f'  a round, ms: draft {method.draft_ms:.2f} '
    f'({method.draft_percent:.0f}%), verify {method.verify_ms:.2f}, '
    f'the rest {method.overhead_ms:.2f} '
    f'({method.overhead_percent:.1f}%); a draft token costs c = '
    f'{method.cost_ratio:.3f} rounds without drafts'
  )
