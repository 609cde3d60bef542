"""Contract of a backend: a module with a class `Plan`, constructed as `Plan(spec, extent, chip)`. Read this to add a
chip.

A plan serves one kind of problem: it holds tiles, compiled kernels and launches. `fa4.torch_ops.run` calls it, and does
what all chips share: it makes each tensor's memory fit the plan's `layout`, allocates out and the gradients, combines
split-KV results, and sums the sink's gradient. So a plan allocates workspaces only (with `memory.empty`), copies no
inputs, and never forwards a problem to another backend.

A plan may rely on this:

* spec.softmax_scale is positive (run moves a negative sign into q).
* Nothing is empty: batch, max_seqlen_q, max_seqlen_k and the rows of q and k are at least 1. Single sequences may be
  empty.
* The tensors' device is the current one. The sink, lse and dlse are contiguous float32 (float64 for float64 inputs);
  out, lse and the gradients to write are row-major.
* Padding rows (past cu_seqlens[-1], past seqused) are already set: out and gradients 0, lse -inf. The plan must not
  write them, and must write every other row, including queries without a key (out 0, lse -inf or the sink) and keys
  without a query (dk and dv 0).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .device import Chip
from .spec import AttentionInputs, AttentionSpec, Gradients, ProblemSize, Saved


class Layout(enum.Enum):
    """Memory layout of q, k, v, out and dout when a plan gets them. The last axis always has stride 1."""

    ANY = "strides and addresses as the caller's"
    ROWS = "rows start at multiples of 16 bytes"
    TMA = "rows start at multiples of 16 bytes, and no stride is 0: what a TMA map takes"


class Plan:
    """Base class of every backend's `Plan`. `forward` also takes the call's `Mods` if the backend supports mods, and
    mods (or None) and the `Cache` if it supports caches. `backward` then also takes the mods and the gradients of
    captured tensors to add to (float32, None for tensors without gradient). Plans are cached by (spec, extent, chip)
    and shared by threads: only kernels compiled on first use may change after `__init__`. No tensor and no extent may
    enter a compile key."""

    layout = Layout.TMA
    compiled = True
    """Whether it launches kernels that CuTe DSL compiled; then `run` does so too."""
    splits = 1
    """Number of parts that each row's keys are split into (split-KV). Above 1, `forward` gets no sink, out (splits,
    *shape of out) and lse (splits, *shape of lse), both float32. Part s writes its normalised output and its own lse;
    `run` combines them."""

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip

    def is_empty(self, inputs: AttentionInputs) -> bool:
        """Whether no query has a key: then there is nothing to launch."""
        return 0 in self.extent or (self.spec.varlen and 0 in (inputs.q.shape[0], inputs.k.shape[0]))

    def take_backward(self, other: Any) -> None:
        """Use the backward of another plan of the same problem."""
        raise NotImplementedError(f"{type(self).__name__} has a backward of its own")

    def describe(self) -> str:
        """Return the tiles of forward and, if needed, backward, in one line for `fa4.explain`. Compiles nothing."""
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """Return what its CTAs wait for, in one line for `fa4.explain`; "" for a plan without kernels."""
        return ""

    def compile_forward(self) -> None:
        """Compile the kernels that `forward` launches, unless that is done."""
        raise NotImplementedError

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        """Write out, like q with head_dim_v columns, and lse, (batch, heads, rows) or varlen (heads, rows). Of calls
        that come again, compiled kernels get the tensors of `inputs` alone, a plain tuple."""
        raise NotImplementedError

    def backward(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        """Write grads.dq, dk and dv. With a sink, return the terms of its gradient: (heads_q, ...) float32, which run
        sums per head."""
        raise NotImplementedError


class ForwardBackwardPlan(Plan):
    """Plan with separate forward and backward objects, made from (spec, extent, chip, tiles), with a method `launch`
    and a text; None for no backward. Tiles passed here replace the table rows, for tuning."""

    directions: tuple[Callable[..., Any], Callable[..., Any] | None]

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
        self.splits = self._forward.splits
        # Bind the methods directly: one Python frame less at each call.
        self.forward = self._forward.launch  # type: ignore[method-assign]
        if backward is not None:
            self._set_backward(backward(spec, extent, chip, backward_tiles))

    def take_backward(self, other: ForwardBackwardPlan) -> None:
        self._set_backward(other._backward)

    def _set_backward(self, backward: Any) -> None:
        self._backward = backward
        self.backward = backward.launch  # type: ignore[method-assign]

    def both(self) -> tuple[Any, Any]:
        """Return the forward and the backward object, of a plan with both."""
        return self._forward, self._backward

    def with_both(self, forward: Any, backward: Any) -> ForwardBackwardPlan:
        """Return the same plan with these objects, of other tiles."""
        other = copy.copy(self)
        other._forward, other.splits = forward, forward.splits
        other.forward = forward.launch  # type: ignore[method-assign]
        other._set_backward(backward)
        return other

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
    """Return the CTAs that a CTA waits for. has_counters: additions to dQ are counted, see `bwd.device.semaphores`."""
    awaited = ["CTAs of its own cluster"] if cfg.ctas > 1 else []
    if has_counters:
        awaited.append("CTAs of lower launch index" if cfg.deterministic else "a CTA that runs and does not wait")
    return " and ".join(awaited) or "no other CTA"
