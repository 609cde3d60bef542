"""Attention on e4m3 tensors on the emulated Blackwell chip, whose kernel multiplies 8-bit numbers."""

from dataclasses import replace

import pytest
import torch
from warpcheck.machine import SCHEDULES

import fa4
from bench import static
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.fwd.variant import RESCALE_THRESHOLD_8BIT
from fa4.mods.ir.record import ModSpec
from fa4.oracle import cases, reference
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm100.fwd import plan as plans
from fa4.sm100.fwd.kernel import channels, smem_map
from fa4.sm100.fwd.plan import Sm100Forward
from fa4.sm100.fwd.tiles import tiles_for
from tests.building import compiled_ahead
from tests.fp8.heads import CASES, E4M3, explained, judged, of_heads
from tests.machine_code import machine_code

CHIP = chip_by_number(100)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.E4M3)
MXFP8 = dict(operands=Operands.MXFP8)
PACKED = ((300, 520), (0, 40), (70, 0), (1, 130))
OWN = (
    Case("pair_of_ctas", seqlen_q=300, seqlen_k=400, head_dim=256, head_dim_v=208),
    Case("two_sizes", seqlen_q=300, seqlen_k=400, head_dim=192, head_dim_v=128, causal=True),
    Case("few", seqlen_q=3, seqlen_k=900, head_dim=128, heads_q=8, heads_kv=2, causal=True, sink=True),
    Case("packed", lengths=PACKED, head_dim=128, head_dim_v=64, heads_q=2, softcap=9.0),
    Case("packed_causal", lengths=PACKED, head_dim=64, causal=True, heads_q=4, heads_kv=2),
)


def run(case, seed, arguments, problem, **changes):
    with emulate("sm_100a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]):
        return problem.call(**arguments | changes)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", (*CASES, *OWN), ids=str)
def test_case_is_right(case, seed):
    problem, arguments = of_heads(cases.make(case, seed), seed, 100)
    if not problem.inputs.varlen and case.seqused:
        for name in ("k", "v"):  # rows that no sequence uses
            for row, (_, count) in zip(arguments[name], case.seqused):
                row[count:] = torch.nan
    out, lse = run(case, seed, arguments, problem, backend="sm100")
    assert out.dtype == torch.bfloat16
    cases.assert_right(judged(problem, out, lse), f"{case.name}, seed {seed}")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("columns", [64, 128, 96])
def test_a_pair_of_ctas(columns, seed, monkeypatch):
    """Each CTA has half of V's columns, a part of a panel. No row of the tables asks for it at these head dims."""
    monkeypatch.setattr(plans, "tiles_for", lambda *what: _with_pairs(tiles_for(*what)))
    case = Case("pair", seqlen_q=300, seqlen_k=400, head_dim=columns)
    problem, arguments = of_heads(cases.make(case, seed), seed, 100)
    cases.assert_right(judged(problem, *run(case, seed, arguments, problem)), f"seed {seed}")


def _with_pairs(choice):
    return replace(choice, row=replace(choice.row, ctas=2))


@pytest.mark.rotates(4)
def test_strides_orders_and_repeats_change_no_bit(seed):
    case = CASES[3]
    problem, arguments = of_heads(cases.make(case, seed), seed, 100)
    views = {
        name: arguments[name].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
        for name in "qkv"
    }
    results = [run(case, seed + i, arguments, problem, **changes) for i, changes in enumerate(({}, {}, views))]
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


@pytest.mark.parametrize(
    "changes, names",
    [
        (dict(), {"sm100.forward"}),
        (dict(mods=ModSpec(dropout=True), varlen=True), {"sm100.forward", "idle_rows"}),
        (dict(needs_backward=True, deterministic=True, dtype=torch.float16), {"sm100.backward"}),
    ],
    ids=["forward", "dropout", "backward"],
)
def test_what_is_recorded_is_compiled(changes, names, tmp_path):
    spec = replace(SPEC, head_dim=64, head_dim_v=64, **changes)
    problem = ahead.AheadProblem(100, spec, ProblemSize(1, 300, 300))
    assert {key[0] for _, key in compiled_ahead(tmp_path, problem)} == names


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(window_right=0),
        dict(head_dim=64, head_dim_v=64),
        dict(head_dim=192, window_right=0),
        dict(head_dim=256, head_dim_v=256),
        dict(window_left=99, softcap=5.0, has_sink=True, varlen=True),
        MXFP8,
        MXFP8 | dict(window_right=0),
        MXFP8 | dict(head_dim=64, head_dim_v=64),
        MXFP8 | dict(head_dim=192, window_right=0),
        MXFP8 | dict(window_left=99, softcap=5.0, has_sink=True, varlen=True),
    ],
    ids=str,
)
def test_nothing_spills(changes, tmp_path, disassembler):
    forward = Sm100Forward(replace(SPEC, **changes), ProblemSize(4, 4096, 4096), CHIP)
    assert static.problems(machine_code(forward, tmp_path)[1]) == []


def test_every_head_dim_fits_the_chip():
    for d in range(16, 272, 16):
        for dv in range(16, 272, 16):
            for rows in (1, 4096):
                cfg = Sm100Forward(replace(SPEC, head_dim=d, head_dim_v=dv), ProblemSize(1, rows, 4096), CHIP).cfg
                assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv, rows)


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 1, 4, 64)), True),
        (dict(q=(2, 300, 4, 272), k=(2, 300, 4, 272)), False),
        (dict(q=(2, 300, 4, 72), k=(2, 300, 4, 72)), False),
        (dict(k_descale=torch.ones(2, 3, 4)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), True),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(changes, is_taken):
    """Other calls are dequantised."""
    found = explained(CHIP, changes)
    assert (found.spec.operands is Operands.E4M3) == is_taken, str(found)


@pytest.mark.parametrize("queries", [300, 100], ids=["many", "few"])
@pytest.mark.parametrize("low, scale", [(1.125, 0.193), (-52.0, 0.193)], ids=["0.21", "rounded_to_0"])
def test_dropout_may_drop_the_largest_p(low, scale, queries, seed):
    """Two keys of a row have weight. Where the first is dropped, O has the second alone, whose rounding cancels."""
    q, k, v = (torch.zeros(1, rows, 1, 64) for rows in (queries, 300, 300))
    q[..., 0], v[...] = 1, 1
    scores = torch.tensor([8.0, low])
    k[..., 0] = -448
    k[0, :2, 0, 0] = scores
    arguments = dict(zip("qkv", (x.to(E4M3) for x in (q, k, v))), softmax_scale=scale, dropout_p=0.5, dropout_seed=seed)
    with emulate("sm_100a", sms=2, seed=seed):
        out = fa4.flash_attn_func(**arguments)
    kept = fa4.dropout_mask(0.5, seed, batch=1, heads=1, seqlen_q=queries, seqlen_k=300)[0, 0, :, :2]
    alone = kept[:, 1] & ~kept[:, 0]
    assert alone.any()
    exact = 2 * torch.softmax(scores * scale, 0)[1]
    error = (out[0, alone, 0].float() - exact).abs().max()
    assert error < 0.01 * exact if exact > 1e-4 else error < 2 * exact


def test_the_reference_lags_as_kernels_do():
    assert reference._LARGEST_LOG2_P == RESCALE_THRESHOLD_8BIT
