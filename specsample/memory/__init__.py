"""Texts that are remembered, to draft from."""
