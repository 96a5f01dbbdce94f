"""The training of a drafter."""
