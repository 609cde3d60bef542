"""Fixtures of warpcheck's tests."""

import pytest


def pytest_addoption(pluginmanager):
    """Once, also where another suite that runs in the same session has loaded it."""
    pluginmanager.import_plugin("warpcheck_cases.suite")


@pytest.fixture
def nvrtc():
    """The module that compiles CUDA C++."""
    from warpcheck import nvrtc

    try:
        nvrtc.library()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"compiles CUDA C++ by NVRTC, of the package nvidia-cuda-nvrtc: {error}")
    return nvrtc
