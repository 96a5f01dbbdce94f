"""Recorded rounds, and what other rules would have made of them."""
