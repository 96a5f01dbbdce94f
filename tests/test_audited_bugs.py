"""Which planted bugs an audit finds, by name, and that docs/exactness.md lists
the others.

A bug is audited as a sampler would have it: in the rule, in how the settings
are applied, or in the drafts and the probabilities that come with them.
"""

from collections.abc import Callable, Mapping
import functools
import inspect
import pathlib
import re
from typing import Any

import pytest

from experiments.certificate.planted import bugs
from experiments.certificate.planted import detectors
from experiments.certificate.planted import rollouts
from experiments.certificate.planted.bug import Bug
from specsample import sampling as sampling_lib
from specsample import testing
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import auditing
from specsample.testing import cases
from specsample.testing import drafted
from specsample.testing import second_call
from specsample.testing.auditing import Finding
from specsample.testing.hash_model import HashModel
from tests import samplers

_PAGE = pathlib.Path(__file__).parents[1] / 'docs/exactness.md'
# Planted with all settings at once; these need only those of an audit.
_WARPS = {
  'the temperature applied after the filters',
  'top-p before top-k',
  'min-p of the sum, not of the largest',
}
Audit = Callable[[], tuple[Finding, ...]]


@functools.cache
def _proposal(drafter, sampling, params, model):
  return drafted.from_drafter(
    drafter, params(), model, cases.PROMPT, sampling, rounds=2
  )


@functools.cache
def _of_round(verifier, drafter, sampling, params, model):
  return testing.audit(
    samplers.of_rule(verifier),
    {'planted': sampling},
    num_uniforms=2,
    model=model,
    drafts=lambda *_: _proposal(drafter, sampling, params, model),
    # `EITHER` drafts from the row's own text once that has grown.
    num_before=3 if params is detectors.params_of_either else 1,
  )


@functools.cache
def _of_warp(warp=sampling_lib.warp):
  return testing.audit(
    samplers.of_rule(verify.chain, warp), auditing.SETTINGS, num_uniforms=2
  )


@functools.cache
def _of_second_call(change=lambda drafter: drafter):
  """Audits the drafts of a second call, with a target of this file."""
  case = next(second_call.cases_of(second_call.SUFFIX, change))
  return testing.audit(
    samplers.of_rule(verify.chain),
    {'planted': Sampling(temperature=1.0)},
    num_uniforms=2,
    model=HashModel(vocab_size=case.vocab_size),
    drafts=lambda *_: case.proposal,
  )


def _audit(bug: Bug, given: Mapping[str, Any]) -> Audit | None:
  """Returns the audit of one version of a bug; None if there is none."""
  version = functools.partial(bug.detector, **given)
  detector, args, given = version.func, version.args, version.keywords
  if detector is detectors.warped and bug.name in _WARPS:
    return functools.partial(_of_warp, **given)
  if detector is detectors.given_away and 'topology' not in given:
    detector = detectors.enumerated
  if detector is rollouts.enumerated:
    return functools.partial(_of_second_call, **given)
  if detector is not detectors.enumerated:
    return None
  bound = inspect.signature(detector.__wrapped__).bind(*args, **given)
  bound.apply_defaults()
  scene = bound.arguments
  is_chain = scene['drafter'].topology is None
  if not is_chain or scene['sampling'].constraint is not None:
    return None
  return functools.partial(_of_round, **scene)


_REACHED = [bug for bug in bugs.BUGS if _audit(bug, bug.mistake) is not None]


@pytest.mark.nightly(
  but=(
    'min-p of the sum, not of the largest',
    'residual = p instead of (p - q)+',
    'an uncapped last ratio in block mode',
    'the first draft kept unverified',
    'sampled drafts verified greedily',
    'temperature after top-p on one side',
    'q from raw logits with processed sampling',
    'a token sampled from bf16 logits and verified with float32 probabilities',
    'remembered tokens declared with the law of the drawn ones',
    'a budget of drafts chosen after they were drawn',
    'the bonus token skipped on full acceptance',
  )
)
@pytest.mark.parametrize('bug', _REACHED, ids=lambda bug: bug.name)
def test_is_found(bug):
  shipped = _audit(bug, bug.correct)()
  assert all(x.follows_target and not x.gives_away for x in shipped)
  planted = _audit(bug, bug.mistake)()
  wrong = [not x.follows_target or x.gives_away for x in planted]
  assert any(wrong), [str(finding) for finding in planted]


def test_the_page_lists_all_others():
  section = _PAGE.read_text('utf-8').partition('## Out of its reach')[2]
  listed = re.findall(r'^\* (.+)$', section, re.MULTILINE)
  reached = {bug.name for bug in _REACHED}
  others = [bug.name for bug in bugs.BUGS if bug.name not in reached]
  assert sorted(listed) == sorted(others)
