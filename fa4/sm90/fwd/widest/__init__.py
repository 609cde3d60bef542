"""Hopper forward of head dims above 256: a pair of CTAs shares its rows."""
