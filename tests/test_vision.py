"""Shapes of vision encoders and of denoisers on the emulated chips: few keys, 72 and 80 columns, odd lengths.

Lengths have the remainders, in tiles of 128, of those in the benchmarks: 77 like 4,173 tokens, 120 like 32,760.
"""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from bench.suites import SUITES
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.sm80.plan import Plan as Sm80Plan
from fa4.sm90.plan import Plan as Sm90Plan
from fa4.sm100.plan import Plan as Sm100Plan
from tests.emulated import Kernels, check_forward, check_gradients

pytestmark = pytest.mark.rotates(6)

KERNELS = {
    "sm80": Kernels("sm80", "sm_80", Sm80Plan),
    "sm90": Kernels("sm90", "sm_90a", Sm90Plan),
    "sm100": Kernels("sm100", "sm_100a", Sm100Plan),
}
CASES = {
    case.name: case
    for case in (
        Case("image_to_77_tokens_of_text", batch=2, seqlen_q=256, seqlen_k=77),
        Case("image_to_300_tokens_d72", seqlen_q=205, seqlen_k=300, head_dim=72),
        Case("video_to_512_tokens", seqlen_q=248, seqlen_k=512, head_dim=128),
        Case("odd_image_d72", seqlen_q=205, seqlen_k=205, head_dim=72),
        Case("odd_image_d80", seqlen_q=205, seqlen_k=205, head_dim=80),
        Case("learned_queries_d72", batch=2, seqlen_q=64, seqlen_k=333, head_dim=72),
        Case("images_of_several_sizes_d72", lengths=((205, 20), (49, 5), (120, 20)), head_dim=72),
    )
}


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_forward(backend, name, seed):
    check_forward(KERNELS[backend], CASES[name], seed)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("learned")])
def test_backward(backend, name, seed):
    check_gradients(KERNELS[backend], cases.make(CASES[name], seed), seed, "random")


def test_suites_have_what_these_cases_stand_for():
    found = {(c.seqlen_q % 128, c.seqlen_k, c.head_dim) for name in ("vision", "diffusion") for c in SUITES[name]}
    assert {(0, 77, 64), (0, 300, 72), (120, 512, 128), (77, 4173, 72), (77, 4173, 80), (64, 4173, 72)} <= found
