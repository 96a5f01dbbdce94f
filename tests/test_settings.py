from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pytest

from specsample import settings
from specsample import types


@dataclasses.dataclass(frozen=True)
class _Budget(settings.Settings):
  patience: settings.Count
  decay: settings.Share = 0.98
  strength: settings.Positive = 2.0
  drafting: settings.NotNegative = 0.0
  least: Annotated[int, settings.at_least(0)] = 0
  order: Annotated[str, settings.one_of('depth', 'width')] = 'depth'
  room: settings.Count | None = None
  is_whole: settings.Flag = False
  ladder: Any = ()

  def _check(self):
    if self.least > self.patience:
      raise ValueError(f'least is {self.least}: give at most {self.patience}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wide(_Budget):
  """Inherits rules and `_check`, and sharpens one of the rules."""

  width: settings.Count
  decay: Annotated[float, settings.between(0.5, 1)] = 1.0


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'patience': 0}, 'Budget.patience is 0: give an integer of at least 1'),
    ({'patience': 2.0}, 'patience is 2.0: give an integer of at least 1'),
    ({'patience': True}, 'patience is True: give an integer'),
    ({'decay': 2}, 'Budget.decay is 2: give a number from 0 to 1'),
    ({'decay': math.nan}, 'decay is nan: give a number from 0 to 1'),
    ({'decay': 'much'}, "decay is 'much': give a number from 0 to 1"),
    ({'decay': None}, 'decay is None: give a number from 0 to 1'),
    ({'strength': 0}, 'strength is 0: give a number above 0'),
    ({'strength': math.inf}, 'strength is inf: give a number above 0'),
    ({'drafting': -0.1}, 'drafting is -0.1: give a number of at least 0'),
    ({'least': -1}, 'least is -1: give an integer of at least 0'),
    ({'order': 'up'}, "order is 'up': give one of 'depth', 'width'"),
    ({'room': 0}, 'room is 0: give an integer of at least 1'),
    ({'is_whole': 1}, 'is_whole is 1: give True or False'),
    ({'least': 9}, 'least is 9: give at most 8'),
  ],
)
def test_a_value_that_breaks_a_rule_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_Budget(8), **changes)


def test_a_value_that_follows_the_rules_is_kept():
  budget = _Budget(8, decay=1, room=3, ladder=[0, 2])
  assert (budget.decay, budget.room) == (1, 3)
  assert hash(budget) == hash(_Budget(8, 1, room=3, ladder=(0, 2)))


def test_a_subclass_inherits_rules_and_may_replace_one():
  _Wide(patience=2, width=1, decay=0.5)
  with pytest.raises(ValueError, match=r'^_Wide.patience is 0'):
    _Wide(patience=0, width=1)
  with pytest.raises(ValueError, match='width is 0'):
    _Wide(patience=1, width=0)
  with pytest.raises(ValueError, match=r'decay is 0.2: .* from 0.5 to 1'):
    _Wide(patience=1, width=1, decay=0.2)
  with pytest.raises(ValueError, match='least is 2: give at most 1'):
    _Wide(patience=1, width=1, least=2)


def test_the_structure_of_a_tree_is_checked():
  @types.pytree
  class Sums(settings.Settings):
    total: jax.Array
    depth: settings.Count = types.static()

  double = jax.jit(lambda sums: jax.tree.map(lambda x: 2 * x, sums))
  found = double(Sums(total=jnp.ones(2), depth=3))
  assert found.depth == 3 and found.total.tolist() == [2, 2]
  with pytest.raises(ValueError, match=r'Sums.depth is 0: give an integer'):
    Sums(total=jnp.ones(2), depth=0)
