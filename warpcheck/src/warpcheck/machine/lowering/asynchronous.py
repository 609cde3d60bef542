"""Lowering of asynchronous copies and tensor-core instructions (ISA 9.7.9.25 - 9.7.9.28, 9.7.15, 9.7.16)."""

from __future__ import annotations

from warpcheck.machine.lowering.lower import NO_OPERAND, SPACES, Lowering, Modifiers, Mods, handles
from warpcheck.machine.lowering.memory import MMA_TYPES, REDUCTIONS, space_of, take_hints
from warpcheck.machine.ptx import Address, Imm, Instruction, Register, Vector


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
        return low.emit("bulk_wait", "b32", [], [], keep=ins.operands[0].value, read=read)
    if mods.has("tensor"):
        return _tensor(low, ins, mods, reduce)
    return _bulk(low, ins, mods, reduce)


def _cp_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if mods.has("commit_group"):
        return low.emit("cp_async_commit", "b32", [], [])
    if mods.has("wait_all"):
        return low.emit("cp_async_wait", "b32", [], [], keep=0, all=True)
    if mods.has("wait_group"):
        return low.emit("cp_async_wait", "b32", [], [], keep=ins.operands[0].value)
    if mods.has("mbarrier"):
        mods.has("arrive"), mods.has("b64")
        noinc, space = mods.has("noinc"), space_of(mods)
        mods.finish()
        base, offset = low.address(ins.operands[0])
        return low.emit("cp_async_mbar", "b64", [], [base], space=space, offset=offset, noinc=noinc)
    policy = take_hints(mods)
    for name in ("shared", "shared::cta", "global"):
        mods.has(name)
    mods.finish()
    operands = list(ins.operands)
    if policy:
        operands.pop()
    (dst, dst_offset), (src, src_offset) = low.address(operands[0]), low.address(operands[1])
    source, extra = "Whole", NO_OPERAND
    if len(operands) > 3:
        predicate = isinstance(operands[3], Register) and operands[3].type == "pred"
        source, extra = ("Ignore", low.src(operands[3], "pred")) if predicate else ("Size", low.src(operands[3], "u32"))
    m: Modifiers = {"bytes": operands[2].value, "to_offset": dst_offset, "from_offset": src_offset, "source": source}
    low.emit("cp_async", "b8", [], [dst, src, extra], **m)


def _directions(mods: Mods) -> tuple[str, str]:
    """Take the destination and source state spaces, in the order of the opcode; the source is "" if it is not given."""
    found = [part for part in mods.left if part in SPACES]
    mods.left = [part for part in mods.left if part not in SPACES]
    return (found[0], found[1]) if len(found) == 2 else (found[0], "")


def _bulk(low: Lowering, ins: Instruction, mods: Mods, reduce: bool) -> None:
    """Sources: destination, source, size, mbarrier, CTA mask (or byte mask)."""
    if mods.has("prefetch"):
        return low.emit("prefetch", "b32", [], [])
    policy = mods.has("L2::cache_hint")
    multicast, byte_mask = mods.has("multicast::cluster"), mods.has("cp_mask")
    mods.has("bulk_group"), mods.has("mbarrier::complete_tx::bytes"), mods.has("noftz")
    op = mods.choose(REDUCTIONS) if reduce else "Add"
    type_ = mods.type() if reduce else "b8"
    to, source = _directions(mods)
    mods.finish()
    operands = list(ins.operands)
    (dst, dst_offset), (src, src_offset) = low.address(operands[0]), low.address(operands[1])
    size = low.src(operands[2], "u32")
    rest = operands[3:]
    bar, bar_offset, mask = _completion(low, rest, to != "global", multicast, policy)
    if byte_mask:
        mask = low.src(rest.pop(0), "b16")
    if to == "global":
        name = "bulk_red" if reduce else "bulk_s2g"
    elif source == "global":
        name = "bulk_g2s"
    else:
        name = "bulk_red_s2s" if reduce else "bulk_s2s"
    offsets: Modifiers = {"to_offset": dst_offset, "from_offset": src_offset, "barrier_offset": bar_offset}
    m: Modifiers = {"multicast": multicast, "operation": op, "byte_mask": byte_mask, **offsets}
    low.emit(name, type_, [], [dst, src, size, bar, mask], **m)


def _completion(low: Lowering, rest: list, barrier: bool, multicast: bool, policy: bool) -> tuple:
    """Remove the mbarrier, the CTA mask and the cache policy of a bulk copy from the `rest` of its operands.

    Returns the mbarrier, its offset and the mask.
    """
    bar, offset, mask = NO_OPERAND, 0, NO_OPERAND
    if barrier:
        bar, offset = low.address(rest.pop(0))
    if multicast:
        mask = low.src(rest.pop(0), "b16")
    if policy:
        rest.pop(0)
    return bar, offset, mask


