"""A kernel that holds some SMs until it is let go, as a communication kernel does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import cutlass.cute as cute
import torch
from cutlass import Int32

from fa4.bwd.device.semaphores import wait_semaphore
from fa4.runtime import jit
from fa4.runtime.device import chip_of

_HELD_BYTES = 200 << 10  # of shared memory: no room for another CTA


@cute.kernel
def hold(flag: cute.Tensor):
    """Until the flag is 1."""
    wait_semaphore(flag.iterator, Int32(1))


@cute.jit
def launch_hold(flag: cute.Tensor, sms: Int32, stream):
    """A CTA for each of `sms` SMs."""
    hold(flag).launch(grid=(sms, 1, 1), block=(32, 1, 1), smem=_HELD_BYTES, stream=stream)


class Holder:
    """Holds SMs of the current GPU. Until it lets go, nothing may wait for the whole GPU, and no kernel may be loaded,
    for that waits for those that run."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()
        flag, sms, stream = jit.fake_tensor(Int32, 1, align=4), Int32(0), jit.current_stream()
        self._launch = jit.compile_kernel(launch_hold, flag, sms, stream, chip=chip_of(self.flag.device))

    @contextlib.contextmanager
    def holding(self, sms: int) -> Iterator[None]:
        """Hold so many SMs inside the context. What is left on the current stream at its end runs with the others."""
        self.flag.fill_(1)  # loads its kernel
        self.flag.zero_()
        torch.cuda.synchronize()
        if sms:
            with torch.cuda.stream(self._stream):
                self._launch(self.flag, sms)
            time.sleep(0.01)
        try:
            yield
        finally:
            self.flag.fill_(1)
            torch.cuda.synchronize()
