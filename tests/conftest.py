"""Fixtures shared by every test."""

import random

import pytest


@pytest.fixture
def seed(request) -> int:
    """A fresh seed for each run, printed when the test fails (pytest shows captured output)."""
    value = random.SystemRandom().randrange(2**31)
    print(f"seed = {value}")
    return value
