"""Shared parts of drafters that look only at the tokens so far."""

from specsample.drafters import pausable


class Stateless(pausable.NothingMissed):
  """The parts of `types.Drafter` that a drafter without state leaves empty."""

  feature_layers = ()
  vocab_size = None

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`; there is no state."""
    del params, batch_size, max_length
    return ()

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`."""
    del params, tokens, count, output
    return state

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`."""
    del params, tokens, length, output, verdict
    return state
