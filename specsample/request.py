"""The arguments of `generate`, checked on the host and put on the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import types
from specsample.sampling import Sampling
from specsample.types import Array, Drafter, Model, StopReason

# Bounds the attention scores of a prefill: this many tokens against the cache.
PREFILL_CHUNK = 128
_SMALLEST_BUCKET = 64


def pad_prompts(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Pads token lists to a bucket: a power of two, at least 64.

  Returns:
    prompts [B, P] int32, padded with 0, and lengths [B] int32.

  Raises:
    ValueError: no prompt, or an empty one.
  """
  lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
  if not prompts or not lengths.all():
    raise ValueError(
      f'prompts have lengths {lengths.tolist()}: give at least one prompt, '
      'each of at least one token (a BOS token, say)'
    )
  bucket = max(_SMALLEST_BUCKET, 1 << int(lengths.max() - 1).bit_length())
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  return padded, lengths


@types.pytree
class Request:
  """The checked arguments of one batch, on the device."""

  tokens: Array  # [B, S] int32
  prompt_length: Array  # [B] int32
  limit: Array  # [B] int32
  limit_reason: Array  # [B] int32
  key: Array  # []
  request_id: Array  # [B] int32
  sampling: Sampling  # leaves [B]
  chunk: int = types.static()  # tokens a prefill pass takes in


def check(
  prompts: Any,
  lengths: Any,
  key: Array,
  request_ids: Any,
  *,
  model: Model,
  drafter: Drafter,
  sampling: Sampling,
  max_new_tokens: int,
  max_length: int | None,
) -> Request:
  """Checks the arguments of `decode.generate` and moves them to the device.

  Values that are being traced are passed on unchecked.

  Raises:
    ValueError: what does not fit, and the remedy.
  """
  _check_settings(model, drafter, max_new_tokens)
  if np.ndim(prompts) != 2 or np.shape(lengths) != np.shape(prompts)[:1]:
    raise ValueError(
      f'prompts have shape {np.shape(prompts)} and lengths {np.shape(lengths)}:'
      ' expected [B, P] and [B] (pad_prompts makes both)'
    )
  batch, width = np.shape(prompts)
  if request_ids is None:
    request_ids = np.arange(batch, dtype=np.int32)
  if np.shape(request_ids) != (batch,):
    raise ValueError(
      f'request_ids have shape {np.shape(request_ids)}: give one integer a '
      f'prompt, [{batch}]'
    )
  room = width + max_new_tokens if max_length is None else max_length
  capacity = min(room, model.max_length)
  traced = any(isinstance(x, jax.core.Tracer) for x in (prompts, lengths))
  xp = jnp if traced else np
  if not traced:
    prompts, lengths = jax.device_get((prompts, lengths))
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    _check_prompts(prompts, lengths, capacity, model)
  # Room for one round behind the last kept token, and for whole chunks.
  chunk = min(PREFILL_CHUNK, width)
  num_chunks = -(-min(width, capacity) // chunk)
  slots = max(capacity + drafter.num_draft_tokens + 1, num_chunks * chunk)
  kept = prompts[:, :slots].astype(np.int32)
  limit = lengths + max_new_tokens
  request = Request(
    tokens=xp.pad(kept, ((0, 0), (0, slots - kept.shape[1]))),
    prompt_length=lengths.astype(np.int32),
    limit=xp.minimum(limit, capacity).astype(np.int32),
    limit_reason=xp.where(
      limit > capacity, StopReason.CACHE_FULL, StopReason.MAX_NEW_TOKENS
    ).astype(np.int32),
    key=key,
    request_id=request_ids,
    sampling=sampling_lib.per_row(sampling, batch, model.vocab_size),
    chunk=chunk,
  )
  # An explicit transfer, so that none is left for the compiled part.
  return request if traced else jax.device_put(request)


def _check_settings(model, drafter, max_new_tokens):
  if drafter.num_draft_tokens < 0:
    raise ValueError(
      f'num_draft_tokens is {drafter.num_draft_tokens}: draft at least 0 '
      'tokens a round'
    )
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens is {max_new_tokens}: ask for at least 1')
  if drafter.vocab_size not in (None, model.vocab_size):
    raise ValueError(
      f'the target has {model.vocab_size} tokens and the drafter '
      f'{drafter.vocab_size}: draft with a model of the same vocabulary'
    )


def _check_prompts(prompts, lengths, capacity, model):
  batch, width = prompts.shape
  if prompts.dtype.kind not in 'iu':
    raise ValueError(
      f'prompts are {prompts.dtype}: give integer token ids, int32'
    )
  if batch == 0 or lengths.min() < 1:
    raise ValueError(
      f'prompt lengths are {lengths.tolist()}: a prompt needs at least one '
      'token (a BOS token, say)'
    )
  if lengths.max() > width:
    raise ValueError(
      f'a prompt length is {lengths.max()}, but prompts hold {width} tokens'
    )
  if lengths.max() >= capacity:
    raise ValueError(
      f'a prompt of {lengths.max()} tokens leaves no room in {capacity}: '
      f'shorten it or raise max_length (the model goes up to '
      f'{model.max_length})'
    )
  is_token = np.arange(width) < lengths[:, None]
  outside = prompts[is_token & ((prompts < 0) | (prompts >= model.vocab_size))]
  if outside.size:
    raise ValueError(
      f'a prompt token has id {outside[0]}, outside the vocabulary of '
      f"{model.vocab_size}: was it made by another model's tokenizer?"
    )
