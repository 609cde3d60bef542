"""Blackwell forward of head dims above 256."""
