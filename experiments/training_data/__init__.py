"""Dialogues for training drafters: making, storing and reading them."""
