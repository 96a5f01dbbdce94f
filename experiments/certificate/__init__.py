"""Evidence that decoding is exact, and that a mistake would be noticed."""
