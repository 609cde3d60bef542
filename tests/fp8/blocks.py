"""Calls on e4m3 tensors with scales of blocks of 32 numbers, which kernels multiply as such: cases, and tests of every
chip that has them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import Operands
from fa4.torch_ops import recipes
from tests.fp8.heads import explained, judged, noting_kernels, rounding_of

PACKED = ((300, 520), (0, 40), (70, 0), (1, 130), (129, 33))
_CASES = (
    Case("full", seqlen_q=300, seqlen_k=520, head_dim=64, batch=2, heads_q=2),
    Case("causal", seqlen_q=530, seqlen_k=530, head_dim=128, causal=True),
    Case("more_keys", seqlen_q=257, seqlen_k=900, head_dim=128, causal=True, heads_q=4, heads_kv=2),
    Case("window", seqlen_q=300, seqlen_k=700, head_dim=64, window_size=(200, 30), softcap=15.0, sink=True),
    Case("group_of_three", seqlen_q=300, seqlen_k=300, head_dim=96, head_dim_v=80, heads_q=3, heads_kv=1),
    Case("one_block", seqlen_q=261, seqlen_k=13, head_dim=32, head_dim_v=48, softmax_scale=0.7),
    Case("empty_rows", seqlen_q=300, seqlen_k=100, head_dim=64, causal=True, sink=True),
    Case("few_keys_used", seqlen_q=256, seqlen_k=333, head_dim=96, batch=2, seqused=((None, 333), (None, 7))),
    Case("packed", lengths=PACKED, head_dim=128, head_dim_v=64, heads_q=2, softcap=9.0),
    Case("packed_causal", lengths=PACKED, head_dim=64, causal=True, heads_q=4, heads_kv=2),
    Case("packed_used", lengths=PACKED, head_dim=128, seqused=((300, 500), (0, 33), (70, 0), (1, 64), (100, 1))),
)
CASES = {case.name: case for case in _CASES}


def of_blocks(problem: cases.Problem, seed: int, chip: int) -> tuple[cases.Problem, dict[str, Any]]:
    """The problem on the numbers that e4m3 tensors and scales of blocks stand for, and the call's arguments. Blocks
    differ by up to 2^8, and scales may be far above or below 1. chip: the number of the one that rounds P."""
    generator, inputs = torch.Generator().manual_seed(seed), problem.inputs
    of_scores, of_v = (12 * torch.randint(-1, 2, (2,), generator=generator)).tolist()
    sizes = {"q": 2.0**of_scores, "k": 2.0**-of_scores, "v": 2.0**of_v}
    arguments, exact = dict[str, Any](), []
    bounds = (inputs.cu_seqlens_q, inputs.seqused_q), *[(inputs.cu_seqlens_k, inputs.seqused_k)] * 2
    for name, x, (cu_seqlens, seqused) in zip("qkv", inputs[:3], bounds):
        shape = (*x.shape[:-1], -(-x.shape[-1] // 32)) if name != "v" else (*x.shape[:-2], 1, x.shape[-1])
        powers = torch.randint(-4, 5, shape, generator=generator).float().exp2()
        powers = powers if name == "v" else powers.repeat_interleave(32, -1)[..., : x.shape[-1]] / 4
        x = sizes[name] * x.float() * powers
        options = dict(cu_seqlens=cu_seqlens, seqused=seqused, axis="tokens" if name == "v" else "head_dim")
        data, scales = fa4.quantize(x, "mxfp8", **options)
        arguments |= {name: data, f"{name}_descale": scales}
        exact.append(fa4.dequantize(data, scales, torch.float32, cu_seqlens=cu_seqlens))
    spec = replace(problem.spec, dtype=torch.bfloat16, operands=Operands.MXFP8)
    problem = replace(problem, inputs=inputs._replace(q=exact[0], k=exact[1], v=exact[2]), spec=spec)
    return replace(problem, rounding=rounding_of(problem, chip)), arguments


def with_nan_scales_of_unused_keys(problem: cases.Problem, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the byte 255, which is NaN, in all scales of K and V that no used key has."""
    i = problem.inputs
    of_k, of_v = (arguments[f"{name}_descale"].view(torch.uint8).clone() for name in "kv")
    used = [i.k.shape[-3]] * i.batch if i.seqused_k is None else i.seqused_k.tolist()
    if i.cu_seqlens_k is None:
        for b, count in enumerate(used):
            of_k[b, count:], of_v[b, -(-count // 32) :] = 255, 255
    else:
        bounds = i.cu_seqlens_k.tolist()
        for b, (first, stop, count) in enumerate(zip(bounds, bounds[1:], used)):
            of_k[first + count : stop] = 255
            of_v[first // 32 + b + -(-count // 32) : stop // 32 + b + 1] = 255
    return arguments | dict(k_descale=of_k.view(recipes.E8M0), v_descale=of_v.view(recipes.E8M0))


class SharedBlockScaleTests:
    """Tests of every chip that multiplies scales of blocks. number: of the chip."""

    number: int

    def of_blocks(self, case: Case, seed: int) -> tuple[cases.Problem, dict[str, Any]]:
        return of_blocks(cases.make(case, seed), seed, self.number)

    def run(self, problem: cases.Problem, arguments: dict[str, Any], seed: int, **chip: Any) -> Any:
        """(out, lse) of a call on the emulated chip, whose kernel takes numbers and scales as they are."""
        options = dict(sms=2, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]) | chip
        with emulate(chip_by_number(self.number).target, **options), noting_kernels() as taken:
            results = problem.call(**arguments)
        assert taken["native"] is Operands.MXFP8
        return results

    def check(self, problem: cases.Problem, arguments: dict[str, Any], seed: int, **chip: Any) -> None:
        results = self.run(problem, arguments, seed, **chip)
        cases.assert_right(judged(problem, *results), f"{problem.case}, seed {seed}")

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_each_scale_counts(self, name: str, seed: int) -> None:
        """With one block's scales doubled for all tokens, the result is that of the numbers with these scales, and
        another one: of a single token's, whose key may have a weight near zero, that is not sure."""
        problem, arguments = self.of_blocks(CASES["full"], seed)
        before = self.run(problem, arguments, seed)
        bits = arguments[f"{name}_descale"].view(torch.uint8).clone()
        bits[1, :, 1, -1] += 1
        changed = arguments | {f"{name}_descale": bits.view(recipes.E8M0)}
        exact = fa4.dequantize(changed[name], changed[f"{name}_descale"], torch.float32)
        problem = replace(problem, inputs=problem.inputs._replace(**{name: exact}))
        out, lse = self.run(problem, changed, seed)
        cases.assert_right(judged(problem, out, lse), f"seed {seed}")
        assert not torch.equal(out, before[0]) and (name == "v") == torch.equal(lse, before[1])

    @pytest.mark.parametrize("name", ["few_keys_used", "packed_used"])
    def test_scales_of_unused_keys_may_hold_anything(self, name: str, seed: int) -> None:
        problem, arguments = self.of_blocks(CASES[name], seed)
        self.check(problem, with_nan_scales_of_unused_keys(problem, arguments), seed)

    def test_scales_have_any_strides(self, seed: int) -> None:
        problem, arguments = self.of_blocks(CASES["full"], seed)
        before = self.run(problem, arguments, seed)
        q, k, v = (arguments[f"{name}_descale"].view(torch.uint8) for name in "qkv")
        k = torch.stack((k, k), -1)[..., 0]
        views = q.transpose(1, 2).contiguous().transpose(1, 2), k, v.flip(1).clone().flip(1)
        scales = {f"{name}_descale": x.view(recipes.E8M0) for name, x in zip("qkv", views)}
        for x, y in zip(before, self.run(problem, arguments | scales, seed)):
            assert torch.equal(x, y)

    def test_a_tensor_may_have_one_factor_instead(self, seed: int) -> None:
        problem, arguments = self.of_blocks(CASES["more_keys"], seed)
        factor = torch.rand(1, 2, generator=torch.Generator().manual_seed(seed)) + 0.5
        exact = arguments["k"].float() * factor[:, None, :, None]
        problem = replace(problem, inputs=problem.inputs._replace(k=exact))
        self.check(problem, arguments | dict(k_descale=factor), seed)

    def test_training_takes_it_for_the_forward(self, seed: int) -> None:
        case = Case("training", seqlen_q=300, seqlen_k=300, head_dim=64, causal=True)
        inputs = cases.make(case, seed).inputs
        q, k, v = (x.bfloat16().requires_grad_() for x in inputs[:3])
        with emulate(chip_by_number(self.number).target, sms=2, seed=seed), noting_kernels() as taken:
            out = fa4.flash_attn_func(q, k, v, causal=True, precision="mxfp8")
            out.float().square().mean().backward()
        assert taken["native"] is Operands.MXFP8
        assert q.grad is not None and q.grad.isfinite().all()

    def test_explain_knows_training(self) -> None:
        x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
        with emulating(chip_by_number(self.number)):
            assert fa4.explain(x, x, x, precision="mxfp8").spec.operands is Operands.MXFP8
            narrow = x[..., :48]
            with pytest.raises(ValueError, match="q has head_dim 48, expected a multiple of 32 for precision 'mxfp8'"):
                fa4.explain(narrow, narrow, narrow, precision="mxfp8")

    def test_scales_along_the_other_axis_are_dequantised(self) -> None:
        chip = chip_by_number(self.number)
        scales = recipes.as_e8m0(recipes.ones((2, 300, 4, 64), 2, "tokens", torch.device("cpu")))
        assert explained(chip, dict(k_descale=scales)).spec.operands is None
        assert explained(chip, dict(v_descale=scales)).spec.operands is Operands.MXFP8


def takes(chip: int, changes: dict[str, Any]) -> bool:
    """Whether a call with scales of q's blocks is multiplied as such. changes: see `explained`."""
    scales = recipes.ones(changes.get("q", (2, 300, 4, 64)), 2, "head_dim", torch.device("cpu"))
    found = explained(chip_by_number(chip), changes | dict(q_descale=recipes.as_e8m0(scales)))
    return found.spec.operands is Operands.MXFP8
