"""Backward of attention to listed keys by up to 64 heads: the rows of its products are keys."""
