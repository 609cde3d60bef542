"""Issue slots of warps, as arrays for the replay: from machine code if available, else an estimate from PTX.

The estimate (`from_ptx`) gives each PTX instruction one slot with the costs of a table of opcodes, without register
names, in the order of the text. It does not model what the assembler merges, moves or spills.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from warpcheck.machine.ptx import Instruction, Kernel, Register
from warpcheck.timing.effects import Action, effects

if TYPE_CHECKING:
    from warpcheck.timing.sass import IssueModel
    from warpcheck.timing.sass import Slot as MachineSlot

_SCOREBOARDS = 60


@dataclass(frozen=True)
class Issue:
    """Issue model of a kernel, as arrays.

    pipes: names by number. slots (s, 14), instructions (i, 3), blocks (b, 4): see core/replay.hpp. The last slot is for
    instructions and events without a slot of their own. source: "machine code" or "PTX". registers: of a thread; 0 if
    unknown.
    """

    pipes: tuple[str, ...]
    slots: np.ndarray
    instructions: np.ndarray
    blocks: np.ndarray
    source: str
    registers: int = 0


@dataclass(frozen=True)
class _Cost:
    """Estimated cost of a PTX instruction, in clocks."""

    pipe: str
    occupancy: int
    stall: int = 1
    latency: int = 4
    waits: bool = False  # readers of its result wait for a scoreboard


_FREE = frozenset({"mov", "cvta", "ld.param", "griddepcontrol", "pragma", "createpolicy"})
_COSTS = {
    "fma": _Cost("fma", 1), "add.f": _Cost("fma", 1), "sub.f": _Cost("fma", 1), "mul.f": _Cost("fma", 1),
    "mad": _Cost("fma", 2), "mul": _Cost("fma", 2),
    "ex2": _Cost("xu", 8, latency=18), "lg2": _Cost("xu", 8, latency=18), "rcp": _Cost("xu", 8, latency=18),
    "rsqrt": _Cost("xu", 8, latency=18), "sqrt": _Cost("xu", 8, latency=18), "tanh": _Cost("xu", 8, latency=18),
    "sin": _Cost("xu", 8, latency=18), "cos": _Cost("xu", 8, latency=18),
    "cvt": _Cost("alu", 4, latency=6),
    "ld": _Cost("lsu", 1, latency=30, waits=True), "st": _Cost("lsu", 1),
    "atom": _Cost("lsu", 1, latency=300, waits=True), "red": _Cost("lsu", 1),
    "ldmatrix": _Cost("lsu", 1, latency=33, waits=True), "stmatrix": _Cost("lsu", 1),
    "shfl": _Cost("lsu", 1, latency=24, waits=True), "redux": _Cost("lsu", 2, latency=44, waits=True),
    "cp": _Cost("tma", 2, stall=2), "mbarrier": _Cost("sync", 2, stall=8), "bar": _Cost("sync", 2, stall=8),
    "barrier": _Cost("sync", 2, stall=8), "fence": _Cost("sync", 1, stall=20), "membar": _Cost("sync", 1, stall=20),
    "tcgen05": _Cost("tensor", 2), "wgmma": _Cost("tensor", 2), "mma": _Cost("tensor", 2, latency=18, waits=True),
    "bra": _Cost("branch", 1, stall=5), "vote": _Cost("alu", 2, latency=6), "elect": _Cost("alu", 2, stall=6),
    "setmaxnreg": _Cost("sync", 1, stall=10), "mapa": _Cost("alu", 2),
}  # fmt: skip
_OTHER = _Cost("alu", 2)
_TMA_ISSUE = _Cost("tma", 2, stall=30)
_MMA_ISSUE = _Cost("tensor", 2, stall=30)


def _cost(instruction: Instruction) -> _Cost | None:
    name, root = instruction.opcode, instruction.parts[0]
    if root in _FREE or name.startswith("ld.param"):
        return None
    if root == "cp" and "tensor" in instruction.parts:
        return _TMA_ISSUE
    if root == "tcgen05":
        if instruction.parts[1] == "mma":
            return _MMA_ISSUE
        if instruction.parts[1] == "ld":
            return _Cost("tmem", 2, waits=True)
        return _COSTS[root]
    if name.endswith("f32x2") and root in ("fma", "add", "mul", "sub"):
        return _Cost("fma", 2)
    if root in ("add", "sub", "mul") and instruction.parts[-1] in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
        return _COSTS[root + ".f"]
    return _COSTS.get(root, _OTHER)


def from_ptx(kernel: Kernel) -> Issue:
    """Estimate the issue model of a kernel without its machine code."""
    code = kernel.instructions
    heads = {0, *kernel.labels.values()} | {
        i + 1 for i, ins in enumerate(code) if ins.parts[0] in ("bra", "brx", "ret", "exit")
    }
    pipes = ("none", "fma", "alu", "xu", "lsu", "tma", "sync", "tensor", "tmem", "branch")
    boards: dict[int, int] = defaultdict(int)  # register -> scoreboards of the instructions that write it
    written = 0
    for ins in code:
        cost = _cost(ins)
        if cost is not None and cost.waits:
            for register in _registers(ins, results=True):
                boards[register] |= 1 << written % _SCOREBOARDS
            written += 1
    slots: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    written = 0
    starts = sorted(head for head in heads if head < len(code))
    for start, stop in zip(starts, [*starts[1:], len(code)]):
        first = len(slots)
        for i in range(start, stop):
            cost = _cost(code[i])
            if cost is None:
                continue
            wait = 0
            for register in _registers(code[i], results=False):
                wait |= boards.get(register, 0)
            sets = 0
            if cost.waits:
                sets = 1 << written % _SCOREBOARDS
                written += 1
            times = pipes.index(cost.pipe), cost.occupancy, cost.stall
            slots.append((*times[:2], 0, 0, times[2], wait, sets, 0, cost.latency, cost.latency, i, 1, 0, 0))
        blocks.append((start, stop, first, len(slots)))
    return _issue(pipes, slots, kernel, blocks, "PTX")


# Opcodes that perform the effect of their PTX instruction. Other opcodes compute operands for these.
_CARRIERS = frozenset("""
    BAR SYNCS STS STG ST STL STSM STAS LDS LDG LD LDSM RED REDG ATOM ATOMS ATOMG LDGSTS LDGDEPBAR HGMMA QGMMA IGMMA
    BGMMA HMMA IMMA DMMA BMMA QMMA OMMA LDTM STTM UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA UTCBAR UTMALDG UTMASTG
    UTMAREDG UTMACMDFLUSH UBLKCP UBLKRED UCGABAR_ARV UCGABAR_WAIT WARPGROUP DEPBAR ARRIVES UGETNEXTWORKID
