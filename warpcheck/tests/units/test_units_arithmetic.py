"""Sums of matrix instructions bit for bit against exact rational arithmetic, per chip and element type."""

import numpy as np
import pytest
from test_units_fragments import MMA, WGMMA_A, from_registers, to_registers, units, warpgroup_registers
from warpcheck_cases.cute_layout import Layout
from warpcheck_cases.mma_model import place, spread, tensor_core_sums

# chip: bytes of K summed at once, bits kept; 8-bit floats of sm_89 differ; later chips are as sm_90
CHIPS = {80: (16, 24), 89: (16, 24), 90: (32, 25)}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
SHAPES = {"f16": (16, 8, 16), "bf16": (16, 8, 16), "tf32": (16, 8, 8), "e4m3": (16, 8, 32), "e5m2": (16, 8, 32)}


def run_mma(arch, a_type, b_type, d_type, a, b, c):
    m, n, k = SHAPES[a_type]
    shapes = next(v for key, v in MMA.items() if key[:3] == (m, n, k) and a_type in key[3])
    layout_c = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
    op = dict(m=m, n=n, k=k, a_type=a_type, b_type=b_type, c_type=d_type, d_type=d_type, arch=arch)
    d = units.mma(op, to_registers(a_type, a, Layout(*shapes[:2])), to_registers(b_type, b, Layout(*shapes[2:])),
                  to_registers(d_type, c, layout_c))  # fmt: skip
    return from_registers(d_type, d, layout_c, m, n)


@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize(
    "a_type, b_type, d_type",
    [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
     ("e4m3", "e5m2", "f32"), ("e5m2", "e5m2", "f32"), ("e4m3", "e4m3", "f16")],
)  # fmt: skip
@pytest.mark.parametrize("width", [3, 24, 70])
def test_mma_sync(arch, a_type, b_type, d_type, width, seed):
    rng = np.random.default_rng(seed)
    m, n, k = SHAPES[a_type]
    a, b, c = (
        spread(rng, a_type, (m, k), width),
        spread(rng, b_type, (n, k), width),
        spread(rng, d_type, (m, n), 2 * width),
    )
    span, fraction_bits = CHIPS[arch]
    output = d_type
    if arch == 89 and BYTES[a_type] == 1:
        fraction_bits, output = 13, "f16" if d_type == "f16" else "e8m13"
    want = tensor_core_sums(a, b, c, span // BYTES[a_type], fraction_bits, a_type, b_type, output)
    assert np.array_equal(run_mma(arch, a_type, b_type, d_type, a, b, c), want)


@pytest.mark.parametrize(
    "a_type, b_type, d_type", [("e4m3", "e5m2", "f32"), ("e4m3", "e4m3", "f16"), ("bf16", "bf16", "f32")]
)
def test_wgmma(a_type, b_type, d_type, seed):
    rng = np.random.default_rng(seed)
    k = 32 // BYTES[a_type]
    a, b, c = spread(rng, a_type, (64, k), 12), spread(rng, b_type, (8, k), 12), spread(rng, d_type, (64, 8), 20)
    shared = np.zeros(65536, np.uint8)
    op = dict(
        a_type=a_type,
        b_type=b_type,
        d_type=d_type,
        n=8,
        b_desc=place(units, rng, shared, b_type, b, "64B", False, 0).desc_sm90(),
    )
    layout_d = Layout(((4, 8, 4), (2, 2, 1)), ((128, 1, 16), (64, 8, 512)))
    d = warpgroup_registers(d_type, c, layout_d)
    units.wgmma(op, shared, warpgroup_registers(a_type, a, Layout(*WGMMA_A[8 * BYTES[a_type]])), d)
    flat = np.ascontiguousarray(d.reshape(4, -1, 32).transpose(1, 0, 2).reshape(-1, 128))
    narrow = BYTES[a_type] == 1
    output = "f16" if d_type == "f16" else "e8m13" if narrow else "f32"
    want = tensor_core_sums(a, b, c, k, 13 if narrow else 25, a_type, b_type, output)
    assert np.array_equal(from_registers(d_type, flat, layout_d, 64, 8), want)


@pytest.mark.parametrize("place_of", ["a", "b", "c"])
def test_infinity_and_nan(place_of, seed):
    rng = np.random.default_rng(seed)
    a, b, c = (
        rng.standard_normal((16, 16)).astype(np.float16),
        rng.standard_normal((8, 16)).astype(np.float16),
        np.ones((16, 8)),
    )
    a, b = a.astype(np.float64), b.astype(np.float64)
    {"a": a, "b": b, "c": c}[place_of][3, 5] = np.inf
    with np.errstate(invalid="ignore"):
        want = a @ b.T + c
        got = run_mma(90, "f16", "f16", "f32", a, b, c)
        assert np.array_equal(np.isinf(got), np.isinf(want)) and np.array_equal(
            got[np.isinf(got)], want[np.isinf(want)]
        )
        a[0] = -a[0]
        a[0, 0], b[:, 0], c[0] = np.inf, np.abs(b[:, 0]) + 1, -np.inf
        assert np.isnan(run_mma(90, "f16", "f16", "f32", a, b, c)[0]).all()


def test_truncation_shows(seed):
    """A sum that round-to-nearest would carry up stays below: 1 + 15 * 2^-24 products keep two bits beyond binary32."""
    a, b, c = np.zeros((16, 16)), np.zeros((8, 16)), np.ones((16, 8))
    a[:, 0], b[:, 0] = 2.0**-12, 2.0**-12 * 1.5  # 1.5 * 2^-24 of c's ulp / 2
    got = run_mma(90, "f16", "f16", "f32", a, b, c)
    assert np.array_equal(got, np.ones((16, 8)))  # nearest would give 1 + 2^-23
