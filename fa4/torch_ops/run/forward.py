"""Execution of the forward of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...fwd.launchers import COMBINE, combine_config, combine_launcher
from ...mods.ir.record import Mods
from ...runtime.jit import Request
from ...runtime.plan import Plan
from ...runtime.spec import AttentionInputs, AttentionSpec, Cache, compute_dtype
from . import allocate, prepare


class ForwardExecutor:
    """Executor of the forward for one kind of problem, reusable for later calls. Everything that is the same for such
    calls is decided here; addresses and the contents of length tensors are not. Valid for inputs with the same shapes,
    strides, dtypes and device. With varlen, the numbers of rows and sequences may differ (a number above 1 stays above
    1), and so may the bounds of lengths while the plan is the same."""

    def __init__(self, inputs: AttentionInputs, spec: AttentionSpec, plan: Plan) -> None:
        """`plan` is for `spec.with_positive_scale()`."""
        self.spec, self.plan = spec, plan
        self._is_empty = plan.is_empty(inputs)
        self._fits = prepare.fits_if_aligned(plan.layout, inputs, spec)
        device = inputs.q.device
        self._device = prepare.device_to_enter(device)
        self._make = allocate.result_maker(inputs, spec, (spec.dtype, compute_dtype(spec.dtype)))
        matrices, fill = (1, -torch.inf) if plan.splits == 1 else (0, allocate.UNWRITTEN)
        self._set_padding_rows = allocate.padding_setter(inputs, spec, plan, "q", matrices, plan.splits, fill)
        if plan.splits > 1:
            self._make_parts = allocate.result_maker(inputs, spec, (torch.float32, torch.float32), (plan.splits,))
        self._max_seqlens = inputs.max_seqlens
        self._launch: Callable[..., None] = plan.forward
        needs_more_steps = self._is_empty or not self._fits or plan.splits > 1 or self._set_padding_rows is not None
        self._only_launches = plan.compiled and not needs_more_steps

    @property
    def takes_any_keys(self) -> bool:
        """Whether calls may differ in the number of keys, if it is rounded to the same one and their layout fits."""
        return self.plan.compiled and self._fits and not self._is_empty and self.spec.keys_may_grow

    def call_with_tensors(self, tensors: tuple) -> tuple[Tensor, Tensor]:
        """Fast path of `__call__` without mods and cache. tensors: the tensor fields of `AttentionInputs`; if only the
        launch remains, the record itself is not built."""
        is_current_device = self._device is None or not prepare.is_other_device(self._device)
        if self._only_launches and is_current_device and prepare.are_aligned(tensors):
            out, lse = self._make(tensors)
            self._launch(tensors, out, lse)
            return out, lse
        return self(AttentionInputs._make((*tensors, *self._max_seqlens)))

    def __call__(
        self,
        inputs: AttentionInputs,
        mods: Mods | None = None,
        cache: Cache | None = None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), row-major. given: a row-major out of the caller, aligned to 16 bytes, to be written."""
        if self._device is not None and prepare.is_other_device(self._device):
            with torch.cuda.device(self._device):
                return self(inputs, mods, cache, given)
        out, lse = self._make(inputs, given)
        if self._is_empty:
            _write_without_keys(inputs, out, lse)
            return out, lse
        plan = self.plan
        extra: tuple = (mods, cache) if cache is not None else () if mods is None else (mods,)
        if not (self._fits and prepare.are_aligned(inputs)):
            inputs = prepare.inputs_for(plan.layout, inputs, self.spec)
        if plan.splits > 1:
            self._forward_in_parts(inputs, out, lse, *extra)
            return out, lse
        if self._set_padding_rows is not None:
            self._set_padding_rows(inputs, (out,), lse)
        plan.forward(inputs, out, lse, *extra)
        return out, lse

    def _forward_in_parts(self, inputs: AttentionInputs, out: Tensor, lse: Tensor, *extra: Any) -> None:
        parts, part_lse = self._make_parts(inputs)
        if self._set_padding_rows is not None:
            self._set_padding_rows(inputs, (), part_lse)
        self.plan.forward(inputs._replace(sink=None), parts, part_lse, *extra)
        if inputs.varlen:
            parts, part_lse, out, lse = parts.unsqueeze(1), part_lse.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0)
        self._join((parts, part_lse, out, lse, inputs.sink))

    def compile(self) -> None:
        """Compile all kernels of a launch before the first launch."""
        if self.plan.compiled and not self._is_empty:
            self.plan.compile_forward()
            if self.plan.splits > 1:
                assert self._join is not None

    def requests_beside_plan(self) -> list[Request]:
        """Return the kernels of a launch that the plan does not know."""
        plan = self.plan
        if plan.splits == 1:
            return []
        return [COMBINE.request(combine_config(plan.spec, plan.splits, plan.chip), plan.chip)]

    @functools.cached_property
    def _join(self) -> Callable[..., None]:
        spec = self.plan.spec
        return combine_launcher(spec, self.plan.splits, self.plan.chip)


def forward(
    inputs: AttentionInputs, spec: AttentionSpec, plan: Plan, mods: Mods | None = None, cache: Cache | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward once, without caching: (out, lse); `plan` is for `spec.with_positive_scale()`."""
    return ForwardExecutor(inputs, spec, plan)(inputs, mods, cache)


def _write_without_keys(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
    """Write the results of a problem without keys: out 0, lse the sink or -inf. Launches no kernel of a backend."""
    out.zero_()
    lse.fill_(-torch.inf)
    if inputs.sink is not None and lse.numel():
        torch.where(allocate.used_rows(inputs), inputs.sink.to(lse.dtype)[:, None], lse, out=lse)
