"""Mods of a call, including dropout: the part that shapes code, and the tensors and numbers it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .graph import Graph, parse


@dataclass(frozen=True, slots=True)
class ModSpec:
    """Part of score_mod, mask_mod, block_mask and dropout that shapes code.

    block: query rows and keys of a block, with a block mask. trained: positions of captured tensors of `score` that
    need gradients. heads_differ: heads have different block lists.
    """

    score: Graph | None = None
    mask: Graph | None = None
    block: tuple[int, int] | None = None
    trained: tuple[int, ...] = ()
    heads_differ: bool = False
    dropout: bool = False

    def key(self) -> tuple:
        """Return plain values that identify the spec, for a compile key."""
        texts = (None if graph is None else graph.text for graph in (self.score, self.mask))
        return *texts, self.block, self.trained, self.heads_differ, self.dropout

    def __str__(self) -> str:
        parts = []
        for role, graph in (("score_mod", self.score), ("mask_mod", self.mask)):
            if graph is not None:
                operators = sum(node.op not in ("input", "const", "number") for node in graph.computed())
                parts.append(f"{role} of {operators} operators and {len(graph.tensors)} captured tensors")
        if self.trained:
            parts[0] += f" ({len(self.trained)} with gradients)"
        if self.block is not None:
            parts.append("block_mask of {} x {}".format(*self.block))
        return ", ".join(parts + ["dropout"] * self.dropout)

    @staticmethod
    def of_plain(given: dict[str, Any]) -> ModSpec:
        """Return the spec of which `runtime.recording` wrote the fields that are not None."""
        present = {name: x for name, x in given.items() if x is not None}
        graphs: dict[str, Any] = {name: parse(present[name]) for name in ("score", "mask") if name in present}
        pairs: dict[str, Any] = {name: tuple(present[name]) for name in ("block", "trained") if name in present}
        return ModSpec(**present | graphs | pairs)


NUM_BLOCK_TENSORS = 10
"""Number of tensors of a block mask that kernels read."""


class Mods(NamedTuple):
    """A call's score_mod and mask_mod as graph strings ("" for none), their tensors and numbers, and the call's
    dropout.

    tensors, numbers: captured by the functions, the score's first. blocks: the tensors of
    `fa4.mods.frontend.blocks.BlockLists` (or none), followed by the tensors they were made of; block_q, block_k: query
    rows and keys of a block. trained: positions of captured tensors that get gradients. dropout_p, dropout_seed: see
    `dropout`; no seed means no dropout.
    """

    tensors: list[Tensor]
    blocks: list[Tensor]
    score: str
    mask: str
    numbers: list[float]
    block_q: int
    block_k: int
    trained: list[int]
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    @classmethod
    def without_functions(cls, dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> Mods:
        """Return the mods of a call with dropout only, or nothing."""
        return cls([], [], "", "", [], 0, 0, [], dropout_p, dropout_seed)

    def spec(self) -> ModSpec:
        score, mask = (parse(text) if text else None for text in (self.score, self.mask))
        block = (self.block_q, self.block_k) if self.blocks else None
        heads_differ = bool(self.blocks) and self.blocks[0].shape[1] > 1
        return ModSpec(score, mask, block, tuple(self.trained), heads_differ, self.dropout_seed is not None)

    @property
    def key_blocks(self) -> int:
        """Number of key blocks of a block mask that has the lists of both sides."""
        return self.blocks[4].shape[-1]

    def spec_key(self) -> tuple:
        """Return what `spec` depends on, at low cost."""
        heads = self.blocks[0].shape[1] if self.blocks else None
        is_dropped = self.dropout_seed is not None
        return self.score, self.mask, self.block_q, self.block_k, tuple(self.trained), heads, is_dropped

    def typed_numbers(self) -> tuple[int | float, ...]:
        """Return the numbers as the kinds that the graphs declare."""
        kinds = [kind for text in (self.score, self.mask) if text for kind in parse(text).numbers]
        return tuple(int(x) if kind == "int" else x for kind, x in zip(kinds, self.numbers))

    def score_values(self) -> tuple[list[Tensor], list[float]]:
        """Return tensors and numbers of the score's graph."""
        graph = parse(self.score)
        return self.tensors[: len(graph.tensors)], self.numbers[: len(graph.numbers)]

    def mask_values(self) -> tuple[list[Tensor], list[float]]:
        """Return tensors and numbers of the mask's graph."""
        graph = parse(self.mask)
        tensors, numbers = len(self.tensors) - len(graph.tensors), len(self.numbers) - len(graph.numbers)
        return self.tensors[tensors:], self.numbers[numbers:]
