"""Timing of passes, rounds and methods on the devices at hand."""
