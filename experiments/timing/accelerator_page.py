"""The page about an accelerator, in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.reporting import columns
from experiments.reporting import rows as rows_lib
from experiments.timing import accelerator_parts

_UNDECIDED = """\
## What is not decided

Whether flash attention or a Pallas kernel would pay off: a profile of a pass on
this device would tell (docs/profile.md). At most, kernels bring `of the
roofline` to 100%."""


def text(
  work: Sequence[accelerator_parts.Part],
  found: Mapping[str, Mapping[str, Any]],
  left_out: Mapping[str, str],
) -> str:
  """Returns the page.

  Args:
    work: all parts that were asked for, in their order.
    found: the results of those that have ended, by name.
    left_out: why the others have none; parts in neither have not begun.
  """
  lines = ['# Measured on the accelerator', '']
  results = {part: found[part.name] for part in work if part.name in found}
  if not results:
    lines.append('Nothing was measured.')
  else:
    lines += _described(list(results.values()))
    of_passes = {part: x for part, x in results.items() if 't_ms' in x}
    if of_passes:
      lines += ['', '## Passes and the loop', '', *_passes(of_passes)]
      lines += ['', '## Drafters', '', *_drafters(of_passes)]
    for part, result in results.items():
      if 'rows' in result:
        lines += ['', f'## {part.what}', '', *_rows(result['rows'])]
  missing = [part for part in work if part.name not in found]
  if missing:
    lines += ['', '## What was left out', '']
    lines += [
      f'* `{part.name}` ({part.what}): '
      f'{left_out.get(part.name, "it has not begun")}'
      for part in missing
    ]
    lines += ['', 'The same command goes on with these.']
  return '\n'.join([*lines, '', _UNDECIDED, ''])


def _described(results) -> Iterator[str]:
  devices = dict.fromkeys(
    f'{x["hardware"]["device_count"]} x {x["hardware"]["device"]} '
    f'({x["hardware"]["platform"]})'
    for x in results
  )
  last = results[-1]
  seconds = sum(result['seconds'] for result in results)
  yield f'* device: {", ".join(devices)}; host: {last["hardware"]["cpu"]}'
  names = ('jax', 'jaxlib', 'specsample')
  versions = ', '.join(f'{name} {last["versions"][name]}' for name in names)
  yield f'* versions: {versions}; commit {last["git_commit"]}'
  bandwidths = [x['memory_gb_per_s'] for x in results if 'memory_gb_per_s' in x]
  if bandwidths:
    yield f'* memory: {max(bandwidths):.0f} GB/s, the most that was reached'
  yield f'* {len(results)} parts in {seconds / 60:.1f} minutes, all at batch 1'


def _passes(results) -> Iterator[str]:
  """Yields a table of the target's passes, a line per target.

  Parts that differ in their drafter alone have the same passes; the first one
  stands for all of them.
  """
  yield (
    't(n): milliseconds of a pass over n tokens, the least. loop: a round of '
    'autoregressive decoding, the median, less t(1), microseconds. of the '
    'roofline: the least time to read weights and cache once, over the time of '
    'a round.'
  )
  yield ''
  sizes = next(iter(results.values()))['t_ms']
  passes = [f't({n})' for n in sizes]
  yield from _head(
    *('target', *passes, 't(17)/t(1)', 'tokens/s', 'loop', 'of the roofline')
  )
  seen = set()
  for part, result in results.items():
    if result['weight_bytes'] in seen:
      continue
    seen.add(result['weight_bytes'])
    t_ms = result['t_ms']
    yield _line(
      part.what,
      *(f'{t_ms[n]:.3f}' for n in sizes),
      f'{t_ms["17"] / t_ms["1"]:.2f}x',
      f'{result["ar_tokens_per_s"]:.1f}',
      f'{1e3 * (result["ar_round_ms"] - t_ms["1"]):.0f}',
      f'{result["percent_of_roofline"]:.0f}%',
    )


def _drafters(results) -> Iterator[str]:
  yield (
    'One prompt, greedy. rest: a round less drafting and the pass of the '
    'target, microseconds. synthetic: the weights are random and drafts are '
    'kept at a stated rate, so the speedup says something of the hardware only.'
  )
  yield ''
  yield from _head(
    *('drafter', 'target', 'K', 'tokens per round', 'tokens/s', 'speedup'),
    *('draft ms', 'verify ms', 'rest'),
  )
  for part, result in results.items():
    for name, one in result['methods'].items():
      yield _line(
        name + (' (synthetic)' if one['synthetic'] else ''),
        part.what,
        one['num_draft_tokens'],
        f'{one["tokens_per_round"]:.2f}',
        f'{one["tokens_per_s"]:.1f}',
        f'{one["tokens_per_s"] / result["ar_tokens_per_s"]:.2f}x',
        f'{one["draft_ms"]:.3f}',
        f'{one["verify_ms"]:.3f}',
        f'{1e3 * one["overhead_ms"]:.0f}',
      )


def _rows(rows) -> Iterator[str]:
  names = ('method', 'K', 'tokens per round', 'speedup', '95% interval')
  yield from _head(*names, 'of the roofline')
  for row in rows:
    if row['category'] != rows_lib.OVERALL:
      continue
    ci95 = row['speedup_ci95']
    yield _line(
      row['method'],
      row['num_draft_tokens'],
      f'{row["tokens_per_round"]:.2f}',
      columns.number(row['speedup'], '.2f', 'x'),
      f'{ci95[0]:.2f}-{ci95[1]:.2f}' if ci95 else columns.NOTHING,
      columns.number(row['percent_of_roofline'], '.0f', '%'),
    )


def _head(*names) -> Iterator[str]:
  yield _line(*names)
  yield _line(*('---' for _ in names))


def _line(*cells) -> str:
  return f'| {" | ".join(map(str, cells))} |'
