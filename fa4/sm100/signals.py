"""What Blackwell adds around barriers: fences of tensor memory, and matrix operations that signal their completion."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int16
from cutlass._mlir.dialects import nvvm

from ..pipeline.channels import Carries, Signals
from .mma import cta_group


class Tcgen05Signals(Signals):
    """tcgen05.fence around arrivals and waits for what tensor memory carries; tcgen05.commit."""

    __slots__ = ()

    def before_arrival(self, carries: Carries) -> None:
        if Carries.TMEM in carries:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)

    def after_wait(self, carries: Carries) -> None:
        if Carries.TMEM in carries:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    def commit(self, barrier: cute.Pointer, ctas: int) -> None:
        """On `barrier` of each CTA of a pair, when every tcgen05.mma this thread has issued is complete."""
        both = Int16(0b11).ir_value() if ctas == 2 else None
        nvvm.tcgen05_commit(barrier.llvm_ptr, multicast_mask=both, group=cta_group(ctas))


SIGNALS = Tcgen05Signals()
