"""Attention on e4m3 tensors with scales of blocks of 32 numbers, which the emulated consumer Blackwell chip multiplies
with them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm120.fwd.kernel import channels, smem_map
from fa4.sm120.fwd.plan import Sm120Forward
from tests.building import compiled_ahead
from tests.fp8.blocks import CASES, SharedBlockScaleTests, takes
from tests.fp8.heads import noting_kernels

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
    keys = [key for _, key in compiled_ahead(tmp_path, problem)]
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


@pytest.mark.parametrize("rows", [300, 20], ids=["many_rows", "few_rows"])
def test_lists_of_blocks(rows, seed):
    """Scales are loaded ahead for the next block of a list, which is not the one before."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (rows, 900, 900))
    mask = fa4.create_block_mask(lambda b, h, i, j: (j // 128) % 3 == 0, 1, None, rows, 900)
    (q8, qs), (k8, ks) = (fa4.quantize(x, "mxfp8") for x in (q, k))
    v8, vs = fa4.quantize(v, "mxfp8", axis="tokens")
    scales = dict(q_descale=qs, k_descale=ks, v_descale=vs)
    with emulate("sm_120a", sms=2, seed=seed), noting_kernels() as taken:
        out = fa4.flash_attn_func(q8, k8, v8, block_mask=mask, **scales)
    assert taken["native"] is Operands.MXFP8
    q, k, v = (fa4.dequantize(x, s, torch.float64) for x, s in ((q8, qs), (k8, ks), (v8, vs)))
    exact = fa4.flash_attn_func(q, k, v, block_mask=mask, backend="torch")
    assert (out.double() - exact).norm() / exact.norm() < 0.03
