"""Lowering of arithmetic, logic, comparison, conversion, control flow and warp instructions.

PTX ISA 9.7.1 - 9.7.8, 9.7.12.
"""

from __future__ import annotations

from typing import Any

from warpcheck.machine.lowering.lower import NO_OPERAND, ROUNDINGS, SPACES, Lowering, Modifiers, Mods, handles
from warpcheck.machine.ptx import TYPE_BITS, Instruction, Pair, Vector

FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2"}
PACKED = {"u16x2": "u16", "s16x2": "s16"}
COMPARISONS = {name: name.capitalize() for name in (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")}  # fmt: skip
COMPARISONS.update({"lo": "Lt", "ls": "Le", "hi": "Gt", "hs": "Ge"})
VOTES = {"all": "All", "any": "Any", "uni": "Uniform"}
BOOLEANS = {"and": "And", "or": "Or", "xor": "Xor"}


def _float_mods(mods: Mods) -> Modifiers:
    mods.has("approx"), mods.has("full")
    xorsign = mods.has("xorsign")
    if xorsign and not mods.has("abs"):
        raise mods.unknown(".xorsign goes with .abs")
    flags = {name.lower(): mods.has(name) for name in ("ftz", "sat", "relu", "NaN")}
    return {"rounding": mods.rounding(), "xorsign": xorsign, **flags}


def _results(low: Lowering, operand: Any) -> list[tuple]:
    """Destinations of `d|p`, or of `d` alone."""
    if isinstance(operand, Pair):
        return [low.dst(operand.first), low.dst(operand.second)]
    return [low.dst(operand), NO_OPERAND]


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
    to = mods.has("to")
    space = mods.take_prefix("param") or mods.take_prefix("shared") or mods.need("global", "local", "const")
    type_ = mods.type()
    mods.finish()
    dst, src = ins.operands
    name = "from_generic" if to else "to_generic"
    windows = {"global": "Global", "const": "Global", "local": "Local", "param": "Param"}
    window = windows.get(space.split("::")[0], "Shared")
    low.emit(name, type_, [low.dst(dst)], [low.src(src, type_)], space=window)


@handles("isspacep")
def _isspacep(low: Lowering, ins: Instruction, mods: Mods) -> None:
    space = mods.left.pop()
    mods.finish()
    low.emit("isspacep", "u64", [low.dst(ins.operands[0])], [low.src(ins.operands[1], "u64")], space=SPACES[space])


def _carries(low: Lowering, ins: Instruction, mods: Mods, op: str, type_: str, reads: bool) -> None:
    """addc, subc, madc and the `.cc` forms. The carry flag is a predicate, the last source and destination."""
    writes = mods.has("cc")
    mods.finish()
    carry = low.carry_register()
    dst = [low.dst(ins.operands[0]), carry if writes else NO_OPERAND]
    src = [low.src(o, type_) for o in ins.operands[1:]]
    low.emit(op, type_, dst, [*src, carry if reads else NO_OPERAND], reads=reads, writes=writes)


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
    if type_ in PACKED:
        return _on_halves(low, ins, name, type_)
    low.emit(name, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], sat=sat)


def _on_halves(low: Lowering, ins: Instruction, op: str, type_: str, **flags: Any) -> None:
    """Lower an instruction on pairs of 16-bit integers: unpack, operate on both halves, and pack."""
    halves = []
    for operand in ins.operands[1:]:
        halves.append([low.new_register(16), low.new_register(16)])
        low.emit("unpack", "b32", halves[-1], [low.src(operand, "b32")])
    results = [low.new_register(16), low.new_register(16)]
    for k, result in enumerate(results):
        low.emit(op, PACKED[type_], [result], [pair[k] for pair in halves], **flags)
    low.emit("pack", "b32", [low.dst(ins.operands[0])], results)


def _float_arithmetic(low: Lowering, ins: Instruction, mods: Mods, type_: str, op: str) -> None:
    mixed = None
    if type_ in ("f16", "bf16") and "f32" in mods.left:  # add.f32.f16: the last type is the type of the sources
        mixed, type_ = type_, "f32"
        mods.left.remove("f32")
    m = _float_mods(mods)
    mods.finish()
    operands = list(ins.operands[1:])
    src = []
    for position, operand in enumerate(operands):
        if mixed and position < len(operands) - 1:
            wide = low.new_register(32)
            low.emit("cvt", "f32", [wide], [low.src(operand, mixed)], type2=mixed)
            src.append(wide)
        else:
            src.append(low.src(operand, type_))
    low.emit(op, type_, [low.dst(ins.operands[0])], src, **m)


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
    low.emit(f"{name}_{part}", type_, [low.dst(ins.operands[0])], src, sat=sat)


@handles("div", "rem", "sad", "popc", "clz", "bfind", "brev", "cnot", "and", "or", "xor", "not", "shl", "shr", "fns",
         "bfe", "bfi", "szext", "bmsk", "abs", "neg", "min", "max", "dp4a", "dp2a")  # fmt: skip
def _simple(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    if name in ("dp4a", "dp2a"):
        high = name == "dp2a" and mods.take("lo", "hi") == "hi"
        btype, atype = mods.type(), mods.type()
        mods.finish()
        src = [low.src(o, "b32") for o in ins.operands[1:]]
        return low.emit(name, atype, [low.dst(ins.operands[0])], src, high=high, type2=btype)
    type_ = mods.type()
    if type_ in FLOATS:
        op = {"div": "fdiv", "abs": "fabs", "neg": "fneg", "min": "fmin", "max": "fmax"}[name]
        m = _float_mods(mods)
        mods.finish()
        return low.emit(op, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], **m)
    shiftamt, wrap, relu = mods.has("shiftamt"), mods.take("wrap", "clamp") == "wrap", mods.has("relu")
    mods.finish()
    if type_ in PACKED:
        return _on_halves(low, ins, name, type_, relu=relu)
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
    low.emit(op, type_, [low.dst(ins.operands[0])], src, shiftamt=shiftamt, wrap=wrap, relu=relu)


@handles("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", "copysign", "testp")
def _special_functions(low: Lowering, ins: Instruction, mods: Mods) -> None:
    name = ins.parts[0]
    type_ = mods.type()
    if name == "testp":
        kinds = {"finite": "Finite", "infinite": "Infinite", "number": "Number", "notanumber": "NotANumber",
                 "normal": "Normal", "subnormal": "Subnormal"}  # fmt: skip
        kind = mods.choose(kinds)
        mods.finish()
        dst, src = low.dst(ins.operands[0]), low.src(ins.operands[1], type_)
        return low.emit("testp", type_, [dst], [src], property=kind)
    m = _float_mods(mods)
    mods.finish()
    low.emit(name, type_, [low.dst(ins.operands[0])], [low.src(o, type_) for o in ins.operands[1:]], **m)


@handles("shf")
def _shf(low: Lowering, ins: Instruction, mods: Mods) -> None:
    direction = mods.take("l", "r")
    wrap = mods.take("clamp", "wrap") == "wrap"
    mods.type()
    mods.finish()
    src = [low.src(o, "b32") for o in ins.operands[1:]]
    low.emit(f"shf_{direction}", "b32", [low.dst(ins.operands[0])], src, wrap=wrap)


@handles("lop3")
def _lop3(low: Lowering, ins: Instruction, mods: Mods) -> None:
    boolean = mods.take("or", "and")
    type_ = mods.type()
    mods.finish()
    table = ins.operands[4].value
    src = [low.src(o, type_) for o in ins.operands[1:4]]
    if boolean is None:
        return low.emit("lop3", type_, [low.dst(ins.operands[0])], src, table=table)
    pair = ins.operands[0]
    dst = [low.dst(pair.first), low.dst(pair.second)]
    src.append(low.src(ins.operands[5], "pred"))
    low.emit("lop3", type_, dst, src, table=table, boolean=BOOLEANS[boolean])


@handles("prmt")
def _prmt(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.type()
    mode = mods.choose({name: name.capitalize() for name in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")}, "Index")
    mods.finish()
    low.emit("prmt", "b32", [low.dst(ins.operands[0])], [low.src(o, "b32") for o in ins.operands[1:]], mode=mode)


@handles("setp", "set")
def _setp(low: Lowering, ins: Instruction, mods: Mods) -> None:
    type_ = mods.type()
    dtype = mods.type() if ins.parts[0] == "set" else None
    comparison, boolean = mods.choose(COMPARISONS), mods.choose(BOOLEANS, "None")
    ftz = mods.has("ftz")
    mods.finish()
    if type_.startswith("b") and type_ not in FLOATS:
        type_ = "u" + type_[1:]
    dst, a, b, *rest = ins.operands
    src = [low.src(a, type_), low.src(b, type_)] + [low.src(c, "pred") for c in rest]
    m: Modifiers = {"comparison": comparison, "boolean": boolean, "ftz": ftz}
    if dtype is not None:
        return low.emit("set", dtype, [low.dst(dst)], src, type2=type_, **m)
    low.emit("setp", type_, _results(low, dst), src, **m)


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
    src = [low.src(a, type_), low.src(b, type_), low.src(c, ctype)]
    low.emit("slct", type_, [low.dst(dst)], src, type2=ctype, ftz=ftz)


@handles("cvt")
def _cvt(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if mods.has("pack"):
        return _cvt_pack_int(low, ins, mods)
    stype, dtype = mods.type(), mods.type()
    name = mods.take(*ROUNDINGS)
    m: Modifiers = {flag: mods.has(flag) for flag in ("ftz", "sat", "satfinite", "relu")}
    m["rounding"] = ROUNDINGS[name] if name else "NearestEven" if dtype in FLOATS or stype in FLOATS else "Zero"
    m["integral"] = name in ("rni", "rzi", "rmi", "rpi")
    mods.has("scaled::n2::ue8m0")
    mods.finish()
    dst, *src = ins.operands
    if dtype.endswith("x2") and dtype != "f32x2" and not stype.endswith("x2"):
        element = dtype[:-2]
        sources = [low.src(s, stype) for s in src]
        return low.emit("cvt_pack", element, [low.dst(dst)], sources, type2=stype, **m)
    if dtype.endswith("x2") and stype.endswith("x2"):
        return low.emit("cvt_unpack", dtype[:-2], [low.dst(dst)], [low.src(src[0], "b32")], type2=stype[:-2], **m)
    if dtype.endswith("x4") or stype.endswith("x4") or len(src) != 1:
        raise mods.unknown()
    low.emit("cvt", dtype, [low.dst(dst)], [low.src(src[0], stype)], type2=stype, **m)


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
    low.emit("cvt_pack_int", type_, [low.dst(ins.operands[0])], src + src_c, bits=bits, type2=stype)


# Control flow.


@handles("bra")
def _bra(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("uni")
    mods.finish()
    low.emit("bra", "b32", [], [], target=low.kernel.labels[ins.operands[0].name])


@handles("brx")
def _brx(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("idx")
    mods.has("uni")
    mods.finish()
    index, targets = ins.operands
    chain = [low.kernel.labels[t.name] for t in targets.items]
    for position, target in enumerate(chain):  # one row per target: compare the index and branch
        low.emit("brx", "b32", [], [low.src(index, "u32"), low.const(position, 32)], target=target)


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
    increase = mods.take("inc", "dec") == "inc"
    mods.has("sync"), mods.has("aligned"), mods.has("u32")
    mods.finish()
    registers = ins.operands[0].value
    low.emit("setmaxnreg", "b32", [], [], registers=registers, grows=increase, aligned=True, sync=True)


# Warp-wide instructions. The last source of a `sync` row is its member mask.


@handles("shfl")
def _shfl(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if not mods.has("sync"):
        raise mods.unknown()
    mode = mods.choose({"up": "Up", "down": "Down", "bfly": "Butterfly", "idx": "Index"})
    mods.type()
    mods.finish()
    dst, *src = ins.operands
    low.emit("shfl", "b32", _results(low, dst), [low.src(s, "b32") for s in src], mode=mode, sync=True)


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
        low.emit("elect", "b32", [low.dst(dst.first), low.dst(dst.second)], [mask], sync=True)
    elif name == "vote":
        mode = mods.need("all", "any", "uni", "ballot")
        mods.type()
        mods.finish()
        src = [low.src(ins.operands[1], "pred"), mask]
        if mode == "ballot":
            low.emit("ballot", "b32", [low.dst(dst)], src, sync=True)
        else:
            low.emit("vote", "pred", [low.dst(dst)], src, mode=VOTES[mode], sync=True)
    elif name == "match":
        mode = mods.need("any", "all")
        type_ = mods.type()
        mods.finish()
        low.emit(f"match_{mode}", type_, _results(low, dst), [low.src(ins.operands[1], type_), mask], sync=True)
    else:
        op = mods.need("add", "min", "max", "and", "or", "xor").capitalize()
        type_ = mods.type()
        flags: Modifiers = {"abs": mods.has("abs"), "nan": mods.has("NaN")}
        mods.finish()
        src = [low.src(ins.operands[1], type_), mask]
        low.emit("redux", type_, [low.dst(dst)], src, sync=True, operation=op, **flags)


@handles("call")
def _call(low: Lowering, ins: Instruction, mods: Mods) -> None:
    raise mods.unknown("calls of device functions")
