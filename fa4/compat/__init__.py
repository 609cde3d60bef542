"""Other libraries' functions by their names and positional order, on fa4."""
