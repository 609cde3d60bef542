"""Attention on e4m3 tensors with scales of blocks of 32 numbers, which the emulated Blackwell chip multiplies with
them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.api import ahead
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm100.fwd.kernel import channels, smem_map, tmem_map
from fa4.sm100.fwd.plan import Sm100Forward
from tests.building import compiled_ahead
from tests.fp8.blocks import CASES, SharedBlockScaleTests, takes

CHIP = chip_by_number(100)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.MXFP8)
OWN = Case("two_sizes", seqlen_q=300, seqlen_k=400, head_dim=192, head_dim_v=128, causal=True)


class TestBlockScales(SharedBlockScaleTests):
    number = 100

    @pytest.mark.rotates(4)
    @pytest.mark.parametrize("case", (*CASES.values(), OWN), ids=str)
    def test_case_is_right(self, case, seed):
        self.check(*self.of_blocks(case, seed), seed)

    def test_keys_are_split(self, seed):
        problem, arguments = self.of_blocks(Case("split", seqlen_q=140, seqlen_k=1500, head_dim=64), seed)
        spec = replace(SPEC, head_dim=64, head_dim_v=64, heads_q=1, heads_kv=1)
        assert Sm100Forward(spec, ProblemSize(1, 140, 1500), chip_by_number(100, sms=8)).splits > 1
        self.check(problem, arguments, seed, sms=8)


def test_what_is_recorded_is_compiled(tmp_path):
    problem = ahead.AheadProblem(100, replace(SPEC, head_dim=64, head_dim_v=64), ProblemSize(1, 300, 300))
    keys = [key for _, key in compiled_ahead(tmp_path, problem)]
    assert len(keys) == 1 and "MXFP8" in str(keys[0])


def test_every_head_dim_fits_the_chip():
    for d, dv in ((d, dv) for d in (32, 64, 96, 128) for dv in range(16, 144, 16)):
        cfg = Sm100Forward(replace(SPEC, head_dim=d, head_dim_v=dv), ProblemSize(1, 4096, 4096), CHIP).cfg
        assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv)
        assert tmem_map(cfg).end <= 512 and cfg.kv_stages >= 3, (d, dv)


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 128, 4, 64)), False),
        (dict(q=(2, 300, 4, 192), k=(2, 300, 4, 192), v=(2, 300, 4, 192)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), True),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(changes, is_taken):
    """Other calls are dequantised."""
    assert takes(100, changes) == is_taken
