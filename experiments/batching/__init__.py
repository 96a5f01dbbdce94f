"""Static batches, compared with batches whose finished rows are refilled."""