""".split())  # fmt: skip  # noqa: SIM905


def from_machine_code(kernel: Kernel, model: IssueModel) -> Issue:
    """Convert an issue model that was read from machine code."""
    pipes = ["none"]
    slots: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    table = effects(kernel)
    done = {slot.ptx for block in model.blocks for slot in block.slots if _does(slot)}
    for block in model.blocks:
        first = len(slots)
        carrier: dict[int, int] = {}
        for number, slot in enumerate(block.slots):
            if slot.ptx is None:
                continue
            is_all_there_is = slot.ptx not in done and table[slot.ptx][0] != Action.NONE
            if _does(slot) or (is_all_there_is and block.start <= slot.ptx < block.stop):
                carrier[slot.ptx] = number
        for number, slot in enumerate(block.slots):
            if slot.pipe not in pipes:
                pipes.append(slot.pipe)
            ptx = -1 if slot.ptx is None else slot.ptx
            sets = 0 if slot.written is None else 1 << slot.written
            reads = 0 if slot.read is None else 1 << slot.read
            latency = round(slot.latency) or 12
            occupancy = 1 if slot.pipe in _SHARED else slot.occupancy
            carries = 0 if carrier.get(ptx) != number else 2 if slot.guarded else 1
            contention = [round(1000 * cost) for cost in (slot.takes, slot.slowed)]
            slots.append((pipes.index(slot.pipe), round(occupancy), round(1000 * slot.holds),
                          _order(slot), slot.stall, slot.wait, sets, reads,
                          latency, round(slot.released) or latency, ptx, carries, *contention))  # fmt: skip
        blocks.append((block.start, block.stop, first, len(slots)))
    return _issue(tuple(pipes), slots, kernel, blocks, "machine code")


def _does(slot: MachineSlot) -> bool:
    return slot.ptx is not None and slot.opcode.partition(".")[0] in _CARRIERS


def _order(slot: MachineSlot) -> int:
    """Return `Slot.ordered` of core/replay.hpp."""
    return 1 if slot.pipe in _ORDERED else 2 if slot.opcode.startswith("ST") and slot.pipe in _SHARED else 0


_ORDERED = frozenset({"fma", "alu", "tensor"})  # pipes whose instructions need the register ports at their issue
_SHARED = frozenset({"lsu"})  # pipes of the whole SM, whose occupancy the units of the replay model


def _issue(pipes: tuple[str, ...], slots: list, kernel: Kernel, blocks: list, source: str) -> Issue:
    slots = [*slots, (0, 0, 0, 0, 1, 0, 0, 0, 1, 1, -1, 1, 0, 0)]
    return Issue(
        pipes, np.array(slots, dtype=np.int64), np.array(effects(kernel), dtype=np.int64).reshape(-1, 3),
        np.array(blocks, dtype=np.int64), source,
    )  # fmt: skip


def _registers(instruction: Instruction, results: bool) -> set[int]:
    """Return the registers that an instruction writes (`results`) or reads."""
    found: set[int] = set()
    operands = instruction.operands
    stores = instruction.parts[0] in ("st", "red", "bra", "bar", "barrier", "fence", "stmatrix", "cp", "prefetch") or (
        instruction.parts[0] == "tcgen05" and instruction.parts[1] != "ld"
    )
    chosen = () if stores and results else operands[:1] if results else operands if stores else operands[1:]

    def visit(operand: object) -> None:
        if isinstance(operand, Register):
            found.add(operand.index)
        for name in ("items", "coords", "extra"):
            for item in getattr(operand, name, None) or ():
                visit(item)
        for name in ("base", "register", "first", "second"):
            if (item := getattr(operand, name, None)) is not None:
                visit(item)

    for operand in chosen:
        visit(operand)
    if not results and instruction.guard is not None:
        found.add(instruction.guard.index)
    return found
