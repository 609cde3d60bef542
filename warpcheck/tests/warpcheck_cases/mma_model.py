"""Matrix operands placed in shared memory by the canonical layouts of PTX ISA 9.7.16.3.3."""

from fractions import Fraction
from math import floor, frexp

import numpy as np
from warpcheck_cases.cute_layout import Layout, swizzle

# mode: bits of the swizzle, its base and shift, chunks (16 bytes) per row of the pattern, lines per group
MODES = {
    "none": (0, 4, 3, 1, 8),
    "32B": (1, 4, 3, 2, 8),
    "64B": (2, 4, 3, 4, 8),
    "128B": (3, 4, 3, 8, 8),
    "128B/32B": (2, 5, 2, 8, 4),
}
SM100_CODES = {"none": 0, "128B/32B": 1, "128B": 2, "64B": 4, "32B": 6}
SM90_CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}

# Element types: bits in shared memory as the unit counts them (a padded narrow element counts 8), exact small values.
EXACT = {
    "f16": (16, np.arange(-8, 9)), "bf16": (16, np.arange(-8, 9)), "tf32": (32, np.arange(-8, 9)),
    "e4m3": (8, np.arange(-8, 9)), "e5m2": (8, [-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8]),
    "e2m3": (8, [-7, -4, -2, -1, 0, 1, 2, 3, 5, 6, 7]), "e3m2": (8, [-8, -5, -2, -1, 0, 1, 2, 3, 4, 7]),
    "e2m1": (8, [-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6]), "s8": (8, np.arange(-128, 128)), "u8": (8, np.arange(256)),
}  # fmt: skip
NARROW_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}


def encode(units, type_: str, values: np.ndarray) -> np.ndarray:
    """Codes as uint32."""
    if type_ in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8).astype(np.uint32)
    return units.encode_floats(type_, values.astype(np.float32), "rna" if type_ == "tf32" else "rn")


def chunk_bytes(type_: str, codes: np.ndarray, dense: bool = False) -> np.ndarray:
    """Codes (..., n) to the bytes of 16-byte chunks (..., chunks, 16); narrow types padded per 16 unless `dense`."""
    bits = NARROW_BITS.get(type_, {"f16": 16, "bf16": 16, "tf32": 32}.get(type_, 8))
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(*codes.shape[:-1], -1)
    if type_ in NARROW_BITS and not dense:
        groups = stream.reshape(*codes.shape[:-1], -1, 16 * bits)
        stream = np.concatenate([groups, np.ones((*groups.shape[:-1], 128 - 16 * bits), np.uint8)], -1)
    return np.packbits(stream, axis=-1, bitorder="little").reshape(*codes.shape[:-1], -1, 16)


