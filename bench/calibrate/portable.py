"""What chips before Hopper have too, as an sm_90 runs it: mma.sync, ldmatrix, cp.async, loads from L2, red, fences."""

from __future__ import annotations

import torch

from .frame import SCRATCH, Bench, Section, looped, timed

SUMS, STEPS = 8, 8  # independent accumulators of a warp, and products into each, where the rate is taken
CHAIN = 32
WARPS = (1, 2, 4)  # a scheduler
_DEPTH = 16.0  # what a product of ones adds


def _mma(i: int) -> str:
    sums = ", ".join(f"c{i}_{j}" for j in range(4))
    shape = "m16n8k16.row.col.f32.bf16.bf16.f32"
    return f"mma.sync.aligned.{shape} {{{sums}}}, {{h0, h1, h2, h3}}, {{h4, h5}}, {{{sums}}};\n"


def _by_warps(chain: str, many: str, count: int) -> tuple[str, tuple[Section, ...]]:
    """PTX and sections: a chain by warp 0 alone, then twice `count` instructions by 1, 2 and 4 warps a scheduler."""
    body = "setp.eq.u32 p, warp, 0;\n" + timed(0, f"@!p bra ALONE;\n{looped(chain, 2, 'CHAIN')}\nALONE:")
    sections = [Section("latency", 2 * CHAIN)]
    for i, warps in enumerate(WARPS, start=1):
        sections.append(Section(f"rate, {warps} warps a scheduler", 2 * count * warps))
        body += f"setp.lt.u32 p, warp, {4 * warps};\n"
        # A loop: short of one, ptxas lets all warps issue the instructions under a predicate, which takes as long.
        body += timed(i, f"@!p bra MANY{i};\n{looped(many, 2, f'PASS{i}')}\nMANY{i}:")
    return body, tuple(sections)


def _products() -> Bench:
    sums = [f"c{i}_{j}" for i in range(SUMS) for j in range(4)]
    body, sections = _by_warps(_mma(0) * CHAIN, "".join(_mma(i) for i in range(SUMS)) * STEPS, SUMS * STEPS)
    total = "".join(f"add.f32 all, all, {name};" for name in sums[1:])

    def initial() -> torch.Tensor:
        ones = torch.tensor([0x3F803F80], dtype=torch.int32).view(torch.float32)  # two of bf16
        return torch.cat([torch.arange(float(SUMS)), ones.expand(6)])

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[0] = _DEPTH * rounds * 2 * (CHAIN + STEPS * len(WARPS))
        return after

    return Bench(
        "mma.sync m16n8k16", sections, body, initial, expected,
        declared=f".reg .f32 all, {', '.join(sums)}; .reg .b32 h0, h1, h2, h3, h4, h5;",
        # From words of their own: of equal sums, and of equal operands, the compiler makes one.
        before="".join(f"ld.global.f32 c{i}_{j}, [data+{4 * i}];" for i in range(SUMS) for j in range(4))
               + "".join(f"ld.global.b32 h{i}, [data+{4 * (SUMS + i)}];" for i in range(6)),
        # The others' sums are used where the first sum is no number, which it is.
        after=f"mov.f32 all, c0_0; {total} testp.notanumber.f32 p, c0_0; @p mov.f32 c0_0, all;"
              "@first st.global.f32 [data], c0_0;",
        threads=32 * 4 * max(WARPS),
    )  # fmt: skip


def _matrices() -> Bench:
    """ldmatrix.x4, each warp from 512 bytes that its lanes cover once: no bank is asked twice in a pass."""
    names = "uvxyz"
    # What is loaded is 0, so that the next address depends on it and stays what it was.
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}0, {0}1, {0}2, {0}3}}, [{0}];\nadd.u32 {0}, {0}, {0}3;\n"
    many = "".join(map(load.format, names)) * STEPS
    body, sections = _by_warps(load.format("x") * CHAIN, many, len(names) * STEPS)
    registers = ", ".join(f"{name}, {name}0, {name}1, {name}2, {name}3" for name in names)
    fold = "".join(f"or.b32 any, any, {name}{i};" for name in names for i in range(4))
    return Bench(
        "ldmatrix.x4", sections, body, lambda: torch.ones(1, dtype=torch.int32),
        lambda before, rounds: torch.zeros_like(before), declared=f".reg .b32 place, any, nil, {registers};",
        before="mov.b32 nil, 0; mov.b32 any, 0; shl.b32 place, thread, 4; add.u32 place, place, room;"
               "st.shared.v4.b32 [place], {nil, nil, nil, nil}; bar.sync 0;"
               + "".join(f"ld.shared.b32 {name}0, [room+{4 * i}]; xor.b32 {name}, place, {name}0;"
                         for i, name in enumerate(names)),
        after=f"{fold} @first st.global.b32 [data], any;", threads=32 * 4 * max(WARPS),
        smem_bytes=16 * 32 * 4 * max(WARPS),
    )  # fmt: skip


