"""All opcode cases."""

from warpcheck_cases.opcodes import (
    block_scaled,
    conversion,
    floating,
    integer,
    matrix,
    matrix_copies,
    memory,
    synchronisation,
    warp,
)
from warpcheck_cases.opcodes.case import Case

GROUPS: dict[str, tuple[Case, ...]] = {
    "integer and logic": tuple(integer.CASES),
    "floating point": tuple(floating.CASES),
    "conversion": tuple(conversion.CASES),
    "warp": tuple(warp.CASES),
    "memory": tuple(memory.CASES),
    "synchronisation": tuple(synchronisation.CASES),
    "matrix": (*matrix.CASES, *matrix_copies.CASES, *block_scaled.CASES),
}
CASES: tuple[Case, ...] = tuple(case for cases in GROUPS.values() for case in cases)
