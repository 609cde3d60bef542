"""Attention on e4m3 tensors with scales of blocks of 32 numbers, which the emulated consumer Blackwell chip multiplies
with them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.api import ahead
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm120.fwd.kernel import channels, smem_map
from fa4.sm120.fwd.plan import Sm120Forward
from tests.fp8.blocks import CASES, SharedBlockScaleTests, takes

pytestmark = pytest.mark.rotates(6)

SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.MXFP8)
OWN = (
    # Fewer words of four scales than lanes of a quad, and columns of the last one that V has not.
    Case("columns_of_v", seqlen_q=130, seqlen_k=200, head_dim=128, head_dim_v=112, causal=True),
    # A tile has rows of all query heads of a group; one of its four slots is empty.
    Case("one_query", batch=2, seqlen_q=1, seqlen_k=200, head_dim=64, heads_q=6, heads_kv=2),
    Case("few_queries", lengths=((3, 90), (0, 33), (5, 0), (4, 200)), head_dim=96, heads_q=4, heads_kv=1, causal=True),
)


class TestBlockScales(SharedBlockScaleTests):
    number = 120

    @pytest.mark.parametrize("case", (*CASES.values(), *OWN), ids=str)
    def test_case_is_right(self, case, seed):
        self.check(*self.of_blocks(case, seed), seed)

    def test_keys_are_split(self, seed):
        """Also those of single queries, which one consumer has."""
        for rows in (140, 1):
            case = Case("split", seqlen_q=rows, seqlen_k=900, head_dim=64, heads_q=2, heads_kv=1)
            spec = replace(SPEC, head_dim=64, head_dim_v=64, heads_q=2, heads_kv=1)
            assert Sm120Forward(spec, ProblemSize(1, rows, 900), chip_by_number(120, sms=8)).splits > 1
            self.check(*self.of_blocks(case, seed), seed, sms=8)


def test_what_is_recorded_is_compiled(tmp_path):
    problem = ahead.AheadProblem(120, replace(SPEC, head_dim=64, head_dim_v=64), ProblemSize(1, 300, 300))
    keys = [key for _, key in ahead.compile_into(tmp_path, problem)]
    assert len(keys) == 1 and "MXFP8" in str(keys[0])


@pytest.mark.parametrize("number", [120, 121])
def test_every_head_dim_fits_the_chip(number):
    chip = chip_by_number(number)
    for d, dv in ((d, dv) for d in (32, 64, 96, 128) for dv in range(16, 144, 16)):
        for extent in (ProblemSize(1, 1, 4096), ProblemSize(1, 4096, 4096)):
            cfg = Sm120Forward(replace(SPEC, head_dim=d, head_dim_v=dv), extent, chip).cfg
            assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block, (d, dv)
            assert cfg.stages >= 2 and cfg.tile_n % 32 == 0, (d, dv)


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 1, 4, 64)), True),
        (dict(q=(2, 300, 4, 192), k=(2, 300, 4, 192), v=(2, 300, 4, 192)), False),
        (dict(v=(2, 300, 4, 72)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), False),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(changes, is_taken):
    """Other calls are dequantised."""
    assert takes(120, changes) == is_taken
