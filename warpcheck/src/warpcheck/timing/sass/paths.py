"""Control-flow check of an issue model: is the machine code that a run is charged with a path of its control flow?

A warp is charged with the machine code blocks of the PTX blocks that it executes. A machine code block that belongs to
the wrong PTX block is charged where no branch leads to it. The share of charged instructions that follow an edge of the
control flow graph is therefore a measure of how reliable the cycles of a run are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from warpcheck.timing.sass import blocks as flow
from warpcheck.timing.sass.code import Function
from warpcheck.timing.sass.issue import IssueModel


@dataclass(frozen=True)
class PathCoverage:
    """Paths of warps, in machine instructions.

    instructions: charged. joined: those in blocks that an edge leads to from the block charged before. breaks: pairs of
    consecutive blocks without an edge -> count.
    """

    instructions: int
    joined: int
    breaks: Counter[tuple[int, int]]

    def __add__(self, other: PathCoverage) -> PathCoverage:
        instructions, joined = self.instructions + other.instructions, self.joined + other.joined
        return PathCoverage(instructions, joined, self.breaks + other.breaks)


def successors(function: Function, blocks: flow.Ranges) -> list[set[int]]:
    """Return the blocks that may follow each block of machine code; a call continues after itself."""
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


def path_coverage(model: IssueModel, executed: Iterable[int]) -> PathCoverage:
    """Return the path of one warp. executed: indices of its PTX instructions, in order."""
    blocks = flow.machine_blocks(model.code)
    edges = successors(model.code, blocks)
    charged = defaultdict(list)
    for block, home in sorted(model.homes.items()):
        charged[home].append(block)
    starts = {block.start: home for home, block in enumerate(model.blocks)}
    instructions = joined = 0
    breaks: Counter[tuple[int, int]] = Counter()
    before: int | None = None
    for index in executed:
        for block in charged[starts[index]] if index in starts else ():
            size = len(blocks[block])
            instructions += size
            if before is None or block in edges[before]:
                joined += size
            else:
                breaks[before, block] += 1
            before = block
    return PathCoverage(instructions, joined, breaks)
