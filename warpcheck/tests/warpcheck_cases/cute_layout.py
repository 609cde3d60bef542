"""CuTe's layout algebra, as far as the tests' models need it: a layout maps coordinates to an index."""

import numpy as np


def _flat(x) -> tuple:
    return tuple(v for item in x for v in _flat(item)) if isinstance(x, tuple) else (x,)


class Layout:
    """`Layout(shape, stride)` of nested tuples; a call takes one linear (colexicographic) index per top-level mode."""

    def __init__(self, shape: tuple, stride: tuple) -> None:
        self.modes = [(_flat(s), _flat(d)) for s, d in zip(shape, stride)]
        assert all(len(s) == len(d) for s, d in self.modes), "shape and stride differ in profile"

    def size(self, mode: int) -> int:
        return int(np.prod(self.modes[mode][0]))

    def __call__(self, *index) -> np.ndarray:
        total = 0
        for (shape, stride), i in zip(self.modes, index):
            rest = np.asarray(i)
            for n, (extent, step) in enumerate(zip(shape, stride)):
                last = n == len(shape) - 1
                total = total + (rest if last else rest % extent) * step
                rest = rest // extent
        return np.asarray(total)

    def table(self) -> np.ndarray:
        """All indices, one array dimension per mode."""
        return self(*np.meshgrid(*[np.arange(self.size(m)) for m in range(len(self.modes))], indexing="ij"))


def swizzle(bits: int, base: int, shift: int, address: np.ndarray) -> np.ndarray:
    """Swizzle<bits, base, shift>: XORs `bits` bits at `base + shift` into those at `base`."""
    return address ^ (((address >> (base + shift)) & ((1 << bits) - 1)) << base)
