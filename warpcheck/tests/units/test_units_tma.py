"""Tensor maps and tensor copies against NumPy: boxes by slicing, swizzles by the tables of PTX ISA 5.5.7."""

import numpy as np
import pytest
from warpcheck.machine import load_core

units = pytest.importorskip(
    "warpcheck.machine._units", reason="it is in no wheel: pip install -e ./warpcheck builds it"
)
encode_tensormap = load_core().encode_tensormap

U8, U16, U32, S32, U64, F16, F32, F32_FTZ, F64, BF16, B4, B4_PAD, B6_PAD = 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13
NONE, SW32, SW64, SW128, SW96 = range(5)
ATOM16, ATOM32, ATOM32_FLIP8, ATOM64 = range(4)
DTYPES = {
    U8: np.uint8,
    U16: np.uint16,
    U32: np.uint32,
    S32: np.int32,
    U64: np.uint64,
    F16: np.float16,
    F32: np.float32,
    F64: np.float64,
}

# ISA 5.5.7: for each line of 128 bytes, the 16-byte cell of the source found at each place.
PAIRS = [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]]
FOURS = [*PAIRS, [2, 3, 0, 1, 6, 7, 4, 5], [3, 2, 1, 0, 7, 6, 5, 4]]
EIGHTS = [
    *FOURS,
    [4, 5, 6, 7, 0, 1, 2, 3],
    [5, 4, 7, 6, 1, 0, 3, 2],
    [6, 7, 4, 5, 2, 3, 0, 1],
    [7, 6, 5, 4, 3, 2, 1, 0],
]
TABLES = {
    (NONE, ATOM16): PAIRS[:1],
    (SW32, ATOM16): PAIRS,
    (SW96, ATOM16): PAIRS,
    (SW64, ATOM16): FOURS,
    (SW128, ATOM16): EIGHTS,
    (SW128, ATOM32): EIGHTS[::2],
    (SW128, ATOM64): EIGHTS[::4],
}
TABLES[SW128, ATOM32_FLIP8] = TABLES[SW128, ATOM32]


def swizzled(data: np.ndarray, offset: int, swizzle: int, atom: int) -> np.ndarray:
    """The bytes of a box as they lie from `offset` (a multiple of 128) of shared memory on."""
    table = TABLES[swizzle, atom]
    padded = np.zeros(-(-data.size // 128) * 128, np.uint8)
    padded[: data.size] = data
    lines = padded.reshape(-1, 8, 16)
    out = np.empty_like(lines)
    for i, line in enumerate(lines):
        number = offset // 128 + i
        out[i] = line[table[number % len(table)]]
        if atom == ATOM32_FLIP8 and number % 2:
            out[i] = out[i].reshape(8, 2, 8)[:, ::-1].reshape(8, 16)
    return out.reshape(-1)


def tensor_map(tensor: np.ndarray, type_: int, box, **fields) -> bytes:
    """`tensor` is indexed outermost dimension first; the map counts from the innermost."""
    return encode_tensormap(
        dict(base=tensor.ctypes.data, type=type_, extent=list(tensor.shape[::-1]), stride=list(tensor.strides[::-1]),
             box=list(box[::-1]), **fields)
    )  # fmt: skip


def box_of(tensor: np.ndarray, box, coords, fill=0, steps=None) -> np.ndarray:
    """The box at `coords` (outermost first), elements outside the tensor replaced by `fill`."""
    steps = steps or [1] * tensor.ndim
    index = np.meshgrid(*[c + np.arange(0, b, s) for c, b, s in zip(coords, box, steps)], indexing="ij")
    inside = np.all([(i >= 0) & (i < n) for i, n in zip(index, tensor.shape)], axis=0)
    clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, tensor.shape))
    return np.where(inside, tensor[clipped], np.array(fill, tensor.dtype))


