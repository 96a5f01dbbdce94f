"""A sharded model gives the unsharded tokens, for every tree and its rules."""

import functools

import jax
import numpy as np
import pytest

from experiments.tpu import hlo
import specsample
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import stopping
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop import decode
from specsample.testing import trained
from specsample.types import DraftKind
from tests.on_8_devices import small

# More than 256 tokens, so that they are drawn in two steps. The vocabulary is
# not a product of other sizes, so that a gathered one is recognised. Fewer
# key-value heads than 4 or 8 devices.
TARGET = small.target(352)
DRAFT = small.draft(352)
# Siblings at both depths, and a node without children before one with some.
TOPOLOGY = tree.Topology((0, 0, 0, 2, 2))
OF = {
  'chain': drafters.Chain(model=DRAFT, num_draft_tokens=2),
  'skip': drafters.Skip(model=TARGET, layers=(0,), num_draft_tokens=2),
  **{
    kind.name.lower(): kind.make(TARGET, TOPOLOGY.depth, 48)
    for kind in trained.CASES
    if kind.branches
  },
}
BIAS = np.zeros(TARGET.vocab_size, np.float32)
BIAS[::7] = 2
SAMPLINGS = {
  'filters': specsample.Sampling(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01
  ),
  'penalties': specsample.Sampling(
    temperature=0.7,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=BIAS,
  ),
  # Only four tokens are allowed, so that n-grams recur.
  'few tokens': specsample.Sampling(
    temperature=1.0,
    logit_bias=np.where(np.arange(TARGET.vocab_size) % 88, -np.inf, 0),
  ),
}
MAX_NEW_TOKENS = 12
# Three rows don't divide evenly into two, four or eight parts.
PROMPTS, LENGTHS = specsample.pad_prompts([[1, 2, 3, 1, 2, 3], [5], [7, 8, 7]])


def tree_of(name, kind=DraftKind.POINT_MASS):
  return drafters.Tree(drafter=OF[name], topology=TOPOLOGY, kind=kind)


def dynamic_of(name):
  return drafters.DynamicTree(drafter=OF[name], num_draft_tokens=5, width=3)


def lattice_of(name):
  return drafters.LatticeTree(
    drafter=OF[name], num_draft_tokens=5, candidates=3
  )


NGRAM = drafters.NgramTree(num_branches=2, depth=2, min_ngram=1)
SAMPLED = DraftKind.SAMPLED
WITHOUT = DraftKind.WITHOUT_REPLACEMENT
# It keeps drafts of untrained drafters too.
LIKELY = verify.Typical(epsilon=0.0)
GREEDY_DRAFT = DraftKind.TOP_AND_SAMPLED
# Every drafter, rule and kind. The first name is that of the weights.
CASES = {
  'medusa': ('medusa', tree_of('medusa'), verify.tree),
  'hydra, i.i.d.': ('hydra', tree_of('hydra', SAMPLED), verify.k_seq),
  'draft model, distinct': (
    'draftmodel',
    tree_of('draftmodel', WITHOUT),
    verify.tree,
  ),
  'eagle, top and drawn': (
    'eagle',
    tree_of('eagle', GREEDY_DRAFT),
    verify.greedy_draft,
  ),
  'eagle-3': ('eagle-3', tree_of('eagle-3'), verify.traversal),
  'eagle-3, dynamic': (
    'eagle-3',
    dynamic_of('eagle-3'),
    LIKELY,
  ),
  'dflash': ('dflash', tree_of('dflash'), verify.tree),
  'dflash 2, i.i.d.': ('dflash 2', tree_of('dflash 2', SAMPLED), verify.tree),
  'dspark, i.i.d.': ('dspark', tree_of('dspark', SAMPLED), verify.traversal),
  'dspark, rnn, dynamic': (
    'dspark, rnn',
    dynamic_of('dspark, rnn'),
    verify.Typical(epsilon=0.0),
  ),
  'dflash, lattice': ('dflash', lattice_of('dflash'), LIKELY),
  'dspark, lattice': ('dspark', lattice_of('dspark'), LIKELY),
  'mtp, i.i.d.': ('mtp', tree_of('mtp', SAMPLED), verify.traversal),
  'chain, distinct': ('chain', tree_of('chain', WITHOUT), verify.traversal),
  'skip, cut': (
    'skip',
    drafters.Adaptive(
      drafter=tree_of('skip'), policies=(policies.TopNodes(3),), widths=(3,)
    ),
    verify.tree,
  ),
  'n-grams': ('chain', NGRAM, verify.tree),
  'medusa, i.i.d.': (
    'medusa',
    tree_of('medusa', SAMPLED),
    verify.multi_path_block,
  ),
}
# Rules that sort the rows on the path.
GATHERS = {verify.multi_path_block}


