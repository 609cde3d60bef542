"""Lowering of asynchronous copies and tensor-core instructions (ISA 9.7.9.25 - 28, 9.7.15, 9.7.16)."""

from __future__ import annotations

from fa4.emulator.machine.lowering.lower import (
    NO_OPERAND,
    Address,
    Imm,
    Instruction,
    Lowering,
    Mods,
    Register,
    Vector,
    handles,
)
from fa4.emulator.machine.lowering.memory import MMA_TYPES, SPACES, space_of, take_hints

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@handles("cp", "multimem")
def _cp(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if ins.parts[0] == "multimem":
        raise mods.unknown()
    reduce = mods.has("reduce")
    if not mods.has("async"):
        raise mods.unknown()
    if not mods.has("bulk"):
        return _cp_async(low, ins, mods)
    if mods.has("commit_group"):
        mods.finish()
        return low.emit("bulk_commit", "b32", [], [])
    if mods.has("wait_group"):
        read = mods.has("read")
        mods.finish()
        return low.emit("bulk_wait", "b32", [], [], [ins.operands[0].value, int(read)])
    if mods.has("tensor"):
        return _tensor(low, ins, mods, reduce)
    return _bulk(low, ins, mods, reduce)


def _cp_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """cp_async m: bytes, destination and source offsets, source form (0 none, 1 src-size, 2 ignore-src).
    cp_async_wait m: groups that may stay pending. cp_async_mbar m: space, byte offset, noinc."""
    if mods.has("commit_group"):
        return low.emit("cp_async_commit", "b32", [], [])
    if mods.has("wait_all"):
        return low.emit("cp_async_wait", "b32", [], [], [0, 1])
    if mods.has("wait_group"):
        return low.emit("cp_async_wait", "b32", [], [], [ins.operands[0].value, 0])
    if mods.has("mbarrier"):
        mods.has("arrive"), mods.has("b64")
        noinc, space = mods.has("noinc"), space_of(mods)
        mods.finish()
        base, offset = low.address(ins.operands[0])
        return low.emit("cp_async_mbar", "b64", [], [base], [space, offset, int(noinc)])
    policy = take_hints(mods)
    for name in ("shared", "shared::cta", "global"):
        mods.has(name)
    mods.finish()
    operands = list(ins.operands)
    if policy:
        operands.pop()
    (dst, dst_offset), (src, src_offset) = low.address(operands[0]), low.address(operands[1])
    form, extra = 0, NO_OPERAND
    if len(operands) > 3:
        predicate = isinstance(operands[3], Register) and operands[3].type == "pred"
        form, extra = (2, low.src(operands[3], "pred")) if predicate else (1, low.src(operands[3], "u32"))
    low.emit("cp_async", "b8", [], [dst, src, extra], [operands[2].value, dst_offset, src_offset, form])


def _directions(mods: Mods) -> tuple[str, str]:
    """Destination and source state spaces, in the order of the opcode."""
    found = [part for part in mods.left if part in SPACES]
    mods.left = [part for part in mods.left if part not in SPACES]
    return (found[0], found[1]) if len(found) == 2 else (found[0], "")


def _bulk(low: Lowering, ins: Instruction, mods: Mods, reduce: bool) -> None:
    """m: destination and source offsets, mbarrier offset, multicast, reduction, byte mask given.
    Sources: destination, source, size, mbarrier, CTA mask (or byte mask)."""
    if mods.has("prefetch"):
        return low.emit("prefetch", "b32", [], [])
    policy = mods.has("L2::cache_hint")
    multicast, byte_mask = mods.has("multicast::cluster"), mods.has("cp_mask")
    mods.has("bulk_group"), mods.has("mbarrier::complete_tx::bytes"), mods.has("noftz")
    op = mods.take(*REDUCTIONS) if reduce else None
    type_ = mods.type() if reduce else "b8"
    to, source = _directions(mods)
    mods.finish()
    operands = list(ins.operands)
    (dst, dst_offset), (src, src_offset) = low.address(operands[0]), low.address(operands[1])
    size = low.src(operands[2], "u32")
    rest = operands[3:]
    bar, bar_offset, mask = NO_OPERAND, 0, NO_OPERAND
    if to != "global":
        bar, bar_offset = low.address(rest.pop(0))
    if multicast:
        mask = low.src(rest.pop(0), "b16")
    if policy:
        rest.pop(0)
    if byte_mask:
        mask = low.src(rest.pop(0), "b16")
    if to == "global":
        name = "bulk_red" if reduce else "bulk_s2g"
    elif source == "global":
        name = "bulk_g2s"
    else:
        name = "bulk_red_s2s" if reduce else "bulk_s2s"
    m = [
        dst_offset,
        src_offset,
        bar_offset,
        int(multicast),
        REDUCTIONS.index(op) if op else 0,
        int(byte_mask),
        SPACES[to],
    ]
    low.emit(name, type_, [], [dst, src, size, bar, mask], m)


def _tensor(low: Lowering, ins: Instruction, mods: Mods, reduce: bool) -> None:
    """m: dimensions, shared offset, mbarrier offset, flags (1 multicast, 2 cta_group::2, 4 gather4/scatter4,
    8 shared::cta), reduction. Sources: shared address, tensor map, mbarrier, CTA mask, five coordinates."""
    prefetch = mods.has("prefetch")
    dims = int(mods.need("1d", "2d", "3d", "4d", "5d")[0])
    policy = mods.has("L2::cache_hint")
    mods.has("L2") if prefetch else None
    four = mods.has("tile::gather4") or mods.has("tile::scatter4")
    mods.has("tile")
    multicast = mods.has("multicast::cluster")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    mods.has("bulk_group"), mods.has("mbarrier::complete_tx::bytes")
    op = mods.take(*REDUCTIONS) if reduce else None
    to, source = _directions(mods)
    mods.finish()
    if prefetch:
        return low.emit("prefetch", "b32", [], [])
    operands = list(ins.operands)
    load = source == "global"
    tensor, shared = (operands[1], operands[0]) if load else (operands[0], operands[1])
    base, shared_offset = low.address(shared)
    map_base, map_offset = low.address(Address(tensor.base, tensor.offset))
    if map_offset:
        raise mods.unknown("an offset on the tensor map address")
    coords = [low.src(c, "s32") for c in tensor.coords]
    coords += [NO_OPERAND] * (5 - len(coords))
    rest = operands[2:]
    bar, bar_offset, mask = NO_OPERAND, 0, NO_OPERAND
    if load:
        bar, bar_offset = low.address(rest.pop(0))
    if multicast:
        mask = low.src(rest.pop(0), "b16")
    if policy:
        rest.pop(0)
    if rest:
        raise mods.unknown("operands of im2col mode")
    flags = int(multicast) | 2 * pair | 4 * four | 8 * (to == "shared::cta")
    name = "tma_load" if load else "tma_red" if reduce else "tma_store"
    low.emit(
        name,
        "b8",
        [],
        [base, map_base, bar, mask, *coords],
        [dims, shared_offset, bar_offset, flags, REDUCTIONS.index(op) if op else 0],
    )


@handles("clusterlaunchcontrol")
def _clc(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """try_cancel m: result offset, mbarrier offset, multicast. first_ctaid m: dimension or -1 for all."""
    if mods.has("try_cancel"):
        mods.has("async"), mods.has("shared::cta"), mods.has("mbarrier::complete_tx::bytes"), mods.has("b128")
        multicast = mods.has("multicast::cluster::all")
        mods.finish()
        (dst, dst_offset), (bar, bar_offset) = low.address(ins.operands[0]), low.address(ins.operands[1])
        return low.emit("clc_try_cancel", "b128", [], [dst, bar], [dst_offset, bar_offset, int(multicast)])
    response = low.src(ins.operands[1], "b128")
    dst = ins.operands[0]
    if mods.has("query_cancel") and mods.has("is_canceled"):
        return low.emit("clc_is_canceled", "pred", [low.dst(dst)], [response])
    which = mods.need_prefix("get_first_ctaid")
    if which == "get_first_ctaid":
        return low.emit("clc_first_ctaid", "b32", [low.dst(d) for d in dst.items], [response], [-1])
    low.emit("clc_first_ctaid", "b32", [low.dst(dst)], [response], ["xyz".index(which[-1])])


# Tensor memory and the fifth-generation tensor core.

KINDS = {"kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2, "kind::i8": 3, "kind::mxf8f6f4": 4, "kind::mxf4": 5,
         "kind::mxf4nvf4": 6}  # fmt: skip
SHAPES = {"16x64b": 0, "16x128b": 1, "16x256b": 2, "32x32b": 3, "16x32bx2": 4}


@handles("tcgen05")
def _tcgen05(low: Lowering, ins: Instruction, mods: Mods) -> None:
    kind = mods.left.pop(0)
    ops = ins.operands
    if kind.startswith("fence::"):
        mods.finish()
        return low.emit("tmem_fence", "b32", [], [], [int(kind == "fence::after_thread_sync")])
    if kind.startswith("wait::"):
        mods.has("sync"), mods.has("aligned")
        mods.finish()
        return low.emit("tmem_wait", "b32", [], [], [int(kind == "wait::st")], aligned=True, sync=True)
    if kind in ("ld", "st"):
        return _tmem_ld_st(low, ins, mods, kind)
    group = mods.choose({"cta_group::1": 1, "cta_group::2": 2})
    if kind == "mma":
        return _umma(low, ins, mods, group)
    if kind == "alloc":
        mods.has("sync"), mods.has("aligned"), mods.has("b32")
        space = space_of(mods)
        mods.finish()
        base, offset = low.address(ops[0])
        columns = low.src(ops[1], "u32")
        return low.emit("tmem_alloc", "b32", [], [base, columns], [group, offset, space], aligned=True, sync=True)
    if kind == "dealloc":
        mods.has("sync"), mods.has("aligned"), mods.has("b32")
        mods.finish()
        src = [low.src(ops[0], "b32"), low.src(ops[1], "u32")]
        return low.emit("tmem_dealloc", "b32", [], src, [group], aligned=True, sync=True)
    if kind == "relinquish_alloc_permit":
        mods.has("sync"), mods.has("aligned")
        mods.finish()
        return low.emit("tmem_relinquish", "b32", [], [], [group], aligned=True, sync=True)
    if kind == "commit":
        multicast = mods.has("multicast::cluster")
        mods.has("mbarrier::arrive::one"), mods.has("b64")
        space = space_of(mods)
        mods.finish()
        base, offset = low.address(ops[0])
        mask = low.src(ops[1], "b16") if multicast else NO_OPERAND
        return low.emit("umma_commit", "b64", [], [base, mask], [group, offset, space])
    if kind == "cp":
        shapes = {"128x256b": 0, "4x256b": 1, "128x128b": 2, "64x128b": 3, "32x128b": 5}
        shape = mods.choose(shapes)
        if mods.take_prefix("warpx") == "warpx2::01_23":
            shape = 4
        fmt = mods.choose({"b4x16_p64": 1, "b6x16_p32": 2}, 0)
        mods.has("b8x16")
        mods.finish()
        base, offset = low.address(ops[0])
        return low.emit("tmem_cp", "b32", [], [base, low.src(ops[1], "b64")], [group, offset, shape, fmt])
    if kind == "shift":
        mods.has("down")
        mods.finish()
        base, offset = low.address(ops[0])
        return low.emit("tmem_shift", "b32", [], [base], [group, offset])
    raise mods.unknown()


def _tmem_ld_st(low: Lowering, ins: Instruction, mods: Mods, kind: str) -> None:
    """m: shape, repetition, pack16, address offset, half split offset."""
    if "red" in mods.left or "spcompress" in mods.left:
        raise mods.unknown()
    mods.has("sync"), mods.has("aligned"), mods.has("b32")
    shape = mods.choose(SHAPES)
    num = int(mods.need_prefix("x")[1:])
    pack = mods.has("pack::16b") or mods.has("unpack::16b")
    mods.finish()
    ops = list(ins.operands)
    regs = ops.pop(0) if kind == "ld" else ops.pop()
    base, offset = low.address(ops.pop(0))
    split = ops.pop(0).value if ops else 0
    items = regs.items if isinstance(regs, Vector) else (regs,)
    m = [shape, num, int(pack), offset, split]
    if kind == "ld":
        low.emit("tmem_ld", "b32", [low.dst(i) for i in items], [base], m, aligned=True, sync=True)
    else:
        low.emit("tmem_st", "b32", [], [base, *(low.src(i, "b32") for i in items)], m, aligned=True, sync=True)


def _umma(low: Lowering, ins: Instruction, mods: Mods, group: int) -> None:
    """m: CTA group, kind, flags (1 A in TMEM, 2 weight stationary, 4 disabled lanes given), scale vector size,
    scale-input-d, offsets of D and A.

    Sources: D, A, B descriptor, instruction descriptor, enable-input-d, scale A, scale B, lanes."""
    kind = KINDS[mods.need_prefix("kind::")]
    if "sp" in mods.left or "ashift" in mods.left:
        raise mods.unknown()
    stationary = mods.has("ws")
    scaled = mods.has("block_scale")
    vector = mods.take("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
    while mods.take_prefix("collector::"):
        pass
    mods.finish()
    default = {4: 1, 5: 2, 6: 4}.get(kind, 0)
    size = {
        "scale_vec::1X": 1,
        "scale_vec::2X": 2,
        "scale_vec::4X": 4,
        "block16": 4,
        "block32": 1 if kind == 4 else 2,
        None: default,
    }[vector]
    d, a, b, idesc, *rest = ins.operands
    d_base, d_offset = low.address(d)
    in_tmem = isinstance(a, Address)
    a_operand, a_offset = low.address(a) if in_tmem else (low.src(a, "b64"), 0)
    scales = [NO_OPERAND, NO_OPERAND]
    if scaled:
        scales = [low.address(rest.pop(0))[0], low.address(rest.pop(0))[0]]
    lanes = []
    if rest and isinstance(rest[0], Vector):
        lanes = [low.src(i, "b32") for i in rest.pop(0).items]
    enable = low.src(rest.pop(0), "pred")
    scale_d = -1
    if rest and isinstance(rest[0], Imm):
        scale_d = rest.pop(0).value
    elif rest and stationary:
        rest.pop(0)  # zero-column mask descriptor
        raise mods.unknown("zero-column mask")
    flags = int(in_tmem) | 2 * stationary | 4 * bool(lanes)
    src = [d_base, a_operand, low.src(b, "b64"), low.src(idesc, "b32"), enable, *scales, *lanes]
    low.emit("umma", "b32", [], src, [group, kind, flags, size, scale_d, d_offset, a_offset])


@handles("wgmma")
def _wgmma(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: N, types of D, A, B packed, flags (1 A in registers, 2 negate A, 4 negate B, 8 A MN-major, 16 B MN-major,
    32 satfinite), registers of D. Sources: D, A registers or descriptor, B descriptor, scale-d."""
    if mods.has("fence"):
        return low.emit("wgmma_fence", "b32", [], [], aligned=True, sync=True)
    if mods.has("commit_group"):
        return low.emit("wgmma_commit", "b32", [], [], aligned=True, sync=True)
    if mods.has("wait_group"):
        return low.emit("wgmma_wait", "b32", [], [], [ins.operands[0].value], aligned=True, sync=True)
    if not mods.has("mma_async") or "sp" in mods.left:
        raise mods.unknown()
    mods.has("sync"), mods.has("aligned")
    shape = mods.need_prefix("m64n")
    n = int(shape[4:].split("k")[0])
    saturate = mods.has("satfinite")
    types = [part for part in mods.left if part in MMA_TYPES]
    mods.left = [part for part in mods.left if part not in MMA_TYPES]
    mods.finish()
    d, a, b, scale, *imms = ins.operands
    in_registers = isinstance(a, Vector)
    values = [i.value for i in imms]
    negate = [values[0] == -1, values[1] == -1] if len(values) >= 2 else [False, False]
    majors = values[2:]
    major_a = bool(majors[0]) if len(majors) == 2 else False
    major_b = bool(majors[-1]) if majors else False
    flags = int(in_registers) | 2 * negate[0] | 4 * negate[1] | 8 * major_a | 16 * major_b | 32 * saturate
    dst = [low.dst(i) for i in d.items]
    a_src = [low.src(i, "b32") for i in a.items] if in_registers else [low.src(a, "b64")]
    scale_src = low.const(int(bool(scale.value)), 1) if isinstance(scale, Imm) else low.src(scale, "pred")
    packed = sum(MMA_TYPES.index(t) << (8 * i) for i, t in enumerate(types))
    src = [*a_src, low.src(b, "b64"), scale_src]
    low.emit("wgmma", "b32", dst, src, [n, packed, flags, len(dst)], aligned=True, sync=True)
