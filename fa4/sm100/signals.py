"""Signals of Blackwell channels: tensor-memory fences around mbarriers, and tcgen05.commit."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int16
from cutlass._mlir.dialects import nvvm

from ..pipeline.channels import Carries, Signals
from .mma import cta_group


class Tcgen05Signals(Signals):
    """tcgen05.fence before arrivals and after waits of channels that carry tensor memory; tcgen05.commit."""

    __slots__ = ()

    def before_arrival(self, carries: Carries) -> None:
        if Carries.TMEM in carries:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)

    def after_wait(self, carries: Carries) -> None:
        if Carries.TMEM in carries:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    def commit(self, barrier: cute.Pointer, ctas: int) -> None:
        """Arrive on `barrier`, in each CTA of a pair, when all tcgen05.mma of this thread so far are complete."""
        multicast_mask = Int16(0b11).ir_value() if ctas == 2 else None
        nvvm.tcgen05_commit(barrier.llvm_ptr, multicast_mask=multicast_mask, group=cta_group(ctas))


SIGNALS = Tcgen05Signals()
