"""Covering arrays: every pair of options of a call on every chip, every triple on the torch path; see `model`."""
