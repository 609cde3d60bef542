"""Issue model: the machine instructions that a warp issues on the chip for each block of its PTX.

The compiler reorders, merges and drops blocks, so blocks of machine code and of PTX do not correspond one to one. Each
block of machine code gets a *home*: a block of PTX that runs as often as the block. Two kinds of instructions identify
it, because the compiler cannot move them to code that runs more or less often: the branch at the end of the block, and
unguarded instructions with an effect. The home is the first of the PTX blocks of these instructions. When a warp enters
a home, it issues the whole block of machine code in its own order. Each slot names the PTX instruction that it was
compiled from, which may be in a later block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from warpcheck.machine.ptx import Kernel, parse
from warpcheck.timing.sass import blocks as flow
from warpcheck.timing.sass.anchors import ANCHORS, anchored
from warpcheck.timing.sass.code import Function, MachineInstruction, cubin_in, embedded_ptx, functions
from warpcheck.timing.sass.pipes import Rate, rate

_EFFECTS = frozenset({
    "mbarrier", "tcgen05", "wgmma", "cp", "bar", "barrier", "st", "stmatrix", "red", "atom", "fence", "setmaxnreg",
    "griddepcontrol", "clusterlaunchcontrol",
})  # fmt: skip
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
_A_BIT_OF_ANOTHER = "wgmma.commit_group"  # in machine code, a bit of the last product of the group
_PRODUCT = "wgmma.mma_async"
_PADDING = frozenset({"NOP", "BRA"})
# Chips with a block of moves before each wait. On sm_100a some waits have one, too; there it counts as the first try,
# as in the rows of docs/results/predicted-times.md.
_PREPARES_WAITS = frozenset({"sm_120a", "sm_121a"})


@dataclass(frozen=True, slots=True)
class Slot:
    """Issue of one machine instruction.

    pipe, occupancy, latency, released, holds, takes, slowed: see `pipes`. stall: clocks until the warp may issue its
    next instruction. wait: mask of scoreboards that must be zero before the issue. written, read: scoreboards that
    count down when the results are available, and when the operands have been read. until: (scoreboard, count) of a
    wait for a count above zero. ptx: index of the PTX instruction; None if the line information names none. guarded:
    under a predicate, so it may have no effect.
    """

    pipe: str
    stall: int
    wait: int
    written: int | None
    read: int | None
    ptx: int | None
    opcode: str
    reuse: int
    yields: bool
    occupancy: float
    latency: float
    until: tuple[int, int] | None = None
    guarded: bool = False
    released: float = 0
    holds: float = 0
    takes: float = 0
    slowed: float = 0

    @property
    def sets(self) -> tuple[int, ...]:
        """Scoreboards that the issue counts up."""
        return tuple(board for board in (self.written, self.read) if board is not None)


@dataclass(frozen=True)
class Block:
    """Block of PTX, instructions `start` up to `stop`, with the slots that a warp issues when it enters the block.

    slots: empty if the compiler put the instructions under predicates into an earlier block. retries: issued each time
    that the warp repeats the block because a wait failed. copies: further copies of the code, such as of an unrolled
    loop; one pass through the block issues one copy.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    retries: tuple[Slot, ...] = ()
    copies: tuple[tuple[Slot, ...], ...] = ()


@dataclass(frozen=True)
class Untied:
    """Machine instructions `start` up to `stop` that belong to no block of PTX, with the reason."""

    start: int
    stop: int
    reason: str


@dataclass(frozen=True)
class Coverage:
    """Quality of an issue model, as fractions.

    tied: machine instructions that belong to a block of PTX. named: machine instructions whose PTX instruction is
    known. reached: PTX instructions with an effect that have a slot.
    """

    instructions: int
    tied: float
    named: float
    reached: float


@dataclass(frozen=True)
class IssueModel:
    """Machine code of a kernel, by blocks of its PTX.

    blocks: all blocks of the PTX, in order and without gaps. homes: block of machine code (`blocks.machine_blocks`) ->
    index in `blocks`, for the blocks whose code is in `Block.slots`.
    """

    entry: str
    chip: str
    blocks: tuple[Block, ...]
    untied: tuple[Untied, ...]
    coverage: Coverage
    code: Function
    homes: Mapping[int, int]


