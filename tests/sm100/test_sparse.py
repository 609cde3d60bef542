"""Blackwell's backward of lists on the emulated chip, against float64; which calls it serves; its machine code."""

import functools

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")


import fa4
from fa4.emulator import emulate
from fa4.sm100.sparse import plan
from fa4.sm100.sparse.config import Gradient, Sm100SparseConfig
from fa4.sm100.sparse.transposed.config import Place, Sm100TransposedConfig
from tests import lists
from tests.lists import Lists, draw

check = functools.partial(lists.check, backend="sm100", chip="sm_100a")
CASES = (
    Lists(128, counts=(200, 0, 70), head_dim=576, head_dim_v=512),  # latents
    Lists(64, counts=(128, 1, 400), head_dim=576, head_dim_v=512, rows=500, longest=400, has_dlse=False),
    Lists(65, tokens=2, head_dim=576, head_dim_v=576, has_dlse=False),  # one CTA of a pair has one head
    Lists(100, tokens=2, heads=2, head_dim=192, head_dim_v=64, dtype=torch.float16, has_dlse=False),
    Lists(16, lists=2, head_dim=64, head_dim_v=576, dtype=torch.float16),
    Lists(64, tokens=2, counts=(0, 129), head_dim=576, head_dim_v=64, dtype=torch.float16),
    Lists(200, tokens=2, has_dlse=False),  # two pairs share a list
    Lists(1, tokens=4, lists=3, heads=2, head_dim=256, head_dim_v=128),
)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, seed):
    lists.check_schedules(check, draw(case, seed), seed, str(case))


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_deterministic_gradients(case, seed):
    lists.check_equal_bits(check, case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(len(CASES)))
def test_random_lists(part, seed):
    lists.check_random(check, CASES[part], seed, draws=6, longest=400, rows=420, tokens=3)


@pytest.mark.parametrize("group", [128, 64])
def test_values_that_are_columns_of_the_keys(group, seed):
    """Rows of v then have the distance of those of k."""
    drawn = draw(Lists(group, tokens=1, head_dim=192, head_dim_v=128, counts=(150,)), seed)
    drawn = draw_latent(drawn, seed)
    check(drawn, seed, "random", "latent")


def draw_latent(drawn, seed):
    """The problem with v in the memory of k."""
    drawn.v = drawn.k[..., : drawn.v.shape[-1]]
    out, lse = torch.zeros(drawn.saved.out.shape).double(), torch.full(drawn.saved.lse.shape, -torch.inf).double()
    for token, part, _, x in lists.each_part(drawn):
        scores = x["q"].double() @ x["k"].double().T * drawn.scale
        lse[token, part] = torch.logsumexp(scores, -1)
        out[token, part] = torch.softmax(scores, -1) @ x["v"].double()
    drawn.saved = drawn.saved._replace(out=out.to(drawn.q.dtype), lse=lse.float())
    return drawn


def test_heads_at_unequal_distances(seed):
    """Rows of k and v whose heads are far apart are copied."""
    drawn = draw(Lists(8, tokens=1, heads=2, head_dim=64, head_dim_v=64, counts=(100,)), seed)
    drawn.k = drawn.k.transpose(0, 1).contiguous().transpose(0, 1)
    check(drawn, seed, "random", "heads first")


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    ("backend", "deterministic", "head_dim", "is_served"),
    [("auto", False, 320, True), ("auto", True, 320, True), ("sm80", False, 64, False), ("auto", False, 136, False)],
)
def test_which_calls_it_serves(backend, deterministic, head_dim, is_served, seed, monkeypatch):
    """Gradients are right in any case."""
    launched = []
    backward = plan.backward
    monkeypatch.setattr(plan, "backward", lambda *arguments: launched.append(backward(*arguments)))
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2, 4, head_dim, generator=gen).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 90, 2, head_dim, generator=gen).bfloat16().requires_grad_() for _ in range(2))
    indices = torch.stack([torch.randperm(90, generator=gen)[:70] for _ in range(4)]).view(1, 2, 2, 70).int()
    with emulate("sm_100a", sms=2, seed=seed):
        out = fa4.sparse_attention(q, k, v, indices, backend=backend, deterministic=deterministic)
        dout = torch.randn(out.shape, generator=gen).to(out.dtype)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = fa4.sparse_attention(*exact, indices)
    for x, right in zip(grads, torch.autograd.grad(out, exact, dout.double())):
        assert (x.double() - right).norm() < 0.01 * right.norm(), f"seed {seed}"
    assert len(launched) == is_served


def test_one_row_of_two_pairs_is_not_served_in_order():
    """Both would store to the rows of a list."""
    assert plan.serves(torch.bfloat16, 64, 64, 129, False) and not plan.serves(torch.bfloat16, 64, 64, 129, True)


def test_products_of_dq_stand_between_those_that_leave_tensor_memory():
    cfg = _config(128)
    letters = {Gradient.DV: "v", Gradient.DK: "k", Gradient.DQ: "q"}
    assert "".join(letters[product.gradient] for product in cfg.products) == "vvqvqvqkqkqkkk"
    assert [product.drains for product in cfg.products if product.drains is not None] == list(range(9))


@pytest.mark.parametrize(("group", "kind"), [(64, Sm100TransposedConfig), (65, Sm100SparseConfig)])
def test_up_to_64_heads_are_columns_of_products(group, kind):
    assert type(_config(group)) is kind


def _config(group, head_dim=576, head_dim_v=512):
    chip = fa4.runtime.device.chip_by_target("sm_100a")
    return plan._config(torch.bfloat16, group, head_dim, head_dim_v, False, False, chip)


def test_panels_of_sums_are_beside_the_scores_that_they_do_not_overwrite():
    cfg = _config(64)
    places = [panel.place for panel in cfg.panels]
    beside_s, beside_dp = cfg.beside
    assert (beside_s, beside_dp) == (5, 6)  # of 17, as S and dP read 9 and 8 of 26 panels
    assert places[:beside_s] == [Place.DP] * 5 and places[beside_s:-6] == [Place.S] * 6
    assert places[-6:] == [Place.S, Place.DP] * 3
    assert [(panel.is_dv, panel.number) for panel in cfg.panels[7:9]] == [(True, 7), (False, 0)]


@pytest.mark.parametrize("head_dim", range(64, 577, 64))
def test_a_ring_of_four_stages_fits_beside_all_heads(head_dim):
    for head_dim_v in range(64, 577, 64):
        cfg = _config(64, head_dim, head_dim_v)
        assert 4 <= cfg.ring_stages <= 8 and sum(cfg.beside) < cfg.sums == len(cfg.panels)
