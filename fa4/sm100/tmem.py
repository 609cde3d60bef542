"""Tensor memory: a map of named column spans. 512 columns of 128 lanes of 32 bits, per SM.

An address is lane << 16 | column. A kernel that owns a whole SM allocates all 512 columns, so that its columns begin
at 0 and a span's address is a compile-time constant. CTAs that share an SM have equal shares, which begin anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector

from ..core.constant import Constant
from ..pipeline.kernel import Resources
from ..pipeline.smem import SmemMap

COLUMNS = 512
LANES = 128


@dataclass(frozen=True, slots=True)
class TmemRange:
    """Columns `first` to `first + columns - 1`, 32 bits wide each; `over` names the span it shares them with."""

    first: int
    columns: int
    over: str | None = None


def cols(first: int, columns: int) -> TmemRange:
    return TmemRange(first, columns)


def alias_of(over: str, columns: int, offset: int = 0) -> TmemRange:
    """`columns` columns inside the span `over`, from its column `offset`: both live there, at different times."""
    return TmemRange(offset, columns, over)


class TmemMap(Constant):
    """Named spans; `tmem.S0` is the first column of span S0.

    Raises:
        ValueError: a span leaves the 512 columns or its alias target, or overlaps one it is not declared an alias of.
    """

    def __init__(self, **spans: TmemRange):
        self.spans: dict[str, TmemRange] = {}
        for name, span in spans.items():
            if span.over is not None:
                target = self.spans.get(span.over)
                if target is None:
                    raise ValueError(f"tmem span {name} is an alias of {span.over}, which is not declared before it")
                if span.first + span.columns > target.columns:
                    raise ValueError(f"tmem span {name} does not fit into {span.over}")
                span = TmemRange(target.first + span.first, span.columns, span.over)
            if span.first < 0 or span.columns < 1 or span.first + span.columns > COLUMNS:
                raise ValueError(f"tmem span {name} leaves the {COLUMNS} columns: {span}")
            for other, there in self.spans.items():
                apart = span.first >= there.first + there.columns or there.first >= span.first + span.columns
                related = other == span.over or (span.over is not None and span.over == there.over)
                if not apart and not related:
                    raise ValueError(f"tmem spans {name} and {other} overlap, and neither is an alias of the other")
            self.spans[name] = span

    def __getattr__(self, name: str) -> int:
        try:
            return self.spans[name].first
        except KeyError:
            raise AttributeError(f"no tmem span is named {name!r}") from None

    @property
    def end(self) -> int:
        """One past the last column in use."""
        return max(span.first + span.columns for span in self.spans.values())

    def table(self) -> str:
        """As Markdown, for the pages in docs/."""
        lines = ["| tensor memory | columns | over |", "|---|---|---|"]
        for name, span in self.spans.items():
            lines.append(f"| {name} | {span.first}-{span.first + span.columns - 1} | {span.over or ''} |")
        return "\n".join(lines)


class PlacedMap(Constant):
    """The spans of a map, counted from where the allocation begins."""

    def __init__(self, spans: TmemMap, base: Int32):
        self._spans, self._base = spans, base

    def __getattr__(self, name: str) -> Int32:
        return self._base + getattr(self._spans, name)


@dataclass(frozen=True, slots=True)
class TensorMemory(Resources):
    """An equal share of the columns for each of `per_sm` CTAs of a multiprocessor, taken by one warp (of each of `ctas`
    CTAs that work together) and given back by it. The hardware puts the address in the region `tmem` of shared memory.

    Raises:
        ValueError: the map needs more columns than the share.
    """

    warp: int
    ctas: int = 1
    per_sm: int = 1

    @property
    def columns(self) -> int:
        return COLUMNS // self.per_sm

    def acquire(self, smem: SmemMap) -> None:
        _allocate(self, smem.pointer("tmem", Int32))

    def release(self, smem: SmemMap) -> None:
        _deallocate(self, smem)

    def place(self, spans: TmemMap, smem: SmemMap) -> TmemMap | PlacedMap:
        """Where the spans lie; after `acquire` and a barrier."""
        if spans.end > self.columns:
            raise ValueError(f"a map of {spans.end} tmem columns does not fit a share of {self.columns}")
        return spans if self.per_sm == 1 else PlacedMap(spans, base(smem))


@cute.jit
def _allocate(memory: cutlass.Constexpr[TensorMemory], holder: cute.Pointer):
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == memory.warp:
        cute.arch.alloc_tmem(memory.columns, holder, is_two_cta=memory.ctas == 2)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=memory.ctas == 2)


@cute.jit
def _deallocate(memory: cutlass.Constexpr[TensorMemory], smem: cutlass.Constexpr[SmemMap]):
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == memory.warp:
        first = 0 if cutlass.const_expr(memory.per_sm == 1) else base(smem)
        share = cute.make_ptr(Int32, first, cute.AddressSpace.tmem, assumed_align=16)
        cute.arch.dealloc_tmem(share, memory.columns, is_two_cta=memory.ctas == 2)


def base(smem: SmemMap) -> Int32:
    """The address that the allocation left. It is 0 where all columns are taken; but because it is read back, the
    compiler forms addresses counted from it with one uniform addition each, where it would move every constant through
    a vector register: a fifth to a third of the instructions of an mma loop."""
    holder = cute.make_tensor(smem.pointer("tmem", Int32), cute.make_layout(1))
    return cute.arch.make_warp_uniform(holder[0])


def wait_loads() -> None:
    """The values of this thread's tcgen05.ld are in their registers."""
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)


def wait_stores() -> None:
    """This thread's tcgen05.st are in tensor memory."""
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.STORE)


def fence_after_sync() -> None:
    """Later tensor-memory accesses of this thread come after what it has learnt through barriers so far."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def lane_address(column, warp) -> Int32:
    """Tensor-memory address of `column` at the first lane that `warp` may reach."""
    return (warp % 4) << 21 | Int32(column)


def load(address, columns: int) -> list[Float32]:
    """Whole warp: this thread's lane of `columns` (a power of two) columns; valid after `wait_loads()`.

    `address` includes the warp's first lane: a warp reaches the lanes 32 * (warp % 4) to 32 * (warp % 4) + 31 only.
    """
    kind = ir.VectorType.get([columns], Int32.mlir_type) if columns > 1 else Int32.mlir_type
    loaded = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_32X32B, pointer(address))
    floats = llvm.bitcast(ir.VectorType.get([columns], Float32.mlir_type) if columns > 1 else Float32.mlir_type, loaded)
    if columns == 1:
        return [Float32(floats)]
    return [Float32(vector.extract(floats, [], [i])) for i in range(columns)]


def store(address, words: list[Int32]) -> None:
    """Whole warp: write this thread's lane of len(words) columns; done after `wait_stores()`."""
    kind = ir.VectorType.get([len(words)], Int32.mlir_type)
    values = vector.from_elements(kind, [word.ir_value() for word in words])
    nvvm.tcgen05_st(nvvm.Tcgen05LdStShape.SHAPE_32X32B, pointer(address), values)


def pointer(address):
    """The address as the LLVM pointer that tcgen05 operations take."""
    return llvm.inttoptr(llvm.PointerType.get(6), Int32(address).ir_value())
