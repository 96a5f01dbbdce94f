"""The parts of a drafter that are left to another drafter."""

import dataclasses
from typing import Any

from specsample import settings
from specsample.drafter import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(Drafter):
  """A drafter that passes on to `drafter` whatever it does not override."""

  drafter: Any  # a Drafter

  @settings.default
  def num_draft_tokens(self) -> int:
    return self.drafter.num_draft_tokens

  @settings.default
  def depth(self) -> int:
    return self.drafter.depth

  @settings.default
  def topology(self) -> Any:
    return self.drafter.topology

  @settings.default
  def feature_layers(self) -> tuple[int, ...]:
    return self.drafter.feature_layers

  @settings.default
  def vocab_size(self) -> int | None:
    return self.drafter.vocab_size

  @settings.default
  def reads_logits(self) -> bool:
    return self.drafter.reads_logits

  @settings.default
  def can_pause(self) -> bool:
    return self.drafter.can_pause

  def init(self, params, batch_size, max_length):
    return self.drafter.init(params, batch_size, max_length)

  def observe(self, params, tokens, count, output, verdict, state):
    return self.drafter.observe(params, tokens, count, output, verdict, state)

  def pause(self, params, tokens, length, state):
    return self.drafter.pause(params, tokens, length, state)

  def resume(self, params, tokens, length, state):
    return self.drafter.resume(params, tokens, length, state)

  def with_most_kept(self, most_kept):
    inner = self.drafter.with_most_kept(most_kept)
    return dataclasses.replace(self, drafter=inner)

  def with_store(self, params, name, store):
    return self.drafter.with_store(params, name, store)
