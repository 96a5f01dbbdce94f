"""The measurements of `benchmark`: one model, its drafters, one machine."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import resource
import sys
from typing import Any, cast

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import progress as progress_lib
from experiments.decoding import prompts
from experiments.decoding import setup as setup_lib
from experiments.reporting import tables
from experiments.timing import roofline as roofline_lib
from experiments.timing import round_times
from experiments.timing import transformers_peer
import specsample
from specsample import settings
from specsample.choosing import loops
from specsample.choosing import pass_times
from specsample.types import Model, Params

# Tokens fed in one pass: a draft of 0, 1, 2, 4, 8 or 16, and the pending one.
_ROWS = (1, 2, 3, 5, 9, 17)
# The columns of the methods in the terminal.
_METHODS = (
  *('name', 'num_draft_tokens', 'verifier', 'tokens_per_s', 'speedup'),
  *('tokens_per_round', 'plain_rounds', 'draft_ms', 'verify_ms'),
  *('overhead_ms', 'overhead_percent', 'cost_ratio'),
)
# Used next to the names of methods, none of which is None.
_PLAIN, _PEER = 'autoregressive', None


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Other:
  """Another model, or the same one with another cache, to compare passes of."""

  model: Model
  params: Params


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Benchmark(settings.Settings):
  """A benchmark's settings.

  The prompt is a text, or the ids 1, 2, 3, ... if there is none. Of `others`
  only passes are timed, after as many tokens. `turns` is how often the parts of
  a round are timed, each time after a prefill.
  """

  model: Model
  params: Params
  methods: Mapping[str, methods_lib.Method]  # by name
  prompt: str | None = None
  loaded: specsample.Loaded | None = None  # with a tokenizer for the prompt
  prompt_length: settings.Count = 64
  max_new_tokens: int = 128
  repeats: settings.Count = 5
  turns: settings.Count = 25
  others: Mapping[str, Other] = dataclasses.field(default_factory=dict)

  def _check(self):
    super()._check()
    if not self.methods:
      raise ValueError('Benchmark.methods is empty: name at least one')

  def check(self) -> None:
    """Checks that everything can be measured; compiles nothing."""
    if self.peer is not None:
      transformers_peer.check(self.peer)
    for method in self.methods.values():
      self.setup(method).check([self.prompt_tokens()])
    prompt, room = len(self.prompt_tokens()), self.model.max_length
    if prompt + self.max_new_tokens > room:
      raise ValueError(
        f'Benchmark.max_new_tokens is {self.max_new_tokens} after a prompt of '
        f'{prompt} tokens, but the model takes {room}: give fewer'
      )

  def setup(self, method: methods_lib.Method) -> setup_lib.Setup:
    """Returns the setup that decodes with a method."""
    return setup_lib.Setup(
      target=self._target,
      method=method,
      sampling=specsample.Sampling(temperature=0.0),
      max_new_tokens=self.max_new_tokens,
    )

  @functools.cached_property
  def _target(self):
    # One for all methods, as what it makes when first used is made once.
    return specsample.Loaded(cast(Any, self.model), self.params, None)

  @property
  def peer(self) -> specsample.Loaded | None:
    """The model that transformers is measured with; None under a mesh."""
    return self.loaded if jax.sharding.get_mesh().empty else None

  def prompt_tokens(self) -> list[int]:
    """Returns the tokens of the one prompt."""
    if self.prompt is None or self.loaded is None:
      return [
        1 + i % (self.model.vocab_size - 1) for i in range(self.prompt_length)
      ]
    return prompts.encode(self.loaded.tokenizer, self.prompt, chat=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
  """A method's speed, and the time of each part of its rounds."""

  name: str = tables.shown('method')
  drafter: str
  verifier: str = tables.shown('rule')
  lossless: bool
  synthetic: bool  # drafts were kept at a stated rate, not by a lossless rule
  num_draft_tokens: int = tables.shown('K')
  tokens_per_s: float = tables.shown('tokens/s', form='.1f')  # prefill included
  # Over autoregressive decoding.
  speedup: float = tables.shown('speedup', form='.2f', unit='x')
  tokens_per_round: float = tables.shown('tokens per round', form='.2f')
  plain_rounds: float = tables.shown('rounds without a draft', form='.0%')
  draft_ms: float = tables.shown('drafting, ms', form='.2f')
  # Like overhead_ms, averaged over the widths of the rounds.
  verify_ms: float = tables.shown('the pass, ms', form='.2f')
  verify_ms_by_width: dict[str, float]
  overhead_ms: float = tables.shown('the rest, ms', form='.2f')
  # Of the sum of the three parts.
  overhead_percent: float = tables.shown('the rest, %', form='.1f')
  # A draft token (for a tree, a level) over a round without drafts.
  cost_ratio: float = tables.shown('c', form='.3f')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """The measurements in benchmark.json; None means not measured."""

  t_ms: dict[str, float]  # a pass of the target, by its number of tokens
  t_ratio: dict[str, float]  # t(n) / t(1)
  # What the loop adds to a pass: the median round, less t(1).
  loop_overhead_ms: float
  ar_tokens_per_s: float  # prefill included, like the next
  transformers_tokens_per_s: float | None
  ar_ms_per_token: float  # without the prefill; the least
  ar_round_ms: float  # without the prefill; the median, used for cost ratios
  memory_gb_per_s: float  # of one device, the faster of reading and copying
  percent_of_roofline: float  # of autoregressive decoding
  methods: list[Speculative]
  # By name: `t_ms`, `weight_bytes` and `cache_bytes`, as the fields here.
  others: dict[str, dict[str, Any]]
  weight_bytes: int  # without copies on a mesh, like cache_bytes
  cache_bytes: int
  # The process after autoregressive decoding, with the weights of `others`.
  peak_rss_bytes: int
  baseline_rss_bytes: int  # the same before the model was loaded
  peak_device_bytes: int | None
  prompt_tokens: int
  max_new_tokens: int


