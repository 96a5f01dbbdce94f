"""Classes that JAX can traverse."""

import dataclasses

import jax

from specsample import types


def _made(_):
  """Returns another class with the same fields."""

  @types.pytree
  class Node:
    x: float
    name: str = types.static(default='a')

  return Node


def test_jit_runs_the_program_of_the_class():
  # Structures whose hashes are close are compared; among so many, some are.
  made = [_made(i) for i in range(60)]
  which = jax.jit(lambda node: made.index(type(node)) + 0 * node.x)
  assert [int(which(cls(x=1.0))) for cls in made] == [*range(60)]


def test_structure_is_that_of_the_class_and_its_static_fields():
  first, other = _made(0), _made(1)
  structure = jax.tree.structure(first(x=1.0))
  assert structure == jax.tree.structure(first(x=2.0))
  assert structure != jax.tree.structure(other(x=1.0))
  assert structure != jax.tree.structure(first(x=1.0, name='b'))
  ((path, leaf),) = jax.tree.leaves_with_path(first(x=3.0))
  assert (jax.tree_util.keystr(path), leaf) == ('.x', 3.0)
  assert jax.tree.map(lambda x: x + 1, first(x=1.0, name='b')) == first(
    x=2.0, name='b'
  )
  assert dataclasses.asdict(first(x=1.0)) == {'x': 1.0, 'name': 'a'}
