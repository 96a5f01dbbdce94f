"""The output of a benchmark: a terminal summary and benchmark.json."""

import dataclasses
import pathlib
from typing import Any

import gin

from experiments.command import environment
from experiments.reporting import result_file
from experiments.timing import benchmarking


def write(out: pathlib.PurePath, measured: benchmarking.Measured) -> None:
  """Writes benchmark.json."""
  described = environment.describe()
  config = {'gin_config': gin.operative_config_str()}
  result_file.write(
    out / 'benchmark.json', content(measured) | described | config
  )


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


def show(out: pathlib.PurePath, measured: benchmarking.Measured) -> None:
  """Prints the summary."""
  for line in lines(measured):
    print(line)
  print(f'\nbenchmark.json is in {out}')


def lines(measured: benchmarking.Measured) -> list[str]:
  """Returns the summary, one fact per line."""
  shown = [
    f'a pass of the target, ms: {_of_passes(measured.t_ms)}',
    f'autoregressive: {measured.ar_tokens_per_s:.1f} tokens/s, '
    f'{measured.ar_ms_per_token:.2f} ms per token without the prefill, '
    f'{measured.percent_of_roofline:.0f}% of the roofline '
    f'(memory: {measured.memory_gb_per_s:.1f} GB/s)',
  ]
  if measured.transformers_tokens_per_s is not None:
    ratio = measured.ar_tokens_per_s / measured.transformers_tokens_per_s
    shown.append(
      f'transformers: {measured.transformers_tokens_per_s:.1f} tokens/s; '
      f'autoregressive is {ratio:.2f}x that'
    )
  for name, found in measured.methods.items():
    shown += _of_method(name, found)
  shown += [
    f'memory, MB: weights {measured.weight_bytes / 1e6:.0f}, cache '
    f'{measured.cache_bytes / 1e6:.0f}, peak of the process '
    f'{measured.peak_rss_bytes / 1e6:.0f} (before the model was loaded '
    f'{measured.baseline_rss_bytes / 1e6:.0f})',
  ]
  if measured.peak_device_bytes is not None:
    shown[-1] += f', of the device {measured.peak_device_bytes / 1e6:.0f}'
  for name, other in measured.others.items():
    shown += [
      f'{name}: a pass, ms: {_of_passes(other.t_ms)}',
      f'  memory, MB: weights {other.weight_bytes / 1e6:.0f}, cache '
      f'{other.cache_bytes / 1e6:.0f}',
    ]
  return shown


def _of_passes(t_ms):
  base = t_ms['1']
  return ', '.join(
    f't({n}) {ms:.1f}' + (f' ({ms / base:.2f}x)' if n != '1' else '')
    for n, ms in t_ms.items()
  )


def _of_method(name, found):
  synthetic = ''
  if found.synthetic:
    synthetic = ' [SYNTHETIC acceptance: no text, a hardware study]'
  return [
    f'{name}, K = {found.num_draft_tokens}, {found.verifier}: '
    f'{found.tokens_per_s:.1f} tokens/s '
    f'({found.speedup:.2f}x), '
    f'{found.tokens_per_round:.2f} tokens per round, {found.plain_rounds:.0%} '
    f'of the rounds without a draft{synthetic}',
    f'  a round, ms: draft {found.draft_ms:.2f} ({found.draft_percent:.0f}%), '
    f'verify {found.verify_ms:.2f}, the rest {found.overhead_ms:.2f} '
    f'({found.overhead_percent:.1f}%); a draft token costs c = '
    f'{found.cost_ratio:.3f} rounds without drafts',
  ]
