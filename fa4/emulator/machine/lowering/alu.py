"""Lowering of arithmetic, logic, comparison, conversion, control flow and warp instructions.

PTX ISA 9.7.1 - 9.7.8, 9.7.12.
"""

from __future__ import annotations

from fa4.emulator.machine.lowering.lower import (
    NO_OPERAND,
    ROUNDINGS,
    Instruction,
    Lowering,
    Mods,
    Pair,
    Vector,
    handles,
)  # fmt: skip
from fa4.emulator.machine.ptx import TYPE_BITS

FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2"}
COMPARISONS = {name: code for code, name in enumerate(
    ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"))}  # fmt: skip
COMPARISONS.update({"lo": 2, "ls": 3, "hi": 4, "hs": 5})
BOOLEANS = {"and": 1, "or": 2, "xor": 3}


def _float_mods(mods: Mods) -> list[int]:
    """m: rounding, ftz, saturation (1 sat, 2 relu), flags (1 NaN, 2 xorsign.abs, 4 approx, 8 full)."""
    rounding = mods.rounding()
    ftz = mods.has("ftz")
    saturation = 1 if mods.has("sat") else 2 if mods.has("relu") else 0
    flags = (1 if mods.has("NaN") else 0) | (4 if mods.has("approx") else 0) | (8 if mods.has("full") else 0)
    if mods.has("xorsign"):
        if not mods.has("abs"):
            raise mods.unknown(".xorsign goes with .abs")
        flags |= 2
    return [rounding, int(ftz), saturation, flags]


@handles("mov", "cvta")
def _mov(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if ins.parts[0] == "cvta":
        return _cvta(low, ins, mods)
    type_ = mods.type()
    mods.finish()
    dst, src = ins.operands
    if isinstance(dst, Vector):
        low.emit("unpack", type_, [low.dst(d) for d in dst.items], [low.src(src, type_)])
    elif isinstance(src, Vector):
        part = "b" + str(TYPE_BITS[type_] // len(src.items))
        low.emit("pack", type_, [low.dst(dst)], [low.src(s, part) for s in src.items])
    else:
        low.emit("mov", type_, [low.dst(dst)], [low.src(src, type_)])


def _cvta(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """to_generic / from_generic, m: space."""
    to = mods.has("to")
    space = mods.take_prefix("param") or mods.take_prefix("shared") or mods.need("global", "local", "const")
    type_ = mods.type()
    mods.finish()
    dst, src = ins.operands
    code = {"global": 1, "const": 1, "local": 4, "param": 5}.get(space.split("::")[0], 2)
    low.emit("from_generic" if to else "to_generic", type_, [low.dst(dst)], [low.src(src, type_)], [code])


@handles("isspacep")
def _isspacep(low: Lowering, ins: Instruction, mods: Mods) -> None:
    space = mods.left.pop()
    mods.finish()
    code = {"global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "local": 4, "param": 5, "const": 6}[
        space.replace("param::entry", "param")
    ]
    low.emit("isspacep", "u64", [low.dst(ins.operands[0])], [low.src(ins.operands[1], "u64")], [code])


def _carries(low: Lowering, ins: Instruction, mods: Mods, op: str, type_: str, reads: bool) -> None:
    """addc, subc, madc: m = reads carry, writes carry. The carry is a hidden predicate, the last source/destination."""
    writes = mods.has("cc")
    mods.finish()
    carry = low.carry_register()
    dst = [low.dst(ins.operands[0]), carry if writes else NO_OPERAND]
    src = [low.src(o, type_) for o in ins.operands[1:]]
    low.emit(op, type_, dst, [*src, carry if reads else NO_OPERAND], [int(reads), int(writes)])


@handles("add", "sub", "addc", "subc")
def _add(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    type_ = mods.type()
    if name in ("addc", "subc"):
        return _carries(low, ins, mods, name, type_, True)
    if "cc" in mods.left:
        return _carries(low, ins, mods, name + "c", type_, False)
    if type_ in FLOATS:
        return _float_arithmetic(low, ins, mods, type_, {"add": "fadd", "sub": "fsub"}[name])
    sat = mods.has("sat")
    mods.finish()
    low.emit(name, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], [int(sat)])


def _float_arithmetic(low: Lowering, ins: Instruction, mods: Mods, type_: str, op: str) -> None:
    mixed = None
    if type_ in ("f16", "bf16") and "f32" in mods.left:  # add.f32.f16: the last type is that of the narrow sources
        mixed, type_ = type_, "f32"
        mods.left.remove("f32")
    m = _float_mods(mods)
    mods.finish()
    operands = list(ins.operands[1:])
    src = []
    for position, operand in enumerate(operands):
        if mixed and position < len(operands) - 1:
            wide = low.new_register(32)
            low.emit("cvt", "f32", [wide], [low.src(operand, mixed)], [0, 0, 0], type2=mixed)
            src.append(wide)
        else:
            src.append(low.src(operand, type_))
    low.emit(op, type_, [low.dst(ins.operands[0])], src, m)


@handles("mul", "mad", "mul24", "mad24", "fma", "madc")
def _mul(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    type_ = mods.type()
    if type_ in FLOATS:
        return _float_arithmetic(low, ins, mods, type_, "fmul" if name == "mul" else "ffma")
    part = mods.take("lo", "hi", "wide", default="lo")
    if name == "madc" or "cc" in mods.left:
        return _carries(low, ins, mods, f"madc_{part}", type_, name == "madc")
    sat = mods.has("sat")
    mods.finish()
    if name == "mad24":
        raise mods.unknown()
    wide = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
    third = wide[type_] if part == "wide" else type_
    types = [type_, type_, third]
    src = [low.src(o, t) for o, t in zip(ins.operands[1:], types)]
    low.emit(f"{name}_{part}", type_, [low.dst(ins.operands[0])], src, [int(sat)])


@handles("div", "rem", "sad", "popc", "clz", "bfind", "brev", "cnot", "and", "or", "xor", "not", "shl", "shr", "fns",
         "bfe", "bfi", "szext", "bmsk", "abs", "neg", "min", "max", "dp4a", "dp2a")  # fmt: skip
def _simple(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    if name in ("dp4a", "dp2a"):
        high = 1 if name == "dp2a" and mods.take("lo", "hi") == "hi" else 0
        btype, atype = mods.type(), mods.type()
        mods.finish()
        src = [low.src(o, "b32") for o in ins.operands[1:]]
        return low.emit(name, atype, [low.dst(ins.operands[0])], src, [high], type2=btype)
    type_ = mods.type()
    if type_ in FLOATS:
        op = {"div": "fdiv", "abs": "fabs", "neg": "fneg", "min": "fmin", "max": "fmax"}[name]
        m = _float_mods(mods)
        mods.finish()
        return low.emit(op, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], m)
    flag = int(mods.has("shiftamt") or mods.take("wrap", "clamp") == "wrap" or mods.has("relu"))
    mods.finish()
    types = [type_] * 4
    if name in ("shl", "shr", "szext"):
        types = [type_, "u32"]
    elif name == "bfe":
        types = [type_, "u32", "u32"]
    elif name == "bfi":
        types = [type_, type_, "u32", "u32"]
    elif name == "bmsk":
        types = ["u32", "u32"]
    src = [low.src(o, t) for o, t in zip(ins.operands[1:], types)]
    op = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}.get(name, name)
    low.emit(op, type_, [low.dst(ins.operands[0])], src, [flag])


@handles("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", "copysign", "testp")
def _special_functions(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    type_ = mods.type()
    if name == "testp":
        kind = mods.take("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        mods.finish()
        kinds = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        dst, src = low.dst(ins.operands[0]), low.src(ins.operands[1], type_)
        return low.emit("testp", type_, [dst], [src], [kinds.index(kind)])
    m = _float_mods(mods)
    mods.finish()
    low.emit(name, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], m)


@handles("shf")
def _shf(low: Lowering, ins: Instruction, mods: Mods) -> None:
    direction = mods.take("l", "r")
    wrap = mods.take("clamp", "wrap") == "wrap"
    mods.type()
    mods.finish()
    src = [low.src(o, "b32") for o in ins.operands[1:]]
    low.emit(f"shf_{direction}", "b32", [low.dst(ins.operands[0])], src, [int(wrap)])


@handles("lop3")
def _lop3(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: truth table, boolean operation of the predicate form (0 none)."""
    boolean = mods.take("or", "and")
    type_ = mods.type()
    mods.finish()
    table = ins.operands[4].value
    src = [low.src(o, type_) for o in ins.operands[1:4]]
    if boolean is None:
        return low.emit("lop3", type_, [low.dst(ins.operands[0])], src, [table, 0])
    pair = ins.operands[0]
    dst = [low.dst(pair.first), low.dst(pair.second)]
    low.emit("lop3", type_, dst, [*src, low.src(ins.operands[5], "pred")], [table, BOOLEANS[boolean]])


@handles("prmt")
def _prmt(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.type()
    modes = ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = modes.index(mods.take(*modes[1:], default=""))
    mods.finish()
    low.emit("prmt", "b32", [low.dst(ins.operands[0])], [low.src(o, "b32") for o in ins.operands[1:]], [mode])


@handles("setp", "set")
def _setp(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: comparison, boolean operation, ftz."""
    type_ = mods.type()
    dtype = mods.type() if ins.parts[0] == "set" else None
    comparison, boolean = mods.choose(COMPARISONS), mods.choose(BOOLEANS, 0)
    ftz = mods.has("ftz")
    mods.finish()
    if type_.startswith("b") and type_ not in FLOATS:
        type_ = "u" + type_[1:]
    dst, a, b, *rest = ins.operands
    src = [low.src(a, type_), low.src(b, type_)] + [low.src(c, "pred") for c in rest]
    m = [comparison, boolean, int(ftz)]
    if dtype is not None:
        return low.emit("set", dtype, [low.dst(dst)], src, m, type2=type_)
    dsts = [low.dst(dst.first), low.dst(dst.second)] if isinstance(dst, Pair) else [low.dst(dst), NO_OPERAND]
    low.emit("setp", type_, dsts, src, m)


@handles("selp", "slct")
def _selp(low: Lowering, ins: Instruction, mods: Mods) -> None:
    type_ = mods.type()
    dst, a, b, c = ins.operands
    if ins.parts[0] == "selp":
        mods.finish()
        return low.emit("selp", type_, [low.dst(dst)], [low.src(a, type_), low.src(b, type_), low.src(c, "pred")])
    ctype, type_ = type_, mods.type()
    ftz = mods.has("ftz")
    mods.finish()
    low.emit(
        "slct",
        type_,
        [low.dst(dst)],
        [low.src(a, type_), low.src(b, type_), low.src(c, ctype)],
        [int(ftz)],
        type2=ctype,
    )


@handles("cvt")
def _cvt(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: rounding, ftz, saturation (1 sat, 2 satfinite) | 4 relu, 1 if rounding to an integer."""
    if mods.has("pack"):
        return _cvt_pack_int(low, ins, mods)
    stype, dtype = mods.type(), mods.type()
    name = mods.take(*ROUNDINGS)
    rounding = ROUNDINGS[name] if name else int(dtype not in FLOATS and stype not in FLOATS)
    integer = int(name in ("rni", "rzi", "rmi", "rpi"))
    ftz = mods.has("ftz")
    saturation = (1 if mods.has("sat") else 2 if mods.has("satfinite") else 0) | (4 if mods.has("relu") else 0)
    mods.has("scaled::n2::ue8m0")
    mods.finish()
    m = [rounding, int(ftz), saturation, integer]
    dst, *src = ins.operands
    if dtype.endswith("x2") and dtype != "f32x2" and not stype.endswith("x2"):
        element = dtype[:-2]
        sources = [low.src(s, stype) for s in src]
        return low.emit("cvt_pack", element, [low.dst(dst)], sources, m, type2=stype)
    if dtype.endswith("x2") and stype.endswith("x2"):
        return low.emit("cvt_unpack", dtype[:-2], [low.dst(dst)], [low.src(src[0], "b32")], m, type2=stype[:-2])
    if dtype.endswith("x4") or stype.endswith("x4") or len(src) != 1:
        raise mods.unknown()
    low.emit("cvt", dtype, [low.dst(dst)], [low.src(src[0], stype)], m, type2=stype)


def _cvt_pack_int(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("sat")
    if "b32" in mods.left:
        mods.left.remove("b32")
        src_c = [low.src(ins.operands[3], "b32")]
    else:
        src_c = []
    narrow = {"u4": ("u8", 4), "s4": ("s8", 4), "u2": ("u8", 2), "s2": ("s8", 2)}
    kind = mods.need("u16", "s16", "u8", "s8", *narrow)
    stype = mods.type()
    mods.finish()
    type_, bits = narrow[kind] if kind in narrow else (kind, TYPE_BITS[kind])
    src = [low.src(o, stype) for o in ins.operands[1:3]]
    low.emit("cvt_pack_int", type_, [low.dst(ins.operands[0])], src + src_c, [bits], type2=stype)


# Control flow.


@handles("bra")
def _bra(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("uni")
    mods.finish()
    low.emit("bra", "b32", [], [], [low.kernel.labels[ins.operands[0].name]])


@handles("brx")
def _brx(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("idx")
    mods.has("uni")
    mods.finish()
    index, targets = ins.operands
    chain = [low.kernel.labels[t.name] for t in targets.items]
    for position, target in enumerate(chain):  # a table of any length: compare and branch, one row per target
        low.emit("brx", "b32", [], [low.src(index, "u32"), low.const(position, 32)], [target])


@handles("ret", "exit")
def _exit(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("uni")
    mods.finish()
    low.emit("exit", "b32", [], [])


@handles("trap", "brkpt")
def _trap(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.finish()
    low.emit("trap", "b32", [], [])


@handles("nanosleep", "pmevent")
def _nanosleep(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if ins.parts[0] == "pmevent":
        mods.has("mask")
        mods.finish()
        return low.emit("nop", "b32", [], [])
    mods.type()
    mods.finish()
    low.emit("nanosleep", "b32", [], [low.src(ins.operands[0], "u32")])


@handles("setmaxnreg")
def _setmaxnreg(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: registers per thread, 1 for inc."""
    increase = mods.take("inc", "dec") == "inc"
    mods.has("sync"), mods.has("aligned"), mods.has("u32")
    mods.finish()
    low.emit("setmaxnreg", "b32", [], [], [ins.operands[0].value, int(increase)], aligned=True, sync=True)


# Warp-wide instructions. `sync` rows have their member mask as the last source.


@handles("shfl")
def _shfl(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if not mods.has("sync"):
        raise mods.unknown()
    mode = ("up", "down", "bfly", "idx").index(mods.take("up", "down", "bfly", "idx"))
    mods.type()
    mods.finish()
    dst, *src = ins.operands
    dsts = [low.dst(dst.first), low.dst(dst.second)] if isinstance(dst, Pair) else [low.dst(dst), NO_OPERAND]
    low.emit("shfl", "b32", dsts, [low.src(s, "b32") for s in src], [mode], sync=True)


@handles("vote", "match", "redux", "elect", "activemask")
def _warp(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    if name == "activemask":
        mods.type()
        mods.finish()
        return low.emit("activemask", "b32", [low.dst(ins.operands[0])], [])
    if not mods.has("sync"):
        raise mods.unknown()
    dst = ins.operands[0]
    mask = low.src(ins.operands[-1], "b32")
    if name == "elect":
        mods.finish()
        dsts = [low.dst(dst.first), low.dst(dst.second)]
        low.emit("elect", "b32", dsts, [mask], sync=True)
    elif name == "vote":
        mode = mods.take("all", "any", "uni", "ballot")
        mods.type()
        mods.finish()
        src = [low.src(ins.operands[1], "pred"), mask]
        if mode == "ballot":
            low.emit("ballot", "b32", [low.dst(dst)], src, sync=True)
        else:
            low.emit("vote", "pred", [low.dst(dst)], src, [("all", "any", "uni").index(mode)], sync=True)
    elif name == "match":
        mode = mods.take("any", "all")
        type_ = mods.type()
        mods.finish()
        dsts = [low.dst(dst.first), low.dst(dst.second)] if isinstance(dst, Pair) else [low.dst(dst), NO_OPERAND]
        low.emit(f"match_{mode}", type_, dsts, [low.src(ins.operands[1], type_), mask], sync=True)
    else:
        op = mods.take("add", "min", "max", "and", "or", "xor")
        type_ = mods.type()
        flags = int(mods.has("abs")) | 2 * int(mods.has("NaN"))
        mods.finish()
        code = ("add", "min", "max", "and", "or", "xor").index(op)
        low.emit("redux", type_, [low.dst(dst)], [low.src(ins.operands[1], type_), mask], [code, flags], sync=True)


@handles("call")
def _call(low: Lowering, ins: Instruction, mods: Mods) -> None:
    raise mods.unknown("calls of device functions")
