"""Functions of other libraries on fa4, with their names and positional order."""
