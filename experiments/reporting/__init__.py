"""Results as rows, columns, tables and files."""
