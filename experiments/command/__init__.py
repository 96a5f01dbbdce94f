"""What every command starts with and ends with."""
