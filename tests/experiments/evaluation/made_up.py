"""Made-up generations, which an evaluation would have decoded."""

from experiments.reporting import rows
from specsample import stats


def generation(tokens, rounds=3, **changes):
  """Returns a generation; `tokens` are its tokens, or their number."""
  tokens = [1] * tokens if isinstance(tokens, int) else tokens
  values = {
    'batch': 0,
    'category': 'a',
    'prompt_tokens': 6,
    'log_probs': [-1.0] * len(tokens),
    'seconds': 1.0,
    'stats': stats.Stats(len(tokens), rounds, (0, rounds), (rounds, 0)),
  }
  return rows.Generation(tokens=tokens, **values | changes)
