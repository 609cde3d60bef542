"""Hopper forward of e4m3 queries, keys and values by 8-bit products."""
