"""Every example runs, and its own checks pass."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ALONE = {
    "custom_mask": [],
    "decode_with_pages": [],
    "denoise": ["--steps", "10"],
    "finetune_transformers": [],
    "serve": ["10"],
    "sparse_gpt": ["--steps", "12"],
    "train_gpt": ["--steps", "15"],
}
TOGETHER = ["long_context"]


def test_each_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*ALONE, *TOGETHER}


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs(name, monkeypatch, capsys):
    if name == "finetune_transformers":
        pytest.importorskip("transformers", reason="hooks into it")
    monkeypatch.setattr(sys, "argv", [name, *ALONE[name]])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", TOGETHER)
def test_an_example_of_two_processes_runs(name):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": str(EXAMPLES.parent),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)
    assert "2 ranks" in printed[0]
