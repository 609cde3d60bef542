"""Where our kernels lean on an order of products that the ISA does not promise: as the docs list it, no more."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.errors import DataRace
from warpcheck.machine import Checks, EmulationOptions

from fa4.emulator import emulate
from fa4.oracle import cases

LETTER = Checks(order="letter")
# Columns of tensor memory at head_dim 64, by what lies there while a product reads it.
P_OF_FORWARD = {column: "P" for tile in (0, 128) for column in range(tile + 64, tile + 128)}
BACKWARD = dict.fromkeys(range(128), "P") | dict.fromkeys(range(192, 320), "dS")
COVERED = {"P": "S", "dS": "dP"}  # what is written there next


def problem(direction: str) -> cases.Problem:
    return cases.make(cases.Case(direction, seqlen_q=300, seqlen_k=300, head_dim=64, causal=True), seed=1)


def documented(kernel: str) -> set[tuple[str, str]]:
    text = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()
    return set(re.findall(rf"^\| {kernel} \| (\w+) \| (\w+) \|", text, re.M))


def overlaps(launches, entry: str, spans: dict[int, str]) -> set[tuple[str, str]]:
    """(what was written, over what) of every finding; all of them must be of the letter, and in tensor memory."""
    found = [finding for launch in launches if entry in launch.entry for finding in launch.findings]
    assert {finding.kind for finding in found} == {"mma-order"}, "\n".join(map(str, found))
    columns = {int(re.match(r"data race in tensor memory, column (\d+):", f.message)[1]) for f in found}
    return {(COVERED[spans[column]], spans[column]) for column in columns}


def test_our_kernels_lean_on_what_the_docs_list():
    with emulate("sm_100a", checks=LETTER, on_finding="collect") as gpu:
        problem("bwd").call_with_gradients(backend="sm100")
    assert gpu.findings
    assert overlaps(gpu.launches, "forward", P_OF_FORWARD) == documented("forward")
    assert overlaps(gpu.launches, "backward", BACKWARD) == documented("backward")


def test_by_the_letter_the_first_of_them_is_an_error():
    with emulate("sm_100a", checks=LETTER), pytest.raises(DataRace, match="only for the same accumulator and shape"):
        problem("fwd").call(backend="sm100")


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="order is 'alphabetical', expected one of"):
        Checks(order="alphabetical")
    with pytest.raises(ValueError, match="on_finding is 'ignore', expected one of"):
        EmulationOptions(on_finding="ignore")
