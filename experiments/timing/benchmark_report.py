"""What the terminal shows of a benchmark."""

from experiments.reporting import columns
from experiments.reporting import tables
from experiments.timing import benchmarking

_METHODS = (
  *('name', 'num_draft_tokens', 'verifier', 'tokens_per_s', 'speedup'),
  *('tokens_per_round', 'plain_rounds', 'draft_ms', 'verify_ms'),
  *('overhead_ms', 'overhead_percent', 'cost_ratio'),
)


def show(measured: benchmarking.Measured) -> None:
  """Prints the tables and the facts about autoregressive decoding."""
  console = tables.console()
  console.print(_passes(measured))
  print(
    f'autoregressive: {measured.ar_tokens_per_s:.1f} tokens/s, '
    f'{measured.ar_ms_per_token:.2f} ms per token without the prefill, '
    f'{measured.percent_of_roofline:.0f}% of the roofline '
    f'(memory: {measured.memory_gb_per_s:.1f} GB/s)'
  )
  if measured.transformers_tokens_per_s is not None:
    ratio = measured.ar_tokens_per_s / measured.transformers_tokens_per_s
    print(
      f'transformers: {measured.transformers_tokens_per_s:.1f} tokens/s; '
      f'autoregressive is {ratio:.2f}x that'
    )
  console.print(columns.table(measured.methods, _METHODS))
  if any(method.synthetic for method in measured.methods):
    print('SYNTHETIC acceptance: no text was decoded; this is a hardware study')
  device = ''
  if measured.peak_device_bytes is not None:
    device = f', of the device {measured.peak_device_bytes / 1e6:.0f}'
  print(
    f'memory, MB: peak of the process {measured.peak_rss_bytes / 1e6:.0f} '
    f'(before the model was loaded {measured.baseline_rss_bytes / 1e6:.0f})'
    f'{device}'
  )


def _passes(measured) -> tables.Table:
  """Returns the table of passes by their number of tokens."""

  def row(name, one):
    base = one.t_ms['1']
    return [
      name,
      *(f'{ms:.1f} ({ms / base:.2f}x)' for ms in one.t_ms.values()),
      f'{one.weight_bytes / 1e6:.0f}',
      f'{one.cache_bytes / 1e6:.0f}',
    ]

  sizes = [f't({n}), ms' for n in measured.t_ms]
  return tables.Table(
    ['a pass of', *sizes, 'weights, MB', 'cache, MB'],
    [
      row('the target', measured),
      *(row(name, one) for name, one in measured.others.items()),
    ],
  )
