"""Remembered texts to draft from."""