@functools.cache
def host_params(name):
  target = TARGET.init(jax.random.key(0))
  if name in ('chain', 'skip'):
    own = DRAFT.init(jax.random.key(1))
  else:
    drafter = OF[name]
    size = drafter.draft_vocab_size
    d2t = None if size is None else 7 * np.arange(size)
    own = drafter.init_params(jax.random.key(1), target, d2t)
    own = testing.with_noise(own, jax.random.key(2))
  return jax.device_get({'target': target, 'drafter': own})


def generate(params, case, sampling):
  """Returns the output, and the compiled loop."""
  _, drafter, rule = CASES[case]
  decoder = specsample.Decoder(TARGET, drafter, rule)
  state = specsample.prefill(
    decoder,
    params,
    PROMPTS,
    LENGTHS,
    jax.random.key(0),
    sampling=sampling,
    max_new_tokens=MAX_NEW_TOKENS,
  )
  dynamic = stopping.placed(specsample.Stop(), TARGET), MAX_NEW_TOKENS, 99
  loop = decode._advance.lower(decoder, params, state, *dynamic).compile()
  state = loop(params, state, *dynamic)
  output = specsample.finish(
    state, max_new_tokens=MAX_NEW_TOKENS, batch_size=len(LENGTHS)
  )
  return jax.device_get(output), hlo.Program(loop.as_text())


@functools.cache
def unsharded(case, sampling):
  output, _ = generate(host_params(CASES[case][0]), case, SAMPLINGS[sampling])
  # Otherwise no path would be moved into place.
  assert specsample.stats.summarize(output).kept
  return output


def check(mesh, case, sampling='filters'):
  """Checks that a mesh gives one device's tokens and gathers no vocabulary."""
  name = CASES[case][0]
  own = DRAFT if name in ('chain', 'skip') else OF[name]
  with jax.set_mesh(mesh):
    axes = {'target': TARGET.param_axes(), 'drafter': own.param_axes()}
    params = sharding.place(host_params(name), axes)
    found, program = generate(params, case, SAMPLINGS[sampling])
  assert program.collectives()
  assert program.host_transfers() == 0
  if CASES[case][2] not in GATHERS:
    assert program.vocab_gathers(TARGET.vocab_size) == 0
  expected = unsharded(case, sampling)
  for field in ('tokens', 'lengths', 'origin', 'accepted', 'stop_reason'):
    np.testing.assert_array_equal(
      getattr(found, field), getattr(expected, field), field
    )
  np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)


@pytest.mark.nightly(but=('eagle-3, dynamic', 'dspark, lattice'))
@pytest.mark.parametrize('case', CASES)
def test_tokens_are_those_of_one_device(case):
  sampling = 'few tokens' if case == 'n-grams' else 'filters'
  check(sharding.make_mesh(2, 4), case, sampling)


@pytest.mark.nightly
@pytest.mark.parametrize('case', ['draft model, distinct', 'eagle-3, dynamic'])
def test_a_mesh_may_divide_the_model_alone(case):
  check(sharding.make_mesh(1, 8, explicit=False), case)


@pytest.mark.slow
def test_penalties_are_counted_on_a_divided_path():
  mesh = sharding.make_mesh(2, 4)
  check(mesh, 'eagle, top and drawn', 'penalties')
