"""Hopper kernel of the lightning indexer's scores."""
