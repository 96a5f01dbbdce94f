"""Errors that end every command in the same way; imports nothing."""


class NotWrittenError(ValueError):
  """Results cannot be written; the message says how to go on."""
