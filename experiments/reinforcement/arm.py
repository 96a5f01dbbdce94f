"""A way of drawing rollouts: a method, its rows, and what it drafts from."""

from collections.abc import Sequence
import dataclasses

import gin
import numpy as np

from experiments import methods as methods_lib
import specsample
from specsample import checks


class History(specsample.History):
  """A history that notes all texts, in the order in which they were added."""

  def __init__(self, *, vocab_size: int, capacity: int, every: int):
    """See `specsample.History`."""
    super().__init__(vocab_size=vocab_size, capacity=capacity, every=every)
    self.texts: list[list[int]] = []

  def add(self, text: Sequence[int] | np.ndarray) -> bool:
    """See `specsample.History`."""
    self.texts.append([int(token) for token in text])
    return super().add(text)


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arm:
  """A way of drawing rollouts; those of all arms have the same distribution.

  Attributes:
    method: decodes; its rule must be lossless.
    num_rows: the rows that are decoded at once.
    fewest_rows: once no answers wait, the batch is halved down to this many
      rows. None: its size does not change.
    history_tokens: how many tokens of earlier answers are kept, to draft from
      if the drafter looks up anything. 0: none.
    history_every: the number of new tokens after which they are sorted again.
  """

  method: methods_lib.Method
  num_rows: int = 16
  fewest_rows: int | None = None
  history_tokens: int = 1 << 16
  history_every: int = 512

  def __post_init__(self):
    """Fits the method to the rows, and refuses one that cannot be used."""
    checks.counts(self, ('num_rows', 'history_every'))
    checks.counts(self, ('history_tokens',), 0)
    if self.fewest_rows is not None:
      checks.counts(self, ('fewest_rows',))
    _check_rule(self.method)  # before `for_batch` times passes
    method = methods_lib.of_batch(self.method, self.num_rows)
    _check_rule(method)
    object.__setattr__(self, 'method', method)

  @property
  def is_plain(self) -> bool:
    """Whether nothing is drafted."""
    return self.method.drafter.num_draft_tokens == 0

  @property
  def looks_up(self) -> bool:
    """Whether drafts come from a history too."""
    if not self.history_tokens:
      return False
    own = self.method.params
    params = {} if own is None else {'drafter': own}
    try:
      self.method.drafter.with_store(params, '', None)
    except ValueError:
      return False
    return True

  def new_history(self, vocab_size: int) -> History | None:
    """Returns an empty history, or None if nothing is looked up."""
    if not self.looks_up:
      return None
    return History(
      vocab_size=vocab_size,
      capacity=self.history_tokens,
      every=self.history_every,
    )


def _check_rule(method):
  rule = methods_lib.file_name(method.verify)
  if not method.verify.lossless:
    raise ValueError(
      f'Arm.method verifies with {rule}, which draws answers from another '
      "distribution than the policy's: choose a lossless rule"
    )
  if not methods_lib.has_log_probs(method):
    raise ValueError(
      f'Arm.method verifies with {rule}, which gives no probabilities of '
      'tokens: choose another rule, such as verify.chain'
    )
