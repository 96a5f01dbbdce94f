"""Which drafters `generate` decodes with."""

import types

import pytest

from experiments.decoding import generating


class _Flags(types.SimpleNamespace):
  """Flag values, and whether --drafter was given."""

  def __getitem__(self, name):
    return types.SimpleNamespace(present=name == 'drafter' and self.is_given)


@pytest.mark.parametrize(
  'candidates, is_given, names',
  [
    (None, False, ['auto']),
    # The drafter that auto chooses may not have candidates.
    (5, False, ['draft']),
    (5, True, ['auto']),
  ],
)
def test_candidates_are_a_draft_models_if_no_drafter_is_named(
  monkeypatch, candidates, is_given, names
):
  values = _Flags(
    top_candidates=candidates, drafter=['auto'], is_given=is_given
  )
  monkeypatch.setattr(generating.flags, 'FLAGS', values)
  assert generating._names() == names
