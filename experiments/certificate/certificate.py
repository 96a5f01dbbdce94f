"""The contents of the certificate, and how each entry is computed."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
import math
from typing import Annotated, Any

import gin

from experiments.certificate import sampled
from experiments.certificate import sampled_cases
from experiments.certificate.planted import bugs
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import progress as progress_lib
from experiments.command import units as units_lib
from experiments.reporting import result_file
from specsample import checks
from specsample import settings
from specsample import stats
from specsample import verify
from specsample.testing import acceptance
from specsample.testing import cases as cases_lib
from specsample.testing import choices
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import second_call
from specsample.testing.cases import Case
from specsample.types import DraftKind, Verifier

Record = dict[str, Any]
# A description, and the function that computes its records.
Work = tuple[str, Callable[[], list[Record]]]

TOLERANCE = 1e-12
SECTIONS = ('cases', 'lossy', 'statistical', 'choices', 'planted_bugs')

_SYNTHETIC = verify.Synthetic(rate=0.8)
_LENIENT = verify.Lenient(lenience=0.5)
# Lossy rules for trees, by name.
LOSSY_OF_TREES: dict[str, Verifier] = {
  'candidates': verify.Candidates(threshold=0.2),
  'typical': verify.Typical(),
}


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(settings.Settings):
  """The amount of work.

  With fewer rows only larger errors are detected; each entry says how large.
  """

  # Of each statistical entry. Fewer than 4096 rows detect almost nothing.
  num_rows: Annotated[int, settings.at_least(4096)] = 131072
  # For which coupled is compared with plain sampling.
  num_keys: settings.Count = 256
  seed: int = 0
  # A certificate without all of them is incomplete, and says so.
  sections: tuple[str, ...] = SECTIONS

  def _check(self):
    unknown = set(self.sections) - set(SECTIONS)
    if unknown or not self.sections:
      raise ValueError(
        f'Plan.sections are {self.sections}: name some of {SECTIONS}'
      )
    checks.seed('Plan.seed', self.seed)


def units(plan: Plan) -> list[units_lib.Unit]:
  """Returns all the work, in order; a key is (section, number, description)."""
  work = {
    'cases': _cases,
    'lossy': _lossy,
    'statistical': _statistical,
    'choices': _choices,
    'planted_bugs': _planted_bugs,
  }
  return [
    unit((section, i, description), find)
    for section in plan.sections
    for i, (description, find) in enumerate(work[section](plan))
  ]


def unit(
  key: tuple[str, int, str], find: Callable[[], list[Record]]
) -> units_lib.Unit:
  """Returns the unit that journals what a function finds."""
  section, _, description = key
  return units_lib.Unit(
    label=f'{section}: {description}',
    key=key,
    run=lambda: {'records': list(map(_finite, find()))},
  )


def build(
  todo: list[units_lib.Unit],
  journal: journal_lib.Journal,
  progress: progress_lib.Bar,
) -> Record:
  """Computes all entries: {section: [records], 'passed': ..., 'complete': ...}.

  Entries that the journal has, from a run with the same `header`, are reused.
  """
  # All entries' programs together hit Linux's limit of 65530 mappings.
  units_lib.run(todo, journal, progress, is_full=lambda: True)
  certificate: Record = {name: [] for name in SECTIONS}
  for one in todo:
    certificate[one.key[0]] += journal[one.key]['records']
  records = [record for name in SECTIONS for record in certificate[name]]
  return certificate | {
    'complete': {one.key[0] for one in todo} == set(SECTIONS),
    'passed': bool(records) and all(map(passed, records)),
  }


def header(plan: Plan) -> Record:
  """Returns what a resumed run must share with the run that it continues."""
  return {
    'schema': result_file.SCHEMA,
    'configuration': dataclasses.asdict(plan),
    **environment.identity(),
  }


def passed(record: Record) -> bool:
  """Returns whether an entry shows what it should."""
  return record['caught'] if 'caught' in record else record['passed']


def _finite(record: Record) -> Record:
  """Replaces NaN and infinity, which JSON lacks, by None."""
  is_number = lambda x: not isinstance(x, float) or math.isfinite(x)
  return {name: x if is_number(x) else None for name, x in record.items()}


def _cases(plan) -> Iterator[Work]:
  shape = lambda case: (case.vocab_size, case.num_draft_tokens)
  for size, group in itertools.groupby(cases_lib.standard_cases(), shape):
    yield (
      'enumeration, V = {}, K = {}'.format(*size),
      functools.partial(_enumerate_all, list(group)),
    )
  yield 'rollouts after a step of the policy', _enumerate_second_calls
  for name, verifier in sampled_cases.TREE_VERIFIERS.items():
    for kind in sorted(verifier.draft_kinds, key=lambda kind: kind.value):
      yield (
        f'trees, {name}, {kind.value}',
        functools.partial(_enumerate_trees, name, verifier, kind),
      )
  for scene in sampled.coupled_scenes():
    yield (
      f'coupled, {scene.name}, {plan.num_keys} keys',
      functools.partial(
        sampled.count_mismatches, scene, plan.num_keys, plan.seed
      ),
    )


def _enumerate_all(cases: list[Case]) -> list[Record]:
  return [
    record
    for case in cases
    for name, verifier in sampled_cases.VERIFIERS.items()
    # With sampled drafts shared noise decides: mismatches are counted instead.
    if not (verifier.positional and case.kind is DraftKind.SAMPLED)
    for record in enumerate_case(name, verifier, case)
  ]


def _enumerate_second_calls() -> list[Record]:
  drafters = second_call.SUFFIX, second_call.EITHER
  return _enumerate_all(
    [case for x in drafters for case in second_call.cases_of(x)]
  )


def _enumerate_trees(name, verifier, kind) -> list[Record]:
  return [
    record
    for case in cases_lib.tree_cases()
    if case.kind is kind
    for record in enumerate_case(name, verifier, case)
  ]


def enumerate_case(name: str, verifier: Verifier, case: Case) -> list[Record]:
  """Returns a lossless rule's records on one case, one per number of rounds.

  If the drafts are siblings whose kind is in `stats.BOUNDED_KINDS`, a record
  also has the most that any exact rule can keep.
  """
  formula = sampled_cases.KEPT.get(name)
  predicted = None
  if formula is not None:
    predicted = float(formula(case.proposal, case.target).sum())
  records = []
  for record in _enumerated(name, verifier, case, predicted):
    is_exact = (
      verifier.lossless
      and record['max_error'] < TOLERANCE
      and record['total_variation'] < TOLERANCE
      and record['expected_accepted']
      < record.get('optimal_accepted', math.inf) + TOLERANCE
    )
    passed = is_exact and _is_as_predicted(record)
    records.append(record | {'passed': passed})
  return records


def _enumerated(name, verifier, case, predicted) -> list[Record]:
  """Returns what enumerations of some rounds found of a rule."""
  enumeration = enumerate_lib.Enumeration(verifier, case.proposal, case.target)
  of_case: Record = {
    'verifier': name,
    'law': case.kind.value,
    'case': case.name,
    'vocab_size': case.vocab_size,
    'num_draft_tokens': case.num_draft_tokens,
    'expected_accepted': enumeration.expected_accepted(),
    'predicted_accepted': predicted,
  }
  if case.topology is not None:
    parents = list(case.topology.parents)
    of_case |= {'case': f'tree: {case.name}', 'parents': parents}
    if case.topology.depth == 1 and case.kind in stats.BOUNDED_KINDS:
      of_case['optimal_accepted'] = stats.optimal_acceptance(
        case.target(0, 0)[0],
        case.proposal(0).probs[0, 0, 0],
        case.topology.num_nodes,
        case.kind,
      )
  records = []
  for rounds in case.rounds:
    error, variation = enumeration.error(rounds, case.law)
    found = {'max_error': error, 'total_variation': variation}
    records.append(of_case | {'rounds': rounds} | found)
  return records


def _is_as_predicted(record):
  predicted = record['predicted_accepted']
  if predicted is None:
    return True
  return abs(record['expected_accepted'] - predicted) < TOLERANCE


def _lossy(plan) -> Iterator[Work]:
  del plan
  rate = _SYNTHETIC.rate
  for case in cases_lib.rule_cases():
    if case.name == 'plain' and case.num_draft_tokens == 2:
      # Lenient keeps what the token rule would with a target scaled like this.
      larger = lambda *place: case.target(*place) / _LENIENT.lenience  # noqa: B023
      as_chain = float(acceptance.tree(case.proposal, larger).sum())
      of_two_rounds = dataclasses.replace(case, rounds=(2,))
      for name, rule, predicted in (
        ('synthetic', _SYNTHETIC, rate + rate**2),
        ('lenient', _LENIENT, as_chain),
      ):
        yield (
          f'{name}, {case.kind.value}, V = {case.vocab_size}',
          functools.partial(
            measure_lossy, name, rule, of_two_rounds, predicted
          ),
        )
  for case in cases_lib.tree_cases():
    if case.name == 'binary, plain':
      for name, of_trees in LOSSY_OF_TREES.items():
        yield (
          f'{name}, {case.kind.value}',
          functools.partial(measure_lossy, name, of_trees, case),
        )


def measure_lossy(
  name: str, rule: Any, case: Case, predicted: float | None = None
) -> list[Record]:
  """Measures a lossy rule's error, and checks that it keeps as predicted."""
  records = []
  for record in _enumerated(name, rule, case, predicted):
    # The error shows that the enumeration would notice a mistake.
    is_noticed = not rule.lossless and record['max_error'] > TOLERANCE
    passed = is_noticed and _is_as_predicted(record)
    records.append(record | dataclasses.asdict(rule) | {'passed': passed})
  return records


