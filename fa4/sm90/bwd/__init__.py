"""The Hopper backward. Read `kernel` first: who does what stands there, as tables."""
