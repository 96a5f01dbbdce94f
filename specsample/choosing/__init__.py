"""Which drafter pays on the machine at hand."""
