"""Recorded rounds, and their replay with other rules and policies."""
