"""Does the machine code, charged by the blocks of PTX that a warp ran, make a path that the chip could have gone?

A wrong home shows: its block of machine code is charged where no branch leads to it. So the share of charges that
follow an edge of the machine code's own control flow says how far the charges of a run can be trusted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from warpcheck.timing.sass import blocks as flow
from warpcheck.timing.sass.code import Function
from warpcheck.timing.sass.issue import IssueModel


@dataclass(frozen=True)
class Walk:
    """Paths of warps. instructions: of the machine, charged. joined: of them, those of blocks that an edge leads to
    from the block charged before. breaks: (block of machine code, the one charged next) without an edge ->
    how often."""

    instructions: int
    joined: int
    breaks: Counter[tuple[int, int]]

    def __add__(self, other: Walk) -> Walk:
        return Walk(self.instructions + other.instructions, self.joined + other.joined, self.breaks + other.breaks)


def successors(function: Function, blocks: flow.Ranges) -> list[set[int]]:
    """Blocks that may run after each block of machine code; a call goes on behind itself."""
    found = []
    for block in range(len(blocks)):
        last = function.instructions[blocks[block][-1]]
        after = set()
        if last.root in flow.ENDS and last.target is not None:
            after.add(blocks.of(last.target))
        guarded = last.guard or last.operands.lstrip("!").startswith(("P", "UP", "~UR"))
        if guarded or last.root not in ("BRA", "EXIT", "RET", "JMP"):
            after.add(block + 1)
        found.append({b for b in after if b < len(blocks)})
    return found


def walk(model: IssueModel, executed: Iterable[int]) -> Walk:
    """The path of one warp. executed: indices of the PTX instructions that it executed, in order."""
    blocks = flow.machine_blocks(model.code)
    edges = successors(model.code, blocks)
    residents = defaultdict(list)
    for block, home in sorted(model.homes.items()):
        residents[home].append(block)
    starts = {block.start: home for home, block in enumerate(model.blocks)}
    instructions = joined = 0
    breaks: Counter[tuple[int, int]] = Counter()
    before: int | None = None
    for index in executed:
        for block in residents[starts[index]] if index in starts else ():
            size = len(blocks[block])
            instructions += size
            if before is None or block in edges[before]:
                joined += size
            else:
                breaks[before, block] += 1
            before = block
    return Walk(instructions, joined, breaks)
