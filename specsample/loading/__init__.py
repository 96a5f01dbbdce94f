"""Loading models, and the drafters that belong to them, from files."""
