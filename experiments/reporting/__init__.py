"""What every result is written with: rows, columns, tables, files."""
