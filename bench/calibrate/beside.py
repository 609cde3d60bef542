"""What four warps do beside what four others do on the same schedulers; and code that is run straight through."""

from __future__ import annotations

import torch

from .frame import SCRATCH, Bench, Section, looped

SUMS, STEPS = 8, 4  # accumulators of a warp, and products into each, in one pass of the loop
FEW, MANY = 8, 24  # passes; who is timed beside the other ends first
_DEPTH = 16.0  # what a product of ones adds
_CHAINS = 8
_COPIES = 16  # of a pass
_ZEROS = 16 * 256  # bytes behind which shared memory is zero


def _mma(i: int) -> str:
    sums = ", ".join(f"c{i}_{j}" for j in range(4))
    shape = "m16n8k16.row.col.f32.bf16.bf16.f32"
    return f"mma.sync.aligned.{shape} {{{sums}}}, {{h0, h1, h2, h3}}, {{h4, h5}}, {{{sums}}};\n"


_PRODUCTS = "".join(map(_mma, range(SUMS))) * STEPS
_SOFTMAX = (
    "max.f32 {x}, {x}, by; fma.rn.f32 {x}, {x}, by, of; ex2.approx.ftz.f32 {x}, {x}; add.rn.f32 {x}, {x}, by;"
    "cvt.rn.bf16x2.f32 packed, {x}, by; mov.b32 {x}, packed;"
)
_OTHERS = {  # PTX of one of the chains, and how often in a pass: about as long as the products
    "fma": ("fma.rn.f32 {x}, {x}, by, of;", 24),
    "max": ("max.f32 {x}, {x}, by;", 12),
    "cvt": ("cvt.rn.bf16x2.f32 packed, {x}, by; mov.b32 {x}, packed;", 12),
    "ex2": ("ex2.approx.ftz.f32 {x}, {x};", 3),
    "softmax": (_SOFTMAX, 3),
    "ldmatrix.x4": (  # of zeros: the next address depends on what was loaded, so that no two are one
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{m{x}0, m{x}1, m{x}2, m{x}3}}, [at{x}];"
        "add.u32 at{x}, at{x}, m{x}3;", 2,
    ),
    "shfl": ("shfl.sync.bfly.b32 {x}, {x}, 1, 31, -1;", 4),
    "stores of 4 bytes": ("st.volatile.shared.f32 [word], {x};", 4),
    "stmatrix.x4": ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [spot], {{h0, h1, h2, h3}};", 2),
    "additions of 4 bytes": ("red.relaxed.gpu.global.add.f32 [line], {x};", 4),
    "stores of 16 bytes": ("st.volatile.shared.v4.f32 [spot], {{{x}, {x}, {x}, {x}}};", 2),
}  # fmt: skip


def _pass(name: str) -> tuple[str, int]:
    """PTX of a pass of the loop, and its instructions."""
    if name == "mma.sync":
        return _PRODUCTS, SUMS * STEPS
    if name == "cp.async":
        copies = "".join(f"cp.async.cg.shared.global [spot+{4096 * i}], [line16], 16;\n" for i in range(_COPIES))
        return copies + "cp.async.wait_all;", _COPIES
    text, steps = _OTHERS[name]
    return "\n".join(text.format(x=f"x{i}") for _ in range(steps) for i in range(_CHAINS)), _CHAINS * steps


