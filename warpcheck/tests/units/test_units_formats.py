"""Narrow float formats against tables built from their definition: sign * 2^(e - bias) * (1 + m / 2^M)."""

import numpy as np
import pytest

units = pytest.importorskip(
    "warpcheck.machine._units", reason="it is in no wheel: pip install -e ./warpcheck builds it"
)

# name: exponent bits, mantissa bits, largest finite code, has infinity, has NaN
FORMATS = {
    "f16": (5, 10, 0x7BFF, True, True),
    "bf16": (8, 7, 0x7F7F, True, True),
    "e4m3": (4, 3, 0x7E, False, True),
    "e5m2": (5, 2, 0x7B, True, True),
    "e2m1": (2, 1, 0x7, False, False),
    "e2m3": (2, 3, 0x1F, False, False),
    "e3m2": (3, 2, 0x1F, False, False),
}


def magnitudes(name: str) -> np.ndarray:
    """Values of the codes 0 .. largest finite, in float64."""
    exponent_bits, mantissa_bits, top, *_ = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(top + 1)
    exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits)
    normal = np.ldexp(1.0 + mantissa / 2.0**mantissa_bits, exponent - bias)
    subnormal = np.ldexp(mantissa / 2.0**mantissa_bits, 1 - bias)
    return np.where(exponent > 0, normal, subnormal)


def rounded(name: str, values: np.ndarray, mode: str, satfinite: bool) -> np.ndarray:
    """Codes by exhaustive search among neighbours."""
    exponent_bits, mantissa_bits, top, infinity, nan = FORMATS[name]
    table = magnitudes(name)
    step = table[-1] - table[-2]
    table = np.append(table, table[-1] + step)  # where an unbounded exponent would go on: overflow
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    codes = []
    for value in values.astype(np.float64):
        if np.isnan(value):
            codes.append({"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}.get(name, top))
            continue
        negative = bool(np.signbit(value))
        magnitude = min(abs(value), 2 * table[-1])
        below = int(np.searchsorted(table, magnitude, side="right")) - 1
        if below >= len(table) - 1:
            code = top + 1 if mode in ("rn", "rna") or np.isinf(value) else None
            if code is None:
                away = (mode == "rp" and not negative) or (mode == "rm" and negative)
                code = top + 1 if away else top
        else:
            low, high = table[below], table[below + 1]
            exact = magnitude == low
            middle = (low + high) / 2
            up = {
                "rn": magnitude > middle or (magnitude == middle and below % 2 == 1),
                "rna": magnitude >= middle,
                "rz": False,
                "rp": not negative and not exact,
                "rm": negative and not exact,
            }[mode]
            code = below + bool(up)
        if code > top:
            code = top if satfinite or not (infinity or nan) else top + 1
        codes.append(code | (sign_bit if negative else 0))
    return np.array(codes, np.uint32)


def samples(name: str, rng: np.random.Generator) -> np.ndarray:
    """Random magnitudes over the format's range and beyond, every code, every midpoint and its neighbours."""
    table = magnitudes(name)
    if len(table) > 1024:
        table = table[rng.choice(len(table), 1024, replace=False)]
        table.sort()
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    spread = np.exp2(rng.uniform(np.log2(table[table > 0].min()) - 3, np.log2(table.max()) + 1.5, 4000))
    special = np.array([0.0, np.inf, np.nan, table.max() * 1.01, table.max() * 2], np.float64)
    with np.errstate(over="ignore"):
        above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
        values = np.concatenate([table, middle, above, below,
                                 spread, special]).astype(np.float32)  # fmt: skip
    return np.concatenate([values, -values])


@pytest.mark.parametrize("name", FORMATS)
def test_decode_every_code(name):
    exponent_bits, mantissa_bits, top, infinity, nan = FORMATS[name]
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    table = magnitudes(name)
    codes = np.arange(top + 1, dtype=np.uint32)
    assert np.array_equal(units.decode_floats(name, codes).astype(np.float64), table)
    assert np.array_equal(units.decode_floats(name, codes | sign_bit).astype(np.float64), -table)
    if infinity:
        assert units.decode_floats(name, np.array([top + 1], np.uint32))[0] == np.inf
    if nan:
        assert np.isnan(units.decode_floats(name, np.array([sign_bit - 1], np.uint32))[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp", "rna"])
@pytest.mark.parametrize("satfinite", [False, True])
def test_encode_rounds_like_a_search(name, mode, satfinite, seed):
    values = samples(name, np.random.default_rng(seed))
    got = units.encode_floats(name, values, mode, satfinite)
    want = rounded(name, values, mode, satfinite)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, [(values[i], hex(got[i]), hex(want[i])) for i in wrong[:5]]


@pytest.mark.parametrize("satfinite", [False, True])
def test_tf32_keeps_ten_bits(satfinite, seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    bits = values.view(np.uint32).astype(np.uint64)
    got = units.encode_floats("tf32", values, "rna", satfinite)
    want = ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32)  # half a unit of the tenth bit, sign and magnitude
    overflow = (want & 0x7F800000) == 0x7F800000
    if satfinite:
        want[overflow] = (want[overflow] & 0x80000000) | 0x7F7FE000
    assert np.array_equal(got, want)


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_ue8m0_is_a_power_of_two(mode, seed):
    rng = np.random.default_rng(seed)
    values = np.exp2(rng.uniform(-140, 127.9, 5000)).astype(np.float32)
    values = np.concatenate([values, np.exp2(np.arange(-127.0, 128)).astype(np.float32), -values])
    exponent = np.log2(np.abs(values.astype(np.float64)))
    exact = np.floor(exponent) if mode == "rz" else np.ceil(exponent)
    want = np.clip(exact, -127, 128) + 127
    want[want == 255] = 255
    assert np.array_equal(units.encode_floats("ue8m0", values, mode, False), want.astype(np.uint32))
    assert units.encode_floats("ue8m0", np.array([np.inf, 3e38], np.float32), "rp", True).tolist() == [0xFE, 0xFE]
    assert units.decode_floats("ue8m0", np.array([0, 1, 127, 254], np.uint32)).tolist() == [
        2.0**-127,
        2.0**-126,
        1.0,
        2.0**127,
    ]
    assert np.isnan(units.decode_floats("ue8m0", np.array([255], np.uint32))[0])
