"""Sums of O in float32. A tensor core adds e4m3 products with 13 bits of the largest term and cuts off the rest, so the
error of a long sum grows with its length. Every 2048 unmasked keys, O is added to a sum in shared memory instead. For
wide heads there is room for sums of bfloat16 only: an addition then errs by 0.2 %, weights of e4m3 by up to 6 %.

A thread adds its own elements. The memory of a warp's sums later holds its rows of O on their way out.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from ....core.constant import Constant
from ....core.vec_io import bits, load_floats, load_halves, pack_word, store_vec
from ....fwd.device.output import wait_stores_read
from ....pipeline.fragment import ROWS_PER_THREAD

PERIOD = 16  # key blocks after which O is added
WARP, ACCESS = 32, 16  # threads; bytes of an access of a thread


class Sums(Constant):
    """O of a consumer: what the tensor cores have added since the last time, `o`, and the sum at `address`, for this
    warp. since: factor of that sum for the row maxima that have grown since."""

    dtype: type[cutlass.Numeric] = Float32

    def __init__(self, o: cute.Tensor, address: Int32):
        self.o, self.since = o, cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.address = address + cute.arch.lane_idx() * ACCESS

    def reset(self) -> None:
        self.o.fill(0.0)
        self.since.fill(1.0)

    def rescale(self, factor: cute.Tensor, has_grown: Boolean) -> None:
        """Multiply by `factor`, row by row, if the scaled maximum of a row of the warp has grown."""
        _rescale(self, factor, has_grown)

    def add_part(self, part: Int32, parts: Int32) -> None:
        """Move O to the sum, after a part of the blocks that is not the last one."""
        _add_part(self, part, parts)

    def finish(self, parts: Int32) -> None:
        """Set O to all of the sum, of so many parts."""
        _finish(self, parts)

    def places(self) -> list[tuple[range, cute.Pointer]]:
        """Return the indices of the elements of each access, and their place in the sum."""
        count = ACCESS * 8 // self.dtype.width
        return [
            (
                range(first, first + count),
                cute.make_ptr(
                    self.dtype, self.address + i * WARP * ACCESS, cute.AddressSpace.smem, assumed_align=ACCESS
                ),
            )
            for i, first in enumerate(range(0, cute.size(self.o), count))
        ]

    def store(self) -> None:
        """Replace the sum by O."""
        for indices, place in self.places():
            store_vec(place, self.packed([self.o[i] for i in indices]))

    def add(self) -> None:
        """Add the sum to O."""
        for indices, place in self.places():
            for i, x in zip(indices, self.loaded(place)):
                self.o[i] = x * self.since[i // 2 % 2] + self.o[i]

    def packed(self, values: list[Float32]) -> list[Int32]:
        return [bits(x) for x in values]

    def loaded(self, place: cute.Pointer) -> list[Float32]:
        return load_floats(place, ACCESS // 4)


class NarrowSums(Sums):
    """Sums in bfloat16."""

    dtype = BFloat16

    def packed(self, values: list[Float32]) -> list[Int32]:
        return [pack_word(values[i : i + 2], self.dtype) for i in range(0, len(values), 2)]

    def loaded(self, place: cute.Pointer) -> list[Float32]:
        return load_halves(place, self.dtype)


@cute.jit
def _rescale(sums: Sums, factor: cute.Tensor, has_grown: Boolean):
    if has_grown:
        for i in range(cute.size(sums.o)):
            sums.o[i] = sums.o[i] * factor[i // 2 % 2]
        for r in range(ROWS_PER_THREAD):
            sums.since[r] = sums.since[r] * factor[r]


@cute.jit
def _add_part(sums: Sums, part: Int32, parts: Int32):
    if part < parts - 1:
        if part > 0:
            sums.add()
        else:
            wait_stores_read()  # of the tile before, from the same memory
        sums.store()
        sums.reset()


@cute.jit
def _finish(sums: Sums, parts: Int32):
    if parts > 1:
        sums.add()
