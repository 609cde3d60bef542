"""Fixture of the tests about traces."""

import sys

import pytest

from tests.mods import read


@pytest.fixture
def restored(monkeypatch):
    """What cases change is put back."""
    monkeypatch.setitem(sys.modules, "fa4_test_config", read.names.cfg)
    read.prepare()
    yield
    read.restore()