def _beside(name: str, first: str = "mma.sync") -> Bench:
    """Each alone, then each beside the other, which runs for longer. first: what warps 0 to 3 do."""
    chains = [f"x{i}" for i in range(_CHAINS)]
    (mine, each), (other, count) = _pass(first), _pass(name)
    what = "products" if first == "mma.sync" else f"warps 0 to 3, {first}"
    whose = name if first == "mma.sync" else f"warps 4 to 7, {name}"
    sections, body = [], ""
    for phase, passes in enumerate(((FEW, 0), (0, FEW), (FEW, MANY), (MANY, FEW))):
        parts = [looped(part, n, f"PASS{phase}{who}") for who, (part, n) in enumerate(zip((mine, other), passes))]
        timed = phase % 2
        stop = f"mov.u64 stop, %clock64; sub.u64 t, stop, start; @{{}} st.global.b64 [row+{8 * phase}], t;"
        body += f"""
        bar.sync 0;
        mov.u64 start, %clock64;
        @second bra SECOND{phase};
        {parts[0]}
        {stop.format("first") if not timed else ""}
        bra JOIN{phase};
        SECOND{phase}:
        {parts[1]}
        {stop.format("alone") if timed else ""}
        JOIN{phase}:
        bar.sync 0;
        """
        how = "beside the other" if phase > 1 else "alone"
        sections.append(Section(f"{whose if timed else what} {how}", FEW * (count if timed else each)))
    sums = [f"c{i}_{j}" for i in range(SUMS) for j in range(4)]
    total = "".join(f"add.f32 all, all, {x};" for x in sums[1:] + chains)
    total += "".join(f"xor.b32 any, any, at{x};" for x in chains)
    start = "".join(f"cvt.rn.f32.u32 {x}, thread; add.f32 {x}, {x}, of;" for x in chains)

    def initial() -> torch.Tensor:
        ones = torch.tensor([0x3F803F80], dtype=torch.int32).view(torch.float32)  # two of bf16
        return torch.cat([torch.arange(float(SUMS)), ones.expand(6)])

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[0] = _DEPTH * rounds * STEPS * (2 * FEW + MANY) if first == "mma.sync" else 0
        return after

    return Bench(
        f"{'mma.sync m16n8k16' if first == 'mma.sync' else first} beside {name}", tuple(sections), body,
        initial, expected,
        declared=f".reg .f32 all, by, of, {', '.join(sums + chains)};"
                 ".reg .b32 h0, h1, h2, h3, h4, h5, packed, spot, word, any; .reg .b64 line, line16;"
                 f".reg .b32 {', '.join(f'm{x}{i}' for x in chains for i in range(4))};"
                 f".reg .b32 nil, {', '.join(f'at{x}' for x in chains)}; .reg .pred second, alone;",
        before="setp.ge.u32 second, thread, 128; setp.eq.u32 alone, thread, 128;"
               "shl.b32 spot, thread, 4; add.u32 spot, spot, room; shl.b32 word, thread, 2; cvt.u64.u32 line, word;"
               f"add.u32 word, word, room; add.u64 line, line, data; add.u64 line, line, {SCRATCH};"
               f"mad.wide.u32 line16, thread, 16, data; add.u64 line16, line16, {SCRATCH};"
               "ld.global.f32 by, [data+4]; ld.global.f32 of, [data+8];"
               "mov.b32 any, 0; mov.b32 nil, 0; st.shared.v4.f32 [spot], {of, of, of, of};"
               f"st.shared.v4.b32 [spot+{_ZEROS}], {{nil, nil, nil, nil}}; bar.sync 0;"
               + "".join(f"ld.shared.b32 any, [spot+{_ZEROS + 4 * (i % 4)}]; add.u32 at{x}, spot, any;"
                         f"add.u32 at{x}, at{x}, {_ZEROS};" for i, x in enumerate(chains))
               + "".join(f"ld.global.f32 c{i}_{j}, [data+{4 * i}];" for i in range(SUMS) for j in range(4))
               + "".join(f"ld.global.b32 h{i}, [data+{4 * (SUMS + i)}];" for i in range(6)) + start,
        # The others' sums are used where the first one is no number, which it is.
        after=f"mov.f32 all, c0_0; {total} testp.notanumber.f32 p, c0_0; @p mov.f32 c0_0, all; @p mov.b32 c0_0, any;"
              "@first st.global.f32 [data], c0_0;",
        threads=256, smem_bytes=4096 * _COPIES if name == "cp.async" else 2 * _ZEROS, scratch=16 * 256,
    )  # fmt: skip


LENGTHS = (512, 1024, 2048, 4096, 8192)


def _straight(length: int) -> Bench:
    """As many FFMA by four warps, one on each scheduler. The first passage fetches them."""
    chains = [f"x{i}" for i in range(_CHAINS)]
    body = "mov.u64 start, %clock64;" + "".join(
        f"fma.rn.f32 {x}, {x}, by, by;\n" for _ in range(length // _CHAINS) for x in chains
    )
    body += "mov.u64 stop, %clock64; sub.u64 t, stop, start; @first st.global.b64 [row], t;"
    total = "".join(f"add.f32 x0, x0, {x};" for x in chains[1:])
    return Bench(
        f"code of {length} instructions", (Section("passage", length),), body, lambda: torch.zeros(1),
        lambda before, rounds: before, declared=f".reg .f32 by, {', '.join(chains)};",
        before="ld.global.f32 by, [data];" + "".join(f"mov.f32 {x}, by;" for x in chains),
        after=f"{total} bar.sync 0; @first st.global.f32 [data], x0;", notes={"first": True},
    )  # fmt: skip


_OF_SHARED_MEMORY = ("ldmatrix.x4", "stores of 4 bytes", "stores of 16 bytes", "additions of 4 bytes", "cp.async")
BENCHES = (
    *map(_beside, ("mma.sync", *_OTHERS)), *(_beside(name, "ldmatrix.x4") for name in _OF_SHARED_MEMORY),
    # Two warps of a scheduler that want the same pipe; of the last two pairs one has other work between.
    *(_beside(name, name) for name in ("ex2", "softmax", "fma", "max")), _beside("ex2", "softmax"),
    _beside("softmax", "ex2"), *map(_straight, LENGTHS),
)  # fmt: skip
