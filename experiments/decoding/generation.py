"""The methods that `generate` offers, and the metrics of a generation."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import reprlib
from typing import Any

import gin

from experiments import methods as methods_lib
from experiments.decoding import rounds as rounds_lib
import specsample
from specsample import text as text_lib


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Generator:
  """The model, methods and sampling of `generate`, loaded only when needed."""

  load: Callable[[], specsample.Loaded]
  methods: dict[str, Callable[[], methods_lib.Method]]
  sampling: specsample.Sampling = specsample.Sampling()

  def maker(self, name: str) -> Callable[[], methods_lib.Method]:
    """Returns what makes a method; raises ValueError if `name` is unknown."""
    if name not in self.methods:
      raise ValueError(
        f'--drafter={name} is unknown: choose one of {", ".join(self.methods)}'
      )
    return self.methods[name]


def with_num_draft_tokens(
  method: methods_lib.Method, name: str, num_draft_tokens: int | None
) -> methods_lib.Method:
  """Returns the method with this K, or unchanged if K is None.

  Args:
    method: the method called `name`.
    name: name of the drafter, for messages.
    num_draft_tokens: K; 0 replaces the drafter by `NoDraft`.

  Raises:
    ValueError: the method drafts nothing, or was not trained for this K.
  """
  if num_draft_tokens is None:
    return method
  own = method.drafter.num_draft_tokens
  if own == 0 and num_draft_tokens:
    raise ValueError(
      f'--num_draft_tokens={num_draft_tokens}, but --drafter={name} drafts '
      'nothing: choose another drafter, or leave --num_draft_tokens out'
    )
  if num_draft_tokens == 0 < own:
    none = specsample.drafters.NoDraft()
    return dataclasses.replace(method, drafter=none, note='')
  return methods_lib.remake(method, num_draft_tokens)


def with_candidates(
  method: methods_lib.Method, num_candidates: int | None
) -> methods_lib.Method:
  """Returns `methods.candidates`, or the method unchanged if given None.

  Raises:
    ValueError: the drafter cannot have that many candidates per position.
  """
  if num_candidates is None:
    return method
  try:
    return methods_lib.candidates(method, num_candidates)
  except ValueError as error:
    raise ValueError(f'--top_candidates={num_candidates}: {error}') from error


def encode(
  tokenizer: text_lib.Tokenizer,
  prompt: str,
  chat: bool,
  system: str | None = None,
) -> list[int]:
  """Returns the tokens of a prompt, plain or as the first turn of a chat.

  Raises:
    ValueError: a chat begins with a system message, but `chat` is False.
  """
  if chat:
    first = [] if system is None else [{'role': 'system', 'content': system}]
    return tokenizer.encode_chat([*first, {'role': 'user', 'content': prompt}])
  if system is not None:
    raise ValueError(
      f'the prompt {reprlib.repr(prompt)} has a system message, but chat is '
      'False: set it to True, or leave the message out'
    )
  return tokenizer.encode(prompt)


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The tokens of a few rounds, and the counts up to the last of them."""

  tokens: list[int]
  origins: list[specsample.Origin]
  stats: specsample.stats.Stats
  stop_reason: specsample.StopReason
  seconds: float  # of all rounds so far, without the time of showing them
  first_seconds: float = 0.0  # of the prefill and the first round
  rounds: Sequence[rounds_lib.Round] = ()  # only if they are kept


def metrics(last: Chunk) -> dict[str, Any]:
  """Returns the metrics of a generation, given its last chunk.

  The prefill counts only towards `time_to_first_token`. For a tree, `drafted`
  counts the tokens of its longest path.
  """
  stats = last.stats
  return {
    'tokens': stats.tokens,
    'rounds': stats.rounds,
    'tokens_per_round': stats.tokens_per_round,
    'drafted': sum(i * count for i, count in enumerate(stats.proposed)),
    'kept': stats.kept,
    # None for a drafter that never drafts.
    'plain_rounds': stats.plain_rounds if len(stats.proposed) > 1 else None,
    'acceptance_by_position': [
      None if math.isnan(share) else share
      for share in stats.acceptance_by_position
    ],
    'time_to_first_token': last.first_seconds if stats.tokens else None,
    'seconds': last.seconds,
    # Logits that are NaN or infinite stop a row before its first token.
    'ms_per_token': 1e3 * last.seconds / stats.tokens if stats.tokens else None,
    'tokens_per_second': stats.tokens / last.seconds if stats.tokens else None,
    'stop_reason': last.stop_reason.name.lower(),
  }


def result(
  prompt: str, shown: Sequence[Chunk], tokenizer: text_lib.Tokenizer
) -> dict[str, Any]:
  """Returns the content of generate.json; `rounds` only if they are kept."""
  rounds = [dataclasses.asdict(x) for one in shown for x in one.rounds]
  tokens = [token for one in shown for token in one.tokens]
  return {
    'gin_config': gin.operative_config_str(),
    'prompt': prompt,
    'text': tokenizer.decode(tokens),
    'tokens': tokens,
    'origins': [origin.name.lower() for one in shown for origin in one.origins],
    'metrics': metrics(shown[-1]),
  } | ({'rounds': rounds} if rounds else {})
