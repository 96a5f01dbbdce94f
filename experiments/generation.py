"""One prompt, decoded round by round as it is shown."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

import gin
import jax
import numpy as np

from experiments import distributed
from experiments import measure
from experiments import methods as methods_lib
import specsample
from specsample import sharding
from specsample import text as text_lib
from specsample.types import DecodeState


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Generator:
  """What `generate` decodes with. Nothing is loaded before it is called for."""

  load: Callable[[], specsample.Loaded]
  methods: dict[str, Callable[[], methods_lib.Method]]
  sampling: specsample.Sampling = specsample.Sampling()

  def method(
    self, name: str, num_draft_tokens: int | None
  ) -> methods_lib.Method:
    """The method of that name, with its own K where None is given.

    Raises:
      ValueError: there is no such method, or it drafts nothing.
    """
    if name not in self.methods:
      raise ValueError(
        f'--drafter={name} is unknown: choose one of {", ".join(self.methods)}'
      )
    method = self.methods[name]()
    if num_draft_tokens is None:
      return method
    own = method.drafter.num_draft_tokens
    if own == 0 and num_draft_tokens:
      raise ValueError(
        f'--num_draft_tokens={num_draft_tokens}, but --drafter={name} drafts '
        'nothing: choose another drafter, or leave it out'
      )
    if num_draft_tokens == 0 < own:
      none = specsample.drafters.NoDraft()
      return dataclasses.replace(method, drafter=none)
    return methods_lib.with_num_draft_tokens(method, num_draft_tokens)


def encode(
  tokenizer: text_lib.Tokenizer,
  prompt: str,
  chat: bool,
  variables: Mapping[str, Any] | None = None,
) -> list[int]:
  """The tokens of a prompt, plain or as the one user turn of a chat.

  The chat template is given `variables`, as `Tokenizer.chat` takes them.
  """
  if chat:
    turn = {'role': 'user', 'content': prompt}
    return tokenizer.encode_chat([turn], variables=variables)
  return tokenizer.encode(prompt)


@dataclasses.dataclass(frozen=True)
class Round:
  """The tokens of one round, and the counts up to it."""

  tokens: list[int]
  origins: list[specsample.Origin]
  stats: specsample.stats.Stats
  stop_reason: specsample.StopReason
  seconds: float  # of all rounds so far, without who shows them


def begin(
  target: specsample.Loaded,
  method: methods_lib.Method,
  tokens: list[int],
  *,
  sampling: specsample.Sampling,
  max_new_tokens: int,
  seed: int,
) -> DecodeState:
  """Takes the prompt in; ValueError for what cannot be decoded."""
  prompts, lengths = specsample.pad_prompts([tokens])
  return specsample.prefill(
    methods_lib.all_params(target.params, method),
    prompts,
    lengths,
    jax.random.key(seed),
    model=target.model,
    drafter=method.drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )


def rounds(
  target: specsample.Loaded, method: methods_lib.Method, state: DecodeState
) -> Iterator[Round]:
  """Decodes until the row stops; the given state is used up."""

  def advance(state, max_rounds):
    return specsample.advance(
      methods_lib.all_params(target.params, method),
      state,
      model=target.model,
      drafter=method.drafter,
      verify=method.verify,
      stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
      max_rounds=max_rounds,
    )

  # No round is run, but the first one need not wait for the compiler.
  state = jax.block_until_ready(advance(state, 0))
  seconds = 0.0
  prompt_length = shown = int(_first_row(state)['length'])
  done = False
  while not done:
    # Who shows the round takes time too, which is none of decoding's.
    state, elapsed = measure.seconds(advance, state, 1)
    seconds += elapsed
    row = _first_row(state)
    length, done = int(row['length']), bool(row['done'])
    yield Round(
      tokens=row['tokens'][shown:length].tolist(),
      origins=[specsample.Origin(i) for i in row['origin'][shown:length]],
      stats=specsample.stats.Stats(
        tokens=length - prompt_length,
        rounds=int(row['round']),
        proposed=tuple(row['proposed'].tolist()),
        accepted=tuple(row['accepted'].tolist()),
      ),
      stop_reason=specsample.StopReason(int(row['stop_reason'])),
      seconds=seconds,
    )
    shown = length


def _first_row(state: DecodeState) -> dict[str, np.ndarray]:
  """What is shown of it, on the host."""
  names = (
    'length',
    'done',
    'tokens',
    'origin',
    'round',
    'proposed',
    'accepted',
    'stop_reason',
  )
  shown = {name: getattr(state, name) for name in names}
  if distributed.is_on():
    shown = _replicate(shown)
  return {name: x[0] for name, x in jax.device_get(shown).items()}


# Of an array that no host holds whole, each gets a whole one.
_replicate = jax.jit(sharding.replicate)


def metrics(last: Round) -> dict[str, Any]:
  """Of a generation, by its last round; the prefill's time is left out."""
  stats = last.stats
  return {
    'tokens': stats.tokens,
    'rounds': stats.rounds,
    'tokens_per_round': stats.tokens_per_round,
    # Of rounds that could have drafted.
    'plain_rounds': stats.plain_rounds if len(stats.proposed) > 1 else None,
    'acceptance_by_position': [
      None if math.isnan(share) else share
      for share in stats.acceptance_by_position
    ],
    'seconds': last.seconds,
    # Logits that are no distribution stop a row before its first token.
    'ms_per_token': 1e3 * last.seconds / stats.tokens if stats.tokens else None,
    'stop_reason': last.stop_reason.name.lower(),
  }


def result(
  prompt: str, shown: Sequence[Round], tokenizer: text_lib.Tokenizer
) -> dict[str, Any]:
  """The content of generate.json."""
  tokens = [token for one in shown for token in one.tokens]
  return {
    'gin_config': gin.operative_config_str(),
    'prompt': prompt,
    'text': tokenizer.decode(tokens),
    'tokens': tokens,
    'origins': [origin.name.lower() for one in shown for origin in one.origins],
    'metrics': metrics(shown[-1]),
  }
