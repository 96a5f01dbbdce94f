"""Carrying over what policies learned from one batch of prompts to the next.

What they learned is kept in the journal with each batch, so that a resumed run
draws the same tokens as an uninterrupted one.
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
  """The state that the policies of a method have learned so far.

  Attributes:
    method: its drafter has policies, as `drafters.Adaptive` does.
    journal: holds what was decoded before; None if nothing was.
  """

  method: methods_lib.Method
  journal: journal_lib.Journal | None
  known: Any = None

  @classmethod
  def of(
    cls, method: methods_lib.Method, journal: journal_lib.Journal | None
  ) -> 'Carried | None':
    """Returns a `Carried` if the method's drafter has policies, else None."""
    return cls(method, journal) if method.drafter.policies else None

  def before(self, key: tuple | None) -> Any:
    """Returns what the policies know before a batch.

    Args:
      key: the journal's key of the batch before it, which an earlier run may
        have decoded; None for the first batch.
    """
    drafter: Any = self.method.drafter  # the protocol has no policies
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

  def learn(
    self, state: specsample.types.DecodeState
  ) -> dict[str, list[Sequence[float]]]:
    """Keeps what the policies know after a batch.

    Returns:
      The same for the journal's record of the batch, as lists.
    """
    drafter: Any = self.method.drafter
    self.known = drafter.learned(state.draft)
    leaves = jax.tree.leaves(self.known)
    return {'policies': [np.asarray(x).tolist() for x in leaves]}