_TILES, _PAGES = 4, 4  # ldmatrix.x4 of a step, and steps' operands in shared memory


_FED_PASSES = 8


def _fed(arithmetic: str = "") -> Bench:
    """Warps that load the second operands of their own products, 4 ldmatrix.x4 for 16 of these, one step ahead: what a
    tile of 32 rows does. arithmetic: PTX on x0 to x7 that follows each step's products."""
    sums = [f"c{i}_{j}" for i in range(4 * _TILES) for j in range(4)]
    shape = "m16n8k16.row.col.f32.bf16.bf16.f32"

    def load(step: int) -> str:
        page = step % _PAGES
        return "".join(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
            f"{{{', '.join(f'b{step % 2}_{tile}_{i}' for i in range(4))}}}, [place+{512 * (_TILES * page + tile)}];\n"
            for tile in range(_TILES)
        )

    def multiply(step: int) -> str:
        text = ""
        for i in range(4 * _TILES):
            of = ", ".join(f"c{i}_{j}" for j in range(4))
            tile, half = divmod(i // 2, 2)
            b = f"b{step % 2}_{tile}_{2 * half}, b{step % 2}_{tile}_{2 * half + 1}"
            text += f"mma.sync.aligned.{shape} {{{of}}}, {{h{i % 2}, h1, h2, h3}}, {{{b}}}, {{{of}}};\n"
        return text

    # The other half of shared memory from pass to pass: what does not change would be loaded once.
    many = "xor.b32 turn, turn, 8192; add.u32 place, first_place, turn;\n"
    many += "".join(load(step + 1) + multiply(step) + arithmetic for step in range(_PAGES))
    body, sections = "", []
    for i, warps in enumerate(WARPS[:2]):
        sections.append(Section(f"{warps} warps a scheduler", _FED_PASSES * _PAGES * len(sums) // 4 * warps))
        body += f"setp.lt.u32 p, warp, {4 * warps};\n"
        body += timed(i, f"@!p bra MANY{i};\n{load(0)}{looped(many, _FED_PASSES, f'PASS{i}')}\nMANY{i}:")
    others = [f"x{i}" for i in range(4)]
    total = "".join(f"add.f32 all, all, {name};" for name in [*sums[1:], *others])
    words, step = len(sums) // 4, 16 * 32 * 4 * WARPS[1]

    def initial() -> torch.Tensor:
        ones = torch.tensor([0x3F803F80], dtype=torch.int32).view(torch.float32)  # two of bf16
        return torch.cat([torch.arange(float(words)), ones.expand(4)])

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[0] = _DEPTH * rounds * 2 * _FED_PASSES * _PAGES
        return after

    operands = (f"b{k}_{t}_{i}" for k in range(2) for t in range(_TILES) for i in range(4))
    return Bench(
        f"mma.sync m16n8k16 of operands from ldmatrix.x4{', and softmax' if arithmetic else ''}", tuple(sections), body,
        initial, expected,
        declared=f".reg .f32 all, by, of, {', '.join([*sums, *others])}; .reg .b32 {', '.join(operands)};"
                 ".reg .b32 h0, h1, h2, h3, place, first_place, turn, c, packed;",
        before="shl.b32 c, thread, 4; add.u32 place, room, c; ld.global.b32 packed, [data+64];"
               "FILL: st.shared.v4.b32 [place], {packed, packed, packed, packed};"
               f"add.u32 place, place, {step}; add.u32 c, c, {step}; setp.lt.u32 p, c, 16384; @p bra FILL; bar.sync 0;"
               "mov.b32 turn, 0; shl.b32 c, lane, 4; add.u32 first_place, room, c; mov.b32 place, first_place;"
               + "".join(f"ld.global.b32 h{i}, [data+{4 * (words + i)}];" for i in range(4))
               + "".join(f"ld.global.f32 c{i}_{j}, [data+{4 * i}];" for i in range(words) for j in range(4))
               + "ld.global.f32 by, [data+4]; ld.global.f32 of, [data+8]; cvt.rn.f32.u32 all, thread;"
               + "".join(f"add.f32 {x}, all, by; add.f32 all, all, of;" for x in others),
        after=f"mov.f32 all, c0_0; {total} testp.notanumber.f32 p, c0_0; @p mov.f32 c0_0, all;"
              "@first st.global.f32 [data], c0_0;",
        threads=32 * 4 * WARPS[1], smem_bytes=16384,
    )  # fmt: skip


ROWS = (1, 4, 16)  # of 16 bytes a thread


def _copies(everywhere: bool) -> Bench:
    """cp.async of 16 bytes a thread, waited for as one group: from L2, which holds what a warm-up left there."""
    threads, most = 128, max(ROWS)
    body, sections = "", []
    for i, rows in enumerate(ROWS):
        copies = "".join(
            f"cp.async.cg.shared.global [place+{16 * threads * row}], [source+{16 * threads * row}], 16;\n"
            for row in range(rows)
        )
        body += timed(i, copies + "cp.async.commit_group;\ncp.async.wait_group 0;")
        sections.append(Section(f"{rows} copies a thread", 1, "group"))
    return Bench(
        f"cp.async of 128 threads, {'all SMs' if everywhere else 'one SM'}", tuple(sections), body,
        lambda: torch.arange(4 * threads * most, dtype=torch.int32), lambda before, rounds: before,
        declared=".reg .b32 place, word; .reg .b64 source;",
        before="shl.b32 word, thread, 4; add.u32 place, room, word; mad.wide.u32 source, thread, 16, data;",
        # The last copy of each thread, which spoils the source where it is wrong.
        after=f"ld.shared.b32 word, [place+{16 * threads * (most - 1)}]; mad.lo.u32 place, thread, 4,"
              f"{4 * threads * (most - 1)}; setp.ne.u32 p, word, place; @p st.global.b32 [data], word;",
        ctas=-1 if everywhere else 1, threads=threads, smem_bytes=16 * threads * most,
    )  # fmt: skip


def _chain_of_loads() -> Bench:
    """Loads from L2, past L1, each from where the one before pointed to; and fences of what was stored before them."""
    chain = "ld.relaxed.gpu.global.b64 hop, [hop];\n" * CHAIN
    body = timed(0, f"@!first bra OTHERS;\n{chain}OTHERS:")
    fences = ("fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", "fence.acq_rel.gpu;")
    for i, fence in enumerate(fences, start=1):
        body += timed(i, f"st.shared.b32 [mine], thread;\n{fence}\n" * CHAIN)
    return Bench(
        "loads from L2, fences",
        (Section("load", CHAIN), *(Section(f"store to shared memory and {fence[:-1]}", CHAIN) for fence in fences)),
        body, lambda: torch.zeros(2, dtype=torch.int32),
        lambda before, rounds: torch.tensor([1, 0], dtype=torch.int32),
        declared=".reg .b64 hop, low; .reg .b32 mine, same;",
        before="@first st.global.b64 [data], data; shl.b32 mine, thread, 2; add.u32 mine, mine, room;"
               "mov.b64 hop, data; bar.sync 0;",
        after="setp.eq.u64 p, hop, data; selp.b32 same, 1, 0, p; @first st.global.b32 [data], same;"
              "@first st.global.b32 [data+4], 0;",
        smem_bytes=512,
    )  # fmt: skip


_ADDS = 16


def _adds(vector: bool) -> Bench:
    """Adds of float32 by all SMs, a warp's side by side: each CTA to bytes of its own, then all to the same."""
    wide = 4 if vector else 1
    add = "red.global.add.v4.f32 [{}], {{one, one, one, one}};\n" if vector else "red.global.add.f32 [{}], one;\n"
    step = 128 * 4 * wide  # bytes of a CTA's instruction
    body = ""
    for i, place in enumerate(("own", "all")):
        # An add is done where a load of the same thread sees it.
        done = f"ld.relaxed.gpu.global.f32 back, [{place}+{step * (_ADDS - 1)}];"
        body += timed(i, "".join(add.format(f"{place}+{step * k}") for k in range(_ADDS)) + done)
    kib = _ADDS * step / 1024
    return Bench(
        f"adds of {4 * wide} bytes a thread, all SMs", (Section("own", kib, "KiB"), Section("same", kib, "KiB")), body,
        lambda: torch.zeros(1), lambda before, rounds: torch.ones_like(before),
        declared=".reg .f32 one, back; .reg .b64 own, all; .reg .b32 offset;",
        before=f"mov.f32 one, 0f3F800000; mul.lo.u32 offset, thread, {4 * wide}; cvt.u64.u32 all, offset;"
               f"add.u64 all, all, data; add.u64 all, all, {SCRATCH}; mad.wide.u32 own, cta, {_ADDS * step}, all;"
               f"add.u64 own, own, {_ADDS * step};",
        after="setp.eq.and.u32 p, cta, 0, first; @p st.global.f32 [data], one;", ctas=-1, scratch=_ADDS * step,
        chips=("sm_90a", "sm_100a") if vector else (),
    )  # fmt: skip


_SOFTMAX = "".join(
    f"max.f32 x{i}, x{i}, by; fma.rn.f32 x{i}, x{i}, by, of; ex2.approx.ftz.f32 x{i}, x{i}; add.rn.f32 x{i}, x{i}, by;"
    f"cvt.rn.bf16x2.f32 packed, x{i}, by; mov.b32 x{i}, packed;\n"
    for i in range(4)
)
BENCHES = (
    _products(), _fed(), _fed(_SOFTMAX), _matrices(),
    _copies(False), _copies(True), _chain_of_loads(), _adds(False), _adds(True),
)  # fmt: skip
