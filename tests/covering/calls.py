"""A row of the array of calls and a seed as a call on dense, packed or jagged tensors, judged by the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

import fa4
from fa4.api.flex import flex_attention
from fa4.compat import flash_attn
from fa4.mods.ir.dropout import Rate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.oracle.reference import Functions
from tests.covering import functions, layouts, lengths
from tests.covering.judge import Judged, defined, judge
from tests.covering.model import Row
from tests.poisoned import poison_past_the_end, poison_unused

_HEADS = {"1": (2, 2), "2": (4, 2), "8": (8, 1), "mqa": (3, 1)}
_DIMS = {
    "small": (8, 16, 24, 32),
    "odd": (40, 56, 72, 88, 104, 120),
    "wide": (136, 160, 200, 232),
}


def head_dims(row: Row, draw: random.Random, multiple: int = 8) -> tuple[int, int]:
    """(head_dim, head_dim_v)."""
    kind, kind_v = row["head_dim"], row["head_dim_v"]
    choices = [d for d in _DIMS.get(kind, (int(kind),) if kind.isdigit() else ()) if d % multiple == 0]
    if kind_v == "smaller":
        choices = [d for d in choices if d > multiple]
    head_dim = draw.choice(choices)
    if kind_v == "same":
        return head_dim, head_dim
    if kind_v == "latent":
        return head_dim, 512
    if kind_v == "larger":
        larger = [d for d in (64, 96, 128) if d > head_dim]
        return head_dim, draw.choice(larger) if larger else head_dim + 8
    wider = (256, 304, 512) if head_dim > 256 else ()
    smaller = [d for d in (8, 16, 32, 48, 64, 96, 128, *wider) if d < head_dim and d % multiple == 0]
    return head_dim, 128 if head_dim == 192 else draw.choice(smaller)


def scale(row: Row, head_dim: int) -> float | None:
    return {"default": None, "given": 1.3 * head_dim**-0.5, "negative": -(head_dim**-0.5)}[row["scale"]]


def _window(row: Row, draw: random.Random) -> dict[str, Any]:
    left, right = draw.randrange(0, 90), draw.randrange(0, 40)
    return {
        "full": {},
        "causal": dict(causal=True),
        "left": dict(window_size=(left, None)),
        "both_sides": dict(window_size=(left, right)),
        "causal_left": dict(causal=True, window_size=(left, draw.choice((None, -1, 0, 3)))),
        "empty_rows": dict(causal=True),
    }[row["mask"]]


@dataclass
class Call:
    """A call of a public function, and what it must give."""

    row: Row
    problem: cases.Problem
    functions: Functions
    mods: dict[str, Any]  # mask_mod or block_mask
    seed: int
    kept: Tensor | None
    leaves: dict[str, Tensor]
    trained: tuple[Tensor, ...]
    wanted: list[str]
    jagged: dict[str, Any]
    extra: dict[str, Any]
    precision: dict[str, str] = field(default_factory=dict)

    def run(self, backend: str = "auto") -> dict[str, Tensor]:
        """out, lse and the gradients that the row asks for."""
        with torch.set_grad_enabled(self.row["direction"] != "inference"):
            out, lse = _FORMS[self.row["form"]](self, backend)
        results = {"out": out.detach(), "lse": lse.detach()}
        sources = self.leaves | {f"captured{i}": x for i, x in enumerate(self.functions.captured)}
        asked = {name: sources[name] for name in self.wanted}
        if asked:
            outputs, given = [out], [self.problem.dout]
            if self.row["dlse"] == "yes":
                outputs.append(lse)
                given.append(defined(self.problem.dlse, lse.detach()))
            grads = torch.autograd.grad(outputs, list(asked.values()), given)
            results |= {name if name.startswith("captured") else f"d{name}": x for name, x in zip(asked, grads)}
        return results

    def judged(self, results: dict[str, Tensor]) -> list[Judged]:
        return judge(self.problem, results, self.functions, self.kept, has_dlse=self.row["dlse"] == "yes")

    def score_mod(self) -> dict[str, Callable]:
        if self.functions.score is None or self.row["form"] == "compat":
            return {}
        return {"score_mod": self.functions.score(*self.functions.captured)}


def given(call: Call) -> dict[str, Any]:
    """Options of a call of any form."""
    sink = {"learnable_sink": call.leaves.get("sink")}
    return call.problem.case.flags() | call.score_mod() | call.mods | sink | call.precision


def _dense(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = (call.leaves[name] for name in "qkv")
    used = {"seqused_k": call.problem.inputs.seqused_k}
    return fa4.flash_attn_func(q, k, v, return_lse=True, backend=backend, **used, **given(call))


def _packed(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = (call.leaves[name] for name in "qkv")
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    named = {name: getattr(call.problem.inputs, name) for name in names} | call.extra
    return fa4.flash_attn_varlen_func(q, k, v, return_lse=True, backend=backend, **named, **given(call))


def _jagged(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = (nested_tensor_from_jagged(call.leaves[x], **call.jagged["q" if x == "q" else "k"]) for x in "qkv")
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True, backend=backend, **given(call))
    return out.values(), lse.values()


def _flex(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = (call.leaves[name].transpose(1, 2) for name in "qkv")
    flags = call.problem.case.flags()
    named = dict(scale=flags["softmax_scale"], deterministic=flags["deterministic"], enable_gqa=True, return_lse=True)
    out, lse = flex_attention(q, k, v, backend=backend, **named, **call.score_mod(), **call.mods)
    return out.transpose(1, 2), lse


def _compat(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """It has no argument for the backend or the seed of dropout, which comes from torch's generator."""
    q, k, v = (call.leaves[name] for name in "qkv")
    flags, inputs = call.problem.case.flags() | call.extra, call.problem.inputs
    flags.pop("dropout_seed", None)
    flags["window_size"] = tuple(-1 if side is None else side for side in flags["window_size"])
    torch.manual_seed(call.seed)
    if inputs.varlen:
        bounds = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *bounds, return_attn_probs=True, **flags)
    else:
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **flags)
    return out, lse


