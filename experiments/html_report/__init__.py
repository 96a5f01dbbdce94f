"""All results on one page."""
