"""Loads, stores, vectors, address spaces, atomics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, element_address, entry, header, load_element, store_element

_ALL = ("sm_80", "sm_90a", "sm_100a")
_SINCE_HOPPER = ("sm_90a", "sm_100a")


def _random(*counts: int, dtype: type = np.uint32) -> Callable[[np.random.Generator], Inputs]:
    def make(rng: np.random.Generator) -> Inputs:
        return tuple(rng.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True) for count in counts)

    return make


def _vectors() -> list[Case]:
    """Every vector width and element size, loaded and stored in one instruction each, registers reversed between."""
    cases = []
    for bits, register in ((8, "h"), (16, "h"), (32, "r"), (64, "d")):
        for count in (1, 2, 4):
            if bits * count > 128:
                continue
            names = [f"%{register}{10 + i}" for i in range(count)]
            vector = "" if count == 1 else f".v{count}"
            loaded = names[0] if count == 1 else "{" + ", ".join(names) + "}"
            stored = names[0] if count == 1 else "{" + ", ".join(reversed(names)) + "}"
            nbytes = bits * count // 8
            dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
            for space in ("global", "shared", "local"):
                body = [element_address("%in0", "%d0", nbytes), element_address("%out", "%d1", nbytes)]
                if space == "global":
                    body += [
                        f"  ld.global{vector}.b{bits} {loaded}, [%d0];",
                        f"  st.global{vector}.b{bits} [%d1], {stored};",
                    ]
                    declared = ""
                else:
                    declared = ".shared .align 16 .b8 buffer[512];" if space == "shared" else ""
                    if space == "local":
                        body.insert(0, "  .local .align 16 .b8 buffer[32];")
                        body += ["  mov.u32 %r0, buffer;"]
                    else:
                        body += ["  mov.u32 %r0, buffer;", f"  mad.lo.u32 %r0, %i, {nbytes}, %r0;"]
                    body += [
                        f"  ld.global{vector}.b{bits} {loaded}, [%d0];",
                        f"  st.{space}{vector}.b{bits} [%r0], {loaded};",
                        f"  ld.{space}{vector}.b{bits} {loaded}, [%r0];",
                        f"  st.global{vector}.b{bits} [%d1], {stored};",
                    ]
                cases.append(
                    Case(
                        f"ld/st.{space}{vector}.b{bits}",
                        entry("sm_80", "\n".join(body), pointers=1, shared=declared),
                        _random(32 * count, dtype=dtype),
                        lambda a, n=count: np.ascontiguousarray(a.reshape(32, n)[:, ::-1]).reshape(-1),
                    )
                )
    return cases


def _narrow() -> list[Case]:
    """Loads narrower than the register sign- or zero-extend."""
    cases = []
    for kind, dtype in (("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16)):
        nbytes = np.dtype(dtype).itemsize
        body = [
            load_element("%r0", nbytes, kind),
            store_element("%r0"),
        ]
        cases.append(
            Case(
                f"ld.global.{kind} into 32 bits",
                entry("sm_80", "\n".join(body), pointers=1),
                _random(32, dtype=np.dtype(f"u{nbytes}").type),
                lambda a, t=dtype: a.view(t).astype(np.int32).view(np.uint32),
            )
        )
    return cases


def _spaces() -> list[Case]:
    generic = "\n".join(
        [
            "  mov.u32 %r0, buffer;",
            "  mad.lo.u32 %r0, %i, 4, %r0;",
            "  cvt.u64.u32 %d2, %r0;",
            "  cvta.shared.u64 %d3, %d2;",
            element_address("%in0", "%d0", 4),
            "  cvta.global.u64 %d4, %d0;",
            "  ld.b32 %r1, [%d4];",
            "  st.b32 [%d3], %r1;",
            "  ld.shared.b32 %r2, [%r0];",
            "  ld.b32 %r3, [%d3];",
            "  add.u32 %r4, %r2, %r3;",
            "  isspacep.shared %p0, %d3;",
            "  isspacep.global %p1, %d3;",
            "  selp.b32 %r5, 1, 0, %p0;",
            "  @%p1 mov.u32 %r5, 100;",
            "  add.u32 %r4, %r4, %r5;",
            store_element("%r4"),
        ]
    )
    offsets = "\n".join(
        [
            element_address("%in0", "%d0", 4),
            "  add.s64 %d0, %d0, 64;",
            "  ld.global.b32 %r0, [%d0+-64];",
            "  ld.global.nc.b32 %r1, [%d0+0];",
            "  xor.b32 %r2, %r0, %r1;",
            store_element("%r2"),
        ]
    )
    packing = "\n".join(
        [
            load_element("%d2", 8),
            "  mov.b64 {%r0, %r1}, %d2;",
            "  mov.b32 {%h0, %h1}, %r0;",
            "  mov.b32 %r2, {%h1, %h0};",
            "  mov.b64 %d3, {%r1, %r2};",
            store_element("%d3", 8),
        ]
    )

    def swapped(a: np.ndarray) -> np.ndarray:
        low, high = a & np.uint64(0xFFFFFFFF), a >> np.uint64(32)
        turned = (low << np.uint64(16) | low >> np.uint64(16)) & np.uint64(0xFFFFFFFF)
        return high | turned << np.uint64(32)

    constants = ".const .align 4 .b32 table[4] = {11, 22, 33, 44};\n.global .align 4 .b32 counters[2] = {7, 9};"
    tables = "\n".join(
        [
            "  and.b32 %r0, %i, 3;",
            "  mov.u64 %d2, table;",
            "  mad.wide.u32 %d2, %r0, 4, %d2;",
            "  ld.const.b32 %r1, [%d2];",
            "  ld.global.b32 %r2, [counters+4];",
            "  add.u32 %r1, %r1, %r2;",
            store_element("%r1"),
        ]
    )
    return [
        Case(
            "ld/st generic, cvta, isspacep",
            entry("sm_80", generic, pointers=1, shared=".shared .align 16 .b8 buffer[128];"),
            _random(32),
            lambda a: a * np.uint32(2) + np.uint32(1),
        ),
        Case(
            "ld.global.nc, negative offset",
            entry("sm_80", offsets, pointers=1),
            _random(48),
            lambda a: a[:32] ^ a[16:48],
        ),
        Case("mov pack and unpack", entry("sm_80", packing, pointers=1), _random(32, dtype=np.uint64), swapped),
        Case(
            ".const and initialised .global",
            entry("sm_80", tables, pointers=0, shared=constants),
            _random(),
            lambda: np.array([11, 22, 33, 44] * 8, np.uint32) + np.uint32(9),
        ),
    ]


def _atomics() -> list[Case]:
    """All lanes of two warps on a few words; the final memory does not depend on their order."""
    signed = lambda a: a.view(np.int32)  # noqa: E731

    def fold(operation: Callable[[int, int], int], start: int) -> Callable[[np.ndarray], np.ndarray]:
        def expected(a: np.ndarray) -> np.ndarray:
            out = np.full(4, start, np.uint32)
            for i, value in enumerate(a.tolist()):
                out[i % 4] = operation(int(out[i % 4]), value) & 0xFFFFFFFF
            return out

        return expected

    def smaller(x: int, y: int) -> int:
        return min(x, y, key=lambda v: int(signed(np.uint32(v).reshape(1))[0]))

    def larger(x: int, y: int) -> int:
        return max(x, y, key=lambda v: int(signed(np.uint32(v).reshape(1))[0]))

    operations: dict[str, Callable[[int, int], int]] = {
        "add.u32": lambda x, y: x + y,
        "add.s32": lambda x, y: x + y,
        "min.u32": min,
        "max.u32": max,
        "min.s32": smaller,
        "max.s32": larger,
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "xor.b32": lambda x, y: x ^ y,
        "inc.u32": lambda x, y: 0 if x >= 20 else x + 1,
    }
    cases = []
    for name, operation in operations.items():
        second = "20" if name == "inc.u32" else "%r1"
        for instruction, start in (
            (f"atom.global.{name} %r9, [%d1], {second};", 5),
            (f"red.global.{name} [%d1], {second};", 5),
            (f"atom.shared.{name} %r9, [%r3], {second};", 5),
        ):
            shared = "shared" in instruction
            body = [
                "  and.b32 %r2, %i, 3;",
                element_address("%out", "%d1", 4, "%r2"),
                "  mov.u32 %r3, buffer;",
                "  mad.lo.u32 %r3, %r2, 4, %r3;",
                "  setp.lt.u32 %p0, %i, 4;",
                f"  @%p0 st.{'shared.b32 [%r3]' if shared else 'global.b32 [%d1]'}, {start};",
                "  bar.sync 0;",
                element_address("%in0", "%d0", 4),
                "  ld.global.b32 %r1, [%d0];",
                f"  {instruction}",
            ]
            if shared:
                body += ["  bar.sync 0;", "  ld.shared.b32 %r5, [%r3];", "  @%p0 st.global.b32 [%d1], %r5;"]
            ptx = entry("sm_80", "\n".join(body), pointers=1, shared=".shared .align 16 .b8 buffer[16];")
            cases.append(Case(instruction.split()[0], ptx, _random(64), fold(operation, start), block=64))
    exchange = "\n".join(
        [
            element_address("%in0", "%d0", 4),
            element_address("%out", "%d1", 4),
            "  ld.global.b32 %r1, [%d0];",
            "  atom.global.exch.b32 %r2, [%d0], 17;",
            "  atom.global.cas.b32 %r3, [%d0], 17, 23;",
            "  atom.global.cas.b32 %r4, [%d0], 17, 29;",
            "  ld.global.b32 %r5, [%d0];",
            "  xor.b32 %r6, %r1, %r2;",
            "  mad.lo.u32 %r6, %r3, 100, %r6;",
            "  mad.lo.u32 %r6, %r4, 10000, %r6;",
            "  mad.lo.u32 %r6, %r5, 1000000, %r6;",
            "  st.global.b32 [%d1], %r6;",
        ]
    )
    cases.append(
        Case(
            "atom.exch, atom.cas",
            entry("sm_80", exchange, pointers=1),
            _random(32),
            lambda a: np.full(32, 17 * 100 + 23 * 10000 + 23 * 1000000, np.uint32),
        )
    )
    return cases + _float_atomics()


def _float_atomics() -> list[Case]:
    """Whole numbers, whose float sums are exact in any order."""
    start = [
        element_address("%in0", "%d0", 4),
        "  ld.global.b32 %r1, [%d0];",
        "  and.b32 %r2, %i, 1;",
        element_address("%out", "%d1", 4, "%r2"),
        "  setp.lt.u32 %p0, %i, 2;",
        "  @%p0 st.global.b32 [%d1], 0;",
        "  bar.sync 0;",
    ]

    def floats(rng: np.random.Generator) -> Inputs:
        return (rng.integers(-50, 50, 32).astype(np.float32).view(np.uint32),)

    def halves(rng: np.random.Generator) -> Inputs:
        return (rng.integers(-9, 9, 64).astype(np.float16).view(np.uint32),)

    def sum32(a: np.ndarray) -> np.ndarray:
        return a.view(np.float32).reshape(16, 2).sum(0, dtype=np.float32)

    def sum16(a: np.ndarray) -> np.ndarray:
        return a.view(np.float16).reshape(16, 4).astype(np.float32).sum(0).astype(np.float16)

    cases = []
    for instruction, inputs, expected, element in (
        ("atom.global.add.f32 %f9, [%d1], %f1;", floats, sum32, "f32"),
        ("red.global.add.f32 [%d1], %f1;", floats, sum32, "f32"),
        ("red.global.add.noftz.f16x2 [%d1], %r1;", halves, sum16, "f16"),
    ):
        code = [*start, "  mov.b32 %f1, %r1;", f"  {instruction}"]
        # -0 and +0 sums may differ by order: the oracle's numbers are compared, not their sign of zero.
        cases.append(
            Case(
                instruction.split()[0],
                entry("sm_80", "\n".join(code), pointers=1),
                inputs,
                lambda a, f=expected: f(a).astype(np.float64),
                element=element,
                compare="abs 0",
            )
        )
    return cases


def _distributed() -> list[Case]:
    """mapa and loads, stores and atomics of another CTA's shared memory, in a cluster of two."""
    body = "\n".join(
        [
            "  mov.u32 %r0, %cluster_ctarank;",
            "  xor.b32 %r1, %r0, 1;",
            "  mov.u32 %r2, buffer;",
            "  mad.lo.u32 %r2, %i, 4, %r2;",
            "  mapa.shared::cluster.u32 %r3, %r2, %r1;",
            "  mad.lo.u32 %r4, %r0, 32, %i;",
            element_address("%in0", "%d0", 4, "%r4"),
            "  ld.global.b32 %r5, [%d0];",
            "  st.shared::cluster.b32 [%r3], %r5;",
            "  barrier.cluster.arrive.release.aligned;",
            "  barrier.cluster.wait.acquire.aligned;",
            "  ld.shared.b32 %r6, [%r2];",
            "  ld.shared::cluster.b32 %r7, [%r3];",
            "  sub.u32 %r8, %r6, %r7;",
            element_address("%out", "%d1", 4, "%r4"),
            "  st.global.b32 [%d1], %r8;",
            "  barrier.cluster.arrive.release.aligned;",
            "  barrier.cluster.wait.acquire.aligned;",
        ]
    )
    ptx = entry("sm_90a", body, pointers=1, shared=".shared .align 16 .b8 buffer[128];")

    def expected(a: np.ndarray) -> np.ndarray:
        halves = a.reshape(2, 32)
        return np.concatenate([halves[1] - halves[0], halves[0] - halves[1]])

    return [
        Case(
            "ld/st.shared::cluster, mapa",
            ptx,
            _random(64),
            expected,
            target="sm_90a",
            grid=2,
            cluster=2,
            chips=_SINCE_HOPPER,
        )
    ]


def _parameters() -> list[Case]:
    """Parameters of several sizes and a struct, read with vector loads."""
    ptx = f"""{header("sm_80")}
.visible .entry test(.param .u64 param_out, .param .u64 param_in0) {{
  .reg .b64 %d<4>; .reg .b32 %r<8>;
  ld.param.u64 %d0, [param_out];
  ld.param.v2.b32 {{%r0, %r1}}, [param_in0];
  mov.b64 %d1, {{%r0, %r1}};
  ld.global.b32 %r2, [%d1];
  st.global.b32 [%d0], %r2;
  ret;
}}
"""
    return [Case("ld.param.v2.b32", ptx, _random(1), lambda a: a, block=1)]


CASES = [*_vectors(), *_narrow(), *_spaces(), *_atomics(), *_distributed(), *_parameters()]
