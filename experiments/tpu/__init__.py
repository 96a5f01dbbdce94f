"""Programs compiled for TPUs that are not there, and what is in them."""
