"""Digests of the PTX of a sample of kernels, to show that a change of the source changes no code.

python -m tests.configurations.ptx keep FILE --jobs 2       before the change
python -m tests.configurations.ptx compare FILE --jobs 2    after it; names the kernels that differ

The sample is every n-th problem of each family of `problems`, on each backend's own chip. Line numbers, comments and
the names of symbols are no part of a digest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import re
import sys
from pathlib import Path
from unittest import mock

from fa4.runtime.device import chip_by_number

from .kernels import planned
from .problems import families

OWN = ((80, "sm80"), (90, "sm90"), (100, "sm100"))
EVERY = {"options": 20, "shapes": 30000, "caches": 5000, "eight bits": 500, "few keys": 6}


def code(ptx: str) -> str:
    """What is left of PTX when what only tells where it came from is gone."""
    kept = []
    for line in re.sub(r"//[^\n]*", "", ptx).splitlines():
        text = line.strip()
        if text.startswith(".section") and "debug" in text:
            break
        if text and not text.startswith((".loc", ".file", ".pragma")):
            kept.append(text)
    text = "\n".join(kept)
    for i, name in enumerate(dict.fromkeys(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text))):
        text = text.replace(name, f"kernel{i}")
    return text


def digests(number: int, backend: str, family: str, share: int, shares: int) -> dict[str, str]:
    """Of every `shares`-th problem of a family's sample: digest by kernel."""
    from warpcheck.host.modules import Modules

    from fa4.emulator import emulate

    found, seen, texts = dict[str, str](), set[tuple](), list[str]()

    def register(_modules: Modules, _binary: bytes, ptx: str, *_rest: object) -> None:
        texts.append(ptx)

    sample = list(enumerate(families()[family]))[:: EVERY[family]][share::shares]
    with emulate(chip_by_number(number).target), mock.patch.object(Modules, "register", register):
        for index, problem in sample:
            for ordinal, kernel in enumerate(planned(problem, number, backend) or []):
                if kernel.key in seen:
                    continue
                seen.add(kernel.key)
                texts.clear()
                kernel.program.compile(kernel.cfg, dataclasses.replace(kernel.chip, emulated=True))
                assert texts, "the compiler kept no PTX"
                whole = "\n".join(code(text) for text in texts)
                found[f"{backend} {family} {index} {ordinal}"] = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.configurations.ptx", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("keep", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--backend", action="append", choices=[backend for _, backend in OWN])
    options = parser.parse_args()
    shares = 2 * options.jobs
    found: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        work = [
            pool.submit(digests, number, backend, family, share, shares)
            for number, backend in OWN
            if options.backend is None or backend in options.backend
            for family in EVERY
            for share in range(shares)
        ]
        for done in concurrent.futures.as_completed(work):
            found |= done.result()
    if options.action == "keep":
        options.file.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{len(found)} kernels kept")
        return 0
    before = json.loads(options.file.read_text())
    differ = sorted(name for name in found if before.get(name) != found[name])
    print("\n".join(differ))
    print(f"{len(found)} kernels compared, {len(differ)} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
