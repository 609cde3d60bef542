"""wgmma, mma.sync, ldmatrix, stmatrix and movmatrix against NumPy and CuTe's (thread, value) layouts."""

import numpy as np
import pytest
from warpcheck_cases.cute_layout import Layout
from warpcheck_cases.mma_model import encode, exact_matrix, place

units = pytest.importorskip(
    "warpcheck.machine._units", reason="it is in no wheel: pip install -e ./warpcheck builds it"
)

BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "s32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "f64": 64,
}


def to_bits(type_: str, values: np.ndarray) -> np.ndarray:
    """Codes as uint64."""
    if type_ == "f64":
        return np.ascontiguousarray(values, np.float64).view(np.uint64)
    if type_ == "f32":
        return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    if type_ in ("s32", "s4", "u4"):
        return values.astype(np.int64).astype(np.uint64) & np.uint64((1 << BITS[type_]) - 1)
    return encode(units, type_, np.ascontiguousarray(values)).astype(np.uint64)


def from_bits(type_: str, codes: np.ndarray) -> np.ndarray:
    if type_ == "f64":
        return codes.view(np.float64)
    if type_ == "f32":
        return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    if type_ == "s32":
        return codes.astype(np.uint32).view(np.int32).astype(np.float64)
    return units.decode_floats(type_, codes.astype(np.uint32)).astype(np.float64)


def to_registers(type_: str, matrix: np.ndarray, layout: Layout) -> np.ndarray:
    """(rows, columns) to (32-bit registers, threads); the layout gives row + rows * column of (thread, value)."""
    index = layout.table()
    codes = to_bits(type_, matrix.T.reshape(-1)[index])
    bits = (codes[..., None] >> np.arange(BITS[type_], dtype=np.uint64)) & np.uint64(1)
    words = np.packbits(bits.astype(np.uint8).reshape(len(index), -1), axis=-1, bitorder="little").view(np.uint32)
    return np.ascontiguousarray(words.T)


def from_registers(type_: str, registers: np.ndarray, layout: Layout, rows: int, columns: int) -> np.ndarray:
    index = layout.table()
    bits = np.unpackbits(np.ascontiguousarray(registers.T).view(np.uint8), axis=-1, bitorder="little")
    bits = bits.reshape(*index.shape, BITS[type_]).astype(np.uint64)
    codes = (bits << np.arange(BITS[type_], dtype=np.uint64)).sum(-1, dtype=np.uint64)
    out = np.zeros(rows * columns)
    out[index.reshape(-1)] = from_bits(type_, codes.reshape(-1))
    return out.reshape(columns, rows).T


def values_of(rng, type_: str, shape) -> np.ndarray:
    if type_ in ("s4", "u4"):
        return rng.integers(*{"s4": (-8, 8), "u4": (0, 16)}[type_], shape).astype(np.float64)
    if type_ in ("f64", "f32", "s32"):
        return rng.integers(-100, 101, shape).astype(np.float64)
    return exact_matrix(rng, type_, shape)


