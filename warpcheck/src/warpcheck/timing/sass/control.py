"""Control bits of a machine instruction: stalls and scoreboards that the compiler has chosen.

Volta and later chips encode an instruction in 128 bits; bits 105 to 125 control the scheduler. Source of the fields:
Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking" (2018), section 2.1. There is no public
source for sm_90 and sm_100; a test checks code of both: before a register that a load writes is read, the code waits
for the scoreboard that these bits name.
"""

from __future__ import annotations

from dataclasses import dataclass

SCOREBOARDS = 6
_NONE = 7


@dataclass(frozen=True, slots=True)
class Control:
    """Control bits of an instruction.

    stall: clocks until the warp may issue again. yields: the scheduler should prefer another warp next. written:
    scoreboard (0 to 5) that counts down when the results are available, or None. read: scoreboard that counts down when
    the operands have been read, or None. wait: mask of scoreboards that must be zero before the issue. reuse: mask of
    operands that stay in the operand cache.
    """

    stall: int
    yields: bool
    written: int | None
    read: int | None
    wait: int
    reuse: int

    @staticmethod
    def decode(upper: int) -> Control:
        """Decode the upper 64 of the 128 bits."""
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
        """Scoreboards that the instruction counts up."""
        return tuple(board for board in (self.written, self.read) if board is not None)

    @property
    def waits(self) -> tuple[int, ...]:
        """Scoreboards of the mask `wait`."""
        return tuple(board for board in range(SCOREBOARDS) if self.wait >> board & 1)
