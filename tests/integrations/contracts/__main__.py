"""python -m tests.integrations.contracts ENGINE: write the contract of an installed engine, and the page of columns."""

import sys
from importlib import import_module

from . import save

if len(sys.argv) != 2 or sys.argv[1] not in ("vllm", "sglang"):
    sys.exit(__doc__)
save(sys.argv[1], import_module(f"{__package__}.{sys.argv[1]}").recorded())
