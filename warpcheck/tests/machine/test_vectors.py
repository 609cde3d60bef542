"""Instructions that all lanes execute together have a road of their own: it must give what lanes give alone."""

import numpy as np
import pytest

from warpcheck import Emulated

KERNEL = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry both(.param .u64 pin, .param .u64 pwhole, .param .u64 pparts)
.reqntid 32
{
    .reg .b64 %d<12>; .reg .b32 %r<16>; .reg .pred %p<2>;
    ld.param.u64 %d0, [pin]; ld.param.u64 %d1, [pwhole]; ld.param.u64 %d2, [pparts];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 32, %r0;
    mul.wide.u32 %d3, %r2, 16; add.s64 %d4, %d0, %d3;
    mul.wide.u32 %d5, %r2, 8; add.s64 %d6, %d1, %d5; add.s64 %d7, %d2, %d5;
    ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%d4];
    mov.b64 %d8, {%r3, %r4}; mov.b64 %d9, {%r5, %r6};
    mov.b64 %d10, 0; mov.b64 %d11, 0;
    and.b32 %r7, %r0, 1; setp.eq.u32 %p0, %r7, 0;
    WHOLE
    EVEN
    ODD
    st.global.u64 [%d6], %d10;
    st.global.u64 [%d7], %d11;
    ret;
}
"""
SINGLE = ["max", "min", "max.NaN", "min.NaN", "add.rm", "sub.rm", "add", "sub", "mul"]
PAIRS = ["add.rm", "add.rn", "sub.rm", "sub.rn", "mul.rn"]
SPECIAL = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 1, 0x80000001, 0x00800000, 0x80800000,
     0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x33800000, 0x4B400000], dtype=np.uint32,
)  # fmt: skip


def inputs(rng: np.random.Generator, ctas: int) -> np.ndarray:
    """Random bits, special values, and pairs of which one is the other or its negative."""
    x = rng.integers(0, 1 << 32, (32 * ctas, 4), dtype=np.uint32)
    special = rng.random(x.shape) < 0.3
    x[special] = rng.choice(SPECIAL, special.sum())
    near = rng.random(len(x)) < 0.3
    x[near] = (x[near] & 0x807FFFFF) | (127 + rng.integers(-3, 3, x[near].shape)).astype(np.uint32) << 23
    same = rng.random(len(x)) < 0.2
    x[same, 2:] = x[same, :2] ^ (rng.integers(0, 2, (same.sum(), 2)) << 31).astype(np.uint32)
    return x


def run(rng: np.random.Generator, text: str, ctas: int) -> tuple[np.ndarray, ...]:
    """Return the inputs, the results of all lanes together, and of even and odd lanes. text: from %r3 to %r6, and from
    %d8 and %d9, to RESULT, a register of 64 bits."""
    x = inputs(rng, ctas)
    whole, parts = np.zeros((2, 32 * ctas), np.uint64)
    roads = {"WHOLE": ("", "%d10"), "EVEN": ("@%p0", "%d11"), "ODD": ("@!%p0", "%d11")}
    ptx = KERNEL
    for name, (guard, result) in roads.items():
        lines = [f"{guard} {line.strip()};" for line in text.replace("RESULT", result).split(";") if line.strip()]
        ptx = ptx.replace(name, "\n    ".join(lines))
    Emulated("sm_100a").launch(ptx, "both", grid=ctas, args=[x, whole, parts])
    return x, whole, parts


@pytest.mark.parametrize("op", SINGLE)
def test_numbers(op, seed):
    x, whole, parts = run(np.random.default_rng(seed), f"{op}.f32 %r8, %r3, %r5; cvt.u64.u32 RESULT, %r8", 16)
    bad = whole != parts
    assert not bad.any(), f"seed {seed}: {op} of {x[bad][0, [0, 2]]} is {whole[bad][0]:#x}, by lanes {parts[bad][0]:#x}"


@pytest.mark.parametrize("op", ["max", "min", "max.NaN"])
def test_three_numbers(op, seed):
    x, whole, parts = run(np.random.default_rng(seed), f"{op}.f32 %r8, %r3, %r5, %r4; cvt.u64.u32 RESULT, %r8", 16)
    bad = whole != parts
    assert not bad.any(), f"seed {seed}: {op} of {x[bad][0, :3]} is {whole[bad][0]:#x}, by lanes {parts[bad][0]:#x}"


@pytest.mark.parametrize("op", PAIRS)
def test_pairs_of_numbers(op, seed):
    x, whole, parts = run(np.random.default_rng(seed), f"{op}.f32x2 RESULT, %d8, %d9", 16)
    bad = whole != parts
    assert not bad.any(), f"seed {seed}: {op} of {x[bad][0]} is {whole[bad][0]:#x}, by lanes {parts[bad][0]:#x}"


def test_halves(seed):
    x, whole, parts = run(np.random.default_rng(seed), "mov.b64 {%r8, %r9}, %d8; mov.b64 RESULT, {%r9, %r8}", 4)
    expected = x[:, 1].astype(np.uint64) | x[:, 0].astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(whole, expected, err_msg=f"seed {seed}")
    np.testing.assert_array_equal(parts, expected, err_msg=f"seed {seed}")
