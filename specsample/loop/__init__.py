"""The decoding loop, which knows no model, drafter or rule."""
