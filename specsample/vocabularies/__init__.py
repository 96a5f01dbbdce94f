"""Two vocabularies: tokens that are shared, padded, or spelled alike."""
