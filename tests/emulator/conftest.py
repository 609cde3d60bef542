"""What tests of the emulator share."""

import pytest


@pytest.fixture
def nvrtc():
    """The module that compiles CUDA C++."""
    from warpcheck import nvrtc

    try:
        nvrtc.library()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"compiles CUDA C++ by NVRTC, of the package nvidia-cuda-nvrtc: {error}")
    return nvrtc
