"""One kernel for every microbenchmark: its body is PTX, so that what is timed is what is written here.

CuTe DSL compiles and launches it, for every chip that the DSL knows. The body stands in a frame with names for what
all bodies need, and is repeated: each repetition writes the clocks that its sections took.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Int8, Int64
from cutlass._mlir.dialects import llvm

from fa4.pipeline.smem import Tile
from fa4.pipeline.tma import TmaMap, TmaTile, descriptor_of
from fa4.runtime import jit
from fa4.runtime.device import Chip

ROUNDS = 9  # repetitions in a launch; the first warms up
BARRIERS = 1024  # bytes of shared memory before a body's own: mbarriers, 8 bytes each
SCRATCH = 4096  # bytes behind `data` where memory begins that nobody looks at
CLOCKS = 4  # clock64 and globaltimer before the first repetition, and after the last

# Names of the frame, as bodies may use them. p, q: predicates that a body may set; first: thread 0 of the CTA.
_DECLARED = """
    .reg .b64 times, ends, data, row, start, stop, t; .reg .b32 smem, room, thread, warp, lane, cta, rank, round, pass;
    .reg .pred p, q, first, more;
    mov.b64 times, $0; mov.b64 ends, $1; mov.b64 data, $2; mov.b32 smem, $3;
    add.u32 room, smem, 1024; mov.u32 thread, %tid.x; shr.u32 warp, thread, 5; and.b32 lane, thread, 31;
    mov.u32 cta, %ctaid.x; mov.u32 rank, %cluster_ctarank; setp.eq.u32 first, thread, 0;
