"""The work of a decoder's pass, computed from its shape: a step's roofline.

It counts the weights, read once per pass; the keys and values of each row's
context; and two operations for each weight that a token meets, plus those of
attention. It leaves out activations, sampling, what the drafts add to the
cache, and the latency of messages. Devices divide every layer among them, with
two all-reduces per layer (Shoeybi et al., 1909.08053).
"""

import dataclasses

from specsample.cost import chips

# Devices send each other bfloat16.
_ACTIVATION_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """The work of one device in a pass."""

  flops: float
  memory_bytes: float
  sent_bytes: float

  def seconds(self, chip: chips.Chip) -> float:
    """Returns the least time by a chip's roofline (Williams et al., 2009)."""
    return chip.seconds(self.flops, self.memory_bytes, self.sent_bytes)

  def bound(self, chip: chips.Chip) -> str:
    """Returns what limits that time: 'memory', 'products' or 'links'."""
    times = {
      'memory': chip.seconds(0, self.memory_bytes, 0),
      'products': chip.seconds(self.flops, 0, 0),
      'links': chip.seconds(0, 0, self.sent_bytes),
    }
    return max(times, key=lambda name: times[name])


def share_of_experts(
  num_experts: int, num_per_token: int, num_tokens: int
) -> float:
  """Returns the mean share of E experts that a pass over n tokens reads.

  Each token is sent to k of them, all equally likely and independent of the
  other tokens: 1 - (1 - k / E)^n.
  """
  return 1 - (1 - num_per_token / num_experts) ** num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderShape:
  """The shape of a decoder with gated feed-forwards, as its cost depends on it.

  Attributes:
    num_layers, dim, num_heads, num_kv_heads, head_dim: L, D and the shape of
      the attention.
    mlp_dim: width of the feed-forward, in layers that have one.
    vocab_size: V. If embeddings are not tied, one row of their table is read
      per token.
    weight_bytes, cache_bytes: bytes per number: 4 in float32, 2 in bfloat16, 1
      in int8.
    num_experts: E, 0 for none.
    num_per_token: how many experts a token is sent to.
    expert_dim, shared_dim: width of each expert, and of one for all tokens.
    num_dense_layers: how many of the L layers have a feed-forward instead of
      experts.
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
    """Returns how many weights a pass over `num_tokens` tokens reads.

    Experts are counted by `share_of_experts`.
    """
    if not self.num_experts:
      return self._weights(0.0)
    share = share_of_experts(self.num_experts, self.num_per_token, num_tokens)
    return self._weights(self.num_experts * share)

  def num_weights(self) -> int:
    """Returns the number of all weights."""
    table = 0 if self.tie_embeddings else self.vocab_size * self.dim
    return int(self._weights(self.num_experts)) + table

  def context_bytes(self, num_tokens: int) -> float:
    """Returns the bytes of the keys and values of one row."""
    vectors = 2 * self.num_layers * self.num_kv_heads * num_tokens
    return vectors * self.head_dim * self.cache_bytes

  def work(
    self, num_tokens: int, *, batch: int = 1, context: int = 0, devices: int = 1
  ) -> Work:
    """Returns the work of one device in a pass over a batch.

    Args:
      num_tokens: tokens per row, K + 1.
      batch: B, the number of rows.
      context: tokens of each row in the cache.
      devices: how many divide heads, feed-forward and vocabulary. If there are
        more than `num_kv_heads`, several read the same keys and values.
    """
    total = batch * num_tokens
    # Attention multiplies queries by keys, and attention weights by values.
    met = 2 * self.num_layers * self.num_heads * self.head_dim * context
    flops = 2 * total * (self._weights(self.num_per_token) + met)
    weights = self.read_weights(total) * self.weight_bytes
    # A ring sends each part of a sum twice, except for a device's own.
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
    """Counts weights without the embedding table, with `experts` per layer."""
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
