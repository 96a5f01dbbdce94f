"""Batches that wait for their longest row, and rows that are refilled."""
