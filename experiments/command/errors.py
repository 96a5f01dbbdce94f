"""Errors that end every command in the same way; this file imports nothing."""


class NotWrittenError(ValueError):
  """The error if results cannot be written; its message says how to go on."""
