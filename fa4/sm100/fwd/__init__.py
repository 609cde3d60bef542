"""The Blackwell forward. Read `kernel` first: who does what stands there, as tables."""
