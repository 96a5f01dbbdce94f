"""Which draft tree is the fastest here."""
