"""Blackwell backward of head dims above 256."""
