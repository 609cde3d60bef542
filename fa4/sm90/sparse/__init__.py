"""Backward of attention to listed keys, for Hopper: `plan.backward`."""
