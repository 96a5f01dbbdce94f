"""The work of a pass of a decoder, from its shape: the roofline of a step.

Counted are the weights, once a pass; keys and values of each row's context; two
operations for each weight a token meets and those of attention. Left out are
activations, sampling, what the drafts add to the cache, and the time until a
message arrives. Between devices, which divide every layer among them, two sums
over all of them a layer (Shoeybi et al., 1909.08053).
"""

import dataclasses

from specsample.cost import chips

# Of bfloat16: what devices send each other.
_ACTIVATION_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What one of the devices does in a pass."""

  flops: float
  memory_bytes: float
  sent_bytes: float

  def seconds(self, chip: chips.Chip) -> float:
    """The least time on a chip: its roofline (Williams et al., 2009)."""
    return chip.seconds(self.flops, self.memory_bytes, self.sent_bytes)

  def bound(self, chip: chips.Chip) -> str:
    """What takes that time: 'memory', 'products' or 'links'."""
    times = {
      'memory': chip.seconds(0, self.memory_bytes, 0),
      'products': chip.seconds(self.flops, 0, 0),
      'links': chip.seconds(0, 0, self.sent_bytes),
    }
    return max(times, key=lambda name: times[name])


def share_of_experts(
  num_experts: int, num_per_token: int, num_tokens: int
) -> float:
  """The share of E experts that a pass over n tokens reads, on average.

  A token is sent to k of them, each as likely, whatever the other tokens' are:
  1 - (1 - k / E)^n.
  """
  return 1 - (1 - num_per_token / num_experts) ** num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A decoder with gated feed-forwards, as far as its cost follows from it.

  Attributes:
    num_layers, dim, num_heads, num_kv_heads, head_dim: L, D and its attention.
    mlp_dim: of the feed-forward, in layers that have one.
    vocab_size: V. Of embeddings that are not tied a row a token is read.
    weight_bytes, cache_bytes: of a number: 4 float32, 2 bfloat16, 1 int8.
    num_experts: E, 0 for none; num_per_token: those that a token is sent to.
    expert_dim, shared_dim: their width, and that of one for all tokens.
    num_dense_layers: of L, those that have one feed-forward in their place.
  """

  num_layers: int
  dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  vocab_size: int
  tie_embeddings: bool = False
  weight_bytes: float = 2.0
  cache_bytes: float = 2.0
  num_experts: int = 0
  num_per_token: int = 0
  expert_dim: int = 0
  shared_dim: int = 0
  num_dense_layers: int = 0

  def read_weights(self, num_tokens: int) -> float:
    """How many weights a pass over so many tokens reads.

    Of many experts `share_of_experts`.
    """
    if not self.num_experts:
      return self._weights(0.0)
    share = share_of_experts(self.num_experts, self.num_per_token, num_tokens)
    return self._weights(self.num_experts * share)

  def num_weights(self) -> int:
    """All of them."""
    table = 0 if self.tie_embeddings else self.vocab_size * self.dim
    return int(self._weights(self.num_experts)) + table

  def context_bytes(self, num_tokens: int) -> float:
    """Of the keys and values of one row."""
    vectors = 2 * self.num_layers * self.num_kv_heads * num_tokens
    return vectors * self.head_dim * self.cache_bytes

  def held_bytes(self, *, batch: int, context: int, devices: int = 1) -> float:
    """Weights and caches, of one of the devices."""
    weights = self.num_weights() * self.weight_bytes / devices
    return weights + self._own_cache(batch * context, devices)

  def work(
    self, num_tokens: int, *, batch: int = 1, context: int = 0, devices: int = 1
  ) -> Work:
    """Of one device, in a pass over so many tokens of each of `batch` rows.

    Args:
      num_tokens: K + 1 of a row.
      batch: B.
      context: tokens of each row in the cache.
      devices: that divide heads, feed-forward and vocabulary. Where they are
        more than `num_kv_heads`, several read the same keys and values.
    """
    total = batch * num_tokens
    # What attention multiplies: queries by keys, their weights by values.
    met = 2 * self.num_layers * self.num_heads * self.head_dim * context
    flops = 2 * total * (self._weights(self.num_per_token) + met)
    weights = self.read_weights(total) * self.weight_bytes
    # A ring sends each part of a sum twice, but for a device's own.
    sums = 2 * self.num_layers * total * self.dim * _ACTIVATION_BYTES
    return Work(
      flops=flops / devices,
      memory_bytes=weights / devices
      + self._own_cache(batch * context, devices),
      sent_bytes=2 * (devices - 1) / devices * sums,
    )

  def _own_cache(self, num_tokens, devices):
    return self.context_bytes(num_tokens) / min(devices, self.num_kv_heads)

  def _weights(self, experts):
    """Without the embeddings' table, and with so many experts a layer."""
    heads = 2 * self.num_heads + 2 * self.num_kv_heads
    attention = self.dim * heads * self.head_dim
    dense = 3 * self.dim * self.mlp_dim
    of_experts = self.dim * self.num_experts + 3 * self.dim * (
      experts * self.expert_dim + self.shared_dim
    )
    num_dense = self.num_dense_layers if self.num_experts else self.num_layers
    num_sparse = self.num_layers - num_dense
    norms = (2 * self.num_layers + 1) * self.dim
    return (
      self.num_layers * attention
      + num_dense * dense
      + num_sparse * of_experts
      + norms
      + self.vocab_size * self.dim
    )
