"""Mixture-of-experts feed-forward: each token is routed to a few experts."""

import dataclasses
import functools
from typing import Annotated

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample.models import int8
from specsample.models import layers
from specsample.models import matrices
from specsample.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(settings.Settings):
  """The sizes and the routing of a mixture of experts.

  Attributes:
    num_experts: E.
    num_per_token: number of experts per token.
    mlp_dim: width of each expert.
    dense_layers: layers with a single feed-forward, of the model's `mlp_dim`.
    scores: how router logits become scores, by a softmax over all experts or a
      sigmoid of each (DeepSeek-V3, 2412.19437, section 2.1.2).
    is_normalised: whether the weights of a token's experts are divided by their
      sum.
    scale: factor by which the weights are then multiplied.
    has_bias: whether a bias is added to the scores to choose experts; weights
      do not include it.
    num_groups, groups_per_token: the experts are divided into `num_groups`
      groups; a token's come from the `groups_per_token` groups with the
      largest sums of their two best scores.
    shared_dim: width of a feed-forward that sees every token, 0 for none.
    has_shared_gate: whether its output is multiplied by the sigmoid of a
      product of the input.
    has_linear_biases: whether the router and the experts' products have biases,
      which weights do include (gpt-oss, 2508.10925).
    limit: if given, experts do not use the model's activation: with gates g of
      at most `limit` and the other factors u within +-limit, the hidden vector
      is g * sigmoid(gate_scale * g) * (u + 1) (gpt-oss).
    gate_scale: see `limit`.
    is_beside_mlp: whether layers have both experts and a feed-forward of the
      model's `mlp_dim`, whose outputs are normalised and added (Gemma 4). The
      router then reads the input of both, divided by its root mean square and
      times a vector, and each expert's weight has a factor of its own.
  """

  num_experts: int
  num_per_token: int
  mlp_dim: int
  dense_layers: tuple[int, ...] = ()
  scores: Annotated[str, settings.one_of('softmax', 'sigmoid')] = 'softmax'
  is_normalised: bool = True
  scale: float = 1.0
  has_bias: bool = False
  num_groups: settings.Count = 1
  groups_per_token: int = 1
  shared_dim: int = 0
  has_shared_gate: bool = False
  has_linear_biases: bool = False
  limit: float | None = None
  gate_scale: float = 1.702
  is_beside_mlp: bool = False

  def _check(self) -> None:
    if not 1 <= self.num_per_token <= self.num_experts:
      raise ValueError(
        f'num_per_token is {self.num_per_token} and num_experts is '
        f'{self.num_experts}: give a num_per_token from 1 to num_experts'
      )
    in_group = self.num_experts // self.num_groups
    if (
      self.num_experts % self.num_groups
      or not 1 <= self.groups_per_token <= self.num_groups
      or self.num_per_token > self.groups_per_token * in_group
    ):
      raise ValueError(
        f'num_groups is {self.num_groups} and groups_per_token is '
        f'{self.groups_per_token}: divide the {self.num_experts} experts '
        'evenly into groups, and give each token groups that hold at least '
        f'num_per_token = {self.num_per_token} experts'
      )


class _Bank(nnx.Module):
  """One matrix product of all experts: [E, in, out] and biases [E, out]."""

  def __init__(self, shape, axes, keys, dtype, *, has_bias):
    kernel = jax.random.normal(next(keys), shape, jnp.float32)
    kernel *= shape[1] ** -0.5
    self.kernel = nnx.Param(kernel.astype(dtype), axes=axes)
    self.bias = _biases(shape, axes, dtype) if has_bias else None
    self.kernel_axes = axes

  def arrays(self):
    """Returns the kernel, perhaps the bias, and their axes for `map_parts`."""
    kernel, axes = self.kernel.get_value(), self.kernel_axes
    is_int8 = isinstance(kernel, int8.Int8)
    found = {'kernel': kernel}
    of_found = {'kernel': int8.of_kernel(*axes) if is_int8 else axes}
    if self.bias is not None:
      found['bias'], of_found['bias'] = self.bias.get_value(), axes[::2]
    return found, of_found


def _biases(shape, axes, dtype):
  return nnx.Param(jnp.zeros(shape[::2], dtype), axes=axes[::2])