def issue_model(ptx: str, cubin: bytes, entry: str) -> IssueModel:
    """Return the issue model of a kernel.

    cubin: compiled from this PTX, with line information; or a fat binary that holds it uncompressed.

    Raises:
        FileNotFoundError: nvdisasm is not installed.
        ValueError: the cubin has no line information or no such kernel, or was compiled from other PTX.
    """
    cubin = cubin_in(cubin)
    module = parse(ptx)
    found = functions(cubin)
    if entry not in found or entry not in module.kernels:
        raise ValueError(f"entry {entry}: the cubin has {', '.join(found)}; the PTX has {', '.join(module.kernels)}")
    kernel = module.kernels[entry]
    lines = _lines(kernel, cubin)
    return tie(kernel, found[entry], lines, module.target)


def _lines(kernel: Kernel, cubin: bytes) -> dict[int, list[int]]:
    """Return the indices of the kernel's instructions for each line of the PTX inside the cubin."""
    text = embedded_ptx(cubin)
    if text is None:
        raise ValueError("the cubin has no PTX lines: compile with --generate-line-info (ptxas: -lineinfo)")
    written = text.split("\n")
    for instruction in kernel.instructions:
        if instruction.opcode not in "".join(written[instruction.line - 1 : instruction.line + 2]):
            break
    else:
        return _by_line(kernel, written)
    # The line numbers differ, for example because comments were added or removed.
    inside = parse(text).kernels.get(kernel.name)
    if inside is None or [i.opcode for i in inside.instructions] != [i.opcode for i in kernel.instructions]:
        raise ValueError(f"the cubin was not made from this PTX: {kernel.name} has other instructions in it")
    return _by_line(inside, written)


def _by_line(kernel: Kernel, written: Sequence[str]) -> dict[int, list[int]]:
    """Return the indices of the instructions for each line.

    An instruction of several lines, such as mma.sync, has all of its lines, because ptxas names the last one.
    """
    found = defaultdict(list)
    for index, instruction in enumerate(kernel.instructions):
        line = instruction.line
        found[line].append(index)
        while ";" not in written[line - 1] and line < len(written):
            line += 1
            found[line].append(index)
    return found


def tie(kernel: Kernel, function: Function, lines: dict[int, list[int]], chip: str) -> IssueModel:
    """Return the issue model of a parsed kernel. lines: PTX line -> indices of instructions."""
    of_ptx, of_code = flow.ptx_blocks(kernel), flow.machine_blocks(function)
    indices = [_index(instruction, lines, kernel) for instruction in function.instructions]
    _tie_products(kernel, function, indices)
    _tie_waits(kernel, function, indices)
    slots = [_slot(*parts, chip) for parts in zip(function.instructions, indices, strict=True)]
    homes, untied = _homes(kernel, function, slots, of_ptx, of_code)
    residents = defaultdict(list)
    for block, home in homes.items():
        residents[home].append(block)
    cold = _cold(kernel, function, indices, of_code)
    blocks: list[Block] = []
    charged: dict[int, int] = {}
    for home in range(len(of_ptx)):
        parts = {block: tuple(slots[i] for i in of_code[block]) for block in residents[home]}
        last = {block: function.instructions[of_code[block][-1]].target for block in parts}
        turned = {block for block, target in last.items() if target is not None and target <= of_code[block].start}
        made, kept = _block(kernel, of_ptx[home], parts, turned, cold, by_tries=chip in _PREPARES_WAITS)
        blocks.append(made)
        charged.update(dict.fromkeys(kept, home))
    coverage = _coverage(kernel, slots, blocks)
    return IssueModel(kernel.name, chip, tuple(blocks), tuple(untied), coverage, function, charged)


def _cold(kernel: Kernel, function: Function, indices: Sequence[int | None], of_code: flow.Ranges) -> set[int]:
    """Return the blocks of machine code that run only after a failed wait: from its target up to the branch back."""
    code = function.instructions
    found = set()
    for i, instruction in enumerate(code):
        target = instruction.target
        if instruction.root != "BRA" or not instruction.guard or target is None or target <= i:
            continue
        if not _is_wait(kernel, indices[i]) or of_code.of(target) == of_code.of(i) + 1:
            continue
        block = of_code.of(target)
        while block < len(of_code):
            found.add(block)
            last = code[of_code[block][-1]]
            if last.root == "BRA" and not last.guard:
                break
            block += 1
    return found


