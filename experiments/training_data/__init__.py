"""Dialogues that drafters learn from: how they are made, kept and read."""