class MoE(nnx.Module):
  """A mixture of experts (Mixtral, 2401.04088; DeepSeek-V3, 2412.19437).

  `config` has the fields of `transformer.Transformer`. Each device holds a
  slice of the width of every expert, so that all devices do the same work.
  """

  def __init__(self, config, keys):
    sizes, dim, dtype = config.experts, config.dim, jnp.dtype(config.dtype)
    count, hidden = sizes.num_experts, sizes.mlp_dim
    self.width = sharding.Axis('mlp', hidden)
    linear = functools.partial(layers.Linear, axes=(None, None), keys=keys)
    has_bias = sizes.has_linear_biases
    self.router = linear(dim, count, bias=has_bias, dtype=jnp.float32)
    param = lambda values: nnx.Param(values, axes=(None,))
    bias = jnp.zeros(count, jnp.float32)
    self.router_bias = param(bias) if sizes.has_bias else None
    # Named as parameters of the router, which are float32 in every model.
    ones = lambda size: param(jnp.ones(size, jnp.float32))
    self.router_scale = ones(dim) if sizes.is_beside_mlp else None
    self.router_factors = ones(count) if sizes.is_beside_mlp else None
    self.norm_eps = config.norm_eps
    wide, narrow = (None, None, self.width), (None, self.width, None)
    bank = functools.partial(_Bank, keys=keys, dtype=dtype)
    self.expert_gate = bank((count, dim, hidden), wide, has_bias=has_bias)
    self.expert_up = bank((count, dim, hidden), wide, has_bias=has_bias)
    self.expert_down = bank((count, hidden, dim), narrow, has_bias=False)
    # Not in the bank: it is added once to the sum over the parts of the width.
    self.expert_out_bias = (
      _biases((count, hidden, dim), narrow, dtype) if has_bias else None
    )
    self.shared = (
      layers.GatedMLP(config, keys, sizes.shared_dim)
      if sizes.shared_dim
      else None
    )
    has_gate = sizes.has_shared_gate
    self.shared_gate = linear(dim, 1, dtype=dtype) if has_gate else None
    self.sizes = sizes
    self.activation = layers.ACTIVATIONS[config.activation]

  def __call__(self, x: Array, routed_by: Array | None = None) -> Array:
    """Maps x [R, D] to [R, D]; the router reads x unless given another."""
    weights, chosen = self._route(x if routed_by is None else routed_by)
    banks = self.expert_gate, self.expert_up, self.expert_down
    arrays, axes = zip(*(bank.arrays() for bank in banks), strict=True)
    rows = 'batch', None
    y = sharding.map_parts(
      self._run,
      (x, weights, chosen, *arrays),
      (rows, rows, rows, *axes),
      result=rows,
      sum_over=self.width,
    )
    if self.expert_out_bias is not None:
      bias = self.expert_out_bias[...]
      y += self._mean_bias(weights, chosen, bias).astype(y.dtype)
    if self.shared is None:
      return y
    shared = self.shared(x)
    if self.shared_gate is not None:
      shared *= jax.nn.sigmoid(self.shared_gate(x))
    return y + shared

  def _route(self, x):
    """Returns the weights and the indices [R, k] of each row's experts."""
    sizes = self.sizes
    read = x.astype(jnp.float32)
    if self.router_scale is not None:
      read = layers.rms_normed(read, self.norm_eps) * self.router_scale[...]
      read *= x.shape[-1] ** -0.5
    logits = self.router(read)
    is_softmax = sizes.scores == 'softmax'
    scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
    merit = scores
    if self.router_bias is not None:
      merit += self.router_bias[...]
    if sizes.num_groups > 1:
      grouped = merit.reshape(len(merit), sizes.num_groups, -1)
      best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
      _, groups = jax.lax.top_k(best.sum(-1), sizes.groups_per_token)
      is_open = jax.nn.one_hot(groups, sizes.num_groups).sum(1) > 0
      merit = jnp.where(is_open[..., None], grouped, -jnp.inf)
      merit = merit.reshape(logits.shape)
    _, chosen = jax.lax.top_k(merit, sizes.num_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if sizes.is_normalised:
      weights /= weights.sum(-1, keepdims=True)
    if self.router_factors is not None:
      factors = jnp.broadcast_to(self.router_factors[...], scores.shape)
      weights *= jnp.take_along_axis(factors, chosen, axis=-1)
    return weights * sizes.scale, chosen

  def _mean_bias(self, weights, chosen, bias):
    """Returns the weighted sum of the biases of each row's experts."""
    is_chosen = jax.nn.one_hot(chosen, self.sizes.num_experts)
    weights = jnp.sum(weights[..., None] * is_chosen, axis=1)
    return jnp.einsum('re,ed->rd', weights, bias.astype(weights.dtype))

  def _run(self, x, weights, chosen, *banks):
    """Returns the weighted sum of the outputs of each row's experts."""
    num_rows, per_row = chosen.shape
    rows, of_experts = jnp.repeat(x, per_row, axis=0), chosen.reshape(-1)
    is_few = len(rows) < self.sizes.num_experts
    run = self._run_alone if is_few else self._run_by_expert
    made = run(rows, of_experts, *banks).reshape(num_rows, per_row, -1)
    return jnp.einsum('rkd,rk->rd', made, weights.astype(made.dtype))

  def _run_alone(self, rows, of_experts, *banks):
    """Runs row by row: reads only chosen experts, repeatedly if rows agree."""

    def run(row_and_expert):
      row, expert = row_and_expert
      take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, 0, False)

      def product(x, bank):
        y = matrices.product(x, bank['kernel'], (None, None), row.dtype)
        return y + bank['bias'] if 'bias' in bank else y

      return self._feed(product, row[None], *jax.tree.map(take, banks))[0]

    return jax.lax.map(run, (rows, of_experts))

  def _run_by_expert(self, rows, of_experts, *banks):
    """Runs the rows of each expert together: reads all experts."""
    order = jnp.argsort(of_experts, stable=True)
    group = of_experts[order]

    def product(x, bank):
      y = matrices.product_by_group(x, bank['kernel'], group)
      return y + bank['bias'][group] if 'bias' in bank else y

    return self._feed(product, rows[order], *banks)[jnp.argsort(order)]

  def _feed(self, product, rows, gate, up, down):
    limit, factor = self.sizes.limit, product(rows, up)
    if limit is None:
      hidden = self.activation(product(rows, gate)) * factor
    else:
      opened = jnp.minimum(product(rows, gate), limit)
      opened *= jax.nn.sigmoid(self.sizes.gate_scale * opened)
      hidden = opened * (jnp.clip(factor, -limit, limit) + 1)
    return product(hidden, down)