# mma.sync: (m, n, k, types of A): layouts of A (m x k) and B (n x k), from mma_traits_sm80, sm90.
MMA = {
    (16, 8, 16, ("f16", "bf16")): (((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128)), ((4, 8), (2, 2)), ((16, 1), (8, 64))),
    (16, 8, 8, ("f16", "bf16")): (((4, 8), (2, 2)), ((32, 1), (16, 8)), ((4, 8), (2,)), ((16, 1), (8,))),
    (16, 8, 8, ("tf32",)): (((4, 8), (2, 2)), ((16, 1), (8, 64)), ((4, 8), (2,)), ((8, 1), (32,))),
    (16, 8, 4, ("tf32",)): (((4, 8), (2,)), ((16, 1), (8,)), ((4, 8), (1,)), ((8, 1), (0,))),
    (16, 8, 16, ("s8", "u8", "e4m3", "e5m2")): (((4, 8), (4, 2)), ((64, 1), (16, 8)), ((4, 8), (4,)), ((32, 1), (8,))),
    (16, 8, 32, ("s8", "u8", "e4m3", "e5m2")): (
        ((4, 8), (4, 2, 2)), ((64, 1), (16, 8, 256)), ((4, 8), (4, 2)), ((32, 1), (8, 128))),
    (8, 8, 16, ("s8", "u8")): (((4, 8), (4,)), ((32, 1), (8,)), ((4, 8), (4,)), ((32, 1), (8,))),
    (16, 8, 32, ("s4", "u4")): (((4, 8), (8, 2)), ((128, 1), (16, 8)), ((4, 8), (8,)), ((64, 1), (8,))),
    (16, 8, 64, ("s4", "u4")): (((4, 8), (8, 2, 2)), ((128, 1), (16, 8, 512)), ((4, 8), (8, 2)), ((64, 1), (8, 256))),
    (8, 8, 32, ("s4", "u4")): (((4, 8), (8,)), ((64, 1), (8,)), ((4, 8), (8,)), ((64, 1), (8,))),
    (8, 8, 4, ("f64",)): (((4, 8), (1,)), ((8, 1), (0,)), ((4, 8), (1,)), ((8, 1), (0,))),
    (16, 8, 8, ("f64",)): (((4, 8), (2, 2)), ((16, 1), (8, 64)), ((4, 8), (2,)), ((8, 1), (32,))),
}  # fmt: skip
MIXED = ({"s8", "u8"}, {"s4", "u4"}, {"e4m3", "e5m2"})  # types of A and B that may differ
MMA_CASES = [
    (m, n, k, a, b)
    for m, n, k, types in MMA
    for a in types
    for b in types
    if a == b or any({a, b} <= mixed for mixed in MIXED)
]


@pytest.mark.parametrize("m, n, k, a_type, b_type", MMA_CASES)
def test_mma_sync(m, n, k, a_type, b_type, seed):
    rng = np.random.default_rng(seed)
    shapes = next(v for key, v in MMA.items() if key[:3] == (m, n, k) and a_type in key[3])
    layout_a, layout_b = Layout(*shapes[:2]), Layout(*shapes[2:])
    layout_c = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8))) if m == 16 else Layout(((4, 8), (2,)), ((16, 1), (8,)))
    outputs = {"f64": ("f64",), "s": ("s32",), "u": ("s32",)}.get(
        a_type if a_type == "f64" else a_type[0], ("f32", "f16")
    )
    for c_type in outputs:
        if c_type == "f16" and a_type in ("bf16", "tf32"):
            continue
        a, b, c = values_of(rng, a_type, (m, k)), values_of(rng, b_type, (n, k)), values_of(rng, c_type, (m, n))
        op = dict(m=m, n=n, k=k, a_type=a_type, b_type=b_type, c_type=c_type, d_type=c_type)
        if c_type == "f16":
            a, b = np.sign(a), np.sign(b)  # sums stay exact in f16
        d = units.mma(
            op, to_registers(a_type, a, layout_a), to_registers(b_type, b, layout_b), to_registers(c_type, c, layout_c)
        )
        assert np.array_equal(from_registers(c_type, d, layout_c, m, n), a @ b.T + c)


def test_mma_sync_saturates_only_on_request(seed):
    rng = np.random.default_rng(seed)
    shapes = MMA[16, 8, 32, ("s8", "u8", "e4m3", "e5m2")]
    a, b = np.full((16, 32), 127.0), np.full((8, 32), 127.0)
    c = np.where(rng.integers(0, 2, (16, 8)), 2.0**31 - 5, -5.0)
    layout_c = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
    op = dict(m=16, n=8, k=32, a_type="s8", b_type="s8", c_type="s32", d_type="s32")
    args = (
        to_registers("s8", a, Layout(*shapes[:2])),
        to_registers("s8", b, Layout(*shapes[2:])),
        to_registers("s32", c, layout_c),
    )
    exact = 32 * 127 * 127 + c
    wrapped = from_registers("s32", units.mma(op, *args), layout_c, 16, 8)
    assert np.array_equal(wrapped, (exact + 2.0**31) % 2.0**32 - 2.0**31)
    clamped = from_registers("s32", units.mma({**op, "saturate": True}, *args), layout_c, 16, 8)
    assert np.array_equal(clamped, np.minimum(exact, 2.0**31 - 1))


