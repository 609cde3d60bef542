"""What one instruction costs: latency in a chain, and clocks between two with 1, 2 and 4 warps a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .frame import Bench, Section, timed, twice

CHAIN = 64  # instructions of the chain whose latency is taken
CHAINS, STEPS = 8, 8  # independent chains of a thread, and half of their length, where the rate is taken
WARPS = (1, 2, 4)  # a scheduler


@dataclass(frozen=True)
class Operation:
    """text: PTX on `{x}`, with a and b from memory (1.0 and 2**-10 as floats; 1 and 3 as integers), and `next` the lane
    behind the own. machine: the opcode that it becomes, by chip. start: of every x; end: what thread 0's is after n."""

    text: str
    machine: str
    start: float | int
    end: Callable[[int], float | int]
    dtype: torch.dtype = torch.float32
    chips: tuple[str, ...] = ()
    setup: str = ""


def _same(value: float | int) -> Callable[[int], float | int]:
    return lambda n: value


def _grows(n: int) -> float:
    return 1.0 + n * 2.0**-10


_PAIR_OF_ONES = torch.tensor([0x3F803F80], dtype=torch.int32).view(torch.float32).item()  # bf16x2
_INTEGER = torch.int32
OPERATIONS = {
    "ex2": Operation("ex2.approx.ftz.f32 {x}, {x};", "MUFU.EX2", 0.0, _same(float("inf"))),
    "rsqrt": Operation("rsqrt.approx.ftz.f32 {x}, {x};", "MUFU.RSQ", 1.0, _same(1.0)),
    "fma": Operation("fma.rn.f32 {x}, {x}, a, b;", "FFMA", 1.0, _grows),
    "add": Operation("add.rn.f32 {x}, {x}, b;", "FADD", 1.0, _grows),
    "mul": Operation("mul.rn.f32 {x}, {x}, a;", "FMUL", 3.0, _same(3.0)),
    "fma2": Operation("fma.rn.f32x2 {x}2, {x}2, aa, bb;", "FFMA2", 1.0, _grows, chips=("sm_100a",)),
    # On sm_100 two of a chain become one instruction of three operands.
    "max": Operation("max.f32 {x}, {x}, b;", "FMNMX", 1.0, _same(1.0), chips=("sm_90a",)),
    "cvt.bf16x2": Operation("cvt.rn.bf16x2.f32 {x}, {x}, a;", "F2FP", 1.0, _same(_PAIR_OF_ONES)),
    "prmt": Operation("prmt.b32 {x}, {x}, b, 0x2103;", "PRMT", 0x01020304, _same(0x01020304), _INTEGER),
    "mad": Operation("mad.lo.s32 {x}, {x}, a, b;", "IMAD", 5, lambda n: 5 + 3 * n, _INTEGER),
    # Each lane has a value of its own: of equal ones the compiler makes no exchange.
    "shfl": Operation(
        "shfl.sync.idx.b32 {x}, {x}, next, 31, -1;", "SHFL", 7, lambda n: 7 + n % 32, _INTEGER,
        setup="add.u32 {x}, {x}, lane;",
    ),
    "lds": Operation(
        "ld.shared.b32 {x}, [{x}];", "LDS", 0, _same(0), _INTEGER,
        setup="mad.lo.u32 {x}, {i}, 4, {x}; add.u32 {x}, {x}, room; @first st.shared.b32 [{x}], {x};",
    ),
}  # fmt: skip


def _bench(name: str, operation: Operation) -> Bench:
    names = [f"x{i}" for i in range(CHAINS)]
    chain = "\n".join(operation.text.format(x="x0") for _ in range(CHAIN))
    many = "\n".join(operation.text.format(x=x) for _ in range(STEPS) for x in names)
    sections = [Section("latency", CHAIN)]
    body = "setp.eq.u32 p, warp, 0;\n" + timed(0, f"@!p bra ALONE;\n{chain}\nALONE:")
    for i, warps in enumerate(WARPS, start=1):
        sections.append(Section(f"rate, {warps} warps a scheduler", 2 * CHAINS * STEPS * warps))
        body += f"setp.lt.u32 p, warp, {4 * warps};\n"
        body += timed(i, f"@!p bra MANY{i};\n{twice(many, f'PASS{i}')}\nMANY{i}:")
    operands = [1.0, 2.0**-10] if operation.dtype == torch.float32 else [1, 3]
    packed = "fma2" in name
    # Each chain starts from a word of its own: of equal ones the compiler makes one chain.
    start = "".join(f"ld.global.b32 {x}, [data+{8 + 4 * i}];" for i, x in enumerate(names))
    start += "".join(operation.setup.format(x=x, i=i) for i, x in enumerate(names))
    end = "sub.u32 x0, x0, room;" if name == "lds" else ""
    if packed:
        start += "".join(f"mov.b64 {x}2, {{{x}, {x}}};" for x in names)
        end = "".join(f"mov.b64 {{{x}, unused}}, {x}2;" for x in names)
    declared = f".reg .b32 a, b, next, unused, other, {', '.join(names)}; .reg .b64 aa, bb;"
    declared += f".reg .b64 {', '.join(x + '2' for x in names)};"

    def initial() -> torch.Tensor:
        return torch.tensor([*operands, *[operation.start] * CHAINS, 0], dtype=operation.dtype)

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[-1] = operation.end((CHAIN + 2 * STEPS * len(WARPS)) * rounds)  # of warp 0's first chain
        return after

    return Bench(
        f"issue {name}", tuple(sections), body, initial, expected, declared=declared,
        before="ld.global.b32 a, [data]; ld.global.b32 b, [data+4]; mov.b64 aa, {a, a}; mov.b64 bb, {b, b};"
               f"add.u32 next, lane, 1; and.b32 next, next, 31; {start} bar.sync 0;",
        after=f"{end} @first st.global.b32 [data+{8 + 4 * CHAINS}], x0; {_keep(names)}",
        threads=32 * 4 * max(WARPS), smem_bytes=4 * CHAINS, chips=operation.chips, notes={"opcode": operation.machine},
    )  # fmt: skip


def _keep(names: list[str]) -> str:
    """PTX that uses all chains, so that none is dropped: a store that never happens, which the compiler cannot know."""
    folded = "".join(f"xor.b32 other, other, {name};" for name in names)
    return f"mov.b32 other, 0; {folded} setp.eq.u32 p, a, 0x7fffffff; @p st.global.b32 [data], other;"


BENCHES = tuple(_bench(name, operation) for name, operation in OPERATIONS.items())
