"""Compilation for TPUs that are not attached, and analysis of the programs."""