def _index(instruction: MachineInstruction, lines: dict[int, list[int]], kernel: Kernel) -> int | None:
    """Return the index of the PTX instruction of a machine instruction, by its line."""
    at = lines.get(instruction.line, ()) if instruction.line is not None else ()
    if len(at) > 1 and instruction.root in flow.ENDS:
        return next((i for i in at if kernel.instructions[i].parts[0] in ("bra", "brx", "ret", "exit")), at[0])
    return at[0] if at else None


def _tie_products(kernel: Kernel, function: Function, indices: list[int | None]) -> None:
    """Correct the indices of wgmma, whose lines in machine code are the line of the fence before the group.

    ptxas keeps the order of products: the n-th product after a fence in machine code is the n-th after it in PTX, as
    long as their shapes agree.
    """
    products = [i for i, instruction in enumerate(kernel.instructions) if instruction.opcode.startswith(_PRODUCT)]
    coming: Iterator[int] = iter(())
    for i, instruction in enumerate(function.instructions):
        at = indices[i]
        if instruction.opcode.startswith("WARPGROUP.ARRIVE") and at is not None:
            coming = iter(products[bisect_left(products, at) :])
        elif instruction.root.endswith("GMMA"):
            product = next(coming, None)
            shape = instruction.opcode.split(".")[1].split("x")
            if product is not None and "m{}n{}k{}".format(*shape) not in kernel.instructions[product].parts:
                coming, product = iter(()), None
            indices[i] = product


def _tie_waits(kernel: Kernel, function: Function, indices: list[int | None]) -> None:
    """Correct the indices of waits.

    The first try of a wait is in straight-line code and has the line before the wait. If it fails, the code branches to
    a loop elsewhere, whose tries have the line of the wait.
    """
    code = function.instructions
    for i, instruction in enumerate(code):
        if instruction.root != "SYNCS" or "TRYWAIT" not in instruction.opcode or _is_wait(kernel, indices[i]):
            continue
        # The branch on the result of the wait is the next branch.
        branch = next((j for j in range(i + 1, min(i + 40, len(code))) if code[j].root in flow.ENDS), None)
        target = code[branch].target if branch is not None else None
        if branch is None or target is None:
            continue
        again = next((j for j in range(target, min(target + 8, len(code))) if _is_wait(kernel, indices[j])), None)
        if again is not None:
            indices[i] = indices[branch] = indices[again]


def _is_wait(kernel: Kernel, index: int | None) -> bool:
    return index is not None and kernel.instructions[index].opcode.startswith(_WAITS)


_FIRST, _BOTH = 1, 3  # masks of operands that stay in the operand cache


def _holds(row: Rate, reuse: int) -> float:
    """Return the clocks that an instruction holds the register ports.

    A product whose first operand stays in the operand cache saves one clock, with both operands two. The model charges
    the saving to this product instead of the next one, which does not change the sum.
    """
    if row.pipe != "tensor":
        return row.holds
    return max(0.0, row.holds - bool(reuse & _FIRST) - (reuse & _BOTH == _BOTH))


def _slot(instruction: MachineInstruction, ptx: int | None, chip: str) -> Slot:
    row: Rate = rate(instruction.opcode, chip)
    control = instruction.control
    until = None
    if instruction.root == "DEPBAR" and instruction.operands.startswith("SB"):
        board, _, count = instruction.operands.partition(",")
        until = int(board[2:]), int(count.strip() or "0", 16)
    return Slot(
        row.pipe, control.stall, control.wait, control.written, control.read, ptx, instruction.opcode, control.reuse,
        control.yields, row.occupancy, row.latency, until, bool(instruction.guard),
        row.released, _holds(row, control.reuse), row.takes, row.slowed,
    )  # fmt: skip


