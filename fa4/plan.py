"""What a backend is: a module with a class `Plan`, made as `Plan(spec, extent, chip)`. All a new chip's author needs.

A plan knows how to serve one kind of problem: its tiles, its compiled kernels, its launches. `fa4.run` calls it, and
does what is the same on every chip: it makes each tensor's memory fit the plan's `layout`, gives out and the gradients
their memory, joins the parts of split keys, sums the sink's gradient. So a plan allocates workspaces only (with
`memory.empty`), copies no inputs, and never hands a problem on to another backend.

A plan may rely on this:

* spec.softmax_scale is positive (run moves a negative sign into q).
* Nothing is empty: batch, max_seqlen_q, max_seqlen_k and the rows of q and k are at least 1. Single sequences may be.
* The tensors' device is the current one. The sink, lse and dlse are contiguous float32 (float64 for float64 inputs);
  out, lse and the gradients to fill are row-major.
* Rows that no sequence uses (past cu_seqlens[-1], past seqused) are set: out and gradients 0, lse -inf. The plan must
  leave them alone, and must write every other row; also of queries that see no key (out 0, lse -inf or the sink) and
  of keys that no query sees (dk and dv 0).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .device import Chip
from .spec import AttentionInputs, AttentionSpec, Gradients, ProblemSize, Saved


class Layout(enum.Enum):
    """How q, k, v, out and dout lie in memory when a plan gets them. The last axis always has stride 1."""

    ANY = "strides and addresses as the caller's"
    ROWS = "rows start at multiples of 16 bytes"
    TMA = "rows start at multiples of 16 bytes, and no stride is 0: what a TMA map takes"


class Plan:
    """The base of every backend's `Plan`. Those that offer score_mod, mask_mod or block_mask take one argument more: in
    `forward` a call's `Mods`, if it has any, in `backward` these and the gradients of captured tensors, to be added to
    (float32, None for those that get none). Those that offer caches take one more in `forward`: mods or None, and the
    `Cache`. Plans are cached by (spec, extent, chip) and shared by threads: state that
    changes after `__init__` is limited to kernels compiled on first use. No tensor and no extent may enter a compile
    key."""

    layout = Layout.TMA
    compiled = True
    """Whether it launches kernels that CuTe DSL compiled; then so does `run`."""
    splits = 1
    """Parts that the keys of each row are cut into. Above 1, `forward` gets no sink, out (splits, *shape of out) and
    lse (splits, *shape of lse), both float32, and part s writes its share, normalised, with its own lse; `run` joins
    them."""

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip

    def is_empty(self, inputs: AttentionInputs) -> bool:
        """Whether no query can see a key: there is nothing to launch then."""
        return 0 in self.extent or (self.spec.varlen and 0 in (inputs.q.shape[0], inputs.k.shape[0]))

    def describe(self) -> str:
        """The tiles of forward and, if the spec needs it, backward, in one line for `fa4.explain`. Compiles nothing."""
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """What CTAs of its kernels wait for, in one line for `fa4.explain`; "" for a plan without kernels."""
        return ""

    def compile_forward(self) -> None:
        """Compile what `forward` launches, if it is not yet."""
        raise NotImplementedError

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        """Fill out, like q with head_dim_v columns, and lse, (batch, heads, rows) or varlen (heads, rows)."""
        raise NotImplementedError

    def backward(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        """Fill grads.dq, dk and dv. Return, if there is a sink, the terms of its gradient: (heads_q, ...) float32,
        which run adds up per head."""
        raise NotImplementedError


class Directions(Plan):
    """A plan whose forward and backward are objects: made of (spec, extent, chip, tiles), with a method `launch` and a
    line of text. Tiles given here replace the rows of the tables, for tuning."""

    directions: tuple[Callable[..., Any], Callable[..., Any]]

    def __init__(
        self,
        spec: AttentionSpec,
        extent: ProblemSize,
        chip: Chip,
        forward_tiles: Any = None,
        backward_tiles: Any = None,
    ) -> None:
        super().__init__(spec, extent, chip)
        forward, backward = self.directions
        self._forward = forward(spec, extent, chip, forward_tiles)
        self._backward = backward(spec, extent, chip, backward_tiles)
        self.splits = self._forward.splits
        # As they are, for a frame less at each call.
        self.forward, self.backward = self._forward.launch, self._backward.launch  # type: ignore[method-assign]

    def compile_forward(self) -> None:
        self._forward.compile()

    def describe(self) -> str:
        return f"{self._forward}; {self._backward}" if self.spec.needs_backward else str(self._forward)

    @property
    def progress(self) -> str:
        forward = f"forward: a CTA waits for {_awaited(self._forward.cfg)}"
        if not self.spec.needs_backward:
            return forward
        cfg = self._backward.config(has_dlse=False)
        return f"{forward}; backward: a CTA waits for {_awaited(cfg, has_counters=cfg.row_blocks.semaphores > 0)}"


def _awaited(cfg: Any, has_counters: bool = False) -> str:
    """The CTAs that a CTA of a main kernel waits for. has_counters: additions to dQ are counted, see `bwd.semaphores`."""
    awaited = ["CTAs of its own cluster"] if cfg.ctas > 1 else []
    if has_counters:
        awaited.append("CTAs of lower launch index" if cfg.deterministic else "a CTA that runs and does not wait")
    return " and ".join(awaited) or "no other CTA"
