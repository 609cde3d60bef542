"""Lengths of sequences, small ones for emulated chips and larger ones for a GPU."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4.oracle import cases
from fa4.oracle.cases import Case
from tests.covering.model import Row


class Ranges(NamedTuple):
    """Rows of a sequence, and of how many there are at most."""

    ragged: tuple[int, int] = (1, 150)
    several: tuple[int, int] = (190, 290)
    large: tuple[int, int] = (256, 420)
    few_keys: tuple[int, int] = (400, 700)
    sequences: int = 3


SMALL = Ranges()
LARGER = 37  # a bound of lengths need not be the longest
MIDDLE = Ranges((1, 900), (500, 1600), (600, 2000), (1500, 6000), 6)


def _pair(kind: str, draw: random.Random, of: Ranges) -> tuple[int, int]:
    """(queries, keys) of a sequence."""
    ragged = draw.randint(*of.ragged), draw.randint(*of.ragged)
    if kind in ("large", "larger", "square"):
        queries = draw.randint(*of.large)
        keys = {"large": of.several, "larger": of.few_keys, "square": (queries, queries)}[kind]
        return queries, draw.randint(*keys)
    return {
        "ragged": ragged,
        "one_query": (1, ragged[1]),
        "one_key": (ragged[0], 1),
        "tiles": (64 * draw.randint(1, 2), 64 * draw.randint(1, 3)),
        "more_queries": (ragged[0] + of.ragged[1] // 2, max(1, ragged[1] // 3)),
        "several_tiles": (draw.randint(*of.several), draw.randint(*of.several)),
        "few_queries": (draw.randint(1, 4), draw.randint(*of.few_keys)),
        "zero": draw.choice(((0, ragged[1]), (ragged[0], 0), (0, 0))),
    }[kind]


def dense(row: Row, draw: random.Random, of: Ranges) -> dict[str, Any]:
    """Fields of a case."""
    kind = row["lengths"]
    queries, keys = _pair(kind, draw, of)
    batch = 1 if kind == "several_tiles" else draw.randint(1, 2)
    if kind == "zero" and row["block_mask"] == "none" and draw.random() < 0.2:
        return dict(batch=0)
    return dict(batch=batch, seqlen_q=queries, seqlen_k=keys)


def packed(row: Row, draw: random.Random, of: Ranges) -> dict[str, Any]:
    kind = row["lengths"]
    count = draw.randint(1, of.sequences)
    pairs = [_pair(kind, draw, of) for _ in range(count)]
    if kind == "several_tiles":
        pairs = [pairs[0], _pair("ragged", draw, of)]
    if kind == "zero":
        pairs += [_pair("ragged", draw, of), (0, draw.randint(*of.ragged))]
        draw.shuffle(pairs)
    return dict(lengths=tuple(pairs), padding=0 if row["form"] == "jagged" else draw.choice((0, 0, 17)))


def used(row: Row, case: Case, draw: random.Random) -> tuple[tuple[int | None, int | None], ...] | None:
    """seqused of each sequence."""
    sides = {"none": (False, False), "keys": (False, True), "queries": (True, False), "both": (True, True)}
    has = sides[row["seqused"]]
    if not any(has):
        return None
    pairs = case.lengths or ((case.seqlen_q, case.seqlen_k),) * case.batch
    return tuple(tuple(draw.randint(0, n) if is_used else None for n, is_used in zip(pair, has)) for pair in pairs)


def offsets(problem: cases.Problem) -> Tensor:
    """seqlen_k - seqlen_q of each sequence."""
    i = problem.inputs
    if i.cu_seqlens_q is None or i.cu_seqlens_k is None:
        return torch.full((i.batch,), i.max_seqlen_k - i.max_seqlen_q, device=i.q.device)
    return (i.cu_seqlens_k.diff() - i.cu_seqlens_q.diff()).long()


def bounds(kind: str, longest: list[int]) -> list[Any]:
    """max_seqlen_q and max_seqlen_k as a caller may give them."""
    if kind == "none":
        return [None, None]
    if kind == "tensor":
        return [torch.tensor(n) for n in longest]
    return [n + LARGER * (kind == "larger") for n in longest]


def jagged(problem: cases.Problem) -> dict[str, dict[str, Any]]:
    """Offsets and lengths of nested q, and of nested k and v."""
    i = problem.inputs
    made = {}
    for name, starts, count in (("q", i.cu_seqlens_q, i.seqused_q), ("k", i.cu_seqlens_k, i.seqused_k)):
        assert starts is not None
        made[name] = dict(offsets=starts.long(), lengths=None if count is None else count.long())
    return made