def random_tensor(rng, shape, dtype) -> np.ndarray:
    """Row pitch padded to 16 bytes, as the map demands."""
    item = np.dtype(dtype).itemsize
    width = -(-shape[-1] * item // 16) * 16
    raw = rng.integers(0, 256, (*shape[:-1], width), dtype=np.uint8)
    return raw.view(dtype)[..., : shape[-1]]


# What host code compiled by CuTe DSL packed (words 0-15), and the arguments it was given.
WORDS = [0x1000, 0x7F00, 0x40312, 8, 0, 0, 0, 0, 63, 47, 0, 0, 0, 0x3F000000, 0xF, 0]
PACKED = {  # what differs from f16, 64 x 48 elements, box 64 x 16, no swizzle
    "f16": ({}, dict(base=0x7F0000001000, rank=2, type=F16, extent=[64, 48], stride=[0, 128], box=[64, 16])),
    "tf32": ({2: 0x50392, 3: 16, 13: 0xF << 24}, dict(rank=2, type=F32, tf32=True, stride=[0, 256], box=[16, 16])),
    "bf16": ({2: 0x40512, 13: 0xF << 24}, dict(type=BF16, box=[16, 16])),
    "e2m1": ({2: 0x40592, 3: 2, 13: 0xF << 24}, dict(type=B4, stride=[0, 32])),
    "128-byte swizzle": ({2: 0x46312}, dict(swizzle=SW128, atomicity=ATOM16)),
    "32-byte swizzle": ({2: 0x42312, 13: 0xF << 24}, dict(swizzle=SW32)),
    "128-byte swizzle of 32-byte atoms": ({2: 0xC6312}, dict(swizzle=SW128, atomicity=ATOM32)),
    "rank 5, large strides": (
        {2: 0x240342, 4: 0xC0000000, 5: 0x10, 6: 0x20000, 7: 0x10, 10: 9, 11: 6, 12: 2, 14: 0x0101030F},
        dict(rank=5, extent=[64, 48, 10, 7, 3], stride=[0, 128, 7 << 34, 256, 2 << 20], box=[64, 16, 4, 2, 2])),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
def test_decodes_what_host_code_packs(case):
    changes, want = PACKED[case]
    words = [changes.get(i, word) for i, word in enumerate(WORDS)] + [0xDEADBEEF] * 16
    got = units.decode_tensormap(np.array(words, np.uint32).tobytes())
    assert {name: got[name] for name in want} == want


def test_encode_and_replace_round_trip(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        rank = int(rng.integers(1, 6))
        modes = dict(type=14, swizzle=5, atomicity=4)
        fields = {name: int(rng.integers(0, count)) for name, count in modes.items()}
        fields |= dict(
            base=int(rng.integers(1, 2**44)) * 16,
            nan_fill=bool(rng.integers(2)),
            extent=rng.integers(1, 2**32, rank).tolist(),
            stride=[0, *(int(x) * 16 for x in rng.integers(0, 2**36, rank - 1))],
            box=rng.integers(1, 257, rank).tolist(),
            element_stride=rng.integers(1, 9, rank).tolist(),
        )
        got = units.decode_tensormap(encode_tensormap(fields))
        assert {name: got[name] for name in fields} == fields
        dim = int(rng.integers(rank))
        replaced = units.tensormap_replace(encode_tensormap(fields), 3, dim, 12345)  # global_dim
        fields["extent"][dim] = 12345
        got = units.decode_tensormap(replaced)
        assert {name: got[name] for name in fields} == fields


@pytest.mark.parametrize("swizzle, atom", TABLES)
@pytest.mark.parametrize("type_, width", [(F16, 64), (F32, 32), (U8, 128), (U64, 16)])
def test_swizzled_boxes(swizzle, atom, type_, width, seed):
    rng = np.random.default_rng(seed)
    width = width // {SW32: 4, SW64: 2}.get(swizzle, 1)
    rows = int(rng.integers(1, 40))
    tensor = random_tensor(rng, (rows + 5, width * 2 + 16), DTYPES[type_])
    coords = [int(rng.integers(0, 5)), int(rng.integers(0, width))]
    offset = 128 * int(rng.integers(0, 16))
    shared = rng.integers(0, 256, 16384, dtype=np.uint8)
    before = shared.copy()
    units.tma_load(
        tensor_map(tensor, type_, [rows, width], swizzle=swizzle, atomicity=atom), coords[::-1], shared, offset
    )
    data = np.ascontiguousarray(box_of(tensor, [rows, width], coords)).view(np.uint8).reshape(-1)
    end = offset + -(-data.size // 128) * 128
    written = swizzled(np.ones(data.size, np.uint8), offset, swizzle, atom).astype(
        bool
    )  # all but a part of the last line
    assert np.array_equal(shared[offset:end][written], swizzled(data, offset, swizzle, atom)[written])
    shared[offset:end][written] = before[offset:end][written]
    assert np.array_equal(shared, before)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("nan_fill", [False, True])
def test_boxes_that_leave_the_tensor(rank, nan_fill, seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        shape = [*rng.integers(1, 6, rank - 1), int(rng.integers(8, 40))]
        box = [*rng.integers(1, 5, rank - 1), 8 * int(rng.integers(1, 5))]
        steps = [*rng.integers(1, 4, rank - 1), 1]
        coords = [int(rng.integers(-n - b, n + 2)) for n, b in zip(shape, box)]
        tensor = random_tensor(rng, shape, np.uint16)
        map_ = tensor_map(tensor, F16, box, nan_fill=nan_fill, element_stride=[int(s) for s in steps[::-1]])
        shared = rng.integers(0, 256, 65536, dtype=np.uint8)
        units.tma_load(map_, coords[::-1], shared, 1024)
        want = box_of(tensor, box, coords, 0x7FFF if nan_fill else 0, steps)
        assert units.tma_box_bytes(map_) == want.nbytes
        assert np.array_equal(shared[1024 : 1024 + want.nbytes].view(np.uint16), want.reshape(-1))

        source = rng.integers(0, 65536, want.shape, dtype=np.uint16)  # and back: only what lies inside is written
        expected = tensor.copy()
        index = np.stack(
            np.meshgrid(*[c + np.arange(0, b, s) for c, b, s in zip(coords, box, steps)], indexing="ij"), axis=-1
        )
        for place, value in zip(index.reshape(-1, rank), source.reshape(-1)):
            if all(0 <= p < n for p, n in zip(place, shape)):
                expected[tuple(place)] = value
        shared[1024 : 1024 + want.nbytes] = source.view(np.uint8).reshape(-1)
        units.tma_store(map_, coords[::-1], shared, 1024)
        assert np.array_equal(tensor, expected)


def test_gather_and_scatter_of_four_rows(seed):
    rng = np.random.default_rng(seed)
    tensor = random_tensor(rng, (20, 96), np.float16).copy()
    rows = [int(rng.integers(0, 20)), -1, 19, 25]
    map_ = tensor_map(tensor, F16, [1, 64], swizzle=SW128)
    shared = np.zeros(2048, np.uint8)
    units.tma_load(map_, [8, *rows], shared, 1024, gather4=True)
    want = np.stack([tensor[r, 8:72] if 0 <= r < 20 else np.zeros(64, np.float16) for r in rows])
    assert np.array_equal(shared[1024:1536], swizzled(want.view(np.uint8).reshape(-1), 1024, SW128, ATOM16))
    expected = tensor.copy()
    tensor[:] = 0
    units.tma_store(map_, [8, *rows], shared, 1024, scatter4=True)
    for r in {rows[0], 19}:  # the drawn row may be row 19 too
        assert np.array_equal(tensor[r, 8:72].view(np.uint16), expected[r, 8:72].view(np.uint16))
        tensor[r, 8:72] = 0
    assert not tensor.any()


@pytest.mark.parametrize("type_, packed", [(B4, 8), (B4_PAD, 8), (B6_PAD, 12)])
def test_packed_elements(type_, packed, seed):
    """16 elements in 8 or 12 bytes of global memory; the padded types put each group into 16 bytes of shared memory."""
    rng = np.random.default_rng(seed)
    groups, rows = 8, 6
    raw = rng.integers(0, 256, (rows, groups * packed), dtype=np.uint8)
    fields = dict(extent=[groups * 16, rows], stride=[0, groups * packed], box=[groups * 16, 4])
    map_ = encode_tensormap(dict(base=raw.ctypes.data, type=type_, **fields))
    shared = np.full(4096, 0xA5, np.uint8)
    units.tma_load(map_, [32, 3], shared, 0)
    width = packed if type_ == B4 else 16
    want = np.full((4, groups, width), 0xA5, np.uint8)
    want[..., :packed] = 0
    want[:3, : groups - 2, :packed] = raw.reshape(rows, groups, packed)[3:6, 2:]
    assert units.tma_box_bytes(map_) == want.size
    assert np.array_equal(shared[: want.size], want.reshape(-1))


def test_tf32_loads_round(seed):
    rng = np.random.default_rng(seed)
    tensor = rng.standard_normal((8, 32)).astype(np.float32)
    shared = np.zeros(1024, np.uint8)
    units.tma_load(tensor_map(tensor, F32, [8, 32], tf32=True), [0, 0], shared, 0)
    got = shared.view(np.float32).reshape(8, 32)
    assert not (got.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(got - tensor) <= np.abs(tensor) * 2.0**-11).all()


@pytest.mark.parametrize(
    "op, type_, model",
    [
        ("add", F32, np.add), ("add", F16, np.add), ("add", U32, np.add), ("add", U64, np.add), ("add", F64, np.add),
        ("min", S32, np.minimum), ("max", S32, np.maximum), ("max", F16, np.maximum), ("min", U64, np.minimum),
        ("and", U32, np.bitwise_and), ("or", U32, np.bitwise_or), ("xor", U64, np.bitwise_xor),
        ("inc", U32, lambda old, x: np.where(old >= x, 0, old + 1)),
        ("dec", U32, lambda old, x: np.where((old == 0) | (old > x), x, old - 1)),
    ],
)  # fmt: skip
def test_reductions(op, type_, model, seed):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[type_]
    if np.issubdtype(dtype, np.floating):
        tensor, source = rng.standard_normal((9, 16)).astype(dtype), rng.standard_normal((9, 16)).astype(dtype)
    else:
        high = 5 if op in ("inc", "dec") else np.iinfo(dtype).max
        tensor, source = rng.integers(0, high, (9, 16), dtype=dtype), rng.integers(0, high, (9, 16), dtype=dtype)
    want = tensor.copy()
    with np.errstate(over="ignore"):
        want[3:9] = model(tensor[3:9], source[:6]).astype(dtype)
    shared = source.view(np.uint8).reshape(-1).copy()
    code = ["add", "min", "max", "inc", "dec", "and", "or", "xor"].index(op)
    units.tma_store(tensor_map(tensor, type_, [9, 16]), [0, 3], shared, 0, reduce=code)
    assert np.array_equal(tensor, want)


def test_reduction_of_bf16_rounds_to_nearest_even(seed):
    import torch

    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32)).bfloat16() for _ in range(2))
    want = a + b
    target, source = a.view(torch.int16).numpy().copy(), b.view(torch.int16).numpy().copy()
    units.tma_store(tensor_map(target, BF16, [4, 64]), [0, 0], source.view(np.uint8).reshape(-1), 0, reduce=0)
    assert np.array_equal(target, want.view(torch.int16).numpy())
