"""python -m tests.integrations.contracts ENGINE: write the contract of an installed engine, and the page of columns;
with "page" as ENGINE the page alone."""

import sys
from importlib import import_module

from . import page, save

if len(sys.argv) != 2 or sys.argv[1] not in ("vllm", "sglang", "page"):
    sys.exit(__doc__)
if sys.argv[1] != "page":
    save(sys.argv[1], import_module(f"{__package__}.{sys.argv[1]}").recorded())
page.PAGE.write_text(page.text())
