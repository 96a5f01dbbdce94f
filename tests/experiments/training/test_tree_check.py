"""What trees would keep, counted again from rounds and from outputs."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.decoding import rounds
from experiments.decoding import setup as setup_lib
from experiments.training import held_out
import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample.models import transformer

# The pending token's children are 1, 2 and 5, and node 1's are 3 and 4.
_MIXED = tree.Topology((0, 0, 1, 1, 0, 4))
_DRAFTED = (7, 8, 3, 4, 9, 5)
_NOTHING = ((0, 0, 0),) * 3
_PROMPTS = [[1, 2, 3, 4], [9, 8], [30, 31, 32]]


@pytest.mark.parametrize(
  ('path', 'num_emitted', 'tried', 'kept'),
  [
    # A whole path, and a token after it.
    (
      (1, 4, 6),
      4,
      ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
      ((1, 0, 0), (0, 1, 0), (1, 0, 0)),
    ),
    # The third child, which has no children.
    ((5,), 2, ((1, 1, 1), *_NOTHING[1:]), ((0, 0, 1), *_NOTHING[1:])),
    # A correction.
    ((1,), 2, ((1, 0, 0), (1, 1, 0), (0, 0, 0)), ((1, 0, 0), *_NOTHING[1:])),
    # Nothing is tried after a stop token, or in a row that is done.
    ((2,), 1, ((1, 1, 0), *_NOTHING[1:]), ((0, 1, 0), *_NOTHING[1:])),
    ((), 0, _NOTHING, _NOTHING),
  ],
)
def test_a_round_is_counted_as_by_hand(path, num_emitted, tried, kept):
  found = held_out.count_tried(_MIXED, _DRAFTED, path, num_emitted)
  np.testing.assert_array_equal(found, (tried, kept))


def test_what_was_not_drafted_was_not_tried():
  found = held_out.count_tried(_MIXED, (7, 8, -1, -1, 9, -1), (1,), 2)
  first = ((1, 0, 0), *_NOTHING[1:])
  np.testing.assert_array_equal(found, (first, first))


def test_acceptance_is_the_share_of_those_tried():
  tried, kept = ((10, 4, 3), (6, 1, 0)), ((6, 1, 0), (3, 1, 0))
  # Rank 1 keeps a quarter of the remaining .4 and, at depth 2, all of .5.
  expected = [[0.6, 0.4 * 0.25, 0], [0.5, 0.5, 0]]
  found = held_out.acceptance_by_rank(np.asarray((tried, kept)))
  np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.fixture(scope='module')
def setup(checkpoint):
  """A function that returns the setup of a drafter with random weights."""
  target = specsample.load(checkpoint)

  def of(make, **settings):
    drafter = make(model=target.model, **settings)
    own = drafter.init_params(jax.random.key(0), target.params)
    noisy = testing.with_noise(own, jax.random.key(1))
    return setup_lib.Setup(
      target=target,
      method=methods.Method(drafter, params=noisy),
      sampling=specsample.Sampling(temperature=0.0),
      max_new_tokens=40,
      stop=specsample.Stop(eos_ids=(7,)),
    )

  return of


def test_ranks_are_those_of_the_rounds_as_they_are_shown(setup):
  """Counts drafts by their fates, which another recorder finds."""
  of_chain = setup(drafters.DraftModel, num_draft_tokens=3, layers=(1,))
  found = held_out.measure_trees(of_chain, _PROMPTS)['acceptance_by_rank']
  shape = 3, 4
  assert np.shape(found) == shape
  # Four children after the pending token and along two paths.
  parents = [0] * 4 + [1] * 4 + [2] * 4 + [5] * 4 + [9] * 4
  topology = tree.Topology(tuple(parents))
  trees = dataclasses.replace(
    of_chain, method=methods.tree(of_chain.method, topology)
  )
  state = trees.prefill(_PROMPTS)
  tried, kept = np.zeros(shape), np.zeros(shape)
  while not np.asarray(state.done).all():
    observed, state = rounds.step(trees, state)
    for row in range(len(_PROMPTS)):
      for shown in rounds.of_row(trees, observed, row):
        for draft in shown.candidates:
          at = topology.depths[draft.node - 1] - 1, (draft.node - 1) % 4
          tried[at] += draft.fate in (rounds.KEPT, rounds.REJECTED)
          kept[at] += draft.fate == rounds.KEPT
  share = kept / np.maximum(tried, 1)
  earlier = np.zeros(3)
  for rank in range(4):
    expected = (1 - earlier) * share[:, rank]
    np.testing.assert_allclose(np.asarray(found)[:, rank], expected, atol=1e-12)
    earlier += expected
  # At each depth one that is not the first.
  assert (kept[:, 1:].sum(axis=1) > 0).all(), kept


def test_a_lattice_has_the_tokens_per_round_of_its_trees(setup):
  of_chain = setup(
    drafters.DSpark, num_draft_tokens=2, feature_layers=(0, 1), rank=4
  )
  found = held_out.measure_trees(of_chain, _PROMPTS)
  assert list(found) == ['tokens_by_nodes']
  by_nodes = found['tokens_by_nodes']
  assert list(by_nodes) == ['1', '3', '7', '15']
  tokens, lengths = specsample.pad_prompts(_PROMPTS)
  output = specsample.generate(
    of_chain.params,
    tokens,
    lengths,
    jax.random.key(1),
    model=of_chain.target.model,
    drafter=drafters.LatticeTree(
      drafter=of_chain.method.drafter, num_draft_tokens=7
    ),
    verify=specsample.verify.tree,
    sampling=of_chain.sampling,
    max_new_tokens=40,
    stop=of_chain.stop,
  )
  num_rounds = sum(
    len(set(row[:length].tolist()))
    for row, length in zip(
      np.asarray(output.emit_round), output.lengths.tolist(), strict=True
    )
  )
  assert by_nodes['7'] == pytest.approx(sum(output.lengths) / num_rounds)


def test_too_few_tokens_for_a_tree_are_named(setup, checkpoint, capsys):
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(
    model=target.model, num_draft_tokens=2, draft_vocab_size=3
  )
  own = drafter.init_params(jax.random.key(0), target.params, [1, 2, 3])
  few = dataclasses.replace(
    setup(drafters.Medusa, num_draft_tokens=2),
    method=methods.Method(drafter, params=own),
  )
  with pytest.raises(ValueError, match='drafts only 3 different tokens'):
    held_out.measure_trees(few, _PROMPTS)
  assert held_out.trees_for_card(few, _PROMPTS) == {}
  line = capsys.readouterr().out
  assert line.startswith('the card says nothing of trees: the tree has 4 sibl')


class _OfChains(transformer.Transformer):
  """A target that cannot read trees."""

  def read(self, params, tokens, cache, features=()):
    """See `types.Readable`."""
    return super().read(params, tokens, cache, features)

  def apply(self, params, tokens, cache, features=()):
    """See `types.Model`."""
    return super().apply(params, tokens, cache, features)


def test_a_target_of_chains_leaves_trees_out(setup, capsys):
  given = setup(drafters.Medusa, num_draft_tokens=2)
  model = _OfChains(**vars(given.target.model))
  drafter = dataclasses.replace(given.method.drafter, model=model)
  of_chains = dataclasses.replace(
    given,
    target=dataclasses.replace(given.target, model=model),
    method=dataclasses.replace(given.method, drafter=drafter),
  )
  assert held_out.trees_for_card(of_chains, _PROMPTS) == {}
  line = capsys.readouterr().out
  assert line.startswith('the card says nothing of trees: ')
  assert '_OfChains.read' in line
