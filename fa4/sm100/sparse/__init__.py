"""Backward of attention to listed keys, for Blackwell: `plan.backward`."""