def measure(
  benchmark: Benchmark, baseline_rss: int, progress: progress_lib.Bar
) -> Measured:
  """Measures everything, memory first because its peak only grows.

  `baseline_rss` is `peak_rss` before the benchmark was made.
  """
  prompt, count = benchmark.prompt_tokens(), benchmark.max_new_tokens
  plain = methods_lib.Method(specsample.drafters.NoDraft())
  room = specsample.pad_prompts([prompt])[0].shape[1] + count
  main = Other(model=benchmark.model, params=benchmark.params)
  num_steps = 5 + len(benchmark.methods) + len(benchmark.others)
  with progress(num_steps) as step:
    step('autoregressive decoding: memory')
    generate = lambda method: benchmark.setup(method).generate([prompt])
    jax.block_until_ready(generate(plain))
    peak = peak_rss()
    memory = jax.local_devices()[0].memory_stats() or {}
    peak_device = memory.get('peak_bytes_in_use')

    step('memory')
    bandwidths = [roofline_lib.memory_bandwidth()]

    step('autoregressive, speculative and transformers, in turns')
    decoders: dict[Any, Callable[[], Any]] = {
      name: functools.partial(generate, method)
      for name, method in {_PLAIN: plain, **benchmark.methods}.items()
    }
    if benchmark.peer is not None:
      peer = transformers_peer.generator(benchmark.peer, prompt, count)
      if peer is not None:
        decoders[_PEER] = peer
    seconds = _least_seconds(decoders, benchmark.repeats)

    step('autoregressive decoding without the prefill')
    times = lambda method: round_times.times(
      benchmark.setup(method), [prompt], repeats=benchmark.turns
    )
    plain_times = times(plain)
    ar_ms = plain_times.least_ms
    bandwidths.append(roofline_lib.memory_bandwidth())

    parts = {}
    for name, method in benchmark.methods.items():
      step(f'parts of a round: {name}')
      parts[name] = times(method)

    step('passes over 1 to 17 tokens')
    passes = _passes(main, len(prompt), room)
    others = {}
    for name, other in benchmark.others.items():
      step(f'passes: {name}')
      others[name] = _passes(other, len(prompt), room)
    bandwidths.append(roofline_lib.memory_bandwidth())

  # The machine's best, like the decoding times: it may be slow for a while.
  bandwidth = max(bandwidths)
  target = {'target': benchmark.params}
  roofline = roofline_lib.Roofline.of(target, benchmark.model, bandwidth)
  transformers_seconds, t_ms = seconds.get(_PEER), passes['t_ms']
  return Measured(
    **passes,
    t_ratio={n: ms / t_ms['1'] for n, ms in t_ms.items()},
    loop_overhead_ms=plain_times.plain_ms - t_ms['1'],
    ar_tokens_per_s=count / seconds[_PLAIN],
    transformers_tokens_per_s=(
      count / transformers_seconds if transformers_seconds else None
    ),
    ar_ms_per_token=ar_ms,
    ar_round_ms=plain_times.plain_ms,
    memory_gb_per_s=bandwidth / 1e9,
    percent_of_roofline=1e5
    * roofline.seconds(1, passes['cache_bytes'], 1)
    / ar_ms,
    methods=[
      _speculative(
        name,
        method,
        specsample.stats.summarize(generate(method)),
        parts[name],
        seconds=seconds[name],
        plain_tokens_per_s=count / seconds[_PLAIN],
        plain_ms=plain_times.plain_ms,
      )
      for name, method in benchmark.methods.items()
    ],
    others=others,
    peak_rss_bytes=peak,
    baseline_rss_bytes=baseline_rss,
    peak_device_bytes=peak_device,
    prompt_tokens=len(prompt),
    max_new_tokens=count,
  )


