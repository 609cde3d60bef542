"""Fixtures shared by every test; fresh memory is poisoned, so that a result nobody wrote cannot look right."""

import os

import pytest
import torch

from tests.poisoned import fresh_memory_is_poison

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads would only get in each other's way.
    torch.set_num_threads(1)


def pytest_addoption(pluginmanager):
    """The plug-in of warpcheck's tests; they may run in the same session."""
    pluginmanager.import_plugin("warpcheck_cases.suite")


@pytest.fixture(autouse=True)
def _poison_fresh_memory():
    """In every test."""
    with fresh_memory_is_poison():
        yield


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The entries of kernels that calls ask the disk for, none of which is there; what is launched does nothing."""
    from fa4.runtime import jit
    from tests.forget import forget_calls

    entries = []

    def through_disk(directory, full_key, build):
        entries.append(jit._entry(directory, full_key).name)
        return lambda *arguments: None

    forget_calls()
    monkeypatch.setattr(jit, "_through_disk", through_disk)
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    yield entries
    forget_calls()