_FORMS = {"dense": _dense, "packed": _packed, "jagged": _jagged, "flex": _flex, "compat": _compat}


def _kept(problem: cases.Problem, form: str, seed: int) -> Tensor | None:
    """What the oracle takes for dropout."""
    i, p = problem.inputs, problem.case.dropout_p
    if not p:
        return None
    first = 0
    if form == "compat":
        torch.manual_seed(seed)
        drawn = torch.randint(1 << 62, (2,), dtype=torch.int64, device=i.q.device)
    else:
        drawn = problem.case.flags()["dropout_seed"]
        first = form == "jagged" and not (i.seqused_q is None and i.seqused_k is None)  # see fa4.dropout_mask
    sizes = dict(heads=i.q.shape[-2], seqlen_q=i.max_seqlen_q, seqlen_k=i.max_seqlen_k, device=i.q.device)
    mask = fa4.dropout_mask(p, drawn, batch=i.batch + first, **sizes)[first:]
    return mask.double() * Rate.of(p).scale


def build(row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None) -> Call:
    """The call of a row; equal seeds give equal calls, and equal variants, by default the seed, give calls that one
    kernel serves but for lengths."""
    fixed = random.Random(f"{seed if variant is None else variant} {sorted(row.items())}")
    draw = random.Random(f"{seed} {sorted(row.items())}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    form, (head_dim, head_dim_v) = row["form"], head_dims(row, fixed)
    heads_q, heads_kv = _HEADS[row["group"]]
    is_packed = form in ("packed", "jagged") or (form == "compat" and fixed.random() < 0.5)
    sizes = lengths.SMALL if is_small else lengths.MIDDLE
    shape = lengths.packed(row, draw, sizes) if is_packed else lengths.dense(row, draw, sizes)
    case = Case(
        "covering",
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=getattr(torch, row["dtype"]),
        softmax_scale=scale(row, head_dim),
        softcap=fixed.choice((5.0, 15.0, 50.0)) if row["softcap"] == "yes" else 0.0,
        sink=row["sink"] == "yes",
        deterministic=row["deterministic"] == "yes",
        dropout_p=fixed.choice((0.1, 0.25, 0.7)) if row["dropout"] == "yes" else 0.0,
        **_window(row, draw),
        **shape,
    )
    case, softcap = replace(case, seqused=lengths.used(row, case, draw)), case.softcap
    if form == "compat" and row["score_mod"] != "none":
        case = replace(case, softcap=0.0)  # the score_mod has it
    problem = poison_past_the_end(poison_unused(cases.make(case, draw.randrange(2**31), device)))
    problem = layouts.laid_out(problem, row["layout"], generator)
    i = problem.inputs
    totals = (i.q.shape[0], i.k.shape[0]) if is_packed else ()
    longest = max(i.max_seqlen_q, i.max_seqlen_k, *totals) + lengths.LARGER
    of = functions.Sizes(i.batch, heads_q, i.max_seqlen_q, i.max_seqlen_k, longest)

    made, mods = Functions(), dict[str, Any]()
    extra, call_seed = dict[str, Any](), draw.randrange(2**31)
    if row["score_mod"] != "none":
        made = functions.score(row["score_mod"], of, generator, device)
        if form == "compat":
            (slopes,) = made.captured
            extra |= dict(alibi_slopes=slopes, softcap=softcap)
            made = functions.compat_alibi(slopes, softcap, lengths.offsets(problem))
    if row["mask_mod"] != "none":
        mask_mod = functions.mask(row["mask_mod"], of, generator, device)
        made = replace(made, mask=mask_mod)
        if row["block_mask"] == "none":
            mods["mask_mod"] = mask_mod
        else:
            of_heads = row["mask_mod"] in functions.OF_HEADS
            mods["block_mask"] = functions.block_mask(row["block_mask"], mask_mod, of_heads, of, device)

    kept = _kept(problem, form, call_seed)
    if form == "packed":
        exact = [i.max_seqlen_q, i.max_seqlen_k]
        kinds = ("exact",) if mods.get("block_mask") is not None else ("exact", "none", "larger", "tensor")
        extra |= dict(zip(("max_seqlen_q", "max_seqlen_k"), lengths.bounds(draw.choice(kinds), exact)))

    leaves = {"q": i.q, "k": i.k, "v": i.v} | ({} if i.sink is None else {"sink": i.sink})
    trained = made.captured if row["captured"] == "trained" else ()
    wanted = [*leaves, *(f"captured{n}" for n in range(len(trained)))]
    if row["direction"] == "partly":
        wanted = sorted(fixed.sample(wanted, fixed.randrange(1, len(wanted))), key=wanted.index)
    if row["direction"] == "inference":
        wanted = []
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
    if trained:
        captured = tuple(x.requires_grad_(f"captured{n}" in wanted) for n, x in enumerate(trained))
        made = replace(made, captured=captured)
    jagged = lengths.jagged(problem) if form == "jagged" else {}
    return Call(row, problem, made, mods, call_seed, kept, leaves, trained, wanted, jagged, extra)
