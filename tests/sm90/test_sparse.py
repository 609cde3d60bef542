"""Hopper's backward of lists on the emulated chip, against float64; which calls it serves; its machine code."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.host.modules import fatbins_in

import fa4
from bench import static
from fa4.emulator import emulate
from fa4.runtime.device import chip_by_number
from fa4.sm90.sparse import plan
from fa4.sm90.sparse.kernel import KERNEL
from fa4.sparse import native
from tests import lists
from tests.lists import Drawn, Lists, draw

check = functools.partial(lists.check, backend="sm90", chip="sm_90a")
CASES = (
    Lists(128, counts=(200, 0, 70)),  # two warpgroups of 64 rows
    Lists(16, counts=(128, 1, 64)),  # one
    Lists(100, heads=2, head_dim=72, head_dim_v=64, dtype=torch.float16, has_dlse=False),
    Lists(64, lists=2, head_dim=64, head_dim_v=104, dtype=torch.float16),
    Lists(200, tokens=2, has_dlse=False),  # two CTAs share a list
    Lists(1, tokens=4, lists=3, heads=2, head_dim=8, head_dim_v=128),
)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, seed):
    lists.check_schedules(check, draw(case, seed), seed, str(case))


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", CASES[:5:2], ids=str)
def test_gradients_where_sums_exceed_the_l2_cache(case, seed, monkeypatch):
    """CTAs start in the middle of their lists then: here two multiprocessors have six tokens or more one by one."""
    monkeypatch.setattr(plan, "exceed_l2", lambda sums, chip: True)
    drawn = draw(replace(case, tokens=6, counts=None), seed)
    drawn.rows = ascending(drawn)
    lists.check_schedules(check, drawn, seed, str(case))


def ascending(drawn: Drawn) -> Tensor:
    """The lists in the order in which kernels make them."""
    return drawn.rows.sort(-1).values  # `NO_ROW` is last


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_deterministic_gradients(case, seed):
    lists.check_equal_bits(check, case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(6))
def test_random_lists(part, seed):
    lists.check_random(check, CASES[part], seed, draws=10, longest=250, rows=260, tokens=4)


def test_strided_and_unaligned_tensors(seed):
    drawn = draw(Lists(16, tokens=2, head_dim=64, head_dim_v=64), seed)
    wide = torch.full((*drawn.k.shape[:2], 129), torch.nan, dtype=drawn.k.dtype)
    wide[..., 1:65], wide[..., 65:] = drawn.k, drawn.v
    drawn.k, drawn.v = wide[..., 1:65], wide[..., 65:]
    drawn.q = drawn.q.transpose(0, 1).contiguous().transpose(0, 1)
    drawn.saved = drawn.saved._replace(dout=drawn.saved.dout[:1, :1].expand_as(drawn.saved.dout))
    check(drawn, seed, "random", "strided")


@pytest.mark.parametrize(
    ("backend", "deterministic", "head_dim", "is_served"),
    [
        ("auto", False, 64, True),
        ("auto", True, 64, True),
        ("sm90", False, 64, True),
        ("sm80", False, 64, False),
        ("sm80", True, 64, False),
        ("auto", False, 136, False),
    ],
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
    with emulate("sm_90a", sms=2, seed=seed):
        out = fa4.sparse_attention(q, k, v, indices, backend=backend, deterministic=deterministic)
        dout = torch.randn(out.shape, generator=gen).to(out.dtype)
        with FlopCounterMode(display=False) as counter:
            grads = torch.autograd.grad(out, (q, k, v), dout)
    assert counter.get_total_flops() == 5 * 2 * (2 * 4 * 70) * head_dim  # queries x heads x listed keys
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = fa4.sparse_attention(*exact, indices)
    for x, right in zip(grads, torch.autograd.grad(out, exact, dout.double())):
        assert (x.double() - right).norm() < 0.01 * right.norm(), f"seed {seed}"
    assert len(launched) == is_served


def test_one_row_of_two_ctas_is_not_served_in_order():
    """Both would store to the rows of a list."""
    assert plan.serves(torch.bfloat16, 64, 64, 129, False) and not plan.serves(torch.bfloat16, 64, 64, 129, True)


def test_only_large_sums_have_a_front():
    chip = chip_by_number(90)
    half, more = (torch.empty(chip.l2 // 8 + i, dtype=torch.float32, device="meta") for i in range(2))
    assert not plan.exceed_l2((half, half), chip) and plan.exceed_l2((half, more), chip)
    with pytest.raises(ValueError, match="varying orders"):
        plan._config(torch.bfloat16, 128, 64, 64, False, True, True, chip)


def test_a_backend_without_kernels_serves_none():
    q = torch.empty(2, 4, 64)
    flags = fa4.runtime.spec.Flags(0.1, backend="torch")
    assert native.backend_of(q, q, q, 1, flags) is None


@pytest.mark.parametrize("has_front", [False, True])
@pytest.mark.parametrize("group", [128, pytest.param(64, marks=pytest.mark.soak)])
def test_products_overlap_and_nothing_spills(group, has_front, tmp_path, disassembler):
    """A step issues S of the next block, dQ, dV or dK, and dP of the next block; it waits for S, for the gradients, and
    for dP. Three products and one role have no scores where a warpgroup holds all rows."""
    chip = chip_by_number(90)
    cfg = plan._config(torch.bfloat16, group, 128, 128, False, False, has_front, chip)
    KERNEL.compile(cfg, chip).export_to_c(str(tmp_path / "kernel.o"), "kernel")
    (binary,) = fatbins_in((tmp_path / "kernel.o").read_bytes())
    (tmp_path / "kernel.cubin").write_bytes(binary[binary.index(b"\x7fELF") :])
    code = static.disassemble(tmp_path / "kernel.cubin", "-c")
    assert not re.search(r"\b(LDL|STL)\b", code), "registers are spilled"
    waits = "".join(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", code))
    assert waits == ("10" + "310" + "0") * 2 if group == 128 else ("10" + "210" + "0" + "00")
    assert code.count("WARPGROUP.ARRIVE") == (2 * (2 + 4 + 2) if group == 128 else 2 + 3 + 1 + 2 + 2)
