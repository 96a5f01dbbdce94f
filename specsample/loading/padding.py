"""Draft models whose vocabulary is padded to another size than the target's.

This happens within model families. For the same tokens, Qwen 2.5 has 151,936
rows in its small models and 152,064 in its large ones, and Gemma 3 has 262,144
and 262,208. Models with different tokens draft with `drafters.TLI`, using a map
from `vocab_map`.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import text
from specsample.loading import load
from specsample.models import int8
from specsample.models import packed
from specsample.models import transformer
from specsample.types import Params

# The largest share of tokens that models of one family name differently.
_MOST_RENAMED = 0.01


def match_vocabulary(draft: load.Loaded, target: load.Loaded) -> load.Loaded:
  """Returns the draft model with its vocabulary resized to the target's.

  Ids keep their meaning. A token that only the target has is never drafted, and
  a token that only the draft model has is cut off. The parameters are placed on
  the mesh that is set.

  If the sizes are equal, the model is returned as it is: models of one family
  may give different names to tokens that they never write. If more than 1% of
  the names differ, there is a warning.

  Raises:
    ValueError: the sizes differ, and the tokenizers name an id differently or
      one of the two models has no tokenizer.
  """
  size = target.model.vocab_size
  if draft.model.vocab_size == size:
    _warn_of_other_names(draft.optional_tokenizer, target.optional_tokenizer)
    return draft
  different = _differences(draft.tokenizer, target.tokenizer)
  if different:
    raise ValueError(
      f'{different[0]}: draft with a model of the same family, which has the '
      'same tokenizer, or with drafters.TLI'
    )
  num_tokens = min(draft.model.num_tokens or draft.model.vocab_size, size)
  model = dataclasses.replace(
    draft.model, vocab_size=size, num_tokens=num_tokens
  )
  params = draft.params and _resized(draft.params, model)
  return dataclasses.replace(draft, model=model, params=params)


def _differences(own: text.Tokenizer, others: text.Tokenizer) -> list[str]:
  """Describes each id that both have under different names, in their order."""
  own_names, other_names = (
    {i: token for token, i in tokenizer.backend.get_vocab().items()}
    for tokenizer in (own, others)
  )
  return [
    f'token {i} is {own_names[i]!r} for the draft model but '
    f'{other_names[i]!r} for the target'
    for i in sorted(own_names.keys() & other_names.keys())
    if own_names[i] != other_names[i]
  ]


def _warn_of_other_names(own, others) -> None:
  if own is None or others is None:
    return
  different = _differences(own, others)
  size = min(own.vocab_size, others.vocab_size)
  if len(different) > _MOST_RENAMED * size:
    warnings.warn(
      'the draft model and the target have vocabularies of equal size, but '
      f'{len(different):,} of {size:,} tokens differ ({different[0]}), so '
      'that few drafts will be accepted: use drafters.TLI or slem.generate',
      stacklevel=3,
    )


def _resized(params: Params, model: transformer.Transformer) -> Params:
  """Returns the parameters with vocabulary matrices of the model's size."""
  resized, axes = dict(params), model.param_axes()

  def resize(leaf):
    kept = sharding.replicate(leaf)[:, : model.vocab_size]
    missing = model.vocab_size - kept.shape[1]
    return jnp.pad(kept, ((0, 0), (0, missing)))

  for name in ('embedding', 'unembedding'):
    matrix = params.get(name)
    if packed.is_packed(matrix):
      resized[name] = packed.pack(resize(packed.dense(matrix)))
    elif matrix is not None:
      is_int8 = isinstance(matrix, int8.Int8)
      own = int8.of_kernel(*axes[name]) if is_int8 else axes[name]
      resized[name] = sharding.place(jax.tree.map(resize, matrix), own)
  return resized
