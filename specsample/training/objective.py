"""What a drafter is trained for, as the trainer takes it."""

from typing import Any, ClassVar, Protocol

from specsample.training.step import Batch
from specsample.types import Array, Params


class Objective(Protocol):
  """A loss of the whole tree of parameters, on a batch of documents.

  A batch holds `tokens` [B, T] int32, a document a row, and `mask` [B, T] bool,
  set where the target wrote the token: those are learned. It may hold `hidden`
  [B, T, D], the target's vectors, found before.

  Implementations are frozen dataclasses of static configuration.
  """

  # So that a type checker takes `dataclasses.fields` of one.
  __dataclass_fields__: ClassVar[dict[str, Any]]

  @property
  def drafter(self) -> Any:
    """The `types.Drafter` that is trained."""

  @property
  def reads_prompt(self) -> bool:
    """Whether more is read than a row's `hidden` from two tokens before the
    mask on."""

  def __call__(
    self, params: Params, batch: Batch
  ) -> tuple[Array, dict[str, Array]]:
    """The loss [], and a report of the batch."""

  def matches(self, params: Params, batch: Batch) -> Array:
    """Where drafts would be right, [K, B, T] bool.

    At [i, b, t], with token t pending: whether the most likely draft i is token
    t + 1 + i, given those before it, and that token is one to learn.
    """
