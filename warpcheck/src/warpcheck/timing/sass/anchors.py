"""Machine instructions that run as often as the PTX instructions that they were compiled from."""

from __future__ import annotations

from collections.abc import Iterable

from warpcheck.machine.ptx import Kernel
from warpcheck.timing.sass.code import MachineInstruction

ANCHORS = frozenset({
    "BAR", "SYNCS", "STS", "STG", "ST", "STL", "STSM", "STAS", "RED", "REDG", "ATOM", "ATOMS", "ATOMG", "LDGSTS",
    "LDGDEPBAR", "DEPBAR", "MEMBAR", "FENCE", "WARPGROUP", "HGMMA", "HMMA", "SHFL", "VOTE", "VOTEU", "REDUX", "CREDUX",
    "LDTM", "STTM", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA", "UTCBAR", "UTCCP", "UTCATOMSWS", "UTMALDG",
    "UTMASTG", "UTMAREDG", "UTMACMDFLUSH", "UBLKCP", "UBLKRED", "UCGABAR_ARV", "UCGABAR_WAIT", "USETMAXREG", "ACQBULK",
    "PREEXIT", "ARRIVES", "UGETNEXTWORKID", "IMMA", "QMMA", "OMMA",
})  # fmt: skip
_VOTES = frozenset({"VOTE", "VOTEU"})


def anchored(kernel: Kernel, code: Iterable[tuple[MachineInstruction, int | None]]) -> list[int]:
    """Return the PTX instructions that have an anchor in a block of machine code.

    code: machine instructions of the block, and the PTX instruction of each.
    """
    found = [(instruction, index) for instruction, index in code if instruction.root in ANCHORS and index is not None]
    # A branch that became predicates. The vote that selects a lane for such an instruction has no predicate.
    merged = {index for instruction, index in found if instruction.guard and kernel.instructions[index].guard is None}
    return [
        index
        for instruction, index in found
        if not (index in merged and (instruction.guard or instruction.root in _VOTES))
        and not _spills(kernel, instruction, index)
    ]


def _spills(kernel: Kernel, instruction: MachineInstruction, index: int) -> bool:
    """Whether the compiler spills a register, which it does at lines of any block."""
    return instruction.root == "STL" and kernel.instructions[index].parts[0] != "st"
