"""Blackwell's forward of lists of latents on the emulated chip, against float64; which calls it serves."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from dataclasses import replace

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.runtime.device import chip_by_target
from fa4.sm100.sparse import plan
from fa4.sparse import native
from tests import lists
from tests.lists import Lists, draw

LATENT = Lists(64, tokens=2, head_dim=576, head_dim_v=512, has_dlse=False)
CASES = (
    replace(LATENT, counts=(200, 0)),
    replace(LATENT, tokens=3, counts=(64, 1, 65)),
    replace(LATENT, group=16, tokens=1, lists=2, heads=2, dtype=torch.float16),
    replace(LATENT, group=63, tokens=1, head_dim=512, counts=(129,)),
    replace(LATENT, group=1, tokens=4, rows=900, longest=800),
)


def check(case, seed, schedule, magnitude=1.0):
    """out has at most twice the error of the same operands in torch. magnitude: of the softmax scale."""
    drawn = draw(case, seed)
    q, k, drawn.scale = drawn.q, drawn.k, drawn.scale * magnitude
    with emulate("sm_100a", sms=4, seed=seed, schedule=schedule):
        out, lse = native.forward("sm100", q, k, drawn.rows, drawn.count, case.head_dim_v, drawn.scale)
    exact, same = torch.zeros(out.shape).double(), torch.zeros(out.shape)
    exact_lse = torch.full(lse.shape, -torch.inf).double()
    for token, part, (rows, head), _ in lists.each_part(drawn):
        keys, values = k[rows, head].double(), k[rows, head, : case.head_dim_v]
        scores = q[token, part].double() @ keys.T * drawn.scale
        exact_lse[token, part] = torch.logsumexp(scores, -1)
        exact[token, part] = torch.softmax(scores, -1) @ values.double()
        p = torch.exp((scores - scores.amax(-1, keepdim=True)).float())
        same[token, part] = p.to(out.dtype).float() @ values.float() / p.sum(-1, keepdim=True)
    about = f"{case}, {schedule}, seed {seed}"
    error, allowed = ((x.double() - exact).norm() for x in (out, same.to(out.dtype)))
    assert error <= 2 * allowed, f"{about}: out is {error} off, allowed {2 * allowed}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5, msg=about)
    return out


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, seed):
    """They have equal bits under all schedules."""
    first, *others = (check(case, seed, schedule) for schedule in SCHEDULES)
    assert all(torch.equal(first, other) for other in others), f"{case}, seed {seed}"


@pytest.mark.parametrize("magnitude", [20.0, -20.0, 0.0])
def test_scales(magnitude, seed):
    """With a large one, O is rescaled when later keys have larger scores."""
    check(replace(LATENT, tokens=1, counts=(200,)), seed, "random", magnitude)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_random_lists(part, seed):
    case = CASES[part % len(CASES)]
    check(replace(case, counts=None, rows=420, longest=400), seed + part, SCHEDULES[part % 3], 1 + part)


@pytest.mark.parametrize(
    ("head_dim", "columns", "group", "parts", "is_served"),
    [
        (576, 512, 64, 148, True), (512, 512, 1, 148, True), (576, 512, 65, 148, False), (576, 512, 64, 147, False),
        (576, 576, 64, 148, False), (320, 256, 64, 148, False),
    ],
)  # fmt: skip
def test_which_shapes_it_serves(head_dim, columns, group, parts, is_served):
    chip = chip_by_target("sm_100a")
    assert plan.serves_forward(torch.bfloat16, head_dim, columns, group, parts, chip) == is_served
    assert not plan.serves_forward(torch.float32, head_dim, columns, group, parts, chip)


@pytest.mark.parametrize(("queries", "is_copied", "is_served"), [(3, False, True), (3, True, False), (1, False, False)])
def test_which_calls_it_serves(queries, is_copied, is_served, seed, monkeypatch):
    """Results are right in any case."""
    launched = []
    forward = plan.forward
    monkeypatch.setattr(plan, "forward", lambda *arguments: launched.append(forward(*arguments)))
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, rows, heads, 576, generator=gen).bfloat16() for rows, heads in ((queries, 16), (300, 1)))
    v = k[..., :512].clone() if is_copied else k[..., :512]
    sink = torch.randn(16, generator=gen).bfloat16()
    indices = torch.rand(1, queries, 1, 300, generator=gen).argsort(-1)[..., :150].int()
    options = dict(causal=True, window=5, return_lse=True)
    with emulate("sm_100a", sms=2, seed=seed):
        out, lse = fa4.sparse_attention(q, k, v, indices, sink=sink, **options)
    exact = [x.double() for x in (q, k, v)]
    right, right_lse = fa4.sparse_attention(*exact, indices, sink=sink.double(), **options)
    assert (out.double() - right).norm() < 0.01 * right.norm(), f"seed {seed}"
    assert (lse.double() - right_lse).abs().max() < 1e-4, f"seed {seed}"
    assert len(launched) == is_served


def test_keys_of_a_block_fill_the_ring_more_than_twice():
    """S of the next block is computed while this one's rows are still there."""
    chip = chip_by_target("sm_100a")
    for head_dim, in_tmem, in_smem in ((576, 6, 3), (512, 6, 2)):
        cfg = plan._forward_config(torch.bfloat16, 64, head_dim, 512, chip)
        assert (cfg.q_panels_in_tmem, cfg.q_panels_in_smem) == (in_tmem, in_smem)
        assert cfg.ring_stages >= 2 * cfg.stages_of_block
