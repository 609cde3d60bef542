"""Marks of tests that need a tool of the CUDA toolkit."""

import pytest
from warpcheck.timing.sass import code

try:
    code.nvdisasm()
    MISSING = ""
except FileNotFoundError as error:
    MISSING = str(error)
needs_nvdisasm = pytest.mark.skipif(bool(MISSING), reason=MISSING)
