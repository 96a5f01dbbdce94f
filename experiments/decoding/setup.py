"""A target, a method, and the settings with which they decode."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import methods as methods_lib
import specsample
from specsample.loop import decode
from specsample.loop import initial
from specsample.loop import request
from specsample.loop import step
from specsample.types import Array, DecodeState, DraftKind, Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
  """The arguments of `specsample.prefill`, `advance` and `generate`."""

  target: specsample.Loaded
  method: methods_lib.Method
  sampling: specsample.Sampling
  max_new_tokens: int
  stop: specsample.Stop = specsample.Stop()
  max_length: int | None = None
  seed: int = 0  # of the PRNG key
  policies: Any = None  # what the drafter's policies already know
  # Shorter prompts are padded to this many tokens: fewer programs are compiled.
  least_width: int = 1

  @property
  def params(self) -> Params:
    """The tree of parameters that the library's functions take."""
    params: dict[str, Params] = {'target': self.target.params}
    if self.method.params is not None:
      params['drafter'] = self.method.params
    if isinstance(self.method.verify, specsample.verify.Certified):
      params['shadow'] = self.target.shadow
    if self.policies is not None:
      params['policies'] = self.policies
    return params

  @property
  def log_probs(self) -> bool:
    """Whether the method's rule allows `log_probs`."""
    return not isinstance(self.method.verify, specsample.verify.Certified)

  @property
  def decoder(self) -> specsample.Decoder:
    """The model, the drafter and the rule."""
    return specsample.Decoder(
      self.target.model, self.method.drafter, self.method.verify
    )

  @property
  def key(self) -> Array:
    """The PRNG key of everything that is drawn."""
    return jax.random.key(self.seed)

  def check(self, prompts: Sequence[list[int]]) -> None:
    """Raises for what `specsample.generate` would refuse; compiles nothing."""
    checked = self._checked(*specsample.pad_prompts(list(prompts)))
    decode.check_rule(self.decoder, self.params, checked)

  def draft_kind(self) -> DraftKind:
    """Returns the kind of the method's drafts, without compiling anything."""
    checked = self._checked(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    begin = functools.partial(initial.state, self.decoder)
    state = jax.eval_shape(begin, self.params, checked)
    return step.abstract_draft(self.decoder, self.params, state).kind

  def prefill(
    self,
    prompts: Sequence[list[int]],
    *,
    request_ids: Sequence[int] | None = None,
    limits: np.ndarray | None = None,
  ) -> DecodeState:
    """Prefills a batch of prompts.

    Each request id selects the random stream of its row. `limits`, [B] int32,
    are the most new tokens of each row, at most `max_new_tokens`, the default.
    """
    tokens, lengths = padded(prompts, self.least_width)
    ids = None if request_ids is None else np.asarray(request_ids, np.int32)
    return specsample.prefill(
      self.decoder,
      self.params,
      tokens,
      lengths,
      self.key,
      request_ids=ids,
      sampling=self.sampling,
      max_new_tokens=self.max_new_tokens if limits is None else limits,
      max_length=self.max_length,
      log_probs=self.log_probs,
    )

  def advance(
    self, state: DecodeState, max_rounds: int | None = None
  ) -> DecodeState:
    """Runs rounds, by default until all rows are done; `state` is donated."""
    if max_rounds is None:
      # Upper bound: every round emits at least one token.
      max_rounds = state.tokens.shape[1]
    return specsample.advance(
      self.decoder,
      self.params,
      state,
      stop=self.stop,
      # The transfer to the device is explicit, like the request's.
      max_rounds=jax.device_put(np.int32(max_rounds)),
    )

  def finish(self, state: DecodeState, num_rows: int) -> specsample.Output:
    """Returns the output of the first `num_rows` rows; a mesh may add rows."""
    return specsample.finish(
      state, max_new_tokens=self.max_new_tokens, batch_size=num_rows
    )

  def generate(self, prompts: Sequence[list[int]]) -> specsample.Output:
    """Decodes a batch of prompts to the end."""
    return self.finish(self.advance(self.prefill(prompts)), len(prompts))

  def _checked(self, tokens, lengths) -> request.Request:
    return request.check(
      self.decoder,
      self.params,
      tokens,
      lengths,
      self.key,
      sampling=self.sampling,
      max_new_tokens=self.max_new_tokens,
      max_length=self.max_length,
      log_probs=self.log_probs,
    )


def padded(
  prompts: Sequence[list[int]], least_width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns what `pad_prompts` does, but at least `least_width` tokens wide."""
  tokens, lengths = specsample.pad_prompts(prompts)
  missing = max(0, least_width - tokens.shape[1])
  return np.pad(tokens, ((0, 0), (0, missing))), lengths


def warm_up(
  begin: Callable[[list[list[int]]], DecodeState],
  advance: Callable[[DecodeState], Any],
  prompts: Sequence[list[int]],
  widths: Sequence[int],
) -> None:
  """Runs a round of each of `Decoder.widths`, by calling `begin` and `advance`.

  XLA builds parts of a program when they first run, which takes a quarter of a
  second for a pass of SmolLM2 on two cores. Every drafter drafts for prompts
  that repeat one token, and a row with little room left has few drafts. Of the
  prompts only the lengths matter.
  """
  repeated = [row[-1:] * len(row) for row in prompts]
  for width in widths:
    state = begin(repeated)
    limit = jnp.minimum(state.limit, state.length + width + 1)
    jax.block_until_ready(advance(dataclasses.replace(state, limit=limit)))
