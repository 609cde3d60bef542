"""Lowering of memory, barrier and matrix-fragment instructions (ISA 9.7.9, 9.7.13, 9.7.14)."""

from __future__ import annotations

from warpcheck.machine.lowering.lower import NO_OPERAND, SPACES, Lowering, Modifiers, Mods, handles
from warpcheck.machine.ptx import Address, Imm, Instruction, Vector

SEMANTICS = {"weak": "Weak", "volatile": "Relaxed", "relaxed": "Relaxed", "mmio": "Relaxed", "acquire": "Acquire",
             "release": "Release", "acq_rel": "AcquireRelease", "sc": "Sc"}  # fmt: skip
SCOPES = {"cta": "Cta", "cluster": "Cluster", "gpu": "Gpu", "sys": "Sys"}
REDUCTIONS = {name: name.capitalize() for name in ("add", "min", "max", "inc", "dec", "and", "or", "xor")}
PROXIES = {"async": "Async", "tensormap": "Tensormap", "alias": "Alias"}
ATOMICS = {**REDUCTIONS, "exch": "Exch", "cas": "Cas"}
CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified")


def take_hints(mods: Mods) -> bool:
    """Take the modifiers that only advise caches. True if the instruction has a cache policy operand."""
    for name in CACHE_HINTS:
        mods.has(name)
    policy = mods.has("L2::cache_hint")
    while mods.take_prefix("L1::") or mods.take_prefix("L2::"):
        pass
    return policy


def space_of(mods: Mods) -> str:
    return mods.choose(SPACES, "Generic")


