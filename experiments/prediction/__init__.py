"""Speedups on chips that are not there."""
