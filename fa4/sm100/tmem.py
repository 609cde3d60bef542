"""Tensor memory (TMEM) of an SM: 512 columns of 128 lanes of 32 bits, as a map of named column ranges.

An address is lane << 16 | column. A kernel that owns a whole SM allocates all 512 columns: its columns begin at 0, and
the address of a range is a compile-time constant. CTAs that share an SM get equal shares with run-time base addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector

from ..core.constant import Constant
from ..pipeline.kernel import Resources
from ..pipeline.smem import SmemMap
from .tensor_memory import COLUMNS, pointer


@dataclass(frozen=True, slots=True)
class TmemRange:
    """Columns `first` to `first + columns - 1`, each 32 bits wide; `over` names the range that it aliases."""

    first: int
    columns: int
    over: str | None = None


def cols(first: int, columns: int) -> TmemRange:
    return TmemRange(first, columns)


def alias_of(over: str, columns: int, offset: int = 0) -> TmemRange:
    """`columns` columns inside the range `over`, from its column `offset`; the two are live at different times."""
    return TmemRange(offset, columns, over)


class TmemMap(Constant):
    """Map of named ranges; `tmem.S0` is the first column of range S0.

    Raises:
        ValueError: a range exceeds the 512 columns or its alias target, or overlaps a range without a declared alias.
    """

    def __init__(self, **ranges: TmemRange):
        self.ranges: dict[str, TmemRange] = {}
        for name, new in ranges.items():
            if new.over is not None:
                target = self.ranges.get(new.over)
                if target is None:
                    raise ValueError(f"tmem range {name} is an alias of {new.over}, which is not declared before it")
                if new.first + new.columns > target.columns:
                    raise ValueError(f"tmem range {name} does not fit into {new.over}")
                new = TmemRange(target.first + new.first, new.columns, new.over)
            if new.first < 0 or new.columns < 1 or new.first + new.columns > COLUMNS:
                raise ValueError(f"tmem range {name} leaves the {COLUMNS} columns: {new}")
            for other, old in self.ranges.items():
                disjoint = new.first >= old.first + old.columns or old.first >= new.first + new.columns
                aliases = other == new.over or (new.over is not None and new.over == old.over)
                if not disjoint and not aliases:
                    raise ValueError(f"tmem ranges {name} and {other} overlap, and neither is an alias of the other")
            self.ranges[name] = new

    def __getattr__(self, name: str) -> int:
        try:
            return self.ranges[name].first
        except KeyError:
            raise AttributeError(f"no tmem range is named {name!r}") from None

    @property
    def end(self) -> int:
        """Number of columns up to the last one in use."""
        return max(r.first + r.columns for r in self.ranges.values())

    def table(self) -> str:
        """Markdown table of the ranges, for the pages in docs/."""
        lines = ["| tensor memory | columns | over |", "|---|---|---|"]
        for name, r in self.ranges.items():
            lines.append(f"| {name} | {r.first}-{r.first + r.columns - 1} | {r.over or ''} |")
        return "\n".join(lines)


class OffsetTmemMap(Constant):
    """Ranges of a map, offset by the base address of the allocation."""

    def __init__(self, tmem_map: TmemMap, base: Int32):
        self._map, self._base = tmem_map, base

    def __getattr__(self, name: str) -> Int32:
        return self._base + getattr(self._map, name)


@dataclass(frozen=True, slots=True)
class TensorMemory(Resources):
    """Tensor memory of a CTA: an equal share of the columns for each of `per_sm` CTAs of an SM.

    One warp allocates and frees it (in each CTA of a pair if `ctas` = 2). The hardware writes the base address to the
    region `tmem` of shared memory.

    Raises:
        ValueError: the map needs more columns than the share.
    """

    warp: int
    ctas: int = 1
    per_sm: int = 1

    @property
    def columns(self) -> int:
        return COLUMNS // self.per_sm

    @cute.jit
    def acquire(self, smem: cutlass.Constexpr[SmemMap]) -> None:
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.warp:
            cute.arch.alloc_tmem(self.columns, smem.pointer("tmem", Int32), is_two_cta=self.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)

    @cute.jit
    def release(self, smem: cutlass.Constexpr[SmemMap]) -> None:
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.warp:
            first = 0 if const_expr(self.per_sm == 1) else base(smem)
            share = cute.make_ptr(Int32, first, cute.AddressSpace.tmem, assumed_align=16)
            cute.arch.dealloc_tmem(share, self.columns, is_two_cta=self.ctas == 2)

    def place(self, tmem_map: TmemMap, smem: SmemMap) -> TmemMap | OffsetTmemMap:
        """The map with its addresses in this CTA; valid after `acquire` and a barrier."""
        if tmem_map.end > self.columns:
            raise ValueError(f"a map of {tmem_map.end} tmem columns does not fit a share of {self.columns}")
        return tmem_map if self.per_sm == 1 else OffsetTmemMap(tmem_map, base(smem))


def base(smem: SmemMap) -> Int32:
    """Base address of the allocation, read from shared memory; 0 if the CTA owns all columns.

    mma loops add to this run-time base even if it is 0: each address is then one uniform addition. Constant addresses
    would each move through a vector register, a fifth to a third of the instructions of an mma loop.
    """
    address = cute.make_tensor(smem.pointer("tmem", Int32), cute.make_layout(1))
    return cute.arch.make_warp_uniform(address[0])


def wait_loads() -> None:
    """Wait until the registers of this thread's tcgen05.ld are valid."""
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)


