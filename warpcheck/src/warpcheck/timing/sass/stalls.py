"""Latencies that the compiler assumes: the fewest clocks from an instruction to the first reader of its result.

If an instruction sets no scoreboard, only stalls delay a reader until the result is ready. The least distance over much
code is therefore an upper bound of the latency that ptxas assumes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from warpcheck.timing.sass import blocks as flow
from warpcheck.timing.sass.code import Function, MachineInstruction

_REGISTER = re.compile(r"\bU?R\d+\b|\bU?P\d\b")
_TWO_RESULTS = frozenset({"ISETP", "FSETP", "UISETP", "PLOP3", "UPLOP3"})
_NO_RESULT = frozenset(
    {"STS", "STG", "ST", "BAR", "SYNCS", "BRA", "RED", "STTM", "STSM", "UTCHMMA", "UTCBAR", "HGMMA", "UTMALDG", "EXIT"}
)  # fmt: skip


def _registers(instruction: MachineInstruction) -> tuple[list[str], set[str]]:
    """Return the registers that an instruction writes and reads; of a vector of registers only the first one."""
    operands = [_REGISTER.findall(operand) for operand in instruction.operands.split(",")]
    written = 0 if instruction.root in _NO_RESULT else 2 if instruction.root in _TWO_RESULTS else 1
    reads = {register for operand in operands[written:] for register in operand}
    return [r for operand in operands[:written] for r in operand[:1]], reads | set(_REGISTER.findall(instruction.guard))


def distances(function: Function) -> dict[str, Counter[int]]:
    """Return for each root opcode how often each distance (clocks) to a reader occurs in a block.

    Instructions that set a scoreboard are left out.
    """
    found: dict[str, Counter[int]] = defaultdict(Counter)
    blocks = flow.machine_blocks(function)
    for block in range(len(blocks)):
        clock = 0
        made: dict[str, tuple[str, int]] = {}
        for i in blocks[block]:
            instruction = function.instructions[i]
            written, reads = _registers(instruction)
            for register in reads & made.keys():
                opcode, at = made[register]
                found[opcode][clock - at] += 1
            for register in written:
                made.pop(register, None)
                # The carry is available one clock earlier than the sum.
                if instruction.control.written is None and ".WIDE" not in instruction.opcode:
                    made[register] = instruction.root, clock
            clock += max(1, instruction.control.stall)
    return dict(found)
