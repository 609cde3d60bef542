"""tcgen05.ld, st, cp and shift against CuTe's layouts of the same instructions (copy_traits_sm100)."""

import numpy as np
import pytest
from warpcheck_cases.cute_layout import Layout, swizzle

units = pytest.importorskip(
    "warpcheck.machine._units", reason="it is in no wheel: pip install -e ./warpcheck builds it"
)

LANES, COLUMNS = 128, 512
S16X64, S16X128, S16X256, S32X32, S16X32X2 = range(5)


def bits_of_register(shape: int, num: int) -> tuple[Layout, int]:
    """(thread, bit of its registers) -> bit of the moved data; and its bits per lane."""
    n = num
    return {
        S16X256: (Layout(((4, 8), (64, 2, n)), ((64, 256 * n), (1, 2048 * n, 256))), 256 * n),
        S16X128: (Layout(((4, 8), (32, 2, n)), ((32, 128 * n), (1, 1024 * n, 128))), 128 * n),
        S16X64: (Layout(((2, 2, 8), (32, n)), ((512 * n, 32, 64 * n), (1, 64))), 64 * n),
        S16X32X2: (Layout(((16, 2), (32, n)), ((64 * n, 32 * n), (1, 32))), 64 * n),
        S32X32: (Layout((32, (32, n)), (32 * n, (1, 32))), 32 * n),
    }[shape]


def cells(shape: int, num: int, pack16: bool, split: int) -> tuple[np.ndarray, np.ndarray]:
    """(16-bit half, thread) -> lane and 16-bit column unit (two per cell) relative to the base."""
    layout, row_bits = bits_of_register(shape, num)
    halves = layout.size(1) // 16
    bit = layout(np.arange(32)[None, :], 16 * np.arange(halves)[:, None])
    lane, unit = bit // row_bits, bit % row_bits // 16
    if shape == S16X32X2:  # CuTe places the second access right behind the first; the instruction says where
        second = unit >= 2 * num
        unit = np.where(second, unit - 2 * num, unit)
        unit = unit * (2 if pack16 else 1) + np.where(second, 2 * split, 0)
    elif pack16:
        unit = unit * 2  # only the low half of each cell
    return lane, unit


CASES = [
    (shape, num, pack16)
    for shape, most in ((S16X64, 128), (S16X128, 64), (S16X256, 32), (S32X32, 128), (S16X32X2, 128))
    for num in (1, 2, 4, 8, 16, 32, 64, 128)
    for pack16 in (False, True)
    if num <= most and num * {S16X64: 2, S16X128: 4, S16X256: 8}.get(shape, 1) * (1 + pack16) <= COLUMNS
]


def random_base(rng, shape, width) -> tuple[int, int]:
    lane = 32 * int(rng.integers(4)) + (16 * int(rng.integers(2)) if shape != S32X32 else 0)
    return lane, int(rng.integers(0, COLUMNS - width + 1))