# wgmma: layouts of A in registers (64 x k), per warpgroup thread, from mma_traits_sm90_gmma.
WGMMA_A = {
    16: (((4, 8, 4), (2, 2, 2)), ((128, 1, 16), (64, 8, 512))),
    32: (((4, 8, 4), (2, 2)), ((64, 1, 16), (8, 256))),
    8: (((4, 8, 4), (4, 2, 2)), ((256, 1, 16), (64, 8, 1024))),
}


def warpgroup_registers(type_: str, matrix: np.ndarray, layout: Layout) -> np.ndarray:
    """(4 warps * registers, 32 threads), warp by warp."""
    registers = to_registers(type_, matrix, layout)
    return np.ascontiguousarray(registers.reshape(len(registers), 4, 32).transpose(1, 0, 2).reshape(-1, 32))


WGMMA_TYPES = [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
               ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("s8", "u8", "s32"), ("u8", "s8", "s32")]  # fmt: skip


@pytest.mark.parametrize("a_type, b_type, d_type", WGMMA_TYPES)
@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
def test_wgmma(a_type, b_type, d_type, a_in_registers, mode, seed):
    rng = np.random.default_rng(seed)
    k, n = 256 // BITS[a_type], 8 * int(rng.integers(1, 33))
    accumulate = bool(rng.integers(2))
    mn_major = [bool(rng.integers(2)) and BITS[a_type] == 16 for _ in range(2)]
    shared = rng.integers(0, 256, 200 * 1024, dtype=np.uint8)
    a, b = exact_matrix(rng, a_type, (64, k)), exact_matrix(rng, b_type, (n, k))
    if d_type == "f16":
        a, b = np.sign(a), np.sign(b)
    op = dict(a_type=a_type, b_type=b_type, d_type=d_type, n=n, accumulate=accumulate, mn_major_b=mn_major[1],
              b_desc=place(units, rng, shared, b_type, b, mode, mn_major[1], 102400).desc_sm90())  # fmt: skip
    a_registers = None
    if a_in_registers:
        a_registers = warpgroup_registers(a_type, a, Layout(*WGMMA_A[BITS[a_type]]))
    else:
        op.update(
            mn_major_a=mn_major[0], a_desc=place(units, rng, shared, a_type, a, mode, mn_major[0], 1024).desc_sm90()
        )
    layout_d = Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))
    c = values_of(rng, d_type if d_type != "f16" else "e2m1", (64, n))
    d = warpgroup_registers(d_type, c, layout_d)
    sign = 1
    if d_type != "s32":
        op["negate_a"], op["negate_b"] = bool(rng.integers(2)), bool(rng.integers(2))
        sign = (-1) ** (op["negate_a"] + op["negate_b"])
    footprint = units.wgmma(op, shared, a_registers, d)
    per_warp = len(d) // 4
    flat = np.ascontiguousarray(d.reshape(4, per_warp, 32).transpose(1, 0, 2).reshape(per_warp, 128))
    want = sign * (a @ b.T) + (c if accumulate else 0)
    assert np.array_equal(from_registers(d_type, flat, layout_d, 64, n), want)
    assert sum(f[3] for f in footprint) == 32 * (n + (0 if a_in_registers else 64))