class Placement:
    """A canonical layout with random strides: where chunk (line, chunk) lies. In units of chunks the layout is
    K-major ((8, m), ..) or MN-major (.., (8, k)) as in the ISA's table, with T elements folded into one chunk."""

    def __init__(self, rng, mode: str, mn_major: bool, lines: int, chunks: int, start: int) -> None:
        bits, base, shift, width, group = MODES[mode]
        self.mode, self.start = mode, start
        self.pattern = (bits, base, shift)
        atom = width * group * 16
        groups, across = -(-lines // group), -(-chunks // width)
        self.leading = self.stride = 0
        pad = 1024 * int(rng.integers(0, 2)) if mode != "none" else 16 * int(rng.integers(0, 3))
        if mode == "none":
            # 8 lines of one chunk are contiguous; the two strides go to groups of lines and to chunks, either inside
            inner = 128 + pad
            line_step, chunk_step = (inner, inner * groups) if rng.integers(2) else (inner * chunks, inner)
            self.layout = Layout(((8, groups), chunks), ((16, line_step), chunk_step))
            self.leading, self.stride = (line_step, chunk_step) if mn_major else (chunk_step, line_step)
        elif mn_major:
            step = atom + pad
            line_step, chunk_step = (step, step * groups) if rng.integers(2) else (step * across, step)
            self.layout = Layout(((group, groups), (width, across)), ((16 * width, line_step), (16, chunk_step)))
            self.leading, self.stride = chunk_step, line_step
        else:
            assert chunks <= width, "one instruction never leaves a swizzled row"
            self.stride = atom + pad
            self.layout = Layout(((group, groups), chunks), ((16 * width, self.stride), 16))
        self.lines, self.chunks = lines, chunks

    def offsets(self) -> np.ndarray:
        """(line, chunk) -> byte offset."""
        line, chunk = np.meshgrid(np.arange(self.lines), np.arange(self.chunks), indexing="ij")
        return swizzle(*self.pattern, self.start + self.layout(line, chunk))

    def desc_sm100(self) -> int:
        return self._fields() | 1 << 46 | SM100_CODES[self.mode] << 61

    def desc_sm90(self) -> int:
        return self._fields() | SM90_CODES[self.mode] << 62

    def _fields(self) -> int:
        return self.start >> 4 | (self.leading >> 4) << 16 | (self.stride >> 4) << 32


def place(
    units,
    rng,
    shared: np.ndarray,
    type_: str,
    matrix: np.ndarray,
    mode: str,
    mn_major: bool,
    start: int,
    dense: bool = False,
) -> Placement:
    """Writes an (mn, k) matrix of exact values; returns where. Untouched bytes keep their noise."""
    codes = encode(units, type_, matrix.T if mn_major else matrix)
    data = chunk_bytes(type_, codes, dense)
    where = Placement(rng, mode, mn_major, data.shape[0], data.shape[1], start)
    for at, chunk in zip(where.offsets().reshape(-1), data.reshape(-1, 16)):
        shared[at : at + 16] = chunk
    return where


def exact_matrix(rng, type_: str, shape: tuple[int, int]) -> np.ndarray:
    return rng.choice(np.array(EXACT[type_][1]), shape).astype(np.float64)


# Arithmetic, as arXiv:2511.10909 reports it, in exact rational numbers.

# mantissa bits, least normal exponent, largest exponent
RANGES = {
    "f16": (10, -14, 15),
    "bf16": (7, -126, 127),
    "tf32": (10, -126, 127),
    "f32": (23, -126, 127),
    "e4m3": (3, -6, 8),
    "e5m2": (2, -14, 15),
    "e2m1": (1, 0, 2),
    "e2m3": (3, 0, 2),
    "e3m2": (2, -2, 4),
    "ue8m0": (0, -127, 127),
    "ue4m3": (3, -6, 8),
}


def spread(rng, type_: str, shape, width: int = 24) -> np.ndarray:
    """Numbers of the format over a wide range of exponents, zeros and subnormals among them."""
    mantissa_bits, least, most = RANGES[type_]
    low, high = max(least - 2, -width), min(most - 1, width)
    exponent = rng.integers(low, high + 1, shape)
    mantissa = rng.integers(1 << mantissa_bits, 2 << mantissa_bits, shape).astype(np.float64)
    step = np.maximum(exponent, least) - mantissa_bits
    value = np.ldexp(np.floor(np.ldexp(mantissa, exponent - mantissa_bits - step)), step)
    return np.where(rng.random(shape) < 0.05, 0.0, value * rng.choice([-1.0, 1.0], shape))


def _exponent(value: float, least: int) -> int | None:
    return None if value == 0 else max(frexp(value)[1] - 1, least)


def _cut(value: Fraction, step: Fraction) -> Fraction:
    whole = floor(abs(value) / step)
    return whole * step if value > 0 else -whole * step


def _rounded(value: Fraction, output: str) -> float:
    if value == 0:
        return 0.0
    bits, least = {"f32": (23, -126), "e8m13": (13, -126), "f16": (10, -14)}[output]
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent = max(exponent if abs(value) >= Fraction(2) ** exponent else exponent - 1, least)
    step = Fraction(2) ** (exponent - bits)
    # Fraction rounds ties to even
    kept, limit = (round(value / step) * step, 65520) if output == "f16" else (_cut(value, step), Fraction(2) ** 128)
    return float(kept) if abs(kept) < limit else float("inf") * (1 if value > 0 else -1)


def _aligned_sum(terms, fraction_bits: int, output: str) -> float:
    """Sum of terms (value, exponent; None for the exponent of a zero), aligned to the largest exponent and cut."""
    step = Fraction(2) ** (max([-126, *(e for _, e in terms if e is not None)]) - fraction_bits)
    return _rounded(sum(_cut(Fraction(value), step) for value, _ in terms), output)


def tensor_core_sums(a, b, c, block: int, fraction_bits: int, a_type: str, b_type: str, output: str) -> np.ndarray:
    """a (m, k), b (n, k), c (m, n) in float64 holding numbers of their formats."""
    out = np.array(c, np.float64)
    for i, j in np.ndindex(out.shape):
        for start in range(0, a.shape[1], block):
            if np.isinf(out[i, j]):
                break
            terms = [(out[i, j], _exponent(out[i, j], -126))]
            for x, y in zip(a[i, start : start + block].tolist(), b[j, start : start + block].tolist()):
                exponent = _exponent(x, RANGES[a_type][1]) + _exponent(y, RANGES[b_type][1]) if x and y else None
                terms.append((Fraction(x) * Fraction(y), exponent))
            out[i, j] = _aligned_sum(terms, fraction_bits, output)
    return out


def scaled_sums(a, b, c, a_type: str, b_type: str, factors_a, factors_b, factor_type: str) -> np.ndarray:
    """The block-scaled kinds: a (m, k), b (n, k), c (m, n), factors (m or n, blocks of K), in float64.

    K = 32: products are aligned by their exponents and those of the factors, to 25 bits. K = 64: groups of 16 products
    are aligned by the exponents of their factors, to 35 bits.
    """
    out = np.array(c, np.float64)
    k, blocks = a.shape[1], factors_a.shape[1]
    group, bits = (1, 25) if k == 32 else (16, 35)
    least = RANGES[factor_type][1]
    for i, j in np.ndindex(out.shape):
        terms = [(out[i, j], _exponent(out[i, j], -126))]
        for start in range(0, k, group):
            x, y = a[i, start : start + group].tolist(), b[j, start : start + group].tolist()
            fa, fb = (float(f[start * blocks // k]) for f in (factors_a[i], factors_b[j]))
            value = sum(Fraction(p) * Fraction(q) for p, q in zip(x, y)) * Fraction(fa) * Fraction(fb)
            exponent = None
            if value:
                exponent = _exponent(fa, least) + _exponent(fb, least)
                if group == 1:
                    exponent += _exponent(x[0], RANGES[a_type][1]) + _exponent(y[0], RANGES[b_type][1])
            terms.append((value, exponent))
        out[i, j] = _aligned_sum(terms, bits, "f32")
    return out
