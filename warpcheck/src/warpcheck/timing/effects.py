"""Effects of PTX instructions on the units of the clock, as far as the text defines them.

Values of a run (addresses, barriers, shapes in registers) are in the events of the record.
"""

from __future__ import annotations

from enum import IntEnum

from warpcheck.machine.ptx import Imm, Instruction, Kernel, Special, Vector


class Action(IntEnum):
    """Effects, with the numbers of core/replay.hpp."""

    NONE = 0
    TMEM_LOAD = 1
    TMEM_STORE = 2
    TMEM_WAIT_LOAD = 3
    TMEM_WAIT_STORE = 4
    BULK_COMMIT = 5
    BULK_WAIT = 6
    BULK_WAIT_READ = 7
    WGMMA = 8
    WGMMA_COMMIT = 9
    WGMMA_WAIT = 10
    COPY_COMMIT = 11
    COPY_WAIT = 12
    COPY = 13
    CLUSTER_ARRIVE = 14
    CLUSTER_WAIT = 15
    NAMED_SYNC = 16
    NAMED_ARRIVE = 17
    TENSOR_SYNC = 18
    EXIT = 19
    CLOCK = 20


class ProductKind(IntEnum):
    """Kinds of mma.sync by their rate, with the numbers of core/replay.cpp. Sums have 32 bits, except in two."""

    F16 = 0  # also bf16
    F16_SUMS = 1  # 16-bit operands and sums
    BYTES = 2  # unscaled operands of 8, 6 or 4 bits
    BYTES_F16_SUMS = 3  # their sums in float16, or in int32 of int8
    SCALED = 4  # block-scaled operands of 8 or 6 bits
    SCALED_4BIT = 5
    TF32 = 6


Effect = tuple[int, int, int]  # action and its two values
IN_SHARED, ENDS_GROUP, K = 1, 2, 4  # of wgmma: A is in shared memory; last product of its group; times its K
_NOTHING: Effect = (Action.NONE, 0, 0)
_REGISTERS = {
    "16x64b": 1,
    "16x128b": 2,
    "16x256b": 4,
    "32x32b": 1,
    "16x32bx2": 1,
}  # 32-bit registers per thread and repetition


def effects(kernel: Kernel) -> list[Effect]:
    """Return the effect of each instruction of a kernel.

    The end of a wgmma group is a flag of its last product: the machine code has no instruction for it.
    """
    found = [effect(instruction) for instruction in kernel.instructions]
    last = -1
    for i in range(len(found)):
        if found[i][0] == Action.WGMMA:
            last = i
        elif found[i][0] == Action.WGMMA_COMMIT:
            found[i] = _NOTHING
            if last >= 0:
                action, n, flags = found[last]
                found[last] = (action, n, flags | ENDS_GROUP)
    return found


def effect(instruction: Instruction) -> Effect:
    """Return action and values: bytes per warp (tensor memory), open groups (waits), N and K (wgmma), FLOPs and kind
    (mma.sync)."""
    parts = instruction.parts
    root, name = parts[0], instruction.opcode
    if root == "tcgen05":
        if parts[1] in ("ld", "st"):
            count = next(int(part[1:]) for part in parts if part[:1] == "x" and part[1:].isdigit())
            shape = next(part for part in parts if part in _REGISTERS)
            action = Action.TMEM_LOAD if parts[1] == "ld" else Action.TMEM_STORE
            return (action, 128 * count * _REGISTERS[shape], 0)
        if parts[1].startswith("wait"):
            return (Action.TMEM_WAIT_LOAD if parts[1].endswith("ld") else Action.TMEM_WAIT_STORE, 0, 0)
    elif root == "wgmma":
        if parts[1] == "mma_async":
            n, k = map(int, next(part[4:].split("k") for part in parts if part.startswith("m64n")))
            return (Action.WGMMA, n, K * k + IN_SHARED * (not isinstance(instruction.operands[1], Vector)))
        if parts[1] == "commit_group":
            return (Action.WGMMA_COMMIT, 0, 0)
        if parts[1] == "wait_group":
            return (Action.WGMMA_WAIT, _count(instruction), 0)
    elif name.startswith("cp.async.bulk.commit_group"):
        return (Action.BULK_COMMIT, 0, 0)
    elif name.startswith("cp.async.bulk.wait_group"):
        return (Action.BULK_WAIT_READ if "read" in parts else Action.BULK_WAIT, _count(instruction), 0)
    elif name.startswith("cp.async.commit_group"):
        return (Action.COPY_COMMIT, 0, 0)
    elif name.startswith("cp.async.wait_group"):
        return (Action.COPY_WAIT, _count(instruction), 0)
    elif name.startswith("cp.async.wait_all"):
        return (Action.COPY_WAIT, 0, 1)
    elif root == "cp" and parts[1] == "async" and parts[2] in ("ca", "cg"):
        return (Action.COPY, 0, 0)
    elif name.startswith("barrier.cluster.arrive"):
        return (Action.CLUSTER_ARRIVE, 0, 0)
    elif name.startswith("barrier.cluster.wait"):
        return (Action.CLUSTER_WAIT, 0, 0)
    elif root in ("bar", "barrier"):
        return (Action.NAMED_ARRIVE if "arrive" in parts else Action.NAMED_SYNC, 0, 0)
    elif root == "mma":
        return (Action.TENSOR_SYNC, _flops(parts), _kind(parts))
    elif root in ("exit", "ret"):
        return (Action.EXIT, 0, 0)
    elif root == "mov" and instruction.operands[1:] == (Special("clock64"),):
        return (Action.CLOCK, 0, 0)
    return _NOTHING


def _count(instruction: Instruction) -> int:
    first = instruction.operands[0]
    return first.value if isinstance(first, Imm) else 0


def _flops(parts: list[str]) -> int:
    shape = next(part for part in parts if part[0] == "m" and "n" in part and "k" in part and part[1].isdigit())
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return 2 * int(m) * int(n) * int(k)


_KINDS = {
    "kind::mxf8f6f4": ProductKind.SCALED,
    "kind::mxf4": ProductKind.SCALED_4BIT,
    "kind::mxf4nvf4": ProductKind.SCALED_4BIT,
}
_16_BIT = frozenset({"f16", "bf16"})


def _kind(parts: list[str]) -> ProductKind:
    """Return the kind of an mma.sync, whose types are those of D, A, B and C."""
    for part in parts:
        if part in _KINDS:
            return _KINDS[part]
    types = [part for part in parts if part in _TYPES]
    if len(types) != 4:
        return ProductKind.F16
    result, operand = types[:2]
    if operand == "tf32":
        return ProductKind.TF32
    if operand in _16_BIT:
        return ProductKind.F16_SUMS if result == "f16" else ProductKind.F16
    return ProductKind.BYTES if result == "f32" else ProductKind.BYTES_F16_SUMS


_TYPES = _16_BIT | {"f32", "tf32", "s32", "s8", "u8", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"}
