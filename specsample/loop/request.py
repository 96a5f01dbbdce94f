"""The arguments of `generate`, checked on the host and put on the device."""

from collections.abc import Sequence
import dataclasses
import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import sampling as sampling_lib
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.loop import certified
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.types import Array, Model, Params, StopReason

# Limits the attention scores of a prefill: this many tokens against the cache.
PREFILL_CHUNK = 128
_SMALLEST_BUCKET = 64
# A TPU tiles a bfloat16 cache by this many tokens. A cache of any other length
# would be laid out again before the loop.
_SLOT_MULTIPLE = 16
_IDS = 'give a list of token ids for each prompt, such as [[1, 2, 3], [4, 5]]'


def pad_prompts(
  prompts: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """Pads token lists to a bucket: a power of two, at least 64.

  Returns:
    prompts [B, P] int32, padded with 0, and lengths [B] int32.
  """
  try:
    rows = [np.asarray(prompt) for prompt in prompts]
  except (TypeError, ValueError) as error:  # no list, or a nested one
    raise ValueError(f'prompts is {reprlib.repr(prompts)}: {_IDS}') from error
  sizes = [row.size for row in rows]
  if not all(sizes) or not rows:
    raise ValueError(
      f'prompts have lengths {sizes}: give at least one prompt, each of at '
      'least one token (a BOS token, say)'
    )
  bucket = max(_SMALLEST_BUCKET, 1 << (max(sizes) - 1).bit_length())
  padded = np.zeros((len(rows), bucket), np.int32)
  for padded_row, row in zip(padded, rows, strict=True):
    is_ids = row.ndim == 1 and row.dtype.kind in 'iu'
    if not (is_ids and np.array_equal(row.astype(np.int32), row)):
      raise ValueError(f'a prompt is {row.tolist()!r}: {_IDS}')
    padded_row[: row.size] = row
  return padded, np.asarray(sizes, np.int32)


@types.pytree
class Request:
  """The checked arguments of one batch, on the device."""

  tokens: Array  # [B, S] int32
  prompt_length: Array  # [B] int32
  limit: Array  # [B] int32
  limit_reason: Array  # [B] int32
  key: Array  # a PRNG key
  request_id: Array  # [B] int32
  sampling: Sampling  # leaves [B]; the bias [B, V]
  chunk: int = types.static()  # tokens per prefill pass
  log_probs: bool = types.static()  # whether they are recorded


def axes(request: Request) -> Request:
  """Returns a request with the `sharding.Axes` of each array in its place."""
  of_rows = lambda x: ('batch', *[None] * (x.ndim - 1))
  return dataclasses.replace(jax.tree.map(of_rows, request), key=())


def check(
  decoder: Decoder,
  params: Params,
  prompts: Any,
  lengths: Any,
  key: Array,
  *,
  request_ids: Any = None,
  sampling: Sampling,
  max_new_tokens: Any,
  max_length: int | None,
  log_probs: bool = True,
) -> Request:
  """Checks the arguments of `decode.generate` and moves them to the device.

  For traced arguments, only shapes and dtypes are checked.
  """
  model = decoder.model
  _check_precision()
  check_params(decoder, params)
  _check_key(key)
  certified.check(decoder, params, sampling, log_probs)
  prompts = checks.integers(
    'prompts',
    prompts,
    'give token ids [B, P], int32, in rows of one length (pad_prompts makes '
    'them)',
  )
  lengths = checks.integers(
    'lengths', lengths, 'give the number of tokens in each prompt [B], int32'
  )
  if prompts.ndim != 2 or lengths.shape != prompts.shape[:1]:
    raise ValueError(
      f'prompts have shape {prompts.shape} and lengths {lengths.shape}: '
      'expected [B, P] and [B] (pad_prompts makes both)'
    )
  batch, width = prompts.shape
  max_new_tokens = counts('max_new_tokens', max_new_tokens, batch)
  if max_length is None:
    most = int(np.max(max_new_tokens, initial=0))
    capacity = min(width + most, model.max_length)
    longest = min(width, capacity)
  else:
    # Does not depend on P: rows of one max_length can replace each other.
    capacity = min(checks.count('max_length', max_length), model.max_length)
    longest = capacity
  # Room for one round after the last kept token, and for whole chunks.
  chunk_ends = -(-longest // PREFILL_CHUNK) * PREFILL_CHUNK
  slots = max(capacity + decoder.round_tokens, chunk_ends)
  slots = -(-slots // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
  # Weights that are stored in a form of their own may ask for fewer tokens.
  says_chunk = lambda x: hasattr(x, 'prefill_chunk')
  stored = filter(says_chunk, jax.tree.leaves(params, is_leaf=says_chunk))
  chunk = min(PREFILL_CHUNK, width, *(x.prefill_chunk for x in stored))

  xp = _namespace((prompts, lengths))
  if xp is np:
    check_prompts(prompts, lengths, capacity, model)
  # Prompts may be padded with values that are not token ids, such as -100.
  is_token = xp.arange(width) < xp.asarray(lengths)[:, None]
  kept = xp.where(is_token, xp.asarray(prompts), 0)[:, :slots].astype(np.int32)
  lengths = xp.asarray(lengths).astype(np.int32)
  limit = lengths + np.minimum(max_new_tokens, capacity)
  request = Request(
    tokens=xp.pad(kept, ((0, 0), (0, slots - kept.shape[1]))),
    prompt_length=lengths,
    limit=xp.minimum(limit, capacity).astype(np.int32),
    limit_reason=xp.where(
      limit > capacity, StopReason.CACHE_FULL, StopReason.MAX_NEW_TOKENS
    ).astype(np.int32),
    key=key,
    request_id=ids(request_ids, batch),
    sampling=sampling_lib.per_row(sampling, batch, model.vocab_size),
    chunk=chunk,
    log_probs=bool(log_probs),
  )
  return _on_devices(request)


def _namespace(tree):
  """Returns `jnp` if an array in a tree is being traced, else `np`."""
  leaves = jax.tree.leaves(tree)
  is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
  return jnp if is_traced else np


def _on_devices(request):
  """Transfers the request explicitly, before the compiled functions need it.

  Rows that are done from the start pad the batch to a multiple of the number of
  parts that the mesh divides it into.
  """
  batch = request.prompt_length.size
  missing = -batch % sharding.batch_parts()
  if missing:
    # Copies of the last row, with a limit of 0 so that they emit nothing.
    xp = _namespace(request)
    fill = lambda x: xp.concatenate([x, xp.repeat(x[-1:], missing, axis=0)])
    rows = jax.tree.map(fill, dataclasses.replace(request, key=None))
    is_row = xp.arange(batch + missing) < batch
    request = dataclasses.replace(
      rows, key=request.key, limit=xp.where(is_row, rows.limit, 0)
    )
  return sharding.place(request, axes(request))


def counts(name: str, value: Any, size: int) -> np.ndarray:
  """Checks that counts, one or [size], are at least 1; returns [size] int32."""
  most = np.iinfo(np.int32).max
  if settings.is_count(value):
    return np.full(size, min(operator.index(value), most), np.int32)
  remedy = (
    f'give one number, or one per prompt [{size}], each an integer of at least '
    '1 and not traced'
  )
  given = checks.integers(name, value, remedy)
  if _namespace(given) is jnp or given.shape != (size,) or np.any(given < 1):
    raise ValueError(f'{name} is {reprlib.repr(value)}: {remedy}')
  return np.minimum(given, most).astype(np.int32)


def _check_precision():
  if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
    raise ValueError(
      'jax_enable_x64 is on, but decoding uses 32 bits: call it under `with '
      'jax.enable_x64(False):`, or turn the setting off'
    )


def check_params(decoder: Decoder, params: Params) -> None:
  """Raises ValueError unless parameters belong to the model and the drafter.

  Those of models and drafters without `abstract_params` are not looked into.
  """
  if not (isinstance(params, dict) and 'target' in params):
    given = f'is of type {type(params).__name__}'
    if isinstance(params, dict):
      given = f'has the keys {sorted(params)}'
    raise ValueError(
      f"params {given}: give a dict with the target's parameters under "
      "'target' and those of a drafter under 'drafter'"
    )
  model: Any = decoder.model
  drafter: Any = decoder.drafter
  checks.parameters("params['target']", model, params['target'])
  if hasattr(drafter, 'abstract_params') and 'drafter' in params:
    own = params['drafter']
    # A head has at least one parameter, so one head more than there are
    # parameters shows that heads are missing; thousands take minutes to trace.
    most = len(jax.tree.leaves(own)) + 1
    if drafter.num_draft_tokens > most:
      drafter = dataclasses.replace(drafter, num_draft_tokens=most)
    checks.parameters("params['drafter']", drafter, own)


def _check_key(key):
  is_array = isinstance(key, jax.Array)
  is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  is_raw = is_array and key.dtype == jnp.uint32
  if not ((is_typed and key.shape == ()) or (is_raw and key.shape == (2,))):
    raise ValueError(f'key is {key!r}: make one with jax.random.key(seed)')
  # Under vmap these generators draw all rows' bits from the first row's key:
  # rows would not be independent, nor would rounds once the first row is done.
  if is_typed and 'rbg' in str(jax.random.key_impl(key)):
    raise ValueError(
      f'key uses the generator {jax.random.key_impl(key)!r}, which is not '
      'exact for many rows at once: make one with jax.random.key(seed, '
      "impl='threefry2x32')"
    )


def ids(request_ids: Any, batch: int) -> Any:
  """Returns the given ids as [batch] int32; None stands for 0 to batch - 1."""
  if request_ids is None:
    return np.arange(batch, dtype=np.int32)
  remedy = f'give one integer below 2**31 per prompt [{batch}]'
  given = checks.integers('request_ids', request_ids, remedy)
  cast = given.astype(np.int32)
  is_same = _namespace(given) is jnp or np.array_equal(cast, given)
  if given.shape != (batch,) or not is_same:
    raise ValueError(f'request_ids is {reprlib.repr(request_ids)}: {remedy}')
  return cast


def check_prompts(
  prompts: np.ndarray, lengths: np.ndarray, capacity: int, model: Model
) -> None:
  """Checks prompts [B, P]; `capacity` must leave room for a token."""
  batch, width = prompts.shape
  if batch == 0 or lengths.min() < 1:
    raise ValueError(
      f'prompt lengths are {lengths.tolist()}: a prompt needs at least one '
      'token (a BOS token, say)'
    )
  if lengths.max() > width:
    raise ValueError(
      f'a prompt length is {lengths.max()}, but prompts hold {width} tokens: '
      'give at most that many'
    )
  if lengths.max() >= capacity:
    raise ValueError(
      f'a prompt of {lengths.max()} tokens leaves no room for new tokens in '
      f'{capacity}: shorten it or raise max_length (the model goes up to '
      f'{model.max_length})'
    )
  is_token = np.arange(width) < lengths[:, None]
  outside = prompts[is_token & ((prompts < 0) | (prompts >= model.vocab_size))]
  if outside.size:
    raise ValueError(
      f'a prompt token has id {outside[0]}, outside the vocabulary of '
      f"{model.vocab_size}: was it made by another model's tokenizer?"
    )


def check_state(decoder: Decoder, state: types.DecodeState) -> None:
  """Raises ValueError unless given a state that was made for such a decoder."""
  is_state(state)
  drafter, verify = decoder.drafter, decoder.verify
  own = drafter.num_draft_tokens, drafter.depth
  known = state.num_draft_tokens, state.proposed.shape[1] - 1
  if own != known:
    raise ValueError(
      f'the drafter proposes {own[0]} tokens per round to a depth of {own[1]}, '
      f'but the state was made for {known[0]} to a depth of {known[1]}: '
      'prefill with this drafter'
    )
  if isinstance(verify, types.ByChoice) and 'choices' not in state.records:
    raise ValueError(
      f'verify is {type(verify).__name__}, but the state was made without it, '
      'so what it needs was not checked: prefill with the same verify'
    )


def is_state(state: Any) -> None:
  """Raises ValueError unless given a state."""
  checks.instance(
    'state', state, types.DecodeState, 'give what prefill or advance returned'
  )