def _homes(kernel: Kernel, function: Function, slots: Sequence[Slot], of_ptx: flow.Ranges, of_code: flow.Ranges):
    """Return the home of each block of machine code, and the code that has none."""
    homes: dict[int, int] = {}
    untied = []
    for block in range(len(of_code)):
        span = of_code[block]
        sure = [of_ptx.of(at) for at in anchored(kernel, ((function.instructions[i], slots[i].ptx) for i in span))]
        likely: Counter[int] = Counter()
        for i in span:
            instruction, slot = function.instructions[i], slots[i]
            if slot.ptx is None:
                continue
            home = of_ptx.of(slot.ptx)
            if i == span[-1] and instruction.root in flow.ENDS and not _is_repeated(kernel, slot.ptx):
                sure.append(home)
            likely[home] += 1 if instruction.guard else 2
        if sure:
            homes[block] = min(sure)
        elif likely:
            most = max(likely.values())
            homes[block] = min(home for home, votes in likely.items() if votes == most)
        elif all(function.instructions[i].root in _PADDING for i in span):
            untied.append(Untied(span.start, span.stop, "padding"))
        else:
            untied.append(Untied(span.start, span.stop, "no instruction here has a line of PTX"))
    return homes, untied


def _is_repeated(kernel: Kernel, index: int) -> bool:
    """Whether the compiler may repeat a PTX instruction wherever it needs the result.

    A branch after such a copy can have its line.
    """
    return kernel.instructions[index].parts[0] == "mov"


def _block(
    kernel: Kernel, span: range, parts: Mapping[int, tuple[Slot, ...]], turned: set[int], cold: set[int], by_tries: bool
) -> tuple[Block, list[int]]:
    """Return a block of PTX, and the blocks of machine code in its slots.

    parts: blocks of machine code, in their order. cold: blocks that run only after a failed wait. turned: blocks that
    end with a backward branch. If the compiler moved the test of a loop to its end, the code has the test before the
    loop as well. The block with the backward branch runs more often, so the other one counts as the copy. by_tries: a
    block without a try of a wait is not its first try, although its instructions have the line of the wait.
    """
    made_of = {block: _made_of(kernel, part) for block, part in parts.items()}
    retries: list[Slot] = []
    first: list[int] = []
    tried: set[int] = set()
    for block, part in parts.items():
        waits = {slot.ptx for slot in part if slot.ptx is not None and _is_wait(kernel, slot.ptx)}
        does_more = any(slot.opcode.partition(".")[0] in ANCHORS and slot.ptx not in waits for slot in part)
        if block in cold or (waits & tried and not does_more) or (retries and not made_of[block]):
            retries.extend(part)
        else:
            first.append(block)
            tried |= {
                slot.ptx for slot in part if slot.ptx in waits and (not by_tries or slot.opcode.startswith("SYNCS"))
            }
    kept: list[int] = []
    copies: list[tuple[Slot, ...]] = []
    for block in sorted(first, key=lambda block: (block not in turned, block)):
        if any(_is_copy(made_of[block], made_of[other]) for other in kept):
            copies.append(parts[block])
        else:
            kept.append(block)
    kept.sort()
    slots = tuple(slot for block in kept for slot in parts[block])
    return Block(span.start, span.stop, slots, tuple(retries), tuple(copies)), kept


def _made_of(kernel: Kernel, part: tuple[Slot, ...]) -> set[int]:
    """Return the PTX instructions of a block of machine code, without branches."""
    return {slot.ptx for slot in part if slot.ptx is not None and kernel.instructions[slot.ptx].parts[0] != "bra"}


def _is_copy(made_of: set[int], other: set[int]) -> bool:
    """Return whether two blocks share so many PTX instructions that one is a copy. One shared instruction is no copy:
    a PTX instruction may become several blocks."""
    both = made_of & other
    return len(both) > 2 and 2 * len(both) >= min(len(made_of), len(other))


def _coverage(kernel: Kernel, slots: Sequence[Slot], blocks: Sequence[Block]) -> Coverage:
    tied = sum(len(b.slots) + len(b.retries) + sum(map(len, b.copies)) for b in blocks)
    carried = {slot.ptx for slot in slots}
    effects = [
        i
        for i, instruction in enumerate(kernel.instructions)
        if instruction.parts[0] in _EFFECTS and not instruction.opcode.startswith(_A_BIT_OF_ANOTHER)
    ]
    named = sum(slot.ptx is not None for slot in slots)
    reached = sum(i in carried for i in effects) / len(effects) if effects else 1.0
    return Coverage(len(slots), tied / len(slots), named / len(slots), reached)
