"""The start and end of commands: flags, settings, journals, progress."""
