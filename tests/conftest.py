"""Fixtures shared by every test."""

import os
import random

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads would only get in each other's way.
    torch.set_num_threads(1)


@pytest.fixture
def seed(request) -> int:
    """A fresh seed for each run, printed when the test fails (pytest shows captured output)."""
    value = random.SystemRandom().randrange(2**31)
    print(f"seed = {value}")
    return value
