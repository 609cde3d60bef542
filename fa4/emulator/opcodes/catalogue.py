"""All opcode cases."""

from fa4.emulator.opcodes import conversion, floating, integer, matrix, memory, synchronisation, warp
from fa4.emulator.opcodes.case import Case

CASES: tuple[Case, ...] = (
    *integer.CASES,
    *floating.CASES,
    *conversion.CASES,
    *warp.CASES,
    *memory.CASES,
    *synchronisation.CASES,
    *matrix.CASES,
)
