"""Hopper forward."""
