"""Carries what policies learned from one batch of prompts to the next.

It is in the journal beside each batch, so that a run that goes on draws what an
undisturbed one draws.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import journal as journal_lib
import specsample


@dataclasses.dataclass(eq=False)
class Carried:
  """What the policies of a method have learned so far.

  Attributes:
    method: has a drafter with policies, such as `drafters.Adaptive`.
    journal: what was decoded before; None if nothing was.
  """

  method: methods_lib.Method
  journal: journal_lib.Journal | None
  known: Any = None

  @classmethod
  def of(
    cls, method: methods_lib.Method, journal: journal_lib.Journal | None
  ) -> 'Carried | None':
    """Returns it for a method with policies, None for others."""
    return cls(method, journal) if hasattr(method.drafter, 'learned') else None

  def before(self, key: tuple | None) -> Any:
    """Returns what was known after the batch of that key, None for the first.

    Args:
      key: of the journal; the batch may have been decoded by another process.
    """
    drafter: Any = self.method.drafter  # the protocol knows no policies
    untaught = drafter.untaught()
    if key is None:
      return untaught
    if self.known is None and self.journal is not None and key in self.journal:
      leaves, structure = jax.tree.flatten(untaught)
      kept = self.journal[key]['policies']
      self.known = jax.tree.unflatten(
        structure,
        [
          np.asarray(x, leaf.dtype)
          for x, leaf in zip(kept, leaves, strict=True)
        ],
      )
    return untaught if self.known is None else self.known

  def learn(self, state: specsample.types.DecodeState) -> None:
    """Takes in what the policies knew at the end of a batch."""
    drafter: Any = self.method.drafter
    self.known = drafter.learned(state.draft)

  def to_json(self) -> list[Sequence[float]]:
    """Returns what is known for the journal."""
    return [np.asarray(x).tolist() for x in jax.tree.leaves(self.known)]
