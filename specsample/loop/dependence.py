"""Whether a function's result depends on an argument, by its trace alone."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def trace(
  function: Callable[..., Any], argument: Any, *others: Any
) -> tuple[bool, Any]:
  """Returns whether any result may depend on the first argument, and shapes.

  Runs nothing: each operation counts as one whose results depend on all that it
  reads. The shapes are those of the results, as of `jax.eval_shape`.

  Args:
    function: called with the arguments, traced.
    argument: an array.
    others: trees of arrays.
  """
  make = jax.make_jaxpr(function, return_shape=True)
  closed, shapes = make(argument, *others)
  jaxpr = closed.jaxpr
  found = {jaxpr.invars[0]}
  is_found = lambda x: not isinstance(x, core.Literal) and x in found
  for equation in jaxpr.eqns:
    if any(map(is_found, equation.invars)):
      found.update(equation.outvars)
  return any(map(is_found, jaxpr.outvars)), shapes
