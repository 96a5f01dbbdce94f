"""How commands start and end: flags, settings, journals, progress."""
