"""Tells what a checkpoint is by the headers of its files."""
