"""Every backend of the chip that is here, against the oracle: all named cases, gradients, bitwise repetition."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.spec import Feature
from tests.gpu.offered import needs_gpu, serving
from tests.sm100.named import EXTRA

pytestmark = needs_gpu


def has_used_q(case: Case) -> bool:
    return any(used_q is not None for used_q, _ in case.seqused or ())


ODD = (
    Case("zero_scale", seqlen_q=90, seqlen_k=70, softmax_scale=0.0, causal=True),
    Case("negative_scale_sink", seqlen_q=90, seqlen_k=70, softmax_scale=-0.2, sink=True),
    Case("sink_without_keys", seqlen_q=5, seqlen_k=0, sink=True),
)
# Few rows and many keys: blocks share the keys of a tile, and `fwd.kernels.combine` joins their parts.
SPLIT = (
    Case("split_decode_sink", batch=2, seqlen_q=1, seqlen_k=3000, heads_q=8, head_dim=128, causal=True, sink=True),
    Case("split_ragged_dims", seqlen_q=130, seqlen_k=2100, head_dim=72, head_dim_v=40, softcap=20.0),
    Case("split_varlen", lengths=((1, 2500), (3, 40), (0, 10), (2, 0), (2, 1800)), heads_q=4, causal=True),
    Case("split_window", seqlen_q=16, seqlen_k=4000, window_size=(1500, 3), heads_q=4, heads_kv=1),
    Case("split_seqused", lengths=((4, 1300), (9, 900)), seqused=((4, 1201), (5, 0)), sink=True),
)
PADDED = Case("padded", batch=3, seqlen_q=200, seqlen_k=290, seqused=((None, 257), (None, 3), (None, 0)), causal=True)
# The public functions take seqused_q with cu_seqlens only.
NAMED = tuple(case for case in (*cases.CASES.values(), *EXTRA, *ODD, PADDED) if case.lengths or not has_used_q(case))
# Many blocks of keys take turns; those of packed sequences begin and end anywhere.
WIDE = (
    Case("wide_full", batch=2, seqlen_q=700, seqlen_k=1900, head_dim=256),
    Case("wide_causal_group", seqlen_q=1500, seqlen_k=1500, heads_q=4, heads_kv=1, head_dim=256, causal=True),
    Case("wide_varlen", lengths=((700, 700), (33, 900), (0, 5), (9, 0)), head_dim=256, causal=True),
    Case("wide_window", seqlen_q=900, seqlen_k=1000, head_dim=192, window_size=(200, 30)),
    Case("wide_values", seqlen_q=900, seqlen_k=1300, head_dim=160, head_dim_v=256),
)
# In slices of the columns of V, and of the gradients.
WIDEST = (
    Case("widest_causal_group", seqlen_q=1500, seqlen_k=1500, heads_q=4, heads_kv=1, head_dim=512, causal=True),
    Case("widest_varlen", lengths=((700, 700), (33, 900), (0, 5), (9, 0)), head_dim=328, head_dim_v=296, causal=True),
    Case("widest_few_rows", batch=2, seqlen_q=3, seqlen_k=5000, heads_q=16, heads_kv=1, head_dim=576, head_dim_v=512),
)
TRAINED, ORDERED = (Feature.BACKWARD,), (Feature.BACKWARD, Feature.DETERMINISTIC)
REPEATED = tuple(
    cases.CASES[name]
    for name in ("many_tiles", "window_both_sides", "varlen", "sink_gqa_window", "causal_d128", "head_dim_192_128")
)


@pytest.mark.parametrize("backend, case", serving(*NAMED, *SPLIT, *WIDEST))
def test_forward(backend, case, seed):
    problem = cases.make(case, seed, device="cuda")
    out, lse = problem.call(backend=backend)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{backend}, {case} (seed {seed})")


@pytest.mark.parametrize("backend, case", serving(*NAMED, *WIDEST, needs=TRAINED))
def test_gradients(backend, case, seed):
    check_gradients(backend, case, False, seed)


@pytest.mark.parametrize("backend, case", serving(*NAMED, *WIDE, *WIDEST, needs=ORDERED))
def test_deterministic_gradients(backend, case, seed):
    check_gradients(backend, case, True, seed)


def check_gradients(backend, case, deterministic, seed):
    problem = cases.make(dataclasses.replace(case, deterministic=deterministic), seed, device="cuda")
    out, lse, grads = problem.call_with_gradients(backend=backend)
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"{backend}, {case} (seed {seed})")


@pytest.mark.parametrize("backend, case", serving(*REPEATED, *WIDE, *WIDEST, needs=ORDERED))
def test_deterministic_gradients_repeat_bit_for_bit(backend, case, seed):
    problem = cases.make(dataclasses.replace(case, deterministic=True), seed, device="cuda")
    _, _, first = problem.call_with_gradients(backend=backend)
    for _ in range(50):
        _, _, again = problem.call_with_gradients(backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
