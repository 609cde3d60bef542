"""Basic blocks of PTX and of machine code."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from warpcheck.machine.ptx import Kernel
from warpcheck.timing.sass.code import Function

_PTX_ENDS = frozenset({"bra", "brx", "ret", "exit", "trap"})
ENDS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "EXIT", "RET", "CALL", "BREAK", "BSYNC", "WARPSYNC"})


@dataclass(frozen=True)
class Ranges:
    """Consecutive ranges of indices: block b is `starts[b]` up to `starts[b + 1]`."""

    starts: tuple[int, ...]
    stop: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, block: int) -> range:
        end = self.starts[block + 1] if block + 1 < len(self.starts) else self.stop
        return range(self.starts[block], end)

    def of(self, index: int) -> int:
        """Return the block that contains an index."""
        return bisect_right(self.starts, index) - 1


def _ranges(heads: set[int], stop: int) -> Ranges:
    return Ranges(tuple(sorted(head for head in heads | {0} if head < stop)), stop)


def ptx_blocks(kernel: Kernel) -> Ranges:
    """Return the blocks of a kernel. A block starts at each label that is a branch target, and after each branch."""
    code = kernel.instructions
    after = {i + 1 for i, instruction in enumerate(code) if instruction.parts[0] in _PTX_ENDS}
    return _ranges(set(kernel.labels.values()) | after, len(code))


def machine_blocks(function: Function) -> Ranges:
    """Return the blocks of machine code. A block starts at each branch target and after each branch."""
    code = function.instructions
    targets = {instruction.target for instruction in code if instruction.target is not None}
    after = {i + 1 for i, instruction in enumerate(code) if instruction.root in ENDS}
    return _ranges(targets | after, len(code))