"""


@dataclass(frozen=True)
class Section:
    """A timed stretch of a body. count: what its clocks are divided by, a number of `unit`."""

    name: str
    count: float = 1
    unit: str = "instruction"


@dataclass(frozen=True)
class TiledTensor:
    """A tensor (rows, heads, columns) of 16-bit numbers from `data` + SCRATCH on, and the boxes in which TMA reads it:
    `box` rows of one head, and `row_bytes` of each, swizzled. rows: for each CTA, in one of the heads."""

    rows: int
    columns: int
    row_bytes: int = 128
    heads: int = 16
    box: int = 128

    @property
    def tile(self) -> Tile:
        return Tile(self.box, self.columns, row_bytes=self.row_bytes)

    def rows_of(self, ctas: int) -> int:
        return self.rows * -(-ctas // self.heads)

    def nbytes(self, ctas: int) -> int:
        return 2 * self.rows_of(ctas) * self.heads * self.columns


@dataclass(frozen=True)
class Bench:
    """One microbenchmark.

    declared: the body's own registers. before: PTX that runs once. body: PTX of one repetition, in which `timed` marks
    the sections. after: PTX that runs once, to write results down. initial: what the 4-byte words at `data` hold, a
    float32 or int32 tensor; expected: what they hold after a launch of so many rounds. threads: of a CTA. ctas: of the
    grid, -n for n per SM. smem_bytes: of shared memory behind `room`. scratch: bytes from `data` + SCRATCH on, as many
    for each CTA and once more, which are not compared with anything. launches: in a row, each from what the one before
    left. chips: targets it is written for, () for all. pdl: launches may overlap. tiles: tensor in the place of
    scratch; the body names its tensor map `map`, whose coordinates are column, row and head.
    """

    name: str
    sections: tuple[Section, ...]
    body: str
    initial: Callable[[], torch.Tensor]
    expected: Callable[[torch.Tensor, int], torch.Tensor]
    declared: str = ""
    before: str = ""
    after: str = ""
    threads: int = 128
    ctas: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    scratch: int = 0
    rounds: int = ROUNDS
    chips: tuple[str, ...] = ()
    pdl: bool = False
    launches: int = 1
    tiles: TiledTensor | None = None
    notes: dict[str, object] = field(default_factory=dict)

    def nbytes(self, ctas: int) -> int:
        """Bytes of the memory at `data`; 0: what `initial` gives."""
        if self.tiles:
            return SCRATCH + self.tiles.nbytes(ctas)
        return SCRATCH + (ctas + 1) * self.scratch if self.scratch else 0


def timed(section: int, text: str, *, together: bool = True) -> str:
    """PTX of a section. together: the whole CTA meets before it and, timed with it, behind it."""
    meet = "bar.sync 0;" if together else ""
    return f"""
    {meet}
    mov.u64 start, %clock64;
    {text}
    {meet}
    mov.u64 stop, %clock64;
    sub.u64 t, stop, start;
    @first st.global.b64 [row+{8 * section}], t;
    """


def twice(text: str, label: str) -> str:
    """PTX: the text two times, as a loop; ptxas may unroll it."""
    return f"""
    mov.b32 pass, 0;
    {label}:
    {text}
    add.u32 pass, pass, 1; setp.lt.u32 more, pass, 2;
    @more bra {label};
    """


def looped(text: str, passes: int, label: str) -> str:
    """PTX: the text as often, as a loop that stays one."""
    if not passes:
        return ""
    return f"""
    mov.b32 pass, 0;
    {label}:
    .pragma "nounroll";
    {text}
    add.u32 pass, pass, 1; setp.lt.u32 more, pass, {passes};
    @more bra {label};
    """


def wait(barrier: str, parity: str, label: str) -> str:
    """PTX: block until the phase of that parity of an mbarrier is over. label: of the loop, once per body."""
    return f"""
    {label}: mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {parity};
    @!p bra {label};
    """


def init(*counts: int) -> str:
    """PTX: mbarriers from the start of shared memory on, each with its count of arrivals."""
    inits = "".join(f"@first mbarrier.init.shared::cta.b64 [smem+{8 * i}], {count};" for i, count in enumerate(counts))
    return inits + "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;"


def text(bench: Bench) -> str:
    """The whole PTX of a benchmark, a statement a line: machine code is tied to it by lines."""
    row_bytes, rounds = 8 * len(bench.sections), bench.rounds
    whole = f"""{{
    {_DECLARED}
    {".reg .b64 map; mov.b64 map, $4;" if bench.tiles else ""}
    {bench.declared}
    {bench.before}
    mad.wide.u32 ends, cta, {8 * CLOCKS}, ends;
    mad.wide.u32 row, cta, {rounds * row_bytes}, times;
    mov.u64 start, %clock64; mov.u64 stop, %globaltimer;
    @first st.global.b64 [ends], start; @first st.global.b64 [ends+8], stop;
    mov.b32 round, 0;
    AGAIN:
    .pragma "nounroll";
    {bench.body}
    add.u64 row, row, {row_bytes};
    add.u32 round, round, 1;
    setp.lt.u32 more, round, {rounds};
    @more bra AGAIN;
    mov.u64 start, %clock64; mov.u64 stop, %globaltimer;
    @first st.global.b64 [ends+16], start; @first st.global.b64 [ends+24], stop;
    {bench.after}
    }}"""
    return whole.replace(";", ";\n")


@cute.kernel
def _kernel(
    times: cute.Tensor, ends: cute.Tensor, data: cute.Tensor, tiles: TmaMap | None, ptx: cutlass.Constexpr[str]
):
    smem = cute.arch.get_dyn_smem(Int8, alignment=1024)
    operands = [times.iterator.toint(), ends.iterator.toint(), data.iterator.toint(), smem.toint()]
    if cutlass.const_expr(tiles is not None):
        operands.append(descriptor_of(tiles))
    # Not `cute.arch.inline_ptx`: it has no way to write the % of a special register.
    llvm.inline_asm(
        None, [operand.ir_value() for operand in operands], ptx, "l,l,l,r" + ",l" * (len(operands) - 4),
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


@cute.jit
def _launch(
    times: cute.Tensor, ends: cute.Tensor, data: cute.Tensor, ptx: cutlass.Constexpr[str],
    shape: cutlass.Constexpr[tuple], pdl: cutlass.Constexpr[bool], tiles: cutlass.Constexpr[TiledTensor | None], stream,
):  # fmt: skip
    ctas, threads, cluster, smem = shape
    source = None
    if cutlass.const_expr(tiles is not None):
        sizes = tiles.rows_of(ctas), tiles.columns, tiles.heads
        strides = tiles.heads * tiles.columns, 1, tiles.columns
        start = cute.recast_ptr(data.iterator + SCRATCH // 4, dtype=BFloat16)
        source = TmaTile.load(cute.make_tensor(start, cute.make_layout(sizes, stride=strides)), tiles.tile).map
    _kernel(times, ends, data, source, ptx).launch(
        grid=(ctas, 1, 1), block=(threads, 1, 1), cluster=(cluster, 1, 1), smem=smem, stream=stream, use_pdl=pdl,
    )  # fmt: skip


def compile_bench(bench: Bench, chip: Chip, sms: int) -> tuple[jit.Launcher, int]:
    """(a launcher of tensors times, ends and data; CTAs of its grid)."""
    ctas = bench.ctas if bench.ctas > 0 else -(bench.ctas or -1) * sms
    shape = (ctas, bench.threads, bench.cluster, BARRIERS + bench.smem_bytes)
    ptx = text(bench)

    def build() -> jit.Launcher:
        times, ends = (jit.fake_tensor(Int64, 1, contiguous=True) for _ in range(2))
        words = jit.fake_tensor(cutlass.Int32, 1, contiguous=True)
        return jit.compile_kernel(
            _launch, times, ends, words, ptx, shape, bench.pdl, bench.tiles, jit.current_stream(), chip=chip
        )

    tiles = dataclasses.astuple(bench.tiles) if bench.tiles else ()
    return jit.compiled(("calibrate", _own_text(), ptx, shape, bench.pdl, tiles), build, chip), ctas


@functools.cache
def _own_text() -> str:
    """Of this file: what a kernel on disk was made with."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
