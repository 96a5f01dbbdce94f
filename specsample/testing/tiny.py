"""Real architectures at a size that compiles and runs in a moment."""

from specsample.models import transformer


def tiny_llama(
  vocab_size: int = 32,
  num_layers: int = 2,
  dim: int = 16,
  max_length: int = 256,
) -> transformer.Transformer:
  """Returns a Llama of a few thousand weights, two query heads per key head.

  Its parameters are `tiny_llama().init(jax.random.key(0))`.
  """
  return transformer.Transformer(
    vocab_size=vocab_size,
    num_layers=num_layers,
    dim=dim,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=2 * dim,
    max_length=max_length,
  )
