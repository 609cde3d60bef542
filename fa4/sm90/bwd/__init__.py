"""Hopper backward. Read `kernel` first: roles, channels and shared-memory map as tables."""
