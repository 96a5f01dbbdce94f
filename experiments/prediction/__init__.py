"""Predicted speedups on chips that are not at hand."""
