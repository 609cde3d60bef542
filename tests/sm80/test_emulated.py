"""The portable kernels on the emulated chip: right against the oracle, and free of races, leaks and stray accesses."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4 import cases
from fa4.cases import Case
from fa4.emulator import emulate

# Small, and each with a part of the kernels that the others leave out.
FORWARD = (
    Case("split_keys", seqlen_q=2, seqlen_k=1100, heads_q=4, head_dim=32, sink=True),
    Case("packed_heads", batch=2, seqlen_q=3, seqlen_k=190, heads_q=8, head_dim=64, causal=True),
)
BOTH = (
    Case("whole_and_ragged_tiles", seqlen_q=140, seqlen_k=200, heads_q=1, heads_kv=1, dtype=torch.float16),
    Case("causal_groups_sink", seqlen_q=70, seqlen_k=150, head_dim=32, heads_q=4, causal=True, sink=True),
    Case("sink_without_keys", seqlen_q=5, seqlen_k=0, softmax_scale=-0.2, sink=True),
    Case(
        "varlen_window_softcap_padding",
        lengths=((70, 90), (0, 5), (33, 20)),
        seqused=((61, 90), (0, 5), (33, 0)),
        head_dim=40,
        head_dim_v=24,
        heads_kv=1,
        window_size=(30, 5),
        softcap=10.0,
    ),
)


def _emulated(seed: int):
    schedule = random.Random(seed).choice(["round_robin", "random", "adversarial"])
    print(f"schedule = {schedule}")
    return emulate("sm_80", seed=seed, schedule=schedule)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case, seed):
    problem = cases.make(case, seed)
    with _emulated(seed):
        out, lse = problem.call(backend="sm80")
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{case} (seed {seed})")


@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_forward_and_gradients(case, deterministic, seed):
    problem = cases.make(dataclasses.replace(case, deterministic=deterministic), seed)
    with _emulated(seed):
        out, lse, grads = problem.call_with_gradients(backend="sm80")
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"{case} (seed {seed})")
