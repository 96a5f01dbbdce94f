"""The drafters and trees that an ablation compares."""

from collections.abc import Sequence
import dataclasses
import functools

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.trees import costs
import specsample
from specsample import tree
from specsample.loop import step

CHAIN, FIXED, CHOSEN = 'chain', 'mc-sim-63', 'chosen'


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
  """A drafter with a tree: one method to measure."""

  drafter: str  # the drafter's name
  name: str  # the tree's name
  method: methods_lib.Method
  topology: tree.Topology | None  # None if the tree depends on the text

  @property
  def method_name(self) -> str:
    """The method's name in the evaluation."""
    return f'{self.drafter} {self.name}'


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ablation:
  """The drafters and trees to compare.

  Attributes:
    evaluation: how they are measured; its methods are the drafters, as chains.
    num_nodes: sizes N of the best trees that are measured.
    candidates: sizes N of the trees that the cost model chooses from.
    depths: depths of the candidates. The largest also limits the depth of all
      other trees. None means 1 to the drafter's own.
    probe: the tree with which the acceptance of each rank is counted, cut to
      the largest depth.
    dynamic_num_nodes: N of EAGLE-2's tree.
    dynamic_width: the width of EAGLE-2's tree.
  """

  evaluation: evaluation_lib.Evaluation
  num_nodes: Sequence[int] = (8, 16, 32, 64)
  candidates: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
  depths: Sequence[int] | None = None
  probe: tree.Topology = dataclasses.field(default_factory=tree.mc_sim_7b_63)
  dynamic_num_nodes: int = 32
  dynamic_width: int = 10

  def __post_init__(self):
    """Raises ValueError if there are no trees, drafters or timings."""
    for name in ('num_nodes', 'candidates', 'depths'):
      given = getattr(self, name)
      if given is not None and (not given or min(given) < 1):
        raise ValueError(
          f'Ablation.{name} is {given}: give at least one number, each at '
          'least 1'
        )
    if not self.drafters:
      raise ValueError(
        'Evaluation.methods has no drafter: name at least one drafter that can '
        'branch'
      )
    if self.evaluation.repeats is None:  # needed for any number of prompts
      timed = dataclasses.replace(
        self.evaluation, repeats=evaluation_lib.REPEATS
      )
      object.__setattr__(self, 'evaluation', timed)
    if not self.evaluation.repeats:
      raise ValueError(
        'Evaluation.repeats is 0, but trees are chosen by the times of rounds: '
        'give at least 1'
      )
    if not self.probe.num_nodes:
      raise ValueError(
        'Ablation.probe has no nodes: give a tree, such as @k_ary()'
      )

  @property
  def drafters(self) -> dict[str, methods_lib.Method]:
    """The methods that draft, by name."""
    return {
      name: method
      for name, method in self.evaluation.methods.items()
      if name != methods_lib.BASELINE
    }

  @property
  def draws(self) -> bool:
    """Whether tokens are drawn, i.e. a temperature is not 0."""
    return bool(np.any(np.asarray(self.evaluation.sampling.temperature) != 0))

  def depths_of(self, name: str) -> Sequence[int]:
    """Returns the depths of a drafter's candidates, in ascending order."""
    own = self.drafters[name].drafter.num_draft_tokens
    return sorted(self.depths or range(1, own + 1))

  def candidates_of(self, name: str) -> list[int]:
    """Returns the candidates that are no larger than the largest timed tree.

    Times are interpolated between sizes, not extrapolated.
    """
    depth, fixed = self.depths_of(name)[-1], tree.mc_sim_7b_63()
    most = max(*self.num_nodes, depth)
    if depth >= fixed.depth:
      most = max(most, fixed.num_nodes)
    return [size for size in self.candidates if size <= most]

  def probe_of(self, name: str) -> tree.Topology:
    """Returns the probe, cut to the largest depth measured for a drafter."""
    depth = self.depths_of(name)[-1]
    return tree.from_paths(
      path for path in self.probe.paths() if len(path) <= depth
    )

  def with_trees(self, entries: Sequence[Entry]) -> evaluation_lib.Evaluation:
    """Returns the evaluation of some entries and of decoding without drafts."""
    baseline = methods_lib.Method(specsample.drafters.NoDraft())
    methods = {entry.method_name: entry.method for entry in entries}
    return dataclasses.replace(
      self.evaluation, methods={methods_lib.BASELINE: baseline, **methods}
    )

  def without_counts(self, name: str) -> list[Entry]:
    """Returns the entries of a drafter that do not depend on its acceptance.

    Raises:
      ValueError: the drafter cannot branch, or not to that depth.
    """
    method, depth = self.drafters[name], self.depths_of(name)[-1]
    deepest = methods_lib.with_num_draft_tokens(method, depth)
    dynamic = methods_lib.dynamic_tree(
      method, self.dynamic_num_nodes, self.dynamic_width, depth
    )
    found = [
      Entry(name, CHAIN, deepest, tree.chain(depth)),
      Entry(name, f'dynamic-{self.dynamic_num_nodes}', dynamic, None),
    ]
    fixed = tree.mc_sim_7b_63()
    if depth >= fixed.depth:
      found.append(self.entry(name, FIXED, fixed))
    return found

  def entry(self, name: str, label: str, topology: tree.Topology) -> Entry:
    """Returns the entry of a drafter with a tree of fixed shape."""
    method = methods_lib.tree(self.drafters[name], topology)
    return Entry(name, label, method, topology)

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Checks that everything can be measured, before anything is compiled.

    Args:
      tokens: the prompts as token ids.

    Raises:
      ValueError: a setting does not fit; the message names it.
    """
    for name, method in self.drafters.items():
      entries = self.without_counts(name)
      self._check_sizes(name)
      for depth in self.depths_of(name):
        methods_lib.with_num_draft_tokens(method, depth)
      entries.append(self.entry(name, 'probe', self.probe_of(name)))
      self.with_trees(entries).check(tokens)
      for entry in entries:
        self._check_draft(entry.method, tokens[0])

  def _check_sizes(self, name):
    depths = self.depths_of(name)
    num_children = max(self.probe_of(name).num_children)
    fits = functools.partial(costs.fits, num_children=num_children)
    wrong = [size for size in self.num_nodes if not fits(size, depths[-1])]
    if wrong:
      raise ValueError(
        f'Ablation.num_nodes has {wrong[0]}, but no tree of that many nodes is '
        f'{depths[-1]} deep with at most {num_children} children per node, as '
        'in Ablation.probe: give other numbers, depths or another probe'
      )
    sizes = self.candidates_of(name)
    if not any(fits(size, d) for size in sizes for d in depths):
      raise ValueError(
        f'Ablation.candidates are {self.candidates}, but no tree of that many '
        f'nodes is {list(depths)} deep: give some that are at least the depth, '
        'and no larger than the largest of Ablation.num_nodes'
      )

  def _check_draft(self, method, prompt):
    """Traces a draft, to raise the errors that drafting would raise."""

    def draft(params, prompts, lengths):
      state = specsample.prefill(
        params,
        prompts,
        lengths,
        jax.random.key(0),
        model=self.evaluation.target.model,
        drafter=method.drafter,
        sampling=self.evaluation.sampling,
        max_new_tokens=self.evaluation.max_new_tokens,
      )
      return step.propose(
        params,
        state,
        model=self.evaluation.target.model,
        drafter=method.drafter,
        verify=method.verify,
      )

    params = methods_lib.all_params(self.evaluation.target, method)
    jax.eval_shape(draft, params, *specsample.pad_prompts([prompt]))