@handles("ld", "ldu", "st")
def _ld_st(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: address, and the data of a store."""
    store = ins.parts[0] == "st"
    if store and mods.has("async"):
        return _st_async(low, ins, mods)
    if store and mods.has("bulk"):
        return _st_bulk(low, ins, mods)
    mods.has("mmio")  # .mmio comes with .relaxed, which gives the semantics
    semantics = mods.choose(SEMANTICS, "Weak")
    space = space_of(mods)
    scope = mods.choose(SCOPES, "Sys" if semantics == "Relaxed" else "Cta")
    take_hints(mods)
    count = mods.choose({"v2": 2, "v4": 4, "v8": 8}, 1)
    type_ = mods.type()
    mods.finish()
    where, data = (ins.operands[0], ins.operands[1]) if store else (ins.operands[1], ins.operands[0])
    items = data.items if isinstance(data, Vector) else (data,)
    if len(items) != count:
        raise mods.unknown(f"{len(items)} registers for {count} elements")
    base, offset = low.address(where)
    m: Modifiers = {"space": space, "count": count, "offset": offset, "semantics": semantics, "scope": scope}
    if store:
        low.emit("st", type_, [], [base, *(low.src(i, type_) for i in items)], **m)
    else:
        low.emit("ld", type_, [low.dst(i) for i in items], [base], **m)


@handles("atom", "red")
def _atom(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: address, then the operands of each element."""
    name = ins.parts[0]
    if mods.has("async"):
        return _red_async(low, ins, mods)
    semantics = SEMANTICS[mods.take("relaxed", "acquire", "release", "acq_rel") or "relaxed"]
    scope = mods.choose(SCOPES, "Gpu")
    space = space_of(mods)
    policy = take_hints(mods)
    mods.has("noftz")
    count = mods.choose({"v2": 2, "v4": 4, "v8": 8}, 1)
    op = mods.choose(ATOMICS)
    type_ = mods.type()
    mods.finish()
    operands = list(ins.operands)
    if policy:
        operands.pop()
    dst = [] if name == "red" else operands.pop(0)
    base, offset = low.address(operands[0])
    src = [base]
    for operand in operands[1:]:
        src += [low.src(i, type_) for i in (operand.items if isinstance(operand, Vector) else (operand,))]
    dsts = [] if name == "red" else [low.dst(i) for i in (dst.items if isinstance(dst, Vector) else (dst,))]
    m: Modifiers = {"space": space, "count": count, "offset": offset, "semantics": semantics, "scope": scope}
    low.emit("atom" if dsts else "red", type_, dsts, src, operation=op, **m)


def _st_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: destination, mbarrier, data."""
    mods.has("weak"), mods.has("shared::cluster"), mods.has("mbarrier::complete_tx::bytes")
    count = mods.choose({"v2": 2, "v4": 4}, 1)
    type_ = mods.type()
    mods.finish()
    where, data, bar = ins.operands
    items = data.items if isinstance(data, Vector) else (data,)
    (base, offset), (bar_base, bar_offset) = low.address(where), low.address(bar)
    src = [base, bar_base, *(low.src(i, type_) for i in items)]
    low.emit("st_async", type_, [], src, count=count, offset=offset, barrier_offset=bar_offset)


def _red_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("relaxed"), mods.has("cluster"), mods.has("shared::cluster"), mods.has("mbarrier::complete_tx::bytes")
    op = mods.choose(ATOMICS)
    type_ = mods.type()
    mods.finish()
    where, data, bar = ins.operands
    (base, offset), (bar_base, bar_offset) = low.address(where), low.address(bar)
    src = [base, bar_base, low.src(data, type_)]
    low.emit("red_async", type_, [], src, count=1, offset=offset, barrier_offset=bar_offset, operation=op)


def _st_bulk(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("weak")
    space = space_of(mods)
    mods.finish()
    base, offset = low.address(ins.operands[0])
    low.emit("st_bulk", "b8", [], [base, low.src(ins.operands[1], "u64")], space=space, offset=offset)


@handles("fence", "membar")
def _fence(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Fences. A proxy fence has semantics only in its unidirectional forms (.acquire, .release)."""
    if mods.has("proxy"):
        kind = mods.take_prefix("async") or mods.take("alias") or mods.need_prefix("tensormap")
        semantics = mods.choose({name: SEMANTICS[name] for name in ("acquire", "release")}, "Weak")
        mods.take(*SCOPES)
        mods.take_prefix("sync_restrict")
        space = mods.take("global", "shared::cta", "shared::cluster")
        mods.finish()
        spaces: Modifiers = {"global": space in (None, "global"), "shared": space != "global"}
        return low.emit("fence_proxy", "b32", [], [], kind=PROXIES[kind.split("::")[0]], semantics=semantics, **spaces)
    if mods.has("mbarrier_init"):
        mods.has("release"), mods.has("cluster")
        mods.finish()
        return low.emit("fence", "b32", [], [], semantics="Release", scope="Cluster", barrier_init=True)
    semantics = SEMANTICS[mods.take("sc", "acq_rel", "acquire", "release") or "sc"]
    scope = (mods.take(*SCOPES, "gl") or "gpu").replace("gl", "gpu")
    mods.take_prefix("sync_restrict")
    mods.finish()
    low.emit("fence", "b32", [], [], semantics=semantics, scope=SCOPES[scope])


@handles("prefetch", "prefetchu", "createpolicy", "applypriority", "discard")
def _advice(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Hints do not change results. createpolicy gives an opaque value. discard would make memory undefined."""
    if ins.parts[0] == "createpolicy":
        return low.emit("createpolicy", "b64", [low.dst(ins.operands[0])], [])
    if ins.parts[0] == "discard":
        raise mods.unknown()
    low.emit("prefetch", "b32", [], [])


@handles("mapa", "getctarank")
def _mapa(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("shared::cluster")
    type_ = mods.type()
    mods.finish()
    src = [low.src(ins.operands[1], type_)]
    if ins.parts[0] == "mapa":
        src.append(low.src(ins.operands[2], "u32"))
    low.emit(ins.parts[0], type_, [low.dst(ins.operands[0])], src)


@handles("bar", "barrier")
def _bar(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if ins.parts[0] == "barrier" and mods.has("cluster"):
        return _cluster_barrier(low, ins, mods)
    mods.has("cta")
    if mods.has("warp"):
        mods.has("sync")
        mods.finish()
        return low.emit("warpsync", "b32", [], [low.src(ins.operands[0], "b32")], sync=True)
    kind = mods.take("sync", "arrive", "red")
    aligned = mods.has("aligned") or ins.parts[0] == "bar"
    if kind == "red":
        op = mods.need("popc", "and", "or").capitalize()
        mods.type()
        mods.finish()
        dst, barrier, *rest = ins.operands
        count = low.src(rest[0], "u32") if len(rest) == 2 else NO_OPERAND
        src = [low.src(barrier, "u32"), count, low.src(rest[-1], "pred")]
        return low.emit("bar_red", "b32", [low.dst(dst)], src, reduction=op, aligned=aligned)
    mods.finish()
    barrier, *rest = ins.operands
    src = [low.src(barrier, "u32"), low.src(rest[0], "u32") if rest else NO_OPERAND]
    low.emit(f"bar_{kind}", "b32", [], src, aligned=aligned)


def _cluster_barrier(low: Lowering, ins: Instruction, mods: Mods) -> None:
    kind = mods.take("arrive", "wait")
    strong = mods.take("release", "acquire", "relaxed") != "relaxed"
    aligned = mods.has("aligned")
    mods.finish()
    low.emit(f"cluster_{kind}", "b32", [], [], strong=strong, aligned=aligned)


@handles("mbarrier")
def _mbarrier(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: address; and a count, a parity or a state."""
    kind = mods.take(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"
    )
    if kind is None:
        raise mods.unknown()
    strong = mods.take("release", "acquire", "relaxed") != "relaxed"
    scope = SCOPES[mods.take(*SCOPES) or "cta"]
    space = space_of(mods)
    expect_tx, parity = mods.has("expect_tx"), mods.has("parity")
    mods.has("noComplete"), mods.has("b64")
    mods.finish()
    ops = list(ins.operands)
    if kind == "pending_count":
        return low.emit("mbar_pending_count", "b32", [low.dst(ops[0])], [low.src(ops[1], "b64")])
    dst = []
    if kind in ("arrive", "arrive_drop", "test_wait", "try_wait") and not isinstance(ops[0], Address):
        dst = [low.dst(ops.pop(0))]
    base, offset = low.address(ops[0])
    third = ops[1] if len(ops) > 1 else Imm(1)
    src = [base, low.src(third, "b64" if kind.endswith("wait") and not parity else "b32")]
    m: Modifiers = {"space": space, "offset": offset, "strong": strong, "scope": scope}
    low.emit(f"mbar_{kind}", "b64", dst, src, **m, expect_tx=expect_tx, parity=parity)


@handles("ldmatrix", "stmatrix")
def _ldmatrix(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("sync"), mods.has("aligned")
    shape = mods.need("m8n8", "m16n16", "m8n16", "m16n8")
    num = mods.choose({"x1": 1, "x2": 2, "x4": 4})
    trans = mods.has("trans")
    space = space_of(mods)
    mods.has("b8x16")
    form = mods.need("b16", "b8", "b6x16_p32", "b4x16_p64")
    mods.finish()
    code = {("m8n8", "b16"): "M8N8B16", ("m16n8", "b8"): "M16N8B8", ("m16n16", "b8"): "M16N16B8",
            ("m8n16", "b6x16_p32"): "M8N16B6", ("m8n16", "b4x16_p64"): "M8N16B4",
            ("m16n16", "b6x16_p32"): "M16N16B6", ("m16n16", "b4x16_p64"): "M16N16B4"}.get((shape, form))  # fmt: skip
    if code is None:
        raise mods.unknown()
    load = ins.parts[0] == "ldmatrix"
    regs, where = (ins.operands[0], ins.operands[1]) if load else (ins.operands[1], ins.operands[0])
    base, offset = low.address(where)
    items = regs.items if isinstance(regs, Vector) else (regs,)
    m: Modifiers = {"shape": code, "count": num, "trans": trans, "space": space, "offset": offset}
    if load:
        low.emit("ldmatrix", "b32", [low.dst(i) for i in items], [base], aligned=True, sync=True, **m)
    else:
        low.emit("stmatrix", "b32", [], [base, *(low.src(i, "b32") for i in items)], aligned=True, sync=True, **m)


@handles("movmatrix")
def _movmatrix(low: Lowering, ins: Instruction, mods: Mods) -> None:
    low.emit("movmatrix", "b32", [low.dst(ins.operands[0])], [low.src(ins.operands[1], "b32")], aligned=True, sync=True)


MMA_TYPES = (
    "f16", "bf16", "tf32", "f64", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1", "f32", "s32", "e2m1", "e2m3", "e3m2",
)  # fmt: skip


# Kinds of block-scaled mma.sync (ISA 9.7.14.3): K, types of A and B, types of the factors for each number of factors
# along K, and the default of that number.
SCALED_KINDS: dict[str, tuple[int, tuple[str, ...], dict[int, tuple[str, ...]], int]] = {
    "kind::mxf8f6f4": (32, ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), {1: ("ue8m0",)}, 1),
    "kind::mxf4": (64, ("e2m1",), {2: ("ue8m0",)}, 2),
    "kind::mxf4nvf4": (64, ("e2m1",), {2: ("ue8m0",), 4: ("ue8m0", "ue4m3")}, 0),
}


def _scaling(mods: Mods, kind: str | None, sizes: list[int], types: list[str]) -> Modifiers:
    """Take the modifiers of block scaling."""
    if not mods.has("block_scale"):
        if kind not in (None, "kind::f8f6f4"):
            raise mods.unknown(f".{kind} needs .block_scale")
        return {}
    vector = mods.choose({"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}, 0)
    type_ = mods.need("ue8m0", "ue4m3")
    if kind not in SCALED_KINDS:
        raise mods.unknown(".block_scale needs a scaled .kind")
    k, elements, factors, default = SCALED_KINDS[kind]
    vector = vector or default
    outer = [types[0], types[-1]]
    if sizes != [16, 8, k] or outer != ["f32", "f32"] or not set(types[1:-1]) <= set(elements):
        raise mods.unknown(f"the shape or a type does not fit .{kind}.block_scale")
    if type_ not in factors.get(vector, ()):
        raise mods.unknown(f"{vector} factors of .{type_} along K do not fit .{kind}")
    return {"scale_vector": vector, "scale_type": type_.upper()}


@handles("mma")
def _mma(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Sources: A, B, C; with block scaling the data, byte and thread of A's scales, and of B's."""
    mods.has("sync"), mods.has("aligned")
    shape = mods.need_prefix("m")
    sizes = [int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split()]
    saturate = mods.has("satfinite")
    kind = mods.take_prefix("kind::")
    layouts = [part for part in mods.left if part in ("row", "col")]
    types = [part for part in mods.left if part in MMA_TYPES]
    mods.left = [part for part in mods.left if part not in ("row", "col") and part not in MMA_TYPES]
    if len(layouts) != 2 or len(types) != 4:
        raise mods.unknown()
    scaling = _scaling(mods, kind, sizes, types)
    mods.finish()
    d, a, b, c = (o.items if isinstance(o, Vector) else (o,) for o in ins.operands[:4])
    element = {"f64": "f64"}.get(types[0], "b32")
    src = [low.src(i, element) for i in (*a, *b)]
    src += [low.src(i, "f32" if types[3] == "f32" else element) for i in c]
    if scaling:
        data_a, select_a, data_b, select_b = ins.operands[4:]
        for data, select in ((data_a, select_a), (data_b, select_b)):
            src += [low.src(data, "b32"), *(low.src(i, "u16") for i in select.items)]
    m: Modifiers = {
        **dict(zip(("m", "n", "k"), sizes)),
        **dict(zip(("d_type", "a_type", "b_type", "c_type"), (name.upper() for name in types))),
        "a_registers": len(a),
        "b_registers": len(b),
        "c_registers": len(c),
        **scaling,
    }
    low.emit(
        "mma_sync", element, [low.dst(i) for i in d], src, aligned=True, sync=True,
        satfinite=saturate, a_columns=layouts[0] == "col", b_rows=layouts[1] == "row",
        containers=kind in ("kind::f8f6f4", "kind::mxf8f6f4"), **m,
    )  # fmt: skip


@handles("griddepcontrol")
def _griddepcontrol(low: Lowering, ins: Instruction, mods: Mods) -> None:
    kind = mods.take("wait", "launch_dependents")
    mods.finish()
    low.emit("griddep_wait" if kind == "wait" else "griddep_launch", "b32", [], [])


MAP_FIELDS = {
    "global_address": "GlobalAddress", "rank": "Rank", "box_dim": "BoxDim", "global_dim": "GlobalDim",
    "global_stride": "GlobalStride", "element_stride": "ElementStride", "elemtype": "ElemType",
    "interleave_layout": "Interleave", "swizzle_mode": "SwizzleMode", "swizzle_atomicity": "SwizzleAtomicity",
    "fill_mode": "FillMode",
}  # fmt: skip


@handles("tensormap")
def _tensormap(low: Lowering, ins: Instruction, mods: Mods) -> None:
    if mods.take_prefix("cp_fenceproxy"):
        (dst, dst_offset), (src, src_offset) = low.address(ins.operands[0]), low.address(ins.operands[1])
        m: Modifiers = {"bytes": ins.operands[2].value, "to_offset": dst_offset, "from_offset": src_offset}
        return low.emit("tensormap_cp", "b32", [], [dst, src], aligned=True, sync=True, **m)
    if not mods.has("replace"):
        raise mods.unknown()
    mods.has("tile")
    name = mods.choose(MAP_FIELDS)
    space = space_of(mods)
    types = [mods.left.pop() for _ in range(len(mods.left))]
    base, offset = low.address(ins.operands[0])
    value_type = "b64" if "b64" in types else "b32"
    ordinal, value = (ins.operands[1].value, ins.operands[2]) if len(ins.operands) == 3 else (0, ins.operands[1])
    sources = [base, low.src(value, value_type)]
    low.emit("tensormap_replace", value_type, [], sources, field=name, ordinal=ordinal, space=space, offset=offset)
