"""A server of prompts whose drafter learns from its rejected drafts."""
