"""Matrix instructions. Operands are small whole numbers, whose sums are exact in any order: every bit is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, element_address, entry

_GROUP, _PAIR = np.arange(32) // 4, np.arange(32) % 4  # groupID and threadID_in_group of the ISA's fragment tables


@dataclass(frozen=True)
class Fragment:
    """Where a lane's elements lie: row and column of element i, as arrays of (lane, i)."""

    rows: np.ndarray
    columns: np.ndarray

    def take(self, matrix: np.ndarray) -> np.ndarray:
        """The matrix as (lane, i)."""
        return matrix[self.rows, self.columns]

    def put(self, elements: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The matrix from (lane, i)."""
        matrix = np.zeros(shape, elements.dtype)
        matrix[self.rows, self.columns] = elements
        return matrix


def _fragment(count: int, row: Callable[[int], np.ndarray], column: Callable[[int], np.ndarray]) -> Fragment:
    return Fragment(np.stack([row(i) for i in range(count)], 1), np.stack([column(i) for i in range(count)], 1))


def fragment_of_a(k: int, per_register: int) -> Fragment:
    """A of m16n8k*: registers alternate between rows g and g+8, then continue in the second half of K."""
    count = 16 * k // 32
    half = 4 // 2 * per_register

    def row(i: int) -> np.ndarray:
        return _GROUP + 8 * (i // per_register % 2)

    def column(i: int) -> np.ndarray:
        return _PAIR * per_register + i % per_register + (k // 2 if i >= half and count > half else 0)

    return _fragment(count, row, column)


def fragment_of_b(k: int, per_register: int) -> Fragment:
    count = 8 * k // 32

    def row(i: int) -> np.ndarray:
        return _PAIR * per_register + i % per_register + (k // 2 if i >= per_register else 0)

    return _fragment(count, row, lambda i: _GROUP)


ACCUMULATOR = _fragment(4, lambda i: _GROUP + 8 * (i // 2), lambda i: _PAIR * 2 + i % 2)


@dataclass(frozen=True)
class _Kind:
    """An operand type of mma.sync: how whole numbers become its bits, and back."""

    name: str
    bits: int
    low: int
    high: int

    def pack(self, values: np.ndarray) -> np.ndarray:
        if self.name == "f16":
            return values.astype(np.float16).view(np.uint16)
        if self.name == "bf16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.name == "tf32":
            return values.astype(np.float32).view(np.uint32)
        if self.name in _MANTISSA_BITS:
            code = np.searchsorted(_fp8_values(self.name), np.abs(values)).astype(np.uint8)
            return code | (values < 0).astype(np.uint8) << 7
        return values.astype(np.int64).astype(np.uint8)

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        if self.name == "f16":
            return bits.view(np.float16).astype(np.float64)
        if self.name == "bf16":
            return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.name == "tf32":
            return bits.view(np.float32).astype(np.float64)
        if self.name in _MANTISSA_BITS:
            return _fp8_values(self.name)[bits & 127] * np.where(bits & 128, -1.0, 1.0)
        return bits.view(np.int8 if self.name == "s8" else np.uint8).astype(np.float64)


_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


def _fp8_values(name: str) -> np.ndarray:
    """The values of the codes 0 to 127 of an 8-bit float, ascending; infinity and NaN as if they were numbers."""
    mantissa = _MANTISSA_BITS[name]
    code = np.arange(128)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (6 - mantissa)) - 1
    return np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)


_F16, _BF16, _TF32 = _Kind("f16", 16, -8, 9), _Kind("bf16", 16, -8, 9), _Kind("tf32", 32, -8, 9)
_S8, _U8 = _Kind("s8", 8, -128, 128), _Kind("u8", 8, 0, 256)
_E4M3, _E5M2 = _Kind("e4m3", 8, -8, 9), _Kind("e5m2", 8, -4, 5)


def _mma(kind: _Kind, k: int, accumulator: str) -> Case:
    per_register = 32 // kind.bits
    a, b = fragment_of_a(k, per_register), fragment_of_b(k, per_register)
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32}[kind.bits]
    result = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[accumulator]

    def inputs(rng: np.random.Generator) -> Inputs:
        left = a.take(rng.integers(kind.low, kind.high, (16, k)))
        right = b.take(rng.integers(kind.low, kind.high, (k, 8)))
        start = ACCUMULATOR.take(rng.integers(-100, 100, (16, 8))).astype(result)
        pack = lambda values: np.ascontiguousarray(kind.pack(values)).view(np.uint32).reshape(-1)  # noqa: E731
        return pack(left), pack(right), np.ascontiguousarray(start).view(np.uint32).reshape(-1)

    def expected(left: np.ndarray, right: np.ndarray, start: np.ndarray) -> np.ndarray:
        x = a.put(kind.unpack(left.view(unsigned)).reshape(32, -1), (16, k))
        y = b.put(kind.unpack(right.view(unsigned)).reshape(32, -1), (k, 8))
        z = ACCUMULATOR.put(start.view(result).astype(np.float64).reshape(32, 4), (16, 8))
        return np.ascontiguousarray(ACCUMULATOR.take(x @ y + z).astype(result)).view(np.uint32)

    counts = (a.rows.shape[1] // per_register, b.rows.shape[1] // per_register, 2 if accumulator == "f16" else 4)
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{accumulator}.{kind.name}.{kind.name}.{accumulator}"
    lists, code, register = [], [], 0
    for index, count in enumerate(counts):
        names = [f"%r{register + j}" for j in range(count)]
        register += count
        code.append(element_address(f"%in{index}", "%d0", 4 * count))
        code += [f"  ld.global.b32 {name}, [%d0+{4 * j}];" for j, name in enumerate(names)]
        lists.append("{" + ", ".join(f"%f{n[2:]}" if index == 2 and accumulator == "f32" else n for n in names) + "}")
        if index == 2 and accumulator == "f32":
            code += [f"  mov.b32 %f{name[2:]}, {name};" for name in names]
    code.append(f"  {opcode} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};")
    code.append(element_address("%out", "%d0", 4 * counts[2]))
    outputs = lists[2].strip("{}").split(", ")
    code += [f"  st.global.b32 [%d0+{4 * j}], {name};" for j, name in enumerate(outputs)]
    return Case(opcode, entry("sm_80", "\n".join(code), pointers=3), inputs, expected)


def _core_matrices(matrix: np.ndarray) -> np.ndarray:
    """A K-major operand with rows of 32 bytes as core matrices of 8 rows, 16 bytes each: K first, then rows."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // 8, 8, 2, columns // 2).transpose(0, 2, 1, 3)


def _store_operands(a_bytes: int, b_bytes: int, threads: int) -> list[str]:
    """Copy in0 to `left` and in1 to `right`, 16 bytes a thread at a time, visible to the asynchronous proxy."""
    code = []
    for pointer, buffer, nbytes in (("%in0", "left", a_bytes), ("%in1", "right", b_bytes)):
        for start in range(0, nbytes, 16 * threads):
            guard = min(threads, (nbytes - start) // 16)
            code += [
                f"  setp.lt.u32 %p0, %i, {guard};",
                f"  mov.u32 %r0, {buffer};",
                "  mad.lo.u32 %r0, %i, 16, %r0;",
                element_address(pointer, "%d0", 16),
                f"  @%p0 ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d0+{start}];",
                f"  @%p0 st.shared.v4.b32 [%r0+{start}], {{%r2, %r3, %r4, %r5}};",
            ]
    return [*code, "  fence.proxy.async.shared::cta;", "  bar.sync 0;"]


def _descriptor(buffer: str, register: str, *, leading: int, stride: int, version: int = 0) -> list[str]:
    """Shared-memory matrix descriptor without swizzle; offsets in bytes."""
    high = (stride >> 4) | version << 14
    return [
        f"  mov.u32 %r0, {buffer};",
        "  shr.u32 %r0, %r0, 4;",
        "  and.b32 %r0, %r0, 0x3fff;",
        f"  or.b32 %r0, %r0, {(leading >> 4) << 16:#x};",
        f"  mov.u32 %r1, {high:#x};",
        f"  mov.b64 {register}, {{%r0, %r1}};",
    ]


def _operands(m: int, n: int, kind: _Kind = _F16) -> Callable[[np.random.Generator], Inputs]:
    def make(rng: np.random.Generator) -> Inputs:
        k = 256 // kind.bits
        left, right = (kind.pack(rng.integers(kind.low, kind.high, (rows, k))) for rows in (m, n))
        pack = lambda x: np.ascontiguousarray(_core_matrices(x)).view(np.uint32).reshape(-1)  # noqa: E731
        return pack(left), pack(right)

    return make


def _unpacked(words: np.ndarray, rows: int, kind: _Kind = _F16) -> np.ndarray:
    k = 256 // kind.bits
    core = words.view(f"u{kind.bits // 8}").reshape(rows // 8, 2, 8, k // 2)
    return kind.unpack(np.ascontiguousarray(core.transpose(0, 2, 1, 3))).reshape(rows, k)


def _wgmma(n: int, kind: _Kind = _F16) -> Case:
    """One warpgroup, D(64, n) = A(64, k) B(n, k)^T from shared memory, k of 32 bytes, twice (the second adds)."""
    count = n // 2
    result, element = ("s32", "b32") if kind is _S8 else ("f32", "f32")
    accumulators = ", ".join(f"%a{i}" for i in range(count))
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{256 // kind.bits}.{result}.{kind.name}.{kind.name}"
    # Scales of A and B (floats only), then which operands are transposed (16-bit ones only).
    immediates = {"s8": "", "f16": ", 1, 1, 0, 0", "bf16": ", 1, 1, 0, 0"}.get(kind.name, ", 1, 1")
    body = [
        f"  .reg .{element} %a<{count}>;",
        *_store_operands(64 * 32, n * 32, 128),
        *_descriptor("left", "%d2", leading=128, stride=256),
        *_descriptor("right", "%d3", leading=128, stride=256),
        "  wgmma.fence.sync.aligned;",
        "  setp.ne.b32 %p1, 0, 0;",
        f"  {opcode} {{{accumulators}}}, %d2, %d3, %p1{immediates};",
        "  setp.eq.b32 %p1, 0, 0;",
        f"  {opcode} {{{accumulators}}}, %d2, %d3, %p1{immediates};",
        "  wgmma.commit_group.sync.aligned;",
        "  wgmma.wait_group.sync.aligned 0;",
        element_address("%out", "%d1", 4 * count),
        *(f"  st.global.{element} [%d1+{4 * i}], %a{i};" for i in range(count)),
    ]

    def expected(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        d = 2 * (_unpacked(left, 64, kind) @ _unpacked(right, n, kind).T)
        i, thread = np.arange(count)[None, :], np.arange(128)[:, None]
        rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
        d = d[rows, 8 * (i // 4) + 2 * (thread % 4) + i % 2]
        return d.astype(np.float32) if element == "f32" else d.astype(np.int32).view(np.uint32)

    shared = f".shared .align 128 .b8 left[2048];\n.shared .align 128 .b8 right[{32 * n}];"
    return Case(
        opcode,
        entry("sm_90a", "\n".join(body), pointers=2, shared=shared),
        _operands(64, n, kind),
        expected,
        target="sm_90a",
        element=element,
        block=128,
        chips=("sm_90a",),
    )


def _tcgen05(n: int) -> Case:
    """One CTA, D(128, n) = A(128, 16) B(n, 16)^T through tensor memory: alloc, mma, commit, ld, dealloc."""
    instruction = 1 << 4 | (n >> 3) << 17 | (128 >> 4) << 24  # f32 accumulator, f16 operands, K-major
    body = [
        *_store_operands(128 * 32, n * 32, 128),
        "  mov.u32 %r20, ready;",
        "  setp.eq.u32 %p8, %i, 0;",
        "  @%p8 mbarrier.init.shared::cta.b64 [%r20], 1;",
        "  fence.mbarrier_init.release.cluster;",
        "  mov.u32 %r21, tensor;",
        "  setp.lt.u32 %p7, %i, 32;",
        "  @!%p7 bra ALLOCATED;",
        f"  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], {max(32, n)};",
        "  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "ALLOCATED:",
        "  tcgen05.fence::before_thread_sync;",
        "  bar.sync 0;",
        "  tcgen05.fence::after_thread_sync;",
        "  ld.shared.b32 %r22, [%r21];",
        *_descriptor("left", "%d2", leading=128, stride=256, version=1),
        *_descriptor("right", "%d3", leading=128, stride=256, version=1),
        "  @!%p8 bra WAIT;",
        "  setp.ne.b32 %p1, 0, 0;",
        f"  tcgen05.mma.cta_group::1.kind::f16 [%r22], %d2, %d3, {instruction:#x}, %p1;",
        "  setp.eq.b32 %p1, 0, 0;",
        f"  tcgen05.mma.cta_group::1.kind::f16 [%r22], %d2, %d3, {instruction:#x}, %p1;",
        "  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];",
        "WAIT:",
        "  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r20], 0;",
        "  @!%p9 bra WAIT2;",
        "  bra READY;",
        "WAIT2:",
        "  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r20], 0;",
        "  @!%p9 bra WAIT2;",
        "READY:",
        "  tcgen05.fence::after_thread_sync;",
        "  shr.u32 %r23, %i, 5;",
        "  shl.b32 %r23, %r23, 21;",
        "  add.u32 %r23, %r22, %r23;",
        f"  mul.lo.u32 %r24, %i, {4 * n};",
        "  cvt.u64.u32 %d4, %r24;",
        "  add.s64 %d4, %out, %d4;",
    ]
    for start in range(0, n, 16):
        names = [f"%r{30 + j}" for j in range(16)]
        body += [
            f"  add.u32 %r25, %r23, {start};",
            f"  tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{', '.join(names)}}}, [%r25];",
            "  tcgen05.wait::ld.sync.aligned;",
            *(f"  st.global.b32 [%d4+{4 * (start + j)}], {name};" for j, name in enumerate(names)),
        ]
    body += [
        "  tcgen05.fence::before_thread_sync;",
        "  bar.sync 0;",
        "  tcgen05.fence::after_thread_sync;",
        "  @!%p7 bra END;",
        f"  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r22, {max(32, n)};",
        "END:",
    ]

    def expected(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return (2 * (_unpacked(left, 128) @ _unpacked(right, n).T)).astype(np.float32)

    shared = (
        f".shared .align 128 .b8 left[4096];\n.shared .align 128 .b8 right[{32 * n}];\n"
        ".shared .align 8 .b64 ready;\n.shared .align 4 .b32 tensor;"
    )
    return Case(
        f"tcgen05.mma kind::f16 m128n{n}k16, tcgen05.ld",
        entry("sm_100a", "\n".join(body), pointers=2, shared=shared),
        _operands(128, n),
        expected,
        target="sm_100a",
        element="f32",
        block=128,
        chips=("sm_100a",),
    )


CASES = [
    _mma(_F16, 16, "f32"),
    _mma(_F16, 8, "f32"),
    _mma(_F16, 16, "f16"),
    _mma(_BF16, 16, "f32"),
    _mma(_BF16, 8, "f32"),
    _mma(_TF32, 8, "f32"),
    _mma(_TF32, 4, "f32"),
    _mma(_S8, 32, "s32"),
    _mma(_S8, 16, "s32"),
    _mma(_U8, 32, "s32"),
    *(_wgmma(n) for n in (8, 64, 256)),
    *(_wgmma(64, kind) for kind in (_BF16, _TF32, _E4M3, _E5M2, _S8)),
    *(_tcgen05(n) for n in (16, 64, 256)),
]


def with_real_operands(case: Case) -> Case | None:
    """The case of a floating-point matrix instruction on normally distributed numbers, for which it has no oracle.

    What it leaves tells in which order, and how precisely, the products are summed.
    """
    found = re.match(r"(?:mma\.sync|wgmma).*\.(f16|bf16|tf32|e4m3|e5m2)\.\1", case.name)
    if found is None:
        return None
    kind = next(k for k in (_F16, _BF16, _TF32, _E4M3, _E5M2) if k.name == found[1])

    def inputs(rng: np.random.Generator) -> Inputs:
        arrays = list(case.inputs(rng))
        for i, array in enumerate(arrays[:2]):
            arrays[i] = _real(kind, array.size * 32 // kind.bits, rng).view(np.uint32)
        if len(arrays) == 3:
            result = np.float16 if case.name.endswith("f16.f16.f16") else np.float32
            arrays[2] = rng.standard_normal(arrays[2].size * 4 // np.dtype(result).itemsize, np.float32).astype(result)
            arrays[2] = arrays[2].view(np.uint32)
        return tuple(arrays)

    return replace(case, name=f"{case.name}, real operands", inputs=inputs)


def _real(kind: _Kind, count: int, rng: np.random.Generator) -> np.ndarray:
    if kind.name in _MANTISSA_BITS:
        values = _fp8_values(kind.name)
        magnitude = np.abs(rng.standard_normal(count))
        code = np.minimum(np.searchsorted(values, magnitude), 119).astype(np.uint8)
        return code | rng.integers(0, 2, count).astype(np.uint8) << 7
    return kind.pack(rng.standard_normal(count))
