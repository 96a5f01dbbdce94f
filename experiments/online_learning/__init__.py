"""A server of prompts whose drafter learns from what is rejected."""
