"""Attention ends, with the bits of a whole chip, however few SMs it gets: see `tests.gpu.residency`."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from tests.gpu.offered import needs_gpu
from tests.gpu.residency import CASES, HEAD_DIMS, IN_STREAMS, SPLIT

pytestmark = needs_gpu
LIMIT_S = 240
CONDITIONS = ("green 8", "green 33", "green 66", "green 132", "polls 66", "polls 124", "streams")


def _command(condition: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.residency", *condition.split()]


@pytest.fixture(scope="module")
def compiled():
    """The kernels of all cases are in the disk cache."""
    running = [subprocess.Popen(_command(f"compile {head_dim}")) for head_dim in HEAD_DIMS]
    assert [process.wait(600) for process in running] == [0] * len(running)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_attention_ends_however_few_sms_it_gets(condition, compiled, capsys):
    if "green" in condition and not pytest.importorskip("torch.cuda.green_contexts").SUPPORTED:
        pytest.skip("this PyTorch makes no green contexts")
    try:
        ended = subprocess.run(_command(condition), capture_output=True, text=True, timeout=LIMIT_S)
        lines, errors = ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as error:
        lines, errors = (error.stdout or b"").decode(), f"no end in {LIMIT_S} s"
    rows = [json.loads(line) for line in lines.splitlines() if line.startswith("[")]
    with capsys.disabled():
        print(f"\n{condition}: alone, there (ms)")
        for name, alone, there, what in rows:
            print(f"  {name:32} {alone:9.2f} {there:9.2f}  {what or 'equal'}")
    expected = [*IN_STREAMS] if condition == "streams" else [*CASES, SPLIT]
    assert [name for name, *_ in rows] == expected, errors[-2000:]
    assert [row for row in rows if row[3]] == []
    if condition in ("green 8", "polls 124"):  # there were so few SMs
        assert all(there > 4 * alone for name, alone, there, _ in rows if name != SPLIT)
