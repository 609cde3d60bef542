"""A row of the array of caches and a seed as a call of `flash_attn_with_kvcache`, judged by the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa4.oracle.reference import Functions
from tests.covering import calls, functions, layouts
from tests.covering.judge import Judged, judge
from tests.covering.model import Row
from tests.kvcache.problem import Built, CacheCase
from tests.kvcache.problem import build as build_cache

_HEADS = {"1": (2, 2), "2": (4, 2), "8": (8, 1), "mqa": (3, 1)}


@dataclass(frozen=True)
class Ranges:
    """Rows of a sequence, and of how many there are at most."""

    ragged: int = 130
    many: tuple[int, int] = (400, 700)
    sequences: int = 3


SMALL = Ranges()
MIDDLE = Ranges(900, (1500, 6000), 6)


@dataclass
class CacheCall:
    """A call, and what it must give."""

    row: Row
    built: Built
    functions: Functions
    changes: dict[str, Any]

    def run(self, backend: str = "auto") -> dict[str, Tensor]:
        """out and lse."""
        changes = self.changes | {"backend": backend}
        if self.row["layout"] == "padded":
            changes |= {name: layouts.padded(self.built.arguments[name]) for name in self.built.after}
        if self.functions.score is not None:
            changes["score_mod"] = self.functions.score(*self.functions.captured)
        if self.functions.mask is not None:
            changes["mask_mod"] = self.functions.mask
        out, lse = self.built.call(**changes)
        return {"out": out, "lse": lse}

    def judged(self, results: dict[str, Tensor]) -> list[Judged]:
        self.built.assert_caches_right("after the call")
        return judge(self.built.problem, results, self.functions)


def _lengths(row: Row, draw: random.Random, of: Ranges, new: int) -> tuple[list[int], int]:
    """Rows in use of each sequence, and of the cache."""
    kind, count = row["lengths"], draw.randint(1, of.sequences)
    ragged = [draw.randint(1, of.ragged) for _ in range(count)]
    if kind == "full":
        size = 1 if row["pages"] == "none" else int(row["pages"])
        rows = -(-max(ragged) // size) * size
        return [rows] * count, rows
    if kind == "zero":
        ragged[draw.randrange(count)] = 0
    if kind == "tiles":
        ragged = [64 * draw.randint(1, 3) for _ in ragged]
    if kind == "long":
        ragged[0] = draw.randint(*of.many)
    return ragged, max(ragged) + new + draw.randint(0, 60)


def build(row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None) -> CacheCall:
    """The call of a row; seed and variant as in `calls.build`."""
    fixed = random.Random(f"{seed if variant is None else variant} {sorted(row.items())}")
    draw = random.Random(f"{seed} {sorted(row.items())}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    is_bytes, most_new = row["bits"] != "16", 9
    head_dim, head_dim_v = calls.head_dims(row, fixed, multiple={"16": 8, "nvfp4": 32}.get(row["bits"], 16))
    heads_q, heads_kv = _HEADS[row["group"]]
    lengths, capacity = _lengths(row, draw, SMALL if is_small else MIDDLE, most_new)
    new: int | tuple[int, ...] = 0
    if row["append"] == "rows":
        new = draw.randint(1, most_new)
    elif row["append"] == "packed":
        new = tuple(draw.randint(0, most_new) for _ in lengths)
    queries: int | tuple[int, ...]
    if row["queries"] == "packed":
        queries = (*(draw.choice((0, 1, 3, 20)) for _ in lengths[:-1]), draw.randint(1, 20))
    else:
        queries = int(row["queries"])
    rotary: dict[str, Any] = {}
    if row["rotary"] != "none":
        kind = fixed.choice(("halves", "interleaved")) if row["rotary"] == "seqlens" else row["rotary"]
        rotary = dict(rotary=kind, rotary_dim=min(head_dim, fixed.choice((16, 32))))
        if row["rotary"] == "seqlens":
            rotary["rotary_seqlens"] = tuple(draw.randint(0, n) for n in lengths)
    window: dict[str, Any] = {
        "full": dict(causal=False),
        "causal": dict(causal=True),
        "left": dict(causal=False, window_size=(draw.randrange(90), None)),
        "both_sides": dict(causal=False, window_size=(draw.randrange(90), draw.randrange(40))),
    }[row["mask"]]
    case = CacheCase(
        "covering",
        tuple(lengths),
        queries=queries,
        new=new,
        capacity=capacity,
        page_size=None if row["pages"] == "none" else int(row["pages"]),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=getattr(torch, row["dtype"]),
        softcap=fixed.choice((5.0, 15.0, 50.0)) if row["softcap"] == "yes" else 0.0,
        softmax_scale=calls.scale(row, head_dim),
        sink=row["sink"] == "yes",
        leftpad=tuple(draw.randint(0, n) for n in lengths) if row["leftpad"] == "yes" else None,
        batch_idx=row["batch_idx"] == "yes",
        fp8=row["bits"] if row["bits"] in ("rows", "nvfp4") else row["descale"] if is_bytes else None,
        int8=row["bits"] == "int8",
        in_k=row["head_dim_v"] == "latent",
        **rotary,
        **window,
    )
    built = build_cache(case, draw.randrange(2**31), device)
    i = built.problem.inputs
    rows = capacity + (case.page_size or 0)
    of = functions.Sizes(case.batch, heads_q, i.max_seqlen_q, rows, max(rows, i.max_seqlen_q, i.q.shape[0]))
    made = Functions()
    if row["score_mod"] != "none":
        made = functions.score(row["score_mod"], of, generator, device)
    if row["mask_mod"] != "none":
        made = replace(made, mask=functions.mask(row["mask_mod"], of, generator, device))
    changes: dict[str, Any] = {"0": {}, "invariant": dict(batch_invariant=True)}.get(
        row["splits"], {"num_splits": int(row["splits"]) if row["splits"].isdigit() else 0}
    )
    if case.batch_idx and case.page_size is not None:  # is refused
        changes["cache_batch_idx"] = torch.arange(case.batch, dtype=torch.int32, device=device)
    return CacheCall(row, built, made, changes)
