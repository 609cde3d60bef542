"""Block-scaled mma.sync bit for bit against exact rational arithmetic, with scales placed by CuTe's layouts."""

import numpy as np
import pytest
from test_units_fragments import MMA, from_registers, to_registers, units
from warpcheck_cases.cute_layout import Layout
from warpcheck_cases.mma_model import scaled_sums

C = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
# mma_traits_sm120: (thread, block of K) to row + 16 * block, and to column + 8 * block. A stride of 0 is a mode of
# threads that thread-id selects from: the pairs of a quad for A, its threads for B.
SCALES_A = Layout(((2, 2, 8), 4), ((8, 0, 1), 16))
SCALES_B = Layout(((4, 8), 4), ((0, 1), 8))


def finite_codes(rng, type_: str, shape) -> np.ndarray:
    codes = rng.integers(0, 1 << BITS[type_], shape, dtype=np.uint32)
    return np.where(np.isfinite(units.decode_floats(type_, codes)), codes, 0).astype(np.uint32)


def operand(type_: str, codes: np.ndarray, layout: Layout, dense: bool) -> np.ndarray:
    """Codes (rows, k) to registers: two codes a byte if dense, otherwise e2m1 in bits 2 to 5 of a byte."""
    values = codes.T.reshape(-1)[layout.table()].astype(np.uint8)
    if dense:
        values = values[:, 0::2] | values[:, 1::2] << 4
    elif type_ == "e2m1":
        values = values << 2
    return np.ascontiguousarray(np.ascontiguousarray(values).view(np.uint32).T)


def scale_registers(rng, codes: np.ndarray, layout: Layout, byte: int, chosen: np.ndarray) -> np.ndarray:
    """Registers of the threads with factors (rows, blocks) from `byte` on in the chosen ones, and noise elsewhere."""
    data = rng.integers(0, 256, (32, 4), dtype=np.uint8)
    for thread in np.flatnonzero(chosen):
        for block in range(codes.shape[1]):
            column, row = divmod(int(layout(thread, block)), len(codes))
            data[thread, byte + block] = codes[row, column]
    return data.view(np.uint32).reshape(-1)


class Operation:
    """A block-scaled operation with random operands, factors and selectors."""

    def __init__(self, rng, a_type: str, b_type: str, vector: int, factor: str, spread: int) -> None:
        self.dense = vector > 1
        k = 64 if self.dense else 32
        shapes = MMA[(16, 8, 64, ("s4", "u4"))] if self.dense else MMA[(16, 8, 32, ("s8", "u8", "e4m3", "e5m2"))]
        codes = [finite_codes(rng, a_type, (16, k)), finite_codes(rng, b_type, (8, k))]
        self.registers = [
            operand(a_type, codes[0], Layout(*shapes[:2]), self.dense),
            operand(b_type, codes[1], Layout(*shapes[2:]), self.dense),
        ]
        low, high = (127 - spread, 128 + spread) if factor == "ue8m0" else (0, 127)  # 127 is ue4m3's NaN
        factors = [rng.integers(low, high, (count, vector), dtype=np.uint32) for count in (16, 8)]
        self.c = np.ldexp(rng.standard_normal((16, 8)), rng.integers(-spread, spread + 1, (16, 8))).astype(np.float32)
        self.threads = int(rng.integers(2)), int(rng.integers(4))
        self.bytes = tuple(vector * int(rng.integers(4 // vector)) for _ in range(2))
        lanes = np.arange(32)
        chosen = lanes // 2 % 2 == self.threads[0], lanes % 4 == self.threads[1]
        self.scales = [
            scale_registers(rng, f, layout, byte, threads)
            for f, layout, byte, threads in zip(factors, (SCALES_A, SCALES_B), self.bytes, chosen)
        ]
        self.op = dict(m=16, n=8, k=k, a_type=a_type, b_type=b_type, c_type="f32", d_type="f32", arch=120,
                       containers=not self.dense, scale_vector=vector, ue4m3=factor == "ue4m3")  # fmt: skip
        values = [units.decode_floats(t, x).astype(np.float64) for t, x in zip((a_type, b_type), codes)]
        powers = [units.decode_floats(factor, f).astype(np.float64) for f in factors]
        self.want = scaled_sums(*values, self.c.astype(np.float64), a_type, b_type, *powers, factor)

    def run(self, **changes) -> np.ndarray:
        selected = {f"scale_{x}": (s, b, t) for x, s, b, t in zip("ab", self.scales, self.bytes, self.threads)}
        d = units.mma({**self.op, **selected, **changes}, *self.registers, to_registers("f32", self.c, C))
        return from_registers("f32", d, C, 16, 8)


@pytest.mark.parametrize("a_type", NARROW)
@pytest.mark.parametrize("b_type", NARROW)
@pytest.mark.parametrize("spread", [2, 20])
def test_mxf8f6f4(a_type, b_type, spread, seed):
    case = Operation(np.random.default_rng(seed), a_type, b_type, 1, "ue8m0", spread)
    assert np.array_equal(case.run(), case.want)


@pytest.mark.parametrize("vector, factor", [(2, "ue8m0"), (4, "ue8m0"), (4, "ue4m3")])
@pytest.mark.parametrize("spread", [2, 20])
def test_mxf4(vector, factor, spread, seed):
    case = Operation(np.random.default_rng(seed), "e2m1", "e2m1", vector, factor, spread)
    assert np.array_equal(case.run(), case.want)


@pytest.mark.parametrize("vector, factor, nan", [(1, "ue8m0", 0xFF), (2, "ue8m0", 0xFF), (4, "ue4m3", 0x7F)])
def test_a_factor_that_is_nan_makes_its_row_or_column_nan(vector, factor, nan, seed):
    rng = np.random.default_rng(seed)
    a_type = "e4m3" if vector == 1 else "e2m1"
    case = Operation(rng, a_type, a_type, vector, factor, 3)
    row, column = int(rng.integers(16)), int(rng.integers(8))
    for scales, byte, thread in (
        (case.scales[0], case.bytes[0], 4 * (row % 8) + 2 * case.threads[0] + row // 8),
        (case.scales[1], case.bytes[1], 4 * column + case.threads[1]),
    ):
        scales.view(np.uint8)[4 * thread + byte + vector - 1] = nan
    want = np.zeros((16, 8), bool)
    want[row], want[:, column] = True, True
    assert np.array_equal(np.isnan(case.run()), want)


@pytest.mark.parametrize("vector, scale, byte, thread", [
    (1, "a", 4, 0), (1, "a", 0, 2), (1, "b", 0, 4), (2, "a", 1, 0), (2, "b", 3, 0), (4, "b", 1, 0),
])  # fmt: skip
def test_selectors_that_select_nothing(vector, scale, byte, thread, seed):
    a_type = "e4m3" if vector == 1 else "e2m1"
    case = Operation(np.random.default_rng(seed), a_type, a_type, vector, "ue8m0", 3)
    with pytest.raises(units.UnitError, match=f"byte {byte}, thread {thread} selects no scale factors of scale_vec"):
        case.run(**{f"scale_{scale}": (case.scales[0], byte, thread)})
