"""mma.sync and arithmetic in turns in the same warps: what holds the registers' ports of a scheduler, for how long.

A product reads ten registers, fewer where an operand is the one before's. The rates are of one warp a scheduler and of
two; beside.py has products and arithmetic in warps of their own.
"""

from __future__ import annotations

import torch

from .frame import Bench, Section, looped, timed

SUMS, CHAINS, PASSES = 8, 8, 8
NEW, SECOND_NEW, SAME = "new operands", "new second operands", "the same operands"
_SHAPE = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_DEPTH = 16.0  # what a product of ones adds
_OPERATIONS = {  # on chain x, where it takes two on y, the next one
    "max": "max.f32 {x}, {x}, by;",
    "fma": "fma.rn.f32 {x}, {x}, by, of;",
    "add": "add.rn.f32 {x}, {x}, by;",
    "mul": "mul.rn.f32 {x}, {x}, by;",
    "cvt": "cvt.rn.bf16x2.f32 {x}i, {x}, by; mov.b32 {x}, {x}i;",
    "xor": "xor.b32 {x}i, {x}i, {y}i;",
    "iadd": "add.u32 {x}i, {x}i, {y}i;",
    "ex2": "ex2.approx.ftz.f32 {x}, {x};",
    "shfl": "shfl.sync.bfly.b32 {x}, {x}, 1, 31, -1;",
    "max and fma": "max.f32 {x}, {x}, by; fma.rn.f32 {y}, {y}, by, of;",
    "max and ex2": "max.f32 {x}, {x}, by; max.f32 {x}, {x}, of; ex2.approx.ftz.f32 {y}, {y};",
}
_OPERATIONS["softmax"] = " ".join(_OPERATIONS[name] for name in ("max", "fma", "ex2", "add", "cvt"))


def _mixed(
    kind: str, count: int, operands: str = NEW, every: int = 1, warps: tuple[int, ...] = (1, 2), products: bool = True
) -> Bench:
    """count: operations after each `every` products, or where products stood."""
    text, chain = "", 0
    for i in [*range(SUMS)] * 2:
        first, second = (i % 4 if operands == NEW else 0), (0 if operands == SAME else i % 4)
        if products:
            of = ", ".join(f"c{i}_{j}" for j in range(4))
            a = ", ".join(f"a{first}_{j}" for j in range(4))
            text += f"{_SHAPE} {{{of}}}, {{{a}}}, {{b{second}_0, b{second}_1}}, {{{of}}};\n"
        for _ in range(count if i % every == every - 1 else 0):
            text += _OPERATIONS[kind].format(x=f"x{chain % CHAINS}", y=f"x{(chain + 1) % CHAINS}") + "\n"
            chain += 1
    body, sections = "", []
    for i, several in enumerate(warps):
        sections.append(Section(f"{several} warps a scheduler", PASSES * 2 * SUMS * several))
        body += f"setp.lt.u32 p, warp, {4 * several};\n"
        body += timed(i, f"@!p bra MANY{i};\n{looped(text, PASSES, f'PASS{i}')}\nMANY{i}:")
    sums = [f"c{i}_{j}" for i in range(SUMS) for j in range(4)]
    chains = [f"x{i}" for i in range(CHAINS)]
    words = [f"a{i}_{j}" for i in range(4) for j in range(4)] + [f"b{i}_{j}" for i in range(4) for j in range(2)]
    total = "".join(f"add.f32 all, all, {x};" for x in [*sums[1:], *chains])
    total += "".join(f"cvt.rn.f32.u32 of, {x}i; add.f32 all, all, of;" for x in chains)

    def initial() -> torch.Tensor:
        ones = torch.tensor([0x3F803F80], dtype=torch.int32).view(torch.float32)  # two of bf16
        return torch.cat([torch.arange(float(SUMS)), ones.expand(len(words))])

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[0] = _DEPTH * rounds * PASSES * 2 * len(warps) * products
        return after

    who = f"mma.sync m16n8k16 of {operands}" if products else "no product"
    return Bench(
        f"{who}, {count} {kind} after each {every}" if count else who, tuple(sections), body, initial, expected,
        declared=f".reg .f32 all, by, of, {', '.join(sums + chains)};"
                 f".reg .b32 {', '.join(words)}, {', '.join(x + 'i' for x in chains)};",
        before="".join(f"ld.global.f32 c{i}_{j}, [data+{4 * i}];" for i in range(SUMS) for j in range(4))
               + "".join(f"ld.global.b32 {word}, [data+{4 * (SUMS + i)}];" for i, word in enumerate(words))
               + "ld.global.f32 by, [data+4]; ld.global.f32 of, [data+8]; cvt.rn.f32.u32 all, thread;"
               + "".join(f"add.f32 {x}, all, by; add.f32 all, all, of; mov.b32 {x}i, {x};" for x in chains),
        # The others' sums are used where the first sum is no number, which it is.
        after=f"mov.f32 all, c0_0; {total} testp.notanumber.f32 p, c0_0; @p mov.f32 c0_0, all;"
              "@first st.global.f32 [data], c0_0;",
        threads=32 * 4 * max(warps),
    )  # fmt: skip


_MANY = (1, 2, 4)
BENCHES = (
    *(_mixed("max", 0, operands, warps=_MANY) for operands in (NEW, SECOND_NEW, SAME)),
    *(_mixed(kind, count, operands) for operands in (NEW, SAME) for kind in ("max", "fma") for count in (1, 2, 4)),
    *(_mixed("cvt", count, operands) for operands in (NEW, SAME) for count in (1, 2)),
    *(_mixed(kind, 2, operands) for operands in (NEW, SAME) for kind in ("add", "mul", "xor", "iadd")),
    *(_mixed(kind, 1, operands, every) for operands in (NEW, SAME) for kind in ("ex2", "softmax") for every in (2, 4)),
    *(_mixed("shfl", 1, operands, 4) for operands in (NEW, SAME)),
    _mixed("max", 2, SECOND_NEW), _mixed("fma", 2, SECOND_NEW), _mixed("softmax", 1, SECOND_NEW, 2),
    *(_mixed(kind, count, SAME, warps=_MANY, products=False)
      for kind, count in (("max and fma", 2), ("max and ex2", 1), ("softmax", 1), ("max", 4), ("fma", 4))),
)  # fmt: skip
