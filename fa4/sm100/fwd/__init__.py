"""The Blackwell forward. Read `kernel` first: it has the tables of roles, channels and memory."""
