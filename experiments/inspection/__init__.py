"""Inspection of checkpoints by the headers of their files."""