@pytest.mark.parametrize("shape, num, pack16", CASES)
def test_load_and_store(shape, num, pack16, seed):
    rng = np.random.default_rng(seed)
    split = int(rng.integers(num * (1 + pack16), 130)) if shape == S16X32X2 and num <= 32 else num * (1 + pack16)
    lane, unit = cells(shape, num, pack16, split)
    width = int(unit.max()) // 2 + 1
    base_lane, base_column = random_base(rng, shape, width)
    taddr = base_lane << 16 | base_column
    tmem = rng.integers(0, 2**32, (LANES, COLUMNS), dtype=np.uint32)
    halves = tmem.view(np.uint16)
    place = (base_lane + lane, 2 * base_column + unit)
    want = np.ascontiguousarray(halves[place].reshape(-1, 2, 32).transpose(0, 2, 1)).view(np.uint32)[..., 0]
    got = units.tmem_ld(tmem, shape, num, pack16, taddr, split)
    assert np.array_equal(got, want)

    regs = rng.integers(0, 2**32, got.shape, dtype=np.uint32)
    expected = tmem.copy()
    if pack16:
        expected.view(np.uint16)[place[0], place[1] | 1] = 0  # the upper half of the cells
    expected.view(np.uint16)[place] = regs[..., None].view(np.uint16).transpose(0, 2, 1).reshape(-1, 32)
    units.tmem_st(tmem, regs, shape, num, pack16, taddr, split)
    assert np.array_equal(tmem, expected)

    touched = np.zeros((LANES, COLUMNS), bool)
    touched[place[0], place[1] // 2] = True
    listed = np.zeros_like(touched)
    for space, _, first_lane, lanes, first, columns, write in units.tmem_rects(shape, num, pack16, taddr, split, True):
        assert space == "tmem" and write
        listed[first_lane : first_lane + lanes, first : first + columns] = True
    assert np.array_equal(listed, touched)


def test_access_beyond_tensor_memory_is_refused():
    tmem = np.zeros((LANES, COLUMNS), np.uint32)
    with pytest.raises(units.UnitError, match=r"columns 500\.\.515"):
        units.tmem_rects(S32X32, 16, False, 500, 0, False)
    with pytest.raises(units.UnitError, match=r"lanes 112\.\.143"):
        units.tmem_rects(S32X32, 1, False, 112 << 16, 0, False)
    assert units.tmem_ld(tmem, S32X32, 1, False, 0).shape == (1, 32)


SWIZZLES = {"none": (0, 0, 1), "32B": (6, 1, 2), "64B": (4, 2, 4), "128B": (2, 3, 8)}  # code, bits, chunks a row


def k_major_chunks(start, leading, stride, mode) -> tuple[int, callable]:
    """The descriptor, and (row, 16-byte chunk) -> byte offset."""
    code, bits, width = SWIZZLES[mode]
    desc = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code << 61
    layout = Layout(((8, 16), 2), ((16 * width, stride), leading if mode == "none" else 16))
    return desc, lambda row, chunk: swizzle(bits, 4, 3, start + layout(row, chunk))


COPIES = {  # name: code, rows, chunks, lanes of a row
    "128x256b": (0, 128, 2, lambda r: [r]),
    "4x256b": (1, 4, 2, lambda r: [32 * r]),
    "128x128b": (2, 128, 1, lambda r: [r]),
    "64x128b.warpx2::02_13": (3, 64, 1, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (4, 64, 1, lambda r: [r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32]),
    "32x128b.warpx4": (5, 32, 1, lambda r: [r, r + 32, r + 64, r + 96]),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("ctas", [1, 2])
def test_copy_from_shared_memory(name, mode, ctas, seed):
    rng = np.random.default_rng(seed)
    code, rows, chunks, lanes = COPIES[name]
    shared = [rng.integers(0, 256, 65536, dtype=np.uint8) for _ in range(ctas)]
    tmem = [rng.integers(0, 2**32, (LANES, COLUMNS), dtype=np.uint32) for _ in range(ctas)]
    desc, offset = k_major_chunks(1024 * int(rng.integers(0, 8)), 128 * int(rng.integers(16, 33)), 1024, mode)
    column = int(rng.integers(0, COLUMNS - 8))
    lane = 31 if name == "4x256b" else 0
    want = [t.copy() for t in tmem]
    for cta in range(ctas):
        for row in range(rows):
            for chunk in range(chunks):
                at = int(offset(row, chunk))
                for target in lanes(row):
                    want[cta][lane + target, column + 4 * chunk : column + 4 * chunk + 4] = shared[cta][
                        at : at + 16
                    ].view(np.uint32)
    footprint = units.tmem_cp(shared, tmem, code, 0, lane << 16 | column, desc)
    for cta in range(ctas):
        assert np.array_equal(tmem[cta], want[cta])
    assert sum(f[3] for f in footprint if f[0] == "shared") == ctas * rows * chunks * 16
    assert sum(f[3] * f[5] for f in footprint if f[0] == "tmem") == ctas * (4 if name == "4x256b" else 128) * 4 * chunks


@pytest.mark.parametrize("bits, shift", [(4, 2), (6, 0)])
def test_copy_decompresses(bits, shift, seed):
    """16 elements of 4 or 6 bits, then padding, become 16 containers of 8 bits; 4 bits sit in bits 2-5."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (128, 2, 16))
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(128, 2, 16 * bits)
    chunk = np.zeros((128, 2, 128), np.uint8)
    chunk[..., : 16 * bits] = stream
    packed = np.packbits(chunk, axis=-1, bitorder="little")
    shared, tmem = np.zeros(8192, np.uint8), np.zeros((LANES, COLUMNS), np.uint32)
    desc, offset = k_major_chunks(0, 128, 256, "none")
    for row in range(128):
        for c in range(2):
            at = int(offset(row, c))
            shared[at : at + 16] = packed[row, c]
    units.tmem_cp([shared], [tmem], 0, 1 if bits == 4 else 2, 0, desc)
    assert np.array_equal(tmem.view(np.uint8)[:, :32], (codes << shift).reshape(128, 32).astype(np.uint8))


def test_shift_moves_rows_to_the_lane_below(seed):
    rng = np.random.default_rng(seed)
    tmem = rng.integers(0, 2**32, (LANES, COLUMNS), dtype=np.uint32)
    want = tmem.copy()
    want[32:63, 40:48] = tmem[33:64, 40:48]
    units.tmem_shift([np.zeros(16, np.uint8)], [tmem], 32 << 16 | 40)
    assert np.array_equal(tmem, want)