def _tensor(low: Lowering, ins: Instruction, mods: Mods, reduce: bool) -> None:
    """Sources: shared address, tensor map, mbarrier, CTA mask, five coordinates."""
    prefetch = mods.has("prefetch")
    dims = int(mods.need("1d", "2d", "3d", "4d", "5d")[0])
    policy = mods.has("L2::cache_hint")
    mods.has("L2") if prefetch else None
    four = mods.has("tile::gather4") or mods.has("tile::scatter4")
    mods.has("tile")
    multicast = mods.has("multicast::cluster")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    mods.has("bulk_group"), mods.has("mbarrier::complete_tx::bytes")
    op = mods.choose(REDUCTIONS) if reduce else "Add"
    _, source = _directions(mods)
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
    bar, bar_offset, mask = _completion(low, rest, load, multicast, policy)
    if rest:
        raise mods.unknown("operands of im2col mode")
    name = "tma_load" if load else "tma_red" if reduce else "tma_store"
    flags: Modifiers = {"multicast": multicast, "pair": pair, "four": four}
    m: Modifiers = {"rank": dims, "offset": shared_offset, "barrier_offset": bar_offset, "operation": op, **flags}
    low.emit(name, "b8", [], [base, map_base, bar, mask, *coords], **m)


@handles("clusterlaunchcontrol")
def _clc(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if mods.has("try_cancel"):
        mods.has("async"), mods.has("shared::cta"), mods.has("mbarrier::complete_tx::bytes"), mods.has("b128")
        multicast = mods.has("multicast::cluster::all")
        mods.finish()
        (dst, dst_offset), (bar, bar_offset) = low.address(ins.operands[0]), low.address(ins.operands[1])
        return low.emit("clc_try_cancel", "b128", [], [dst, bar], offset=dst_offset, barrier_offset=bar_offset,
                        multicast=multicast)  # fmt: skip
    response = low.src(ins.operands[1], "b128")
    dst = ins.operands[0]
    if mods.has("query_cancel") and mods.has("is_canceled"):
        return low.emit("clc_is_canceled", "pred", [low.dst(dst)], [response])
    which = mods.need_prefix("get_first_ctaid")
    if which == "get_first_ctaid":
        return low.emit("clc_first_ctaid", "b32", [low.dst(d) for d in dst.items], [response], axis=-1)
    low.emit("clc_first_ctaid", "b32", [low.dst(dst)], [response], axis="xyz".index(which[-1]))


# Tensor memory and the fifth-generation tensor core.

KINDS = {"kind::" + name: name.upper() for name in ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")}
SHAPES = {name: "S" + name for name in ("16x64b", "16x128b", "16x256b", "32x32b", "16x32bx2")}


@handles("tcgen05")
def _tcgen05(low: Lowering, ins: Instruction, mods: Mods) -> None:
    kind = mods.left.pop(0)
    ops = ins.operands
    if kind.startswith("fence::"):
        mods.finish()
        return low.emit("tmem_fence", "b32", [], [], after=kind == "fence::after_thread_sync")
    if kind.startswith("wait::"):
        mods.has("sync"), mods.has("aligned")
        mods.finish()
        return low.emit("tmem_wait", "b32", [], [], stores=kind == "wait::st", aligned=True, sync=True)
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
        return low.emit("tmem_alloc", "b32", [], [base, columns], aligned=True, sync=True,
                        group=group, offset=offset, space=space)  # fmt: skip
    if kind == "dealloc":
        mods.has("sync"), mods.has("aligned"), mods.has("b32")
        mods.finish()
        src = [low.src(ops[0], "b32"), low.src(ops[1], "u32")]
        return low.emit("tmem_dealloc", "b32", [], src, group=group, aligned=True, sync=True)
    if kind == "relinquish_alloc_permit":
        mods.has("sync"), mods.has("aligned")
        mods.finish()
        return low.emit("tmem_relinquish", "b32", [], [], group=group, aligned=True, sync=True)
    if kind == "commit":
        multicast = mods.has("multicast::cluster")
        mods.has("mbarrier::arrive::one"), mods.has("b64")
        space = space_of(mods)
        mods.finish()
        base, offset = low.address(ops[0])
        mask = low.src(ops[1], "b16") if multicast else NO_OPERAND
        return low.emit("umma_commit", "b64", [], [base, mask], group=group, offset=offset, space=space)
    if kind == "cp":
        shapes = {"128x256b": "S128x256b", "4x256b": "S4x256b", "128x128b": "S128x128b", "64x128b": "S64x128b_02_13",
                  "32x128b": "S32x128b_x4"}  # fmt: skip
        shape = mods.choose(shapes)
        if mods.take_prefix("warpx") == "warpx2::01_23":
            shape = "S64x128b_01_23"
        fmt = mods.choose({"b4x16_p64": "B4x16Pad64", "b6x16_p32": "B6x16Pad32"}, "None")
        mods.has("b8x16")
        mods.finish()
        base, offset = low.address(ops[0])
        src = [base, low.src(ops[1], "b64")]
        return low.emit("tmem_cp", "b32", [], src, group=group, offset=offset, shape=shape, format=fmt)
    if kind == "shift":
        mods.has("down")
        mods.finish()
        base, offset = low.address(ops[0])
        return low.emit("tmem_shift", "b32", [], [base], group=group, offset=offset)
    raise mods.unknown()


def _tmem_ld_st(low: Lowering, ins: Instruction, mods: Mods, kind: str) -> None:
    if "spcompress" in mods.left:
        raise mods.unknown()
    reduces, type_ = kind == "ld" and mods.has("red"), "b32"
    mods.has("sync"), mods.has("aligned")
    shape = mods.choose(SHAPES)
    num = int(mods.need_prefix("x")[1:])
    m: Modifiers = {}
    if reduces:
        m = {"reduces": True, "operation": mods.need("min", "max").capitalize()}
        m |= {"abs": mods.has("abs"), "nan": mods.has("NaN")}
        type_ = mods.type()
        if shape not in ("S32x32b", "S16x32bx2") or num < 2 or type_ not in ("f32", "u32", "s32"):
            raise mods.unknown()
    mods.has("b32")
    pack = mods.has("pack::16b") or mods.has("unpack::16b")
    mods.finish()
    ops = list(ins.operands)
    regs = ops.pop(0) if kind == "ld" else ops.pop()
    reduced = [ops.pop(0)] if reduces else []
    base, offset = low.address(ops.pop(0))
    split = ops.pop(0).value if ops else 0
    items = (*(regs.items if isinstance(regs, Vector) else (regs,)), *reduced)
    m |= {"shape": shape, "repeat": num, "pack16": pack, "offset": offset, "split": split}
    if kind == "ld":
        low.emit("tmem_ld", type_, [low.dst(i) for i in items], [base], aligned=True, sync=True, **m)
    else:
        low.emit("tmem_st", "b32", [], [base, *(low.src(i, "b32") for i in items)], aligned=True, sync=True, **m)


def _umma(low: Lowering, ins: Instruction, mods: Mods, group: int) -> None:
    """Sources: D, A, B descriptor, instruction descriptor, enable-input-d, scale A, scale B, lanes."""
    kind = KINDS[mods.need_prefix("kind::")]
    if "sp" in mods.left or "ashift" in mods.left:
        raise mods.unknown()
    stationary = mods.has("ws")
    scaled = mods.has("block_scale")
    vector = mods.take("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
    while mods.take_prefix("collector::"):
        pass
    mods.finish()
    default = {"MXF8F6F4": 1, "MXF4": 2, "MXF4NVF4": 4}.get(kind, 0)
    size = {
        "scale_vec::1X": 1,
        "scale_vec::2X": 2,
        "scale_vec::4X": 4,
        "block16": 4,
        "block32": 1 if kind == "MXF8F6F4" else 2,
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
    scale_d = 0
    if rest and isinstance(rest[0], Imm):
        scale_d = rest.pop(0).value
    elif rest and stationary:
        rest.pop(0)  # zero-column mask descriptor
        raise mods.unknown("zero-column mask")
    src = [d_base, a_operand, low.src(b, "b64"), low.src(idesc, "b32"), enable, *scales, *lanes]
    flags: Modifiers = {"a_in_tmem": in_tmem, "stationary": stationary, "lanes": bool(lanes)}
    scales_by: Modifiers = {"scale_vector": size, "scale_d": scale_d}
    low.emit("umma", "b32", [], src, group=group, kind=kind, d_offset=d_offset, a_offset=a_offset, **flags, **scales_by)


@handles("wgmma")
def _wgmma(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: D, A registers or descriptor, B descriptor, scale-d."""
    if mods.has("fence"):
        return low.emit("wgmma_fence", "b32", [], [], aligned=True, sync=True)
    if mods.has("commit_group"):
        return low.emit("wgmma_commit", "b32", [], [], aligned=True, sync=True)
    if mods.has("wait_group"):
        return low.emit("wgmma_wait", "b32", [], [], keep=ins.operands[0].value, aligned=True, sync=True)
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
    flags: Modifiers = {
        "a_in_registers": in_registers, "negate_a": negate[0], "negate_b": negate[1], "a_mn_major": major_a,
        "b_mn_major": major_b, "satfinite": saturate,
    }  # fmt: skip
    dst = [low.dst(i) for i in d.items]
    a_src = [low.src(i, "b32") for i in a.items] if in_registers else [low.src(a, "b64")]
    scale_src = low.const(int(bool(scale.value)), 1) if isinstance(scale, Imm) else low.src(scale, "pred")
    named: Modifiers = dict(zip(("d_type", "a_type", "b_type"), (name.upper() for name in types)))
    src = [*a_src, low.src(b, "b64"), scale_src]
    low.emit("wgmma", "b32", dst, src, aligned=True, sync=True, n=n, **named, **flags)
