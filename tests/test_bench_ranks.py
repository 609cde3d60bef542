"""The benchmarks of several GPUs, on a CPU in a group of one or two processes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

from bench import context_parallel, overlap, progress, ranks_page, sharded, summary

pytestmark = pytest.mark.rotates(6)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_sequences_split_over_ranks_are_checked_and_compared_with_one_gpu(kind, group):
    """In a group of one process, where every provider of fa4 runs."""
    offered = sharded.providers(init_device_mesh("cpu", (1,)), deterministic=True)[:3]
    for case in sharded.cases(kind, "4/2", "64", 16, window=9):
        taking = [provider for provider in offered if provider.takes(case)]
        assert len(taking) == (2 if kind == "window" else 3)
        right, said = context_parallel.right_ones(case, taking, CPU, 0)
        assert right == taking and all(row["checked"] for row in said.values()), said
        rows = context_parallel.measured(case, taking, said, CPU, seconds=0.0, seed=0)
        assert [row["provider"] for row in rows] == [provider.name for provider in taking]
        assert all(row["median_ms"] > 0 and row["differs"] < 0.02 and row["sent_bytes"] == 0 for row in rows[1:])
        lines = summary.among_gpus([json.loads(json.dumps(row | {"deterministic": True})) for row in rows])
        shown = {"causal": "", "window": " window 9 |"}.get(kind, f" {kind} |")
        assert lines[2].startswith(f"| {case.direction} |{shown} 4/2 | 0k | ") and lines[2].count("%)") == len(rows) - 1
        assert summary.efficiencies(rows)[2].startswith(f"| {rows[1]['provider']} | fewer | 1 | ")
    wrong = taking[1]._replace(attend=lambda *given: 1.5 * taking[1].attend(*given))
    right, said = context_parallel.right_ones(case, [wrong], CPU, 0)
    assert not right and said[wrong.name]["error"].startswith("ArithmeticError: wrong result")


def test_operations_of_packed_sequences_and_windows_are_those_of_visible_pairs():
    causal, packed, window = (
        sharded.cases(kind, "2/2", "64", 16, window=9)[0] for kind in ("causal", "packed", "window")
    )
    assert causal.flops == 2 * 2 * 2 * 16 * (64 * 65 // 2)
    assert packed.lengths == (32, 16, 8, 8)
    assert packed.flops == 2 * 2 * 2 * 16 * sum(n * (n + 1) // 2 for n in packed.lengths)
    assert window.flops == 2 * 2 * 2 * 16 * (sum(range(1, 11)) + 54 * 10)
    assert packed.shortened(32).lengths == (16, 8, 4, 4) and window.shortened(32).window == 8
    labels = [dataclasses.replace(case, direction="bwd").label for case in (causal, packed, window)]
    assert [label.split(" b1")[0] for label in labels] == ["bwd d16 causal", "bwd d16 packed", "bwd d16 window 9"]


def test_a_trace_tells_messages_under_attention_from_exposed_ones():
    events = [
        ("ncclDevKernel_SendRecv(x)", 0.0, 4000.0),
        ("fa4_sm90_forward_1", 1000.0, 2000.0),
        ("fa4_sm90_forward_1", 1500.0, 2500.0),
        ("void at::native::add", 2000.0, 3000.0),
        ("void at::native::add", 5000.0, 6000.0),
    ]
    found = overlap.shares(events)
    expected = {"span": 6, "attention": 1.5, "messages": 4, "under_attention": 1.5, "under_others": 0.5, "exposed": 2}
    assert found == expected
    (line,) = overlap.table([{"label": "a", "provider": "b", "overlap": found}])[2:]
    assert line == "| a | b | 6 | 1.5 | 4 | 1.5 | 0.5 | 2 |"
    assert overlap.shares([]) == dict.fromkeys(expected, 0.0)


def torchrun(module: str, *arguments: object, processes: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += ["-m", module, *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_rows_of_two_ranks_have_the_bytes_of_their_messages(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = "--case causal,packed:4/2:64 --head-dim 16 --seconds 0"
    torchrun("bench.context_parallel", *options.split(), "--only", "fa4 ring,fa4 all-gather", "--output", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 3 and not any("error" in row for row in rows)
    keys = 2 * 32 * 2 * 16 * 2  # bytes of k and v of a rank
    sent = {(row["direction"], row["provider"]): row["sent_bytes"] for row in rows if "sent_bytes" in row}
    # A backward sends keys, and gradients: the ring's in the input dtype, the others in float32.
    assert sent == {
        ("fwd", "fa4 ring"): keys,
        ("fwd", "fa4 all-gather"): keys,
        ("bwd", "fa4 ring"): 2 * keys,
        ("bwd", "fa4 all-gather"): 3 * keys,
    }
    assert summary.messages(rows)[2].startswith("| fwd d16 causal b1 h4/2 64 bfloat16 | fa4 ring | 0 | ")


def test_steps_of_data_parallel_models_end_and_repeat(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = "--steps 7 --beside 6 --round 2 --layers 2 --heads 4 2 --head-dim 8 --seqlen 32 --dtype float32"
    text = torchrun("bench.progress", *options.split(), "--output", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["mode"], row["provider"]) for row in rows] == [
        (m, p) for m in progress.MODES for p in progress.PROVIDERS
    ]
    assert [row["steps"] for row in rows] == 2 * [7, 6, 6] and all(row["repeats_bitwise"] for row in rows[::3])
    losses = [row["loss"] for row in rows]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4) and losses[1] == pytest.approx(losses[2], rel=1e-4)
    lines = summary.training_lines(rows)
    assert [line for line in text.splitlines() if line.startswith("|")] == lines[2:]


def test_a_round_that_does_not_end_ends_the_process():
    program = "import time; from bench.progress import Watchdog; Watchdog(1.0).alive(); time.sleep(60)"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "Timeout (0:00:01)!" in ended.stderr


def test_a_page_is_made_of_rows(tmp_path):
    traced = {"span": 6, "attention": 1.5, "messages": 4, "under_attention": 1.5, "under_others": 0.5, "exposed": 2}
    of_machine = {"device": "GPU", "world": 4, "nccl": "2", "passing_gbps": 250.0, "versions": {"torch": "2"}}
    common = {"suite": "context_parallel", "time": "2026-01-02T00:00:00", "machine": of_machine, "deterministic": True}
    case = sharded.cases("full", "4/2", "65536", 128, window=9)[0]
    common |= {**dataclasses.asdict(case), "label": case.label, "median_ms": 2.0}
    rows = [
        {**common, "provider": "fa4, one GPU"},
        {**common, "provider": "fa4 ring", "efficiency": 0.97, "sent_bytes": 500_000_000, "overlap": traced},
        {key: value for key, value in common.items() if key != "median_ms"} | {"provider": "torch", "error": "none"},
    ]
    file, output = tmp_path / "rows.jsonl", tmp_path / "page.md"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert CliRunner().invoke(ranks_page.main, [str(file), "--output", str(output)]).exit_code == 0
    text = output.read_text()
    assert "4 x GPU, torch 2, NCCL 2, 2026-01-02; 250 GB/s" in text and "TransformerEngine is not installed" in text
    assert "| fwd | full | 4/2 | 64k | 2 | 2 (97%) | - |" in text
    assert "| fa4 ring | 64k and more | 1 | 97% | 97% | 97% |" in text
    assert f"| {case.label} | fa4 ring | 500 | 2 | 2 |" in text
    assert f"| {case.label} | fa4 ring | 6 | 1.5 | 4 | 1.5 | 0.5 | 2 |" in text
    assert f"* torch, {case.label}: none" in text