def _statistical(plan) -> Iterator[Work]:
  for draw in sampled_cases.draws():
    yield draw.name, functools.partial(_measure, draw, plan)


def _measure(draw, plan):
  return [sampled.measure(draw, plan.num_rows, plan.seed)]


def _choices(plan) -> Iterator[Work]:
  del plan
  for scene in choices.scenes():
    name = f'choices, {scene.name}'
    yield name, functools.partial(_compare_choices, scene)


def _compare_choices(scene) -> list[Record]:
  """Compares `verify.Certified` with the best tokens, for each setting."""
  model = scene.model()
  missed = choices.missed_bounds(scene, model)
  records = []
  for setting, sampling in choices.SETTINGS.items():
    rule = verify.Certified(coupled=bool(sampling.temperature > 0))
    found = choices.found(scene, model, setting, rule)
    records.append(
      {
        'verifier': 'certified',
        'case': scene.name,
        'settings': setting,
        'missed_bounds': missed,
        **dataclasses.asdict(found),
        'passed': missed == found.wrong == 0,
      }
    )
  return records


def _planted_bugs(plan) -> Iterator[Work]:
  del plan
  for bug in bugs.BUGS:
    yield bug.name, functools.partial(_catch, bug)


def _catch(bug) -> list[Record]:
  planted, shipped = bug.planted(), bug.shipped()
  return [
    {
      'name': bug.name,
      # A statistic that is NaN catches nothing.
      'caught': planted.statistic > planted.threshold and not shipped.alarm,
      'statistic': planted.statistic,
      'threshold': planted.threshold,
      'shipped_statistic': shipped.statistic,
      'detector': planted.detector,
    }
  ]
