"""Checks that drafters make of their settings when they are made."""

import operator


def check_num_draft_tokens(num_draft_tokens: int) -> None:
  """Raises ValueError unless K is an integer of at least 1."""
  try:
    is_count = operator.index(num_draft_tokens) >= 1
  except TypeError:
    is_count = False
  if not is_count:
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens!r}: draft at least 1 token a '
      'round; NoDraft() decodes without drafts'
    )
