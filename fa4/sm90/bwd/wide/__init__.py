"""Hopper backward of wide heads. Read `kernel` first: roles, channels and shared-memory map as tables."""
