"""tcgen05.mma against NumPy: operands placed by the ISA's canonical layouts, D read by CuTe's TMEM layouts.

Operands are small numbers whose products and sums are exact, so that a wrong place shows as a wrong number."""

import numpy as np
import pytest
from warpcheck_cases.cute_layout import Layout
from warpcheck_cases.mma_model import (
    EXACT,
    MODES,
    NARROW_BITS,
    Placement,
    chunk_bytes,
    encode,
    exact_matrix,
    place,
    spread,
)
from warpcheck_cases.mma_model import tensor_core_sums as sums_of_the_core

units = pytest.importorskip(
    "warpcheck.machine._units", reason="it is in no wheel: pip install -e ./warpcheck builds it"
)

KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2, "i8": 3, "mxf8f6f4": 4, "mxf4": 5, "mxf4nvf4": 6}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "u8": 0, "s8": 1}
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
COLUMNS = 512


def d_layout(m: int, n: int, ctas: int, stationary: bool = False) -> Layout:
    """(row within the CTA, column) -> lane + 128 * TMEM column, from mma_traits_sm100_frag."""
    if stationary:
        return {128: Layout((128, n), (1, 128)), 64: Layout((64, (n // 2, 2)), (1, (128, 64))),
                32: Layout((32, (n // 4, 4)), (1, (128, 32)))}[m]  # fmt: skip
    if ctas == 1 and m == 64:
        return Layout(((16, 4), n), ((1, 32), 128))
    if ctas == 2 and m == 128:
        return Layout((64, (n // 2, 2)), (1, (128, 64)))
    return Layout((128, n), (1, 128))


class Case:
    """One random instruction: memories, descriptors and the expected D."""

    def __init__(self, rng, kind, types, m, n, ctas=1, modes=("128B", "128B"), majors=(False, False), a_tmem=False,
                 d_type="f32", stationary=False):  # fmt: skip
        self.rng, self.ctas, self.m, self.n, self.k = rng, ctas, m, n, K[kind]
        self.rows = m // ctas
        self.shared = [rng.integers(0, 256, 200 * 1024, dtype=np.uint8) for _ in range(ctas)]
        self.tmem = [rng.integers(0, 2**32, (128, COLUMNS), dtype=np.uint32) for _ in range(ctas)]
        self.a, self.b = exact_matrix(rng, types[0], (m, self.k)), exact_matrix(rng, types[1], (n, self.k))
        d_format = {"f16": 0, "f32": 1, "s32": 2}[d_type]
        self.idesc = (d_format << 4 | CODES[types[0]] << 7 | CODES[types[1]] << 10 | majors[0] << 15 | majors[1] << 16
                      | (n >> 3) << 17 | (m >> 4) << 24)  # fmt: skip
        self.op = dict(kind=KINDS[kind], cta_group=ctas, idesc=self.idesc, weight_stationary=stationary)
        self.d_type = d_type
        self.layout = d_layout(m, n, ctas, stationary)
        half = ctas == 1 and m == 64 and not stationary
        self.lane = 16 * int(rng.integers(2)) if half else 0
        self.column = int(rng.integers(0, COLUMNS - 256 - 32))
        self.op["d_tmem"] = self.lane << 16 | self.column
        starts = [1024 * int(rng.integers(0, 4)), 100 * 1024]
        states = rng.bit_generator.state  # both CTAs use the same descriptors
        for cta in range(ctas):
            rng.bit_generator.state = states
            rows = self.a[cta * self.rows : (cta + 1) * self.rows]
            if a_tmem:
                self._place_a_in_tmem(cta, rows, types[0], half, stationary)
            else:
                self.op["a_desc"] = place(
                    units, rng, self.shared[cta], types[0], rows, modes[0], majors[0], starts[0]
                ).desc_sm100()
            columns = self.b[cta * n // ctas : (cta + 1) * n // ctas]
            self.op["b_desc"] = place(
                units, rng, self.shared[cta], types[1], columns, modes[1], majors[1], starts[1]
            ).desc_sm100()

    def _place_a_in_tmem(self, cta, rows, type_, half, stationary) -> None:
        """Row i in the lanes of row i of D; where the columns of D are split over lanes, each part has its copy."""
        codes = encode(units, type_, rows)
        if type_ in NARROW_BITS:  # 8-bit containers; 4 bits in the middle
            data = (codes << (2 if type_ == "e2m1" else 0)).astype(np.uint8)
        else:
            data = chunk_bytes(type_, codes).reshape(len(rows), -1)
        words = data.reshape(len(rows), -1).view(np.uint32)
        column = COLUMNS - 24
        self.op["a_tmem"] = self.lane << 16 | column
        lanes = np.unique(self.layout.table() % 128, axis=1).reshape(len(rows), -1)
        for row, copies in zip(words, lanes):
            for lane in copies:
                self.tmem[cta][self.lane + lane, column : column + words.shape[1]] = row

    def read_d(self, cta: int) -> np.ndarray:
        """D's rows of one CTA as bits: (rows, n)."""
        place = self.layout.table()
        return self.tmem[cta][self.lane + place % 128, self.column + place // 128]

    def values(self, bits: np.ndarray) -> np.ndarray:
        if self.d_type == "f16":
            return (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        return bits.view(np.float32 if self.d_type == "f32" else np.int32).astype(np.float64)

    def run(self, **changes) -> list:
        """Executes, checks every cell of TMEM, returns the footprint."""
        scale = 2.0 ** -changes.get("scale_d", 0)
        accumulate = changes.get("accumulate", False)
        if accumulate:  # start from exact numbers
            start = self.rng.integers(-64, 65, (self.m, self.n)) * (16 if self.d_type == "f32" else 1)
            place = self.layout.table()
            for cta in range(self.ctas):
                part = start[cta * self.rows : (cta + 1) * self.rows]
                word = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[self.d_type]
                bits = part.astype(word).view(np.uint16 if self.d_type == "f16" else np.uint32).astype(np.uint32)
                self.tmem[cta][self.lane + place % 128, self.column + place // 128] = bits
        before = [t.copy() for t in self.tmem]
        want = self.a @ self.b.T * changes.pop("sign", 1) + (start * scale if accumulate else 0)
        footprint = units.umma({**self.op, **changes}, self.shared, self.tmem)
        for cta in range(self.ctas):
            got = self.values(self.read_d(cta))
            assert np.array_equal(got, want[cta * self.rows : (cta + 1) * self.rows])
            if self.d_type == "f16":
                assert not (self.read_d(cta) >> 16).any()
            place = self.layout.table()
            touched = np.zeros((128, COLUMNS), bool)
            touched[self.lane + place % 128, self.column + place // 128] = True
            assert np.array_equal(self.tmem[cta][~touched], before[cta][~touched])
            listed = np.zeros_like(touched)
            for f in footprint:
                if f[0] == "tmem" and f[1] == cta and f[6]:
                    listed[f[2] : f[2] + f[3], f[4] : f[4] + f[5]] = True
            assert np.array_equal(listed, touched)
        return footprint


SHAPES = [
    (64, 8, 1),
    (64, 248, 1),
    (128, 8, 1),
    (128, 40, 1),
    (128, 256, 1),
    (128, 32, 2),
    (128, 256, 2),
    (256, 16, 2),
    (256, 256, 2),
]


@pytest.mark.parametrize("m, n, ctas", SHAPES)
@pytest.mark.parametrize("a_tmem", [False, True])
@pytest.mark.parametrize("d_type", ["f32", "f16"])
def test_f16_shapes(m, n, ctas, a_tmem, d_type, seed):
    n = max(n, 32) if a_tmem and ctas == 2 else n
    rng = np.random.default_rng(seed)
    case = Case(rng, "f16", ("f16", "f16"), m, n, ctas, a_tmem=a_tmem, d_type=d_type)
    case.run(accumulate=bool(rng.integers(2)))


@pytest.mark.parametrize("mode_a", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("mode_b", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("major_a, major_b", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("ctas", [1, 2])
def test_swizzles_and_majors(mode_a, mode_b, major_a, major_b, ctas, seed):
    rng = np.random.default_rng(seed)
    case = Case(
        rng,
        "f16",
        ("bf16", "bf16"),
        128 * ctas,
        64 * int(rng.integers(1, 5)),
        ctas,
        (mode_a, mode_b),
        (major_a, major_b),
    )
    footprint = case.run(accumulate=True)
    # The shared bytes listed are those of the operands, each once.
    listed = sorted((f[1], f[2], f[3]) for f in footprint if f[0] == "shared")
    ends = [(cta, offset + size) for cta, offset, size in listed]
    assert all(ends[i] <= listed[i + 1][:2] for i in range(len(listed) - 1))
    assert sum(size for *_, size in listed) == 2 * 16 * (case.m + case.n)


@pytest.mark.parametrize("start", [32, 64, 96])
def test_descriptor_advanced_along_k(start, seed):
    """Inside a swizzled row the next K step starts 32 bytes further on: the pattern follows the address."""
    rng = np.random.default_rng(seed)
    case = Case(rng, "f16", ("f16", "f16"), 128, 64)
    wide = Placement(rng, "128B", False, 128, 8, 8192)
    data = chunk_bytes("f16", encode(units, "f16", case.a))
    for row, offsets in enumerate(wide.offsets()):
        for chunk in range(2):
            at = offsets[start // 16 + chunk]
            case.shared[0][at : at + 16] = data[row, chunk]
    case.op["a_desc"] = wide.desc_sm100() + (start >> 4)
    case.run()


@pytest.mark.parametrize("majors", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("m, ctas", [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_tf32(majors, m, ctas, seed):
    rng = np.random.default_rng(seed)
    modes = ["128B/32B" if major else "64B" for major in majors]
    Case(rng, "tf32", ("tf32", "tf32"), m, 64, ctas, modes, majors).run(accumulate=True)
    Case(
        rng, "tf32", ("tf32", "tf32"), m, 64, ctas, modes, (False, majors[1]) if majors[0] else majors, a_tmem=True
    ).run()


@pytest.mark.parametrize("a", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("b", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("a_tmem", [False, True])
def test_f8f6f4(a, b, a_tmem, seed):
    rng = np.random.default_rng(seed)
    ctas = int(rng.integers(1, 3))
    Case(rng, "f8f6f4", (a, b), 128 * ctas, 96, ctas, (rng.choice(list(MODES)[:4]), "128B"), a_tmem=a_tmem).run(
        accumulate=True
    )


@pytest.mark.parametrize("a, b", [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")])
@pytest.mark.parametrize("majors", [(False, False), (True, True)])
def test_i8(a, b, majors, seed):
    rng = np.random.default_rng(seed)
    Case(rng, "i8", (a, b), 128, 64, 1, majors=majors, d_type="s32").run(accumulate=True)
    Case(rng, "i8", (a, b), 256, 64, 2, majors=majors, d_type="s32", a_tmem=True).run(accumulate=True)


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("a_tmem", [False, True])
def test_weight_stationary(m, n, a_tmem, seed):
    rng = np.random.default_rng(seed)
    Case(rng, "f16", ("f16", "f16"), m, n, 1, a_tmem=a_tmem, stationary=True).run(accumulate=True)


def test_negation_and_scale(seed):
    rng = np.random.default_rng(seed)
    for bits, sign in ((1 << 13, -1), (1 << 14, -1), (3 << 13, 1)):
        case = Case(rng, "f16", ("f16", "f16"), 128, 64)
        case.run(idesc=case.idesc | bits, sign=sign, accumulate=True, scale_d=int(rng.integers(0, 5)))


@pytest.mark.parametrize("ctas", [1, 2])
def test_disabled_lanes_keep_their_rows(ctas, seed):
    rng = np.random.default_rng(seed)
    case = Case(rng, "f16", ("f16", "f16"), 128 * ctas, 64, ctas)
    mask = rng.integers(0, 2**32, 4 * ctas, dtype=np.uint64)
    before = [case.read_d(cta).copy() for cta in range(ctas)]
    units.umma({**case.op, "disable_lane": mask.tolist()}, case.shared, case.tmem)
    want = case.a @ case.b.T
    off = ((mask[:, None] >> np.arange(32, dtype=np.uint64)) & 1).astype(bool).reshape(ctas, 128)
    for cta in range(ctas):
        assert np.array_equal(case.read_d(cta)[off[cta]], before[cta][off[cta]])
        assert np.array_equal(case.values(case.read_d(cta)[~off[cta]]), want[128 * cta : 128 * cta + 128][~off[cta]])


def test_sums_are_those_of_the_tensor_core(seed):
    """Random numbers of wide range, bit for bit: all 16 products and D are aligned, cut, added, cut once."""
    rng = np.random.default_rng(seed)
    case = Case(rng, "f16", ("f16", "f16"), 128, 16)
    case.a, case.b = (spread(rng, "f16", (n, 16)) for n in (128, 16))
    case.op["a_desc"] = place(units, rng, case.shared[0], "f16", case.a, "128B", False, 0).desc_sm100()
    case.op["b_desc"] = place(units, rng, case.shared[0], "f16", case.b, "128B", False, 100 * 1024).desc_sm100()
    d = spread(rng, "f32", (128, 16))
    case.tmem[0][:, case.column : case.column + 16] = d.astype(np.float32).view(np.uint32)
    units.umma({**case.op, "accumulate": True}, case.shared, case.tmem)
    want = sums_of_the_core(case.a, case.b, d, block=16, fraction_bits=25, a_type="f16", b_type="f16", output="f32")
    assert np.array_equal(case.read_d(0).view(np.float32).astype(np.float64), want)


SCALED = [("mxf8f6f4", "e4m3", "e4m3", 1), ("mxf8f6f4", "e2m1", "e5m2", 1), ("mxf8f6f4", "e3m2", "e2m3", 1),
          ("mxf4", "e2m1", "e2m1", 2), ("mxf4nvf4", "e2m1", "e2m1", 2), ("mxf4nvf4", "e2m1", "e2m1", 4)]  # fmt: skip


@pytest.mark.parametrize("kind, a_type, b_type, vector", SCALED)
@pytest.mark.parametrize("m, n, ctas", [(128, 64, 1), (128, 200, 1), (256, 256, 2), (128, 64, 2)])
def test_block_scaling(kind, a_type, b_type, vector, m, n, ctas, seed):
    """Scale factors lie as tmem_sf_frg says: row i in lane i % 32 of every warp's part, one column per 32."""
    rng = np.random.default_rng(seed)
    k, rows, dense = K[kind], m // ctas, kind != "mxf8f6f4"
    ue8m0 = kind != "mxf4nvf4" or vector == 2
    a, b = exact_matrix(rng, a_type, (m, k)), exact_matrix(rng, b_type, (n, k))
    shared = [rng.integers(0, 256, 200 * 1024, dtype=np.uint8) for _ in range(ctas)]
    tmem = [rng.integers(0, 2**32, (128, COLUMNS), dtype=np.uint32) for _ in range(ctas)]
    powers = [rng.integers(-2, 3, (count, vector)).astype(np.float64) for count in (m, n)]
    scales = [np.exp2(p) for p in powers]
    codes = [
        units.encode_floats("ue8m0" if ue8m0 else "e4m3", s.astype(np.float32), "rz" if ue8m0 else "rn", True)
        for s in scales
    ]
    ids = [
        int(rng.integers(0, 4)) if vector == 1 else 2 * int(rng.integers(0, 2)) if vector == 2 else 0 for _ in range(2)
    ]
    columns = [300, 320]
    split = ctas == 2 and m == 128
    for cta in range(ctas):
        bytes_ = tmem[cta].view(np.uint8).reshape(128, COLUMNS, 4)
        for i in range(rows):
            for part in range(4):
                bytes_[32 * part + i % 32, columns[0] + i // 32, ids[0] : ids[0] + vector] = codes[0][cta * rows + i]
        for j in range(n):
            within = j % (n // 2) if split else j
            for part in (2 * (j // (n // 2)) + np.arange(2)) if split else range(4):
                bytes_[32 * part + within % 32, columns[1] + within // 32, ids[1] : ids[1] + vector] = codes[1][j]
    states = rng.bit_generator.state
    op = dict(
        kind=KINDS[kind],
        cta_group=ctas,
        scale_vector=vector,
        d_tmem=10,
        scale_a_tmem=columns[0],
        scale_b_tmem=columns[1],
    )
    for cta in range(ctas):
        rng.bit_generator.state = states
        op["a_desc"] = place(
            units, rng, shared[cta], a_type, a[cta * rows : (cta + 1) * rows], "128B", False, 0, dense
        ).desc_sm100()
        part = b[cta * n // ctas : (cta + 1) * n // ctas]
        op["b_desc"] = place(units, rng, shared[cta], b_type, part, "128B", False, 102400, dense).desc_sm100()
    types = (1, 1) if dense else (CODES[a_type], CODES[b_type])
    op["idesc"] = (
        ids[1] << 4 | types[0] << 7 | types[1] << 10 | (n >> 3) << 17 | ue8m0 << 23 | (m >> 7) << 27 | ids[0] << 29
    )
    units.umma(op, shared, tmem)
    spread = [np.repeat(s, k // vector, axis=1) for s in scales]
    want = (a * spread[0]) @ (b * spread[1]).T
    table = d_layout(m, n, ctas).table()
    for cta in range(ctas):
        got = tmem[cta][table % 128, 10 + table // 128].view(np.float32)
        assert np.array_equal(got, want[cta * rows : (cta + 1) * rows])


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(idesc=1 << 4 | 8 << 17 | 7 << 24), "M = 112, N = 64 is not a shape"),
        (dict(idesc=1 << 4 | 8 << 17 | 8 << 24 | 5 << 7), "kind::f16 takes"),
        (dict(idesc=1 << 4 | 8 << 17 | 8 << 24 | 4), "sparse"),
        (dict(idesc=3 << 4 | 8 << 17 | 8 << 24), "accumulator type 3"),
        (dict(a_desc=0), "bits 46-48 hold 0, expected 1"),
        (dict(a_desc=1 << 46 | 3 << 61), "invalid swizzle mode 3"),
        (dict(a_desc=1 << 46 | 1 << 61), "32-byte atoms"),
        (dict(d_tmem=16 << 16), "starts at lane 16, expected 0"),
        (dict(d_tmem=480), "columns 480..543 leave tensor memory"),
    ],
)
def test_refusals_name_the_field(change, text, seed):
    case = Case(np.random.default_rng(seed), "f16", ("f16", "f16"), 128, 64)
    with pytest.raises(units.UnitError, match=text):
        units.umma({**case.op, **change}, case.shared, case.tmem)


@pytest.mark.parametrize(
    "kind, types, n, a_tmem",
    [
        ("i8", ("s8", "s8"), 16, False),  # ISA table 39: steps of 32
        ("i8", ("s8", "s8"), 48, False),
        ("f16", ("f16", "f16"), 16, True),  # asserted by CUTLASS for A in tensor memory
        ("f16", ("f16", "f16"), 48, True),
    ],
)
def test_a_pair_takes_steps_of_32_columns(kind, types, n, a_tmem, seed):
    d_type = "s32" if kind == "i8" else "f32"
    case = Case(np.random.default_rng(seed), kind, types, 256, n, 2, a_tmem=a_tmem, d_type=d_type)
    with pytest.raises(units.UnitError, match=f"M = 256, N = {n} is not a shape of cta_group::2"):
        units.umma(case.op, case.shared, case.tmem)


@pytest.mark.parametrize("ctas, n", [(1, 8), (1, 24), (2, 16), (2, 48)])
def test_columns_of_a_transposed_8bit_operand(ctas, n, seed):
    """ISA, "various combinations of N shape with .cta_group qualifier for 8bit transpose B": steps of 16 a CTA."""
    case = Case(np.random.default_rng(seed), "f8f6f4", ("e4m3", "e5m2"), 128 * ctas, 32 * ctas, ctas)
    idesc = case.idesc & ~(63 << 17) | n >> 3 << 17 | 1 << 16
    with pytest.raises(units.UnitError, match=f"N = {n} is not a shape of cta_group::{ctas}"):
        units.umma({**case.op, "idesc": idesc}, case.shared, case.tmem)


def test_every_type_has_exact_values():
    for type_, (_, values) in EXACT.items():
        if type_ not in ("s8", "u8"):
            codes = encode(units, type_, np.array(values))
            assert np.array_equal(units.decode_floats(type_, codes), np.array(values, np.float32)), type_
