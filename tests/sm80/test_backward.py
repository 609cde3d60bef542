"""The portable backward: tiles for every head dim, code for every flag, and on a GPU gradients and determinism."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import cases, jit
from fa4.cases import Case
from fa4.device import chip_by_number
from fa4.sm80.backward import BackwardConfig, build
from fa4.sm80.tiles import backward_tiles

ODD = (
    Case("negative_scale", seqlen_q=90, seqlen_k=70, softmax_scale=-0.2, sink=True),
    Case("zero_scale", seqlen_q=90, seqlen_k=70, softmax_scale=0.0, causal=True),
    Case("sink_without_keys", seqlen_q=5, seqlen_k=0, sink=True),
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernel on a CUDA device")


@pytest.mark.parametrize("number", [80, 86, 90, 120])
def test_every_head_dim_has_tiles_that_fit_the_chip(number):
    chip = chip_by_number(number)
    for head_dim in range(8, 257, 8):
        for head_dim_v in (8, head_dim, 256):
            assert backward_tiles(head_dim, head_dim_v, chip).fits(head_dim, head_dim_v, chip)


@pytest.mark.parametrize("number", [80, 90, 120])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_compiles_without_a_gpu(number, everything):
    chip = chip_by_number(number)
    head_dim, head_dim_v = (72, 40) if everything else (64, 64)
    flags = [
        "has_left",
        "has_right",
        "has_softcap",
        "has_sink",
        "varlen",
        "has_seqused_q",
        "has_seqused_k",
        "has_dlse",
        "deterministic",
    ]
    cfg = BackwardConfig(
        dtype=jit.dsl_dtype(torch.float16 if everything else torch.bfloat16),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        group=4 if everything else 1,
        tiles=backward_tiles(head_dim, head_dim_v, chip),
        **dict.fromkeys(flags, everything),
    )
    assert hash(cfg) == hash(dataclasses.replace(cfg))  # it is a cache key
    assert callable(build(cfg, chip))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@pytest.mark.parametrize("case", [*cases.CASES.values(), *ODD], ids=str)
def test_gradients_of_named_case_on_the_gpu(case, deterministic, seed):
    case = dataclasses.replace(case, deterministic=deterministic)
    problem = cases.make(case, seed, device="cuda")
    out, lse, grads = problem.call_with_gradients(backend="sm80")
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"{case} (seed {seed})")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["many_tiles", "window_both_sides", "varlen", "sink_gqa_window"])
def test_deterministic_gradients_repeat_bit_for_bit(name, seed):
    case = dataclasses.replace(cases.CASES[name], deterministic=True)
    problem = cases.make(case, seed, device="cuda")
    _, _, first = problem.call_with_gradients(backend="sm80")
    for _ in range(50):
        _, _, again = problem.call_with_gradients(backend="sm80")
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
