"""Drafting across two vocabularies: by shared tokens, padding or text."""
