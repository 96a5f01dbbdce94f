"""Topologies, and what follows from them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specsample import tree

_MIXED = tree.Topology((0, 0, 1, 1, 0, 4))


def test_a_topology_knows_its_shape():
  assert _MIXED.num_nodes == 6
  assert _MIXED.depths == (1, 1, 2, 2, 1, 3)
  assert _MIXED.depth == 3
  assert _MIXED.ranks == (0, 1, 0, 1, 2, 0)
  assert _MIXED.num_children == (3, 2, 0, 0, 1, 0, 0)
  assert [_MIXED.level(i) for i in range(4)] == [(0,), (1, 2, 5), (3, 4), (6,)]
  assert _MIXED.paths() == [(0,), (1,), (0, 0), (0, 1), (2,), (0, 1, 0)]


def test_chains_and_k_ary_trees():
  assert tree.chain(3) == tree.Topology((0, 1, 2)) == tree.k_ary((1, 1, 1))
  assert tree.k_ary((3, 2)).parents == (0, 0, 0, 1, 1, 2, 2, 3, 3)


def test_medusas_tree():
  # 63 nodes, four deep, ten children of the pending token.
  topology = tree.mc_sim_7b_63()
  assert topology.num_nodes == 63
  assert topology.depth == 4
  assert topology.num_children[0] == 10
  depths = np.asarray(topology.depths)
  assert [(depths == i).sum() for i in range(1, 5)] == [10, 28, 23, 2]


@pytest.mark.parametrize(
  ('parents', 'message'),
  [
    ((0, 2), r'node 2 follows node 2, but must follow one of 0 to 1'),
    ((1,), 'node 1 follows node 1'),
    ((0, -1), 'node 2 follows node -1'),
  ],
)
def test_a_node_before_its_parent_is_refused(parents, message):
  with pytest.raises(ValueError, match=message):
    tree.Topology(parents)


@pytest.mark.parametrize(
  ('paths', 'message'),
  [
    ([(0,), (1, 0)], r'\[1, 0\] needs path \[1\]'),
    ([(0,), (2,)], r'\[2\] needs path \[1\]'),
    ([(0,), (0,)], r'\[0\] is empty or occurs twice'),
    ([()], 'is empty or'),
  ],
)
def test_paths_without_a_beginning_are_refused(paths, message):
  with pytest.raises(ValueError, match=message):
    tree.from_paths(paths)


@pytest.mark.parametrize('branching', [(), (2, 0)])
def test_a_level_without_nodes_is_refused(branching):
  with pytest.raises(ValueError, match='branching is'):
    tree.k_ary(branching)


def _worth(topology, acceptance):
  """Returns the expected number of kept drafts."""
  worth = [1.0]
  for parent, rank in zip(topology.parents, topology.ranks, strict=True):
    worth.append(worth[parent] * acceptance[rank])
  return sum(worth[1:])


def _all_topologies(num_nodes, depth, num_children):
  for parents in itertools.product(*(range(i + 1) for i in range(num_nodes))):
    topology = tree.Topology(parents)
    is_shallow = topology.depth <= depth
    if is_shallow and max(topology.num_children) <= num_children:
      yield topology


@pytest.mark.parametrize(
  'acceptance', [(0.6, 0.2, 0.1), (0.3, 0.4), (0.5, 0.0, 0.3), (0.2,)]
)
@pytest.mark.parametrize(('num_nodes', 'depth'), [(1, 3), (3, 3), (6, 2)])
def test_no_tree_keeps_more_than_the_best(acceptance, num_nodes, depth):
  worths = [
    _worth(topology, acceptance)
    for topology in _all_topologies(num_nodes, depth, len(acceptance))
  ]
  if not worths:
    with pytest.raises(ValueError, match=f'num_nodes is {num_nodes}: '):
      tree.best(acceptance, num_nodes, depth)
    return
  found = tree.best(acceptance, num_nodes, depth)
  assert found.num_nodes == num_nodes
  assert found.depth <= depth
  assert _worth(found, acceptance) == pytest.approx(max(worths), abs=1e-12)


def test_the_best_knows_of_rates_by_depth():
  acceptance = ((0.6, 0.3), (0.2, 0.1), (0.9, 0.05))
  kept = lambda topology: sum(
    np.prod([acceptance[d][rank] for d, rank in enumerate(path)])
    for path in topology.paths()
  )
  for num_nodes in (2, 4, 7):
    found = tree.best(acceptance, num_nodes, 3)
    most = max(map(kept, _all_topologies(num_nodes, 3, 2)))
    assert kept(found) == pytest.approx(most, abs=1e-12)


def test_expected_tokens_are_those_of_random_walks():
  acceptance = np.asarray([[0.5, 0.2, 0.1], [0.3, 0.4, 0.0], [0.7, 0.1, 0.1]])
  children: dict[int, list[int]] = {}
  for i, parent in enumerate(_MIXED.parents):
    children.setdefault(parent, []).append(i + 1)
  rng = np.random.default_rng(0)
  lengths = []
  for _ in range(20_000):
    node, depth = 0, 0
    while children.get(node):
      rates = acceptance[depth]
      rank = rng.choice(4, p=[*rates, 1 - rates.sum()])
      if rank >= len(children[node]):
        break
      node, depth = children[node][rank], depth + 1
    lengths.append(1 + depth)
  expected = tree.expected_tokens(_MIXED, acceptance)
  error = np.std(lengths) / np.sqrt(len(lengths))
  assert abs(np.mean(lengths) - expected) < 5 * error


def test_what_has_no_rate_is_never_kept():
  assert tree.expected_tokens(_MIXED, (0.5,)) == 1 + 0.5 + 0.25
  assert tree.expected_tokens(tree.chain(3), ((0.5,), (0.5,))) == 1.75


@pytest.mark.parametrize('acceptance', [(), (0.6, 0.5), (-0.1, 0.2)])
def test_what_is_no_acceptance_is_refused(acceptance):
  with pytest.raises(
    ValueError, match='give the probability that the child of'
  ):
    tree.best(acceptance, 3, 2)


def test_ancestors_depths_and_paths():
  deep = tree.Topology((0, 1, 2, 3, 4, 2))
  for topology in (_MIXED, deep, tree.mc_sim_7b_63()):
    found = tree.ancestors(jnp.asarray(topology.parents))
    paths = [[0]]
    for i, parent in enumerate(topology.parents):
      paths.append([*paths[parent], i + 1])
    for node, path in enumerate(paths):
      expected = np.isin(np.arange(len(paths)), path)
      np.testing.assert_array_equal(found[node], expected)
      behind = np.zeros(topology.depth + 1, int)
      behind[: len(path) - 1] = path[1:]
      ours = tree.path_to(found, jnp.int32(node), topology.depth + 1)
      np.testing.assert_array_equal(ours, behind)
    np.testing.assert_array_equal(tree.depths(found), (0, *topology.depths))
