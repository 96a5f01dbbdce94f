"""Flax NNX networks as pure functions of trees of arrays.

A network is a class whose constructor takes a configuration (a frozen
dataclass) and an iterator of PRNG keys (`layers.random_keys`). Its variables
name the axes of their arrays in the metadata `axes`.
"""

import functools
from typing import Any

from flax import nnx
import jax

from specsample import checks
from specsample.models import layers
from specsample.types import Array, Params


class Buffer(nnx.Variable):
  """An array among the parameters that is not trained, such as a map of ids."""


def init(network: Any, config: Any, key: Array) -> Params:
  """Returns random parameters: nested dictionaries of arrays."""
  made = network(config, layers.random_keys(key))
  return nnx.to_pure_dict(nnx.split(made)[1])


def abstract_params(network: Any, config: Any) -> Params:
  """Returns the parameters' shapes and dtypes without allocating them."""
  return nnx.to_pure_dict(_abstract(network, config)[1])


def param_axes(network: Any, config: Any) -> Params:
  """Returns a tuple of `sharding.Axes` per parameter, one for each axis."""
  return _of_variables(
    network, config, lambda variable: variable.get_metadata('axes')
  )


def is_trained(network: Any, config: Any) -> Params:
  """Returns whether each parameter is trained, as a tree of bool."""
  return _of_variables(
    network, config, lambda variable: not isinstance(variable, Buffer)
  )


def merge(network: Any, config: Any, params: Params) -> Any:
  """Returns the network with these parameters."""
  checks.parameters('params', config, params)
  return nnx.merge(_abstract(network, config)[0], params)


@functools.lru_cache(maxsize=64)
def _abstract(network, config):
  made = nnx.eval_shape(
    lambda: network(config, layers.random_keys(jax.random.key(0)))
  )
  definition, state = nnx.split(made)
  # The sharding is dropped: it belongs to the mesh that is set now, and this
  # result is cached for all meshes.
  plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return definition, jax.tree.map(plain, state)


def _of_variables(network, config, function):
  values = jax.tree.map(
    lambda variable: variable.replace(function(variable)),
    _abstract(network, config)[1],
    is_leaf=lambda x: isinstance(x, nnx.Variable),
  )
  return nnx.to_pure_dict(values)
