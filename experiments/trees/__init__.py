"""Choosing the draft tree that is fastest on this machine."""
