"""The decoding loop, which works with any model, drafter and rule."""