def _passes(one, num_before, max_length):
  params = {'target': one.params}
  found = pass_times.passes(
    params, one.model, _ROWS, length=num_before, max_length=max_length
  )
  return {
    't_ms': {str(rows): 1e3 * min(seconds) for rows, seconds in found.items()},
    'weight_bytes': roofline_lib.weight_bytes(params),
    'cache_bytes': roofline_lib.cache_bytes(one.model, max_length),
  }


def _speculative(
  name, method, stats, parts, *, seconds, plain_tokens_per_s, plain_ms
):
  draft_ms, rest_ms = round_times.settled(parts.draft_ms, parts.overhead_ms)
  verify_ms, overhead_ms = (
    float(
      np.average(
        round_times.by_drafts(by_width, len(stats.proposed) - 1),
        weights=stats.proposed,
      )
    )
    for by_width in (parts.verify_ms, rest_ms)
  )
  num_drafts = method.drafter.num_draft_tokens
  return Speculative(
    name=name,
    drafter=methods_lib.file_name(method.drafter),
    verifier=methods_lib.file_name(method.verify),
    lossless=method.verify.lossless,
    synthetic=isinstance(method.verify, specsample.verify.Synthetic),
    num_draft_tokens=num_drafts,
    tokens_per_s=stats.tokens / seconds,
    speedup=stats.tokens / seconds / plain_tokens_per_s,
    tokens_per_round=stats.tokens_per_round,
    plain_rounds=stats.plain_rounds,
    draft_ms=draft_ms,
    verify_ms=verify_ms,
    verify_ms_by_width=parts.verify_ms,
    overhead_ms=overhead_ms,
    overhead_percent=100 * overhead_ms / (draft_ms + verify_ms + overhead_ms),
    # NoDraft has depth 0, and no draft whose cost could be stated.
    cost_ratio=draft_ms / max(method.drafter.depth, 1) / plain_ms,
  )


def _least_seconds(decoders, repeats):
  """Returns the least seconds of each decoder; all of them take turns.

  The least is taken because other work of the machine only adds time.
  """

  def loop(decode):
    return lambda count: [decode() for _ in range(count)]

  ready = {name: functools.partial(loop, x) for name, x in decoders.items()}
  taken = loops.in_turns(ready, count=1, repeats=repeats)
  return {name: min(seconds) for name, seconds in taken.items()}


def peak_rss() -> int:
  """Returns the most bytes that this process has held in memory so far."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def show(measured: Measured) -> None:
  """Prints the tables and the facts about autoregressive decoding."""
  console = tables.console()
  console.print(_table_of_passes(measured))
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
  console.print(tables.table(measured.methods, _METHODS))
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


def _table_of_passes(measured) -> tables.Table:
  """Returns the table of passes by their number of tokens."""

  def row(name, one):
    base = one['t_ms']['1']
    return [
      name,
      *(f'{ms:.1f} ({ms / base:.2f}x)' for ms in one['t_ms'].values()),
      *(f'{one[x] / 1e6:.0f}' for x in ('weight_bytes', 'cache_bytes')),
    ]

  sizes = [f't({n}), ms' for n in measured.t_ms]
  return tables.Table(
    ['a pass of', *sizes, 'weights, MB', 'cache, MB'],
    [
      row(name, one)
      for name, one in {'the target': vars(measured), **measured.others}.items()
    ],
  )
