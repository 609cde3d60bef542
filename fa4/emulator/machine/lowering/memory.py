"""Lowering of memory, barrier and matrix-fragment instructions (ISA 9.7.9, 9.7.13, 9.7.14)."""

from __future__ import annotations

from fa4.emulator.machine.lowering.lower import NO_OPERAND, Address, Imm, Instruction, Lowering, Mods, Vector, handles

SPACES = {"global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "local": 4, "param": 5, "param::entry": 5,
          "param::func": 5, "const": 6}  # fmt: skip
SEMANTICS = {"weak": 0, "volatile": 1, "relaxed": 1, "mmio": 1, "acquire": 2, "release": 4, "acq_rel": 6, "sc": 6}
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
ATOMICS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified")


def take_hints(mods: Mods) -> bool:
    """Drop the modifiers that only advise caches; True when a cache policy operand follows."""
    for name in CACHE_HINTS:
        mods.has(name)
    policy = mods.has("L2::cache_hint")
    while mods.take_prefix("L1::") or mods.take_prefix("L2::"):
        pass
    return policy


def space_of(mods: Mods, default: int = 0) -> int:
    name = mods.take(*SPACES)
    return SPACES[name] if name else default


@handles("ld", "ldu", "st")
def _ld_st(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: space, elements, byte offset, semantics (1 relaxed, 2 acquire, 4 release), scope. Source 0 is the address."""
    store = ins.parts[0] == "st"
    if store and mods.has("async"):
        return _st_async(low, ins, mods)
    if store and mods.has("bulk"):
        return _st_bulk(low, ins, mods)
    semantics = mods.choose(SEMANTICS, "weak")
    space = space_of(mods)
    scope = mods.choose(SCOPES, "cta" if semantics != 1 else "sys")
    take_hints(mods)
    count = mods.choose({"v2": 2, "v4": 4, "v8": 8}, 1)
    type_ = mods.type()
    mods.finish()
    where, data = (ins.operands[0], ins.operands[1]) if store else (ins.operands[1], ins.operands[0])
    items = data.items if isinstance(data, Vector) else (data,)
    if len(items) != count:
        raise mods.unknown(f"{len(items)} registers for {count} elements")
    base, offset = low.address(where)
    m = [space, count, offset, semantics, scope]
    if store:
        low.emit("st", type_, [], [base, *(low.src(i, type_) for i in items)], m)
    else:
        low.emit("ld", type_, [low.dst(i) for i in items], [base], m)


@handles("atom", "red")
def _atom(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: space, elements, byte offset, semantics, scope, operation. Sources: address, operands of each element."""
    name = ins.parts[0]
    if mods.has("async"):
        return _red_async(low, ins, mods)
    semantics = SEMANTICS[mods.take("relaxed", "acquire", "release", "acq_rel") or "relaxed"]
    scope = mods.choose(SCOPES, "gpu")
    space = space_of(mods)
    policy = take_hints(mods)
    mods.has("noftz")
    count = mods.choose({"v2": 2, "v4": 4, "v8": 8}, 1)
    op = ATOMICS.index(mods.need(*ATOMICS))
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
    low.emit("atom" if dsts else "red", type_, dsts, src, [space, count, offset, semantics, scope, op])


def _st_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: elements, offset of the destination, offset of the mbarrier. Sources: destination, mbarrier, data."""
    mods.has("weak"), mods.has("shared::cluster"), mods.has("mbarrier::complete_tx::bytes")
    count = mods.choose({"v2": 2, "v4": 4}, 1)
    type_ = mods.type()
    mods.finish()
    where, data, bar = ins.operands
    items = data.items if isinstance(data, Vector) else (data,)
    (base, offset), (bar_base, bar_offset) = low.address(where), low.address(bar)
    low.emit("st_async", type_, [], [base, bar_base, *(low.src(i, type_) for i in items)], [count, offset, bar_offset])


def _red_async(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("relaxed"), mods.has("cluster"), mods.has("shared::cluster"), mods.has("mbarrier::complete_tx::bytes")
    op = ATOMICS.index(mods.need(*ATOMICS))
    type_ = mods.type()
    mods.finish()
    where, data, bar = ins.operands
    (base, offset), (bar_base, bar_offset) = low.address(where), low.address(bar)
    low.emit("red_async", type_, [], [base, bar_base, low.src(data, type_)], [1, offset, bar_offset, op])


def _st_bulk(low: Lowering, ins: Instruction, mods: Mods) -> None:
    mods.has("weak")
    space = space_of(mods)
    mods.finish()
    base, offset = low.address(ins.operands[0])
    low.emit("st_bulk", "b8", [], [base, low.src(ins.operands[1], "u64")], [space, 0, offset])


@handles("fence", "membar")
def _fence(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """fence m: semantics (2 acquire, 4 release), scope, 1 for mbarrier_init alone.

    fence_proxy m: kind (0 async, 1 tensormap, 2 alias), spaces (1 global, 2 shared::cta, 4 shared::cluster), semantics
    of the one-directional form (0 both)."""
    if mods.has("proxy"):
        kind = mods.take_prefix("async") or mods.take("alias") or mods.need_prefix("tensormap")
        semantics = mods.choose({name: SEMANTICS[name] for name in ("acquire", "release")}, 0)
        mods.take(*SCOPES)
        mods.take_prefix("sync_restrict")
        spaces = mods.choose({"global": 1, "shared::cta": 2, "shared::cluster": 6}, 7)
        mods.finish()
        code = {"async": 0, "tensormap": 1, "alias": 2}[kind.split("::")[0]]
        return low.emit("fence_proxy", "b32", [], [], [code, spaces, semantics])
    if mods.has("mbarrier_init"):
        mods.has("release"), mods.has("cluster")
        mods.finish()
        return low.emit("fence", "b32", [], [], [4, 1, 1])
    semantics = SEMANTICS[mods.take("sc", "acq_rel", "acquire", "release") or "sc"]
    scope = (mods.take(*SCOPES, "gl") or "gpu").replace("gl", "gpu")
    mods.take_prefix("sync_restrict")
    mods.finish()
    low.emit("fence", "b32", [], [], [semantics, SCOPES[scope], 0])


@handles("prefetch", "prefetchu", "createpolicy", "applypriority", "discard")
def _advice(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """Hints have no effect on results; createpolicy gives an opaque value."""
    if ins.parts[0] == "createpolicy":
        return low.emit("createpolicy", "b64", [low.dst(ins.operands[0])], [])
    if ins.parts[0] == "discard":
        raise mods.unknown()
    low.emit("prefetch", "b32", [], [])


@handles("mapa", "getctarank")
def _mapa(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: 1 for shared::cluster addresses, 0 for generic ones."""
    shared = int(mods.has("shared::cluster"))
    type_ = mods.type()
    mods.finish()
    src = [low.src(ins.operands[1], type_)]
    if ins.parts[0] == "mapa":
        src.append(low.src(ins.operands[2], "u32"))
    low.emit(ins.parts[0], type_, [low.dst(ins.operands[0])], src, [shared])


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
        op = mods.take("popc", "and", "or")
        mods.type()
        mods.finish()
        dst, barrier, *rest = ins.operands
        count = low.src(rest[0], "u32") if len(rest) == 2 else NO_OPERAND
        src = [low.src(barrier, "u32"), count, low.src(rest[-1], "pred")]
        return low.emit("bar_red", "b32", [low.dst(dst)], src, [("popc", "and", "or").index(op)], aligned=aligned)
    mods.finish()
    barrier, *rest = ins.operands
    src = [low.src(barrier, "u32"), low.src(rest[0], "u32") if rest else NO_OPERAND]
    low.emit(f"bar_{kind}", "b32", [], src, aligned=aligned)


def _cluster_barrier(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """cluster_arrive m: 1 if release; cluster_wait m: 1 if acquire."""
    kind = mods.take("arrive", "wait")
    strong = mods.take("release", "acquire", "relaxed") != "relaxed"
    aligned = mods.has("aligned")
    mods.finish()
    low.emit(f"cluster_{kind}", "b32", [], [], [int(strong)], aligned=aligned)


@handles("mbarrier")
def _mbarrier(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: space, byte offset, semantics (0 relaxed, 1 release or acquire), scope, variant.
    Variant: arrive 1 expect_tx, 2 noComplete; waits 1 parity. Sources: address, count / parity / state."""
    kind = mods.take(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"
    )
    if kind is None:
        raise mods.unknown()
    strong = mods.take("release", "acquire", "relaxed") != "relaxed"
    scope = mods.choose(SCOPES, "cta")
    space = space_of(mods)
    variant = 1 if mods.has("expect_tx") or mods.has("parity") else 2 if mods.has("noComplete") else 0
    mods.has("b64")
    mods.finish()
    ops = list(ins.operands)
    if kind == "pending_count":
        return low.emit("mbar_pending_count", "b32", [low.dst(ops[0])], [low.src(ops[1], "b64")])
    dst = []
    if kind in ("arrive", "arrive_drop", "test_wait", "try_wait") and not isinstance(ops[0], Address):
        dst = [low.dst(ops.pop(0))]
    base, offset = low.address(ops[0])
    third = ops[1] if len(ops) > 1 else Imm(1)
    third_type = "b64" if kind.endswith("wait") and not variant else "b32"
    low.emit(
        f"mbar_{kind}", "b64", dst, [base, low.src(third, third_type)], [space, offset, int(strong), scope, variant]
    )


@handles("ldmatrix", "stmatrix")
def _ldmatrix(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: shape, matrices, transposed, space, byte offset."""
    mods.has("sync"), mods.has("aligned")
    shape = mods.need("m8n8", "m16n16", "m8n16", "m16n8")
    num = mods.choose({"x1": 1, "x2": 2, "x4": 4})
    trans = int(mods.has("trans"))
    space = space_of(mods)
    mods.has("b8x16")
    form = mods.need("b16", "b8", "b6x16_p32", "b4x16_p64")
    mods.finish()
    code = {("m8n8", "b16"): 0, ("m16n8", "b8"): 1, ("m16n16", "b8"): 2, ("m8n16", "b6x16_p32"): 3,
            ("m8n16", "b4x16_p64"): 4, ("m16n16", "b6x16_p32"): 5, ("m16n16", "b4x16_p64"): 6}[shape, form]  # fmt: skip
    if code > 4:
        raise mods.unknown()
    load = ins.parts[0] == "ldmatrix"
    regs, where = (ins.operands[0], ins.operands[1]) if load else (ins.operands[1], ins.operands[0])
    base, offset = low.address(where)
    items = regs.items if isinstance(regs, Vector) else (regs,)
    m = [code, num, trans, space, offset]
    if load:
        low.emit("ldmatrix", "b32", [low.dst(i) for i in items], [base], m, aligned=True, sync=True)
    else:
        low.emit("stmatrix", "b32", [], [base, *(low.src(i, "b32") for i in items)], m, aligned=True, sync=True)


@handles("movmatrix")
def _movmatrix(low: Lowering, ins: Instruction, mods: Mods) -> None:
    low.emit("movmatrix", "b32", [low.dst(ins.operands[0])], [low.src(ins.operands[1], "b32")], aligned=True, sync=True)


MMA_TYPES = (
    "f16", "bf16", "tf32", "f64", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1", "f32", "s32", "e2m1", "e2m3", "e3m2",
)  # fmt: skip


@handles("mma")
def _mma(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """m: M, N, K, types of D, A, B, C packed in bytes, flags (1 satfinite, 2 A column-major, 4 B row-major,
    8 containers), counts of A, B, C registers packed in bytes."""
    mods.has("sync"), mods.has("aligned")
    shape = mods.need_prefix("m")
    sizes = [int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split()]
    saturate = mods.has("satfinite")
    containers = mods.take_prefix("kind::f8f6f4")
    layouts = [part for part in mods.left if part in ("row", "col")]
    types = [part for part in mods.left if part in MMA_TYPES]
    mods.left = [part for part in mods.left if part not in ("row", "col") and part not in MMA_TYPES]
    mods.finish()
    if len(layouts) != 2 or len(types) != 4:
        raise mods.unknown()
    d, a, b, c = (o.items if isinstance(o, Vector) else (o,) for o in ins.operands[:4])
    element = {"f64": "f64"}.get(types[0], "b32")
    packed = sum(MMA_TYPES.index(t) << (8 * i) for i, t in enumerate(types))
    flags = int(saturate) | 2 * (layouts[0] == "col") | 4 * (layouts[1] == "row") | 8 * bool(containers)
    src = [low.src(i, element) for i in (*a, *b)]
    src += [low.src(i, "f32" if types[3] == "f32" else element) for i in c]
    counts = len(a) | len(b) << 8 | len(c) << 16
    dst = [low.dst(i) for i in d]
    low.emit("mma_sync", element, dst, src, [*sizes, packed, flags, counts], aligned=True, sync=True)


@handles("griddepcontrol")
def _griddepcontrol(low: Lowering, ins: Instruction, mods: Mods) -> None:
    kind = mods.take("wait", "launch_dependents")
    mods.finish()
    low.emit("griddep_wait" if kind == "wait" else "griddep_launch", "b32", [], [])


@handles("tensormap")
def _tensormap(low: Lowering, ins: Instruction, mods: Mods) -> None:
    """replace m: field, ordinal, space, byte offset; cp_fenceproxy m: bytes, destination and source offset."""
    if mods.take_prefix("cp_fenceproxy"):
        (dst, dst_offset), (src, src_offset) = low.address(ins.operands[0]), low.address(ins.operands[1])
        return low.emit(
            "tensormap_cp",
            "b32",
            [],
            [dst, src],
            [ins.operands[2].value, dst_offset, src_offset],
            aligned=True,
            sync=True,
        )
    if not mods.has("replace"):
        raise mods.unknown()
    fields = (
        "global_address",
        "rank",
        "box_dim",
        "global_dim",
        "global_stride",
        "element_stride",
        "elemtype",
        "interleave_layout",
        "swizzle_mode",
        "fill_mode",
        "swizzle_atomicity",
    )
    mods.has("tile")
    name = mods.take(*fields)
    space = space_of(mods)
    types = [mods.left.pop() for _ in range(len(mods.left))]
    base, offset = low.address(ins.operands[0])
    value_type = "b64" if "b64" in types else "b32"
    ordinal, value = (ins.operands[1].value, ins.operands[2]) if len(ins.operands) == 3 else (0, ins.operands[1])
    low.emit(
        "tensormap_replace",
        value_type,
        [],
        [base, low.src(value, value_type)],
        [fields.index(name), ordinal, space, offset],
    )
