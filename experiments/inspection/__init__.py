"""What a checkpoint is, from the headers of its files."""
