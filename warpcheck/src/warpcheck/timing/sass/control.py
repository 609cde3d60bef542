"""The control bits of an instruction: what the compiler decided about its time.

Volta and later encode an instruction in 128 bits; bits 105 to 125 are the scheduler's. Source of the fields: Jia et
al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking" (2018), section 2.1. Nothing public says that
they hold for sm_90 and sm_100. A test shows it in code of both: each register that a load writes is waited for, on the
scoreboard that these bits name, before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

SCOREBOARDS = 6
_NONE = 7


@dataclass(frozen=True, slots=True)
class Control:
    """stall: clocks until the warp may issue again. yields: another warp should be preferred next. written: scoreboard
    (0 to 5) that counts down when the results are there, None without one. read: scoreboard that counts down when the
    operands have been read. wait: mask of scoreboards that must be at zero before the issue. reuse: mask of operands
    that stay in the operand cache.
    """

    stall: int
    yields: bool
    written: int | None
    read: int | None
    wait: int
    reuse: int

    @staticmethod
    def decode(upper: int) -> Control:
        """From the upper 64 of the 128 bits."""
        bits = upper >> 41
        written, read = bits >> 5 & 7, bits >> 8 & 7
        return Control(
            stall=bits & 15,
            yields=not bits >> 4 & 1,
            written=None if written == _NONE else written,
            read=None if read == _NONE else read,
            wait=bits >> 11 & 63,
            reuse=bits >> 17 & 15,
        )

    @property
    def sets(self) -> tuple[int, ...]:
        """Scoreboards that this instruction counts up."""
        return tuple(board for board in (self.written, self.read) if board is not None)

    @property
    def waits(self) -> tuple[int, ...]:
        """Scoreboards of the mask."""
        return tuple(board for board in range(SCOREBOARDS) if self.wait >> board & 1)