def rows_of(rng, count: int) -> tuple[np.ndarray, list[int]]:
    """Shared memory and distinct 16-byte aligned row addresses."""
    return rng.integers(0, 256, 4096, dtype=np.uint8), (16 * rng.permutation(256)[:count]).tolist()


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix_of_16_bits(num, trans, seed):
    """ISA figure 104: thread t holds elements 2 (t % 4) and the next of row t / 4; transposed, of column t / 4."""
    rng = np.random.default_rng(seed)
    shared, rows = rows_of(rng, 8 * num)
    matrices = np.stack([shared[r : r + 16].view(np.uint16) for r in rows]).reshape(num, 8, 8)
    fragments = matrices.transpose(0, 2, 1) if trans else matrices
    want = np.ascontiguousarray(fragments).view(np.uint32).reshape(num, 32)
    assert np.array_equal(units.ldmatrix(shared, rows, 0, num, trans), want)
    target = np.zeros_like(shared)
    units.stmatrix(target, rows, want, 0, num, trans)
    for r in rows:
        assert np.array_equal(target[r : r + 16], shared[r : r + 16])
    assert np.count_nonzero(target) <= 128 * num


@pytest.mark.parametrize("num", [1, 2])
def test_ldmatrix_of_16x16_bytes(num, seed):
    """Of the transposed matrix a thread takes columns 4 (t % 4) .. + 3 of rows t / 4 (first register) and t / 4 + 8."""
    rng = np.random.default_rng(seed)
    shared, rows = rows_of(rng, 16 * num)
    matrices = np.stack([shared[r : r + 16] for r in rows]).reshape(num, 16, 16).transpose(0, 2, 1)
    want = np.ascontiguousarray(matrices).view(np.uint32).reshape(num, 2, 8, 4).reshape(2 * num, 32)
    assert np.array_equal(units.ldmatrix(shared, rows, 2, num, True), want)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_stmatrix_of_16x8_bytes(num, seed):
    """CuTe's SM100_U8x4_STSM_T: byte b of thread t goes to row 2 (t % 4) + b % 2, column t / 4 + 8 (b / 2)."""
    rng = np.random.default_rng(seed)
    shared, rows = rows_of(rng, 8 * num)
    registers = rng.integers(0, 2**32, (num, 32), dtype=np.uint32)
    units.stmatrix(shared, rows, registers, 1, num, True)
    source = Layout(((4, 8), (8, 2, 2)), ((256, 8), (1, 128, 64)))  # (thread, bit) -> bit of 8 rows of 128
    bits = source(np.arange(32)[:, None], 8 * np.arange(4)[None, :])
    for i in range(num):
        for thread, value in enumerate(registers[i].view(np.uint8).reshape(32, 4)):
            for byte in range(4):
                row, column = divmod(int(bits[thread, byte]), 128)
                assert shared[rows[8 * i + row] + column // 8] == value[byte]


@pytest.mark.parametrize("bits, shapes", [(6, (3, 5)), (4, (4, 6))])
@pytest.mark.parametrize("tall", [False, True])
def test_ldmatrix_of_narrow_elements(bits, shapes, tall, seed):
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 3))
    height = 16 if tall else 8
    codes = rng.integers(0, 1 << bits, (height * num, 16))
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(height * num, -1).astype(np.uint8)
    shared, rows = rows_of(rng, height * num)
    for at, row in zip(rows, np.packbits(stream, axis=-1, bitorder="little")):
        shared[at : at + len(row)] = row
    containers = (codes << (2 if bits == 4 else 0)).astype(np.uint8).reshape(num, height, 16)
    if tall:
        containers = containers.transpose(0, 2, 1)
    want = np.ascontiguousarray(containers).view(np.uint32).reshape(-1, 32)
    assert np.array_equal(units.ldmatrix(shared, rows, shapes[tall], num, tall), want)


def test_movmatrix_transposes(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 65536, (8, 8), dtype=np.uint16)
    got = units.movmatrix(matrix.view(np.uint32).reshape(1, 32).copy())
    assert np.array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)
