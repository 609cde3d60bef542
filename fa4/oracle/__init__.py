"""Attention by formula in float64, and named cases that are judged by it."""
