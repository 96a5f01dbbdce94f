"""Decoding of prompts with a method, and display of the output."""
