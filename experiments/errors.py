"""Errors that end every command in the same way; imports nothing."""


class NotWrittenError(ValueError):
  """What was found cannot be kept; the message says how to go on."""