def wait_stores() -> None:
    """Wait until this thread's tcgen05.st are complete."""
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.STORE)


def fence_after_sync() -> None:
    """Order later tensor-memory accesses of this thread after its barrier waits so far."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def lane_address(column: Int32 | int, warp: Int32) -> Int32:
    """Tensor-memory address of `column` at the first lane that `warp` can access."""
    return (warp % 4) << 21 | Int32(column)


def load(address: Int32 | int, columns: int) -> list[Float32]:
    """Whole warp: load this thread's lane of `columns` (a power of two from 2 on) columns; valid after `wait_loads()`.

    `address` includes the first lane of the warp: a warp can access lanes 32 * (warp % 4) to 32 * (warp % 4) + 31 only.
    """
    kind = ir.VectorType.get([columns], Int32.mlir_type)
    loaded = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_32X32B, pointer(address))
    floats = llvm.bitcast(ir.VectorType.get([columns], Float32.mlir_type), loaded)
    return [Float32(vector.extract(floats, [], [i])) for i in range(columns)]


QUAD_ROWS = 8  # that a warp has of 8 columns, four threads each


def load_quad_rows(address: Int32 | int, columns: int) -> list[list[list[Float32]]]:
    """Whole warp: load `columns` columns of 16 lanes, four threads of which share a row: thread t has columns
    2 (t % 4) and the next of every 8. Valid after `wait_loads()`.

    Returns, for the rows t // 4 and t // 4 + 8, the two values of every 8 columns.
    """
    count = columns // 2
    kind = ir.VectorType.get([count], Int32.mlir_type)
    loaded = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_16X256B, pointer(Int32(address)))
    floats = llvm.bitcast(ir.VectorType.get([count], Float32.mlir_type), loaded)
    values = [Float32(vector.extract(floats, [], [i])) for i in range(count)]
    return [[values[i : i + 2] for i in range(first, count, 4)] for first in (0, 2)]


def load_quads(address: Int32 | int, columns: int) -> list[list[list[Float32]]]:
    """The same of the warp's 32 lanes: for the rows t // 4, t // 4 + 8, + 16 and + 24."""
    return load_quad_rows(address, columns) + load_quad_rows(Int32(address) + (16 << 16), columns)


def load_and_maximum(address: Int32 | int, columns: int) -> tuple[list[Float32], Float32]:
    """The same, and the largest of the loaded numbers, NaN left out; on sm_103."""
    kind = ir.VectorType.get([columns], Float32.mlir_type)
    floats, largest = nvvm.tcgen05_ld_red(
        kind, Float32.mlir_type, nvvm.Tcgen05LdStShape.SHAPE_32X32B, nvvm.ReductionKind.MAX, pointer(address)
    )
    return [Float32(vector.extract(floats, [], [i])) for i in range(columns)], Float32(largest)


def store(address: Int32 | int, packed: list[Int32]) -> None:
    """Whole warp: store this thread's lane of len(packed) columns; complete after `wait_stores()`."""
    kind = ir.VectorType.get([len(packed)], Int32.mlir_type)
    values = vector.from_elements(kind, [x.ir_value() for x in packed])
    nvvm.tcgen05_st(nvvm.Tcgen05LdStShape.SHAPE_32X32B, pointer(address), values)
