"""The stages of an ablation: count, time, choose, compare.

The work of a stage follows from the journal of the stages before it, so that an
interrupted run goes on with the same trees.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools

from experiments import methods as methods_lib
from experiments.command import journal as journal_lib
from experiments.command import progress as progress_lib
from experiments.command import units as units_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import audits
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import round_parts as parts_lib
from experiments.timing import round_times
from experiments.trees import acceptance as acceptance_lib
from experiments.trees import comparison
from experiments.trees import costs as costs_lib
from specsample import tree


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
  """The measurements that the report needs besides the journal.

  Attributes:
    evaluation: evaluates all entries, and decoding without a draft.
    entries: the entries, in the order of the evaluation.
    counts: the acceptance counts, by drafter.
    costs: the measured times, by drafter.
    chosen: by drafter, the entry of the tree that the cost model chose.
  """

  evaluation: evaluation_lib.Evaluation
  entries: Sequence[comparison.Entry]
  counts: Mapping[str, acceptance_lib.Counts]
  costs: Mapping[str, costs_lib.Costs]
  chosen: Mapping[str, comparison.Entry]


def run(
  ablation: comparison.Ablation,
  prompts: Sequence[prompts_lib.Prompt],
  tokens: Sequence[list[int]],
  journal: journal_lib.Journal,
  progress: progress_lib.Bar,
) -> Compared:
  """Does the work that the journal lacks.

  Args:
    ablation: the drafters and trees to compare.
    prompts: the prompts to decode.
    tokens: the prompts as token ids.
    journal: the work that is done; see `evaluation` for its other keys.
    progress: shows the progress, see `progress.bar`.
  """
  counting = list(_counting(ablation, tokens))
  units_lib.run(counting, journal, progress)
  counts = {
    name: _counts(ablation, name, len(tokens), journal)
    for name in ablation.drafters
  }
  entries = [
    entry
    for name in ablation.drafters
    for entry in _entries(ablation, name, counts[name])
  ]
  known = ablation.with_trees(entries)
  # One visit each: there is no room for the executables of all trees at once.
  timing = [
    unit
    for unit in evaluation_lib.units(known, prompts, tokens, visits=1)
    if unit.key[0] == parts_lib.KIND
  ]
  timing += _drafting(ablation, counts, tokens)
  units_lib.run(timing, journal, progress)
  costs, chosen = {}, {}
  for name in ablation.drafters:
    of_drafter = [entry for entry in entries if entry.drafter == name]
    costs[name] = _costs(ablation, name, counts[name], of_drafter, journal)
    chosen[name] = _choose(
      ablation, of_drafter, counts[name].acceptance, costs[name]
    )
    if chosen[name] not in of_drafter:
      entries.insert(entries.index(of_drafter[-1]) + 1, chosen[name])
  evaluation = ablation.with_trees(entries)
  work = list(evaluation_lib.units(evaluation, prompts, tokens, visits=1))
  units_lib.run(work, journal, progress)
  parted = audits.units(evaluation, tokens, journal)
  if parted:
    units_lib.run(parted, journal, progress)
  return Compared(evaluation, entries, counts, costs, chosen)


def _counting(ablation, tokens) -> Iterator[units_lib.Unit]:
  evaluation = ablation.evaluation
  for name in ablation.drafters:
    method = ablation.entry(name, 'probe', ablation.probe_of(name)).method
    for i, batch in enumerate(evaluation.batches(len(tokens))):
      yield units_lib.Unit(
        f'acceptance by rank, prompt {batch[0] + 1} of {len(tokens)}, {name}',
        ('acceptance', name, i),
        functools.partial(
          _count, evaluation, method, [tokens[j] for j in batch], batch
        ),
      )


def _count(evaluation, method, prompts, request_ids):
  counts = acceptance_lib.decode(evaluation, method, prompts, request_ids)
  return dataclasses.asdict(counts)


def _counts(ablation, name, num_prompts, journal) -> acceptance_lib.Counts:
  """Returns the counts of a drafter over all prompts."""
  probe = ablation.probe_of(name)
  total = acceptance_lib.Counts.none(probe.depth, max(probe.num_children))
  for i in range(len(ablation.evaluation.batches(num_prompts))):
    total += acceptance_lib.Counts(**journal['acceptance', name, i])
  return total


def _entries(ablation, name, counts) -> list[comparison.Entry]:
  """Returns a drafter's entries, except that of the chosen tree."""
  chain, *others = ablation.without_counts(name)
  depth = ablation.depths_of(name)[-1:]
  sizes = sorted(set(ablation.num_nodes))
  best = [
    ablation.entry(name, f'best-{topology.num_nodes}', topology)
    for topology in costs_lib.grid(counts.acceptance, sizes, depth)
  ]
  return [chain, *best, *others]


def _drafting(ablation, counts, tokens) -> Iterator[units_lib.Unit]:
  """Yields units that time drafting at each depth, with a mid-sized tree."""
  prompts = ablation.evaluation.typical(tokens)
  for name in ablation.drafters:
    for topology in _timed(ablation, name, counts[name]):
      method = ablation.entry(name, 'timed', topology).method
      yield units_lib.Unit(
        f'drafting {topology.depth} deep, {name}',
        ('draft', name, topology.depth),
        functools.partial(_draft_ms, ablation.evaluation, method, prompts),
      )


def _timed(ablation, name, counts) -> list[tree.Topology]:
  """Returns a tree for each depth; a chain where the best is not that deep."""
  num_children = len(counts.tried[0])
  middle = sorted(ablation.num_nodes)[len(ablation.num_nodes) // 2]
  by_depth = {}
  for depth in ablation.depths_of(name):
    size = min(middle, costs_lib.largest(depth, num_children))
    topology = tree.best(counts.acceptance, size, depth)
    if topology.depth < depth:  # a larger tree may reach it
      topology = tree.chain(depth)
    by_depth[topology.depth] = topology
  return list(by_depth.values())


def _draft_ms(evaluation, method, tokens):
  draft_ms = round_times.draft_ms(
    *(evaluation.setup(method), tokens),
    repeats=evaluation.num_repeats(len(tokens)),
  )
  return {'draft_ms': draft_ms}


def _costs(ablation, name, counts, entries, journal) -> costs_lib.Costs:
  """Returns a drafter's costs; decoding without drafts is a tree of size 0."""
  plain = parts_lib.means(journal, methods_lib.BASELINE)
  parts = {0: plain} | {
    entry.topology.num_nodes: parts_lib.means(journal, entry.method_name)
    for entry in entries
    if entry.topology is not None
  }
  return costs_lib.Costs(
    draft_ms={
      topology.depth: journal['draft', name, topology.depth]['draft_ms']
      for topology in _timed(ablation, name, counts)
    },
    verify_ms={size: found['verify_ms'] for size, found in parts.items()},
    overhead_ms={size: found['overhead_ms'] for size, found in parts.items()},
    autoregressive_ms=plain['plain_ms'],
  )


def _choose(ablation, entries, acceptance, costs) -> comparison.Entry:
  """Returns the entry of the chosen tree, which may be a new one."""
  name = entries[0].drafter
  topology = costs_lib.choose(
    costs_lib.grid(
      acceptance, ablation.candidates_of(name), ablation.depths_of(name)
    ),
    acceptance,
    costs,
  ).topology
  for entry in entries:
    # A chain of drawn tokens is not a tree of the most likely tokens.
    is_drawn = entry.name == comparison.CHAIN and ablation.draws
    if entry.topology == topology and not is_drawn:
      return entry
  return ablation.entry(name, comparison.CHOSEN, topology)
