"""Parameters of the clock model for each chip, with the source of each number.

Times are in cycles of the SM's clock, rates in bytes per cycle and SM. The issue model holds the cost of ordinary
instructions; these tables hold the units behind them: barriers, tensor cores, memories and copies.

sure: A raw measurements of the chip, or several that agree; B one credible measurement or a statement of the vendor; C
an estimate between known bounds. open: unpublished, so it was fitted; docs/timing.md names the data.

Sources, as the table names them:
    SemiAnalysis: github SemiAnalysisAI/microbench-blackwell (B200, 1965 MHz)
    META: facebookexperimental/triton, NVLatencyModel.cpp and its calibration notes (B200)
    TK: github StuartSul/gpu-experiments (B200)
    QRC: github ademeure/QuickRunCUDA (B300)
    FGS: FlashGPU-Sim, configurations of H100 and H200
    FV: flash_vla, unit measurements on sm_90
    HOP: arXiv 2402.13499 and 2501.12084 (H800, H100 PCIe)
    FI: github flashinfer-ai/flashinfer, issue 3628 (RTX 5060 Ti) and pull request 4149 (RTX 5090): peaks of mma.sync
    GN: gau-nernst's blog, "speed-of-light flash attention for 5090" (RTX 5090 at 400 W)
    MH: main-horse.github.io, mmapeak on an RTX 5090; only ratios, its absolute numbers exceed NVIDIA's
    SK: github florianmattana/sass-king, tensor cores (RTX 5070 Ti)
    MD: github markdewing/AI_kernels, latency (RTX 5090, RTX PRO 6000)
    IM: github kekzl/imp, pull request 169 (RTX 5090)
    TP: github zzc0721/torch-performance-test-data, issue 160 (RTX PRO 6000, Workstation Edition)
    law: follows from other numbers of the table
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


class Number(NamedTuple):
    """Parameter of a chip. See the head of the module for `sure` and `open`."""

    value: float
    sure: str
    source: str
    open: bool = False


def _A(value: float, source: str) -> Number:
    return Number(value, "A", source)


def _B(value: float, source: str) -> Number:
    return Number(value, "B", source)


def _C(value: float, source: str) -> Number:
    return Number(value, "C", source)


def _fit(value: float, source: str) -> Number:
    return Number(value, "C", source, True)


def _absent(unit: str, *names: str, value: float = 0) -> dict[str, Number]:
    """Return the numbers of a unit that the chip does not have."""
    return dict.fromkeys(names, _C(value, f"no {unit} on this chip"))


_UNKNOWN = _C(math.inf, "unknown")


@dataclass(frozen=True)
class Power:
    """Law of the clock under a power limit.

    A chip takes `at_rest` watts, and (static + tensor * share) * f^3 more at f GHz, where `share` is the part of the
    time in which the tensor cores are busy: voltage rises with the clock. most: GHz.
    """

    most: Number
    at_rest: Number
    static: Number
    tensor: Number

    def clock(self, watts: float, share: float) -> float:
        """Return the clock in GHz at which the chip takes `watts`, at most `most`.

        Raises:
            ValueError: not more than the chip takes at rest.
        """
        if watts <= self.at_rest.value:
            raise ValueError(f"watts is {watts:g}, expected more than the {self.at_rest.value:g} of a chip at rest")
        each = self.static.value + self.tensor.value * share
        return min(self.most.value, ((watts - self.at_rest.value) / each) ** (1 / 3))


@dataclass(frozen=True)
class ChipTable:
    """Parameters of a chip.

    sms: number of SMs. clock: GHz, the default for converting cycles to time. clock_backward: the same for backward
    passes, if it differs. numbers: by the names of `_replay.CHIP_NUMBERS`. l2_capacity: bytes that stay in L2.
    l2_beyond: bytes of which, read again and again, none is found there [default: the capacity]. power: law of the
    clock under a power limit; None if unknown.
    """

    chip: str
    gpu: str
    sms: int
    clock: Number
    numbers: dict[str, Number]
    clock_backward: Number | None = None
    l2_capacity: Number = _UNKNOWN
    l2_beyond: Number | None = None
    power: Power | None = None

    def clock_of(self, direction: str) -> float:
        """Return the clock in GHz. direction: "fwd" or "bwd"."""
        return (self.clock_backward if direction == "bwd" and self.clock_backward else self.clock).value

    def values(self) -> dict[str, float]:
        return {name: number.value for name, number in self.numbers.items()}

    def l2_misses(self, nbytes: float) -> float:
        """Return the share of a working set that comes from device memory each time."""
        first, last = self.l2_capacity.value, (self.l2_beyond or self.l2_capacity).value
        if nbytes <= first:
            return 0.0
        return 1.0 if nbytes >= last else (nbytes - first) / (last - first)

    def device_memory(self, read: float, outside: float, stored: float, added: float, partial: float) -> float:
        """Return the cycles that device memory takes, times the SMs.

        read, stored, added: bytes. outside: bytes that boxes read beside those. partial: sectors stored in part.
        """
        rate = self.values()
        cycles = (read + outside * rate["dram_outside"]) / rate["dram_bytes"] + stored / rate["dram_store_bytes"]
        return cycles + added / rate["dram_add_bytes"] + partial * rate["dram_partial"]

    def but(self, **values: float) -> ChipTable:
        """Return the table with other values.

        Raises:
            ValueError: the table has no such number.
        """
        unknown = sorted(set(values) - set(self.numbers))
        if unknown:
            raise ValueError(f"the table of {self.chip} has no {', '.join(unknown)}; it has {', '.join(self.numbers)}")
        changed = {name: self.numbers[name]._replace(value=value, source="given") for name, value in values.items()}
        return replace(self, numbers={**self.numbers, **changed})


_B200 = ChipTable(
    "sm_100a", "B200", 148, _fit(1.732, "fitted: flash-attn-4's forward, full, d 128, 4k and 16k; 1.82 seen (TK)"),
    {
        "launch": _C(1000, "start of a grid; not part of what a profiler calls the kernel's time"),
        "replace": _B(1000, "QRC: one CTA per 1000 cycles and SM; FGS 1200"),
        "mbarrier_arrive": _B(29, "FGS on an H100; META's 92 on a B200 holds the code around it too"),
        "mbarrier_wake": _B(43, "FGS on an H100, as there"),
        "mbarrier_try": _C(36, "a wait that need not wait; FGS on an H100: 36 until the predicate is there"),
        "named_barrier": _A(30, "META"),
        "cluster_barrier": _C(375, "QRC 373-395"),
        "mma_flops": _A(8192, "bf16, all sources"),
        **_absent("mma.sync at this rate", "mma_f16_sums", value=1),
        **_absent("mma.sync at this rate", "mma_8bit", "mma_scaled", value=2),
        **_absent("mma.sync at this rate", "mma_scaled_4bit", value=4),
        "mma_start_ss": _A(56, "SemiAnalysis: a batch takes II n + 148; law: 148 - commit - mbarrier_wake"),
        "mma_start_ts": _A(24, "SemiAnalysis: II n + 116 with A in tensor memory"),
        "mma_start_pair": _A(34, "SemiAnalysis: II n + 182, and + 150 with A in tensor memory"),
        "mma_residual_pair": _A(3, "SemiAnalysis: +1 to +6 for pairs at N <= 96"),
        "commit": _C(49, "law: what is left of 148 and of 116; MOD 52 from the product's end to the reader"),
        **_absent("wgmma", "wgmma_start", "wgmma_start_ss", "wgmma_tail", "wgmma_overhead"),
        "smem_bytes": _A(128, "all sources"),
        "smem_latency": _B(29, "QRC 24-29"),
        "tma_share": _B(0.5, "FV on an H100: copies slow concurrent products 1.05 times"),
        "tmem_bytes": _A(64, "TK: 128 x 128 float32 by a warpgroup in 282 cycles; per scheduler"),
        "tmem_load_latency": _fit(26, "TK 282 - 256; loaded kernels show up to 200"),
        "tmem_store_latency": _C(27, "TK 283 - 256"),
        "tmem_stretch": _fit(1.15, "tcgen05.ld and st during products; seen, not measured"),
        "tma_latency": _A(417, "META: 460 + 6 a KB to the reader; law: 460 - mbarrier_wake"),
        "tma_bytes": _A(170, "META: 6 cycles a KB"),
        "box_sectors": _C(0, "1: L2 gives a box of TMA in sectors, as on an H200; 0: its bytes; not measured"),
        "tma_row": _C(0, "at least, for a row of a box; on an H200 1.05; not measured"),
        "tma_cut_row": _C(0, "more for a row that the tensor's edge cuts; on an H200 0.8; not measured"),
        "tma_cut_sector": _C(0, "more if the edge is within a sector; on an H200 1; not measured"),
        "tma_store_latency": _B(130, "META: 130 + 52 a KB"),
        "tma_store_bytes": _B(20, "META: 52 cycles a KB"),
        "tma_store_cut_row": _C(0, "more for a row that the tensor's edge cuts; on an H200 1; not measured"),
        "reduce_bytes": _fit(20, "cp.reduce.async.bulk; as a store"),
        "red_bytes": _C(70, "additions by threads, as a load; on an H100 a fifth; not measured"),
        "red_port_bytes": _C(0, "additions do not delay accesses to shared memory; on an H200 they do; not measured"),
        "red_queue": _C(0, "as above"),
        "red_burst": _C(0, "as above"),
        **_absent("mma.sync that stores wait for", "store_waits"),
        "copy_lines": _C(0, "cycles a line of a quarter of a warp's cp.async; on an H200 1; not measured"),
        "copy_passes": _C(4, "of shared memory by a warp's cp.async, as a store; on an H200 1; not measured"),
        "store_read_bytes": _C(20, "no faster than it stores, as an H100; not measured"),
        "store_share": _C(1, "what a store reads of shared memory's port; not measured"),
        "code_miss": _C(0, "the first passage through code; not measured"),
        "l2_bytes": _A(70, "TK: 20.45 TB/s over 148 SMs at 1.965 GHz"),
        "l2_own_bytes": _C(70, "of what nobody else reads; on an H100 a third; not measured"),
        "gpcs": _C(8, "as an H100's; of what several SMs of one read the same comes there once"),
        "l2_latency": _B(300, "QRC, FGS"),
        "dram_bytes": _A(24.8, "TK, SemiAnalysis: 7.2 TB/s over 148 SMs at 1.965 GHz"),
        "dram_store_bytes": _C(24.8, "as reads; not measured"),
        "dram_add_bytes": _C(12.4, "as a read and a store; not measured"),
        "dram_partial": _C(0, "of a sector that a store of a box writes in part; on an H200 10 cycles; not measured"),
        "dram_outside": _C(0, "of what the sectors of a box have beside it; on an H200 0.66; not measured"),
        "dram_latency": _B(795, "QRC, FGS 790-800"),
        "dsmem_latency": _B(190, "QRC 165-222 (B300)"),
        "dsmem_bytes": _fit(20, "as FGS measured on an H200: 15-21"),
        "atomic_latency": _C(320, "as a load from L2"),
        "cancel_latency": _C(1900, "a comment in quack: about 1 us"),
    },
    _fit(1.882, "fitted: flash-attn-4's backward, full, d 128, 4k and 16k; 1.965 is the most"),
    _A(78e6, "TK: loads run at full speed up to 78 MB of the 126"),
)  # fmt: skip

# Units other than these are as a B200's; exponentials are in `sass.pipes`.
_B300 = replace(
    _B200, chip="sm_103a", gpu="B300", sms=160,
    clock=_fit(1.647, "fitted: flash-attn-4's forward, full, d 128, 16k: 1882 TFLOP/s (its pull request 2605)"),
    clock_backward=None,
    numbers={
        **_B200.numbers,
        "l2_bytes": _C(65, "law: a B200's 20.45 TB/s over 160 SMs at 1.965 GHz"),
        "dram_bytes": _C(27.3, "law: a B200's 7.2 TB/s over 160 SMs at 1.647 GHz; NVIDIA names 8 TB/s for both"),
        "dram_store_bytes": _C(27.3, "as reads; not measured"),
        "dram_add_bytes": _C(13.65, "as a read and a store; not measured"),
    },
)  # fmt: skip

_H100 = ChipTable(
    "sm_90a", "H100", 132, _B(1.71, "cycles over time of single forwards, Nsight Compute: 1.71 to 1.8"),
    {
        "launch": _B(4400, "of kernels with 64 short CTAs: elapsed cycles less those with a CTA, Nsight Compute"),
        "replace": _B(1200, "FGS"),
        "mbarrier_arrive": _A(19, "bench.calibrate: 69 one way, code around it included; 29 to 43 as FGS has it"),
        "mbarrier_wake": _A(29, "as there"),
        "mbarrier_try": _B(36, "FGS: until the predicate is there"),
        "named_barrier": _A(30, "bench.calibrate: 49 one way with the code around it; FGS 30"),
        "cluster_barrier": _A(60, "bench.calibrate: 72 relaxed; 753 with release and acquire, nearly all of it fences"),
        "mma_flops": _A(4096 * 4 / 6.06, "bench.calibrate: m16n8k16 with 4 warps a scheduler 6.06 cycles; HOP 6.36"),
        "mma_f16_sums": _C(1, "as an A100; not measured"),
        "mma_8bit": _C(2, "int8 of an A100; not measured"),
        **_absent("block-scaled mma.sync", "mma_scaled", value=2),
        **_absent("block-scaled mma.sync", "mma_scaled_4bit", value=4),
        **_absent("tcgen05", "mma_start_ss", "mma_start_ts", "mma_start_pair", "mma_residual_pair", "commit"),
        "wgmma_start": _A(10, "bench.calibrate: a batch with A in registers takes N / 2 a product and 44"),
        "wgmma_start_ss": _A(20, "bench.calibrate: 10 more with A in shared memory"),
        "wgmma_tail": _A(24, "bench.calibrate: what is left of 44"),
        "wgmma_overhead": _A(0, "bench.calibrate: 16 products take 16 N / 2 more than none, two warpgroups or one"),
        "smem_bytes": _A(128, "all sources"),
        "smem_latency": _A(23, "bench.calibrate: a chain of loads 23.4, of ldmatrix.x4 35 with an addition each"),
        "tma_share": _A(0, "bench.calibrate: products take 69 cycles with and without 82 bytes a cycle copied in"),
        **_absent("tensor memory", "tmem_bytes", value=64),
        **_absent("tensor memory", "tmem_load_latency", "tmem_store_latency"),
        **_absent("tensor memory", "tmem_stretch", value=1),
        "tma_latency": _A(320, "bench.calibrate: 1 KiB is there after 377 to 516, with issue and wake-up"),
        "tma_bytes": _A(105, "bench.calibrate: one SM, four of 32 KiB in flight: 9.8 cycles a KiB"),
        "box_sectors": _A(1, "bench.calibrate on an H200: boxes that the tensor's edge cuts are no faster"),
        "tma_row": _A(1.05, "bench.calibrate on an H200: tiles of 128 rows in boxes of 64 bytes, 1.05 cycles a row"),
        "tma_cut_row": _A(0.8, "bench.calibrate on an H200: tiles of rows of 160 and 192 bytes, less those of 128"),
        "tma_cut_sector": _A(1, "as there: tiles of rows of 144 bytes"),
        "tma_store_latency": _A(100, "bench.calibrate: 131 for 1 KiB"),
        "tma_store_bytes": _A(32, "bench.calibrate: 1114 cycles for 32 KiB"),
        "tma_store_cut_row": _A(1, "bench.calibrate on an H200: rows of 160 and 192 bytes; 1 more if cut in a sector"),
        "reduce_bytes": _A(14, "bench.calibrate: all SMs, each to its own bytes: 73 cycles a KiB; one alone 40"),
        "red_bytes": _A(17.2, "bench.calibrate: 4 bytes a thread, all SMs 59.5 cycles a KiB; 16 bytes a thread 41.4"),
        "red_port_bytes": _A(28, "bench.calibrate: one SM, 4 bytes a thread: 18.3 cycles for 4 warps"),
        "red_queue": _A(100, "bench.calibrate on an H200: beside additions, ldmatrix takes 135 cycles instead of 32"),
        "red_burst": _fit(2000, "additions that L2 has not taken, in cycles; with portable backwards in view"),
        "store_waits": _A(1, "bench.calibrate: stores of 4 bytes beside mma.sync take 7.4 cycles instead of 4.4"),
        "copy_lines": _A(1.03, "bench.calibrate on an H200: cp.async of rows of 192 bytes by segments of 64: 8.2"),
        "copy_passes": _A(1, "bench.calibrate on an H200: ldmatrix beside cp.async 18.3 cycles instead of 16.6"),
        "store_read_bytes": _A(32, "bench.calibrate: a store has read its bytes when it is complete, an addition too"),
        "store_share": _C(1, "what a store reads of shared memory's port; not measured"),
        "code_miss": _A(8, "bench.calibrate: the first passage through code takes 15.6 cycles for 8 FFMA, then 8"),
        "l2_bytes": _A(80, "bench.calibrate: all SMs read the same: 12.8 cycles a KiB"),
        "l2_own_bytes": _A(29, "bench.calibrate: each SM reads its own: 34.7 cycles a KiB"),
        "gpcs": _A(8, "bench.calibrate: what 2 to 8 neighbours read comes at 31 to 32, 16: 40 to 51, 33: 75"),
        "l2_latency": _A(270, "bench.calibrate: a chain of loads 281"),
        "dram_bytes": _A(14, "TK 3.24 TB/s"),
        "dram_store_bytes": _C(12.4, "law: an H200's share of reads, 16 of 18.1"),
        "dram_add_bytes": _C(4.5, "law: an H200's share of reads, 5.8 of 18.1"),
        "dram_partial": _A(10, "bench.calibrate on an H200: stores of tiles of rows of 144 bytes"),
        "dram_outside": _B(0.66, "bench.calibrate on an H200: loads of tiles of rows of 144 to 192 bytes; 0.4 to 0.9"),
        "dram_latency": _A(910, "bench.calibrate: 16 KiB that nobody has touched after 1159, from L2 after 516"),
        "dsmem_latency": _A(187, "180-193"),
        "dsmem_bytes": _B(20, "FGS on an H200: loads 19.9, stores 18.9, bulk 21.3"),
        "atomic_latency": _A(410, "bench.calibrate: a chain of atomic additions 424"),
        **_absent("cluster launch control", "cancel_latency", value=1900),
    },
    l2_capacity=_A(34e6, "TK: loads run at full speed up to 34 MB"),
    l2_beyond=_A(46e6, "TK: at 4.7 TB/s with 40 MB, between the 8.2 of L2 and the 3.24 of device memory"),
    power=Power(
        _A(1.98, "NVIDIA"), _C(100, "between the 70 of a chip without work and what its memory takes"),
        _fit(50, "as below"),
        _fit(147.5, "14 rows of suite hopper, d 64 and d 128, 1k and 4k, on an H100 of 700 W: bench.held_out"),
    ),
)  # fmt: skip

# Multiprocessors and clocks are an H100's. Rates are per cycle of an SM at 1.97 GHz.
_H200 = replace(
    _H100, gpu="H200",
    numbers={
        **_H100.numbers,
        "dram_store_bytes": _A(16, "bench.calibrate: stores of tiles of 302 MB, rows of 128 and 256 bytes"),
        "dram_add_bytes": _A(5.8, "bench.calibrate: bulk additions to a working set of 121 MB, 174 cycles a KiB"),
        "dram_bytes": _A(18.1, "bench.calibrate: a working set of 121 MB, 56.7 cycles a KiB; 4.7 of 4.8 TB/s"),
        "l2_own_bytes": _A(35.5, "bench.calibrate: each SM its own, 28.8 cycles a KiB of 32 KiB each, 30.5 of 16 KiB"),
        "red_bytes": _A(20.3, "bench.calibrate: 4 bytes a thread, all SMs 50 cycles a KiB"),
        "reduce_bytes": _A(16, "bench.calibrate: 64 cycles a KiB, also if 2 to 16 SMs add to the same bytes"),
    },
    l2_capacity=_A(43e6, "bench.calibrate: loads run at full speed up to 43 MB"),
    l2_beyond=_A(55e6, "bench.calibrate: 51.9 cycles a KiB with 52 MB, between the 30.1 of L2 and 60 of 61 MB"),
)  # fmt: skip

_RTX_5090 = ChipTable(
    "sm_120a", "RTX 5090", 170, _C(2.8, "law: FI has products at 253 TFLOP/s, 2.91 GHz, and GEMMs at 237, 2.72"),
    {
        **_H100.numbers,
        **_absent("wgmma", "wgmma_start", "wgmma_start_ss", "wgmma_tail", "wgmma_overhead"),
        "launch": _C(4400, "as an H100; not measured"),
        "replace": _C(1200, "as an H100; not measured"),
        "mbarrier_arrive": _C(19, "as an H100; not measured"),
        "mbarrier_wake": _C(29, "as an H100; not measured"),
        "mbarrier_try": _C(36, "as an H100; not measured"),
        "named_barrier": _C(30, "as an H100; not measured"),
        "cluster_barrier": _C(60, "as an H100; not measured"),
        "mma_flops": _A(512, "law: 209.5 TFLOP/s (NVIDIA, GN) over 170 SMs at 2.407 GHz; half of the sums in float16"),
        "mma_f16_sums": _A(2, "FI on an RTX 5060 Ti: 103 TFLOP/s against 51"),
        "mma_8bit": _A(2, "FI: 506 TFLOP/s against 253"),
        "mma_scaled": _A(4, "FI: 993 TFLOP/s against 253; 6-bit operands may have half of it"),
        "mma_scaled_4bit": _B(8, "MH: 1474 TFLOP/s against 737 of mxf8"),
        "smem_latency": _B(23, "SK on an RTX 5070 Ti: a chain of ldmatrix 33, on an H100 35"),
        "tma_share": _C(0.5, "as FV on an H100; not measured"),
        "tma_latency": _C(430, "an H100's 320, and 110 more of L2's latency; not measured"),
        "tma_bytes": _B(9.7, "IM: tiles of 16 and 32 KiB at 4.6 TB/s on all SMs, at about 2.8 GHz"),
        "box_sectors": _C(0, "on an H200 1; not measured"),
        "tma_row": _C(0, "on an H200 1.05; not measured"),
        "tma_cut_row": _C(0, "on an H200 0.8; not measured"),
        "tma_cut_sector": _C(0, "on an H200 1; not measured"),
        "tma_store_cut_row": _C(0, "on an H200 1; not measured"),
        "dram_partial": _C(0, "on an H200 10 cycles; not measured"),
        "dram_outside": _C(0, "on an H200 0.66; not measured"),
        "tma_store_latency": _C(100, "as an H100; not measured"),
        "tma_store_bytes": _C(9.7, "as its loads; not measured"),
        "reduce_bytes": _fit(5, "half of its loads, as an H100; not measured"),
        "red_bytes": _fit(17.2, "as an H100; not measured"),
        "red_port_bytes": _C(0, "on an H200 additions delay accesses to shared memory; not measured"),
        "red_queue": _C(0, "as above"),
        "red_burst": _C(0, "as above"),
        "store_waits": _C(0, "on an H200 1; not measured"),
        "copy_lines": _C(0, "on an H200 1; not measured"),
        "copy_passes": _C(4, "on an H200 1; not measured"),
        "store_read_bytes": _C(9.7, "as its stores; not measured"),
        "code_miss": _C(8, "as an H100; not measured"),
        "l2_bytes": _C(12.6, "IM: cp.async of tiles of 32 KiB at 6.0 TB/s on all SMs; 14.2 of 16 KiB, partly from L1"),
        "l2_own_bytes": _C(12.6, "of what nobody else reads; not measured"),
        "gpcs": _B(11, "NVIDIA: 12 on the whole die of 192 SMs; law: 170 / 16"),
        "l2_latency": _A(360, "MD: a chain of loads"),
        "dram_bytes": _B(3.76, "NVIDIA: 1792 GB/s over 170 SMs at 2.8 GHz"),
        "dram_store_bytes": _C(3.76, "as reads; not measured"),
        "dram_add_bytes": _C(1.88, "as a read and a store; not measured"),
        "dram_latency": _A(936, "MD: a chain of loads"),
        **_absent("cluster of several SMs", "dsmem_latency", value=190),
        **_absent("cluster of several SMs", "dsmem_bytes", value=20),
        "atomic_latency": _C(500, "an H100's 410, and 90 more of L2's latency; not measured"),
    },
    l2_capacity=_B(96 << 20, "NVIDIA"),
)  # fmt: skip

_RTX_PRO_6000 = replace(
    _RTX_5090, gpu="RTX PRO 6000", sms=188,
    clock=_C(1.9, "law: a bf16 GEMM of 8192 at 350 TFLOP/s (TP), if it has 95 % of the peak; NVIDIA's boost: 2.617"),
    numbers={
        **_RTX_5090.numbers,
        "mma_flops": _B(1024, "law: 503.8 TFLOP/s (NVIDIA) over 188 SMs at 2.617 GHz: float32 sums at the full rate"),
        "mma_f16_sums": _C(1, "law: only GeForce has float32 sums at half the rate"),
        "mma_scaled": _B(2, "as unscaled operands of 8 bits: NVIDIA's rate of FP8"),
        "mma_scaled_4bit": _B(4, "law: 4000 TOPS (NVIDIA) of sparse FP4"),
        "gpcs": _B(12, "NVIDIA"),
        "l2_latency": _A(352, "MD: a chain of loads"),
        "dram_bytes": _B(5.0, "NVIDIA: 1792 GB/s over 188 SMs at 1.9 GHz"),
        "dram_store_bytes": _C(5.0, "as reads; not measured"),
        "dram_add_bytes": _C(2.5, "as a read and a store; not measured"),
        "dram_latency": _A(864, "MD: a chain of loads"),
    },
    l2_capacity=_B(128 << 20, "NVIDIA"),
)  # fmt: skip

_GB10 = replace(
    _RTX_PRO_6000, chip="sm_121a", gpu="GB10", sms=48,
    clock=_B(2.4, "github hoesing/spark-gpu-throttle-check: unless it is throttled"),
    numbers={
        **_RTX_PRO_6000.numbers,
        "mma_flops": _B(1024, "law: 1 PFLOP/s (NVIDIA) of sparse FP4 is 4340 of dense FP4 a cycle and SM, 4 x 1024"),
        "gpcs": _C(4, "16 SMs each, as GB202, and one more; not published"),
        "l2_latency": _C(360, "as an RTX 5090; not measured"),
        "dram_bytes": _B(2.37, "NVIDIA: 273 GB/s over 48 SMs at 2.4 GHz"),
        "dram_store_bytes": _C(2.37, "as reads; not measured"),
        "dram_add_bytes": _C(1.185, "as a read and a store; not measured"),
        "dram_latency": _C(936, "as an RTX 5090; not measured"),
    },
    l2_capacity=_B(24 << 20, "NVIDIA"),
)  # fmt: skip

GPUS = {table.gpu: table for table in (_B200, _B300, _H100, _H200, _RTX_5090, _RTX_PRO_6000, _GB10)}
# Of the GPUs that `machine.chips` names.
TABLES = {table.chip: table for table in (_B200, _B300, _H100, _RTX_5090, _GB10)}


def chip_table(chip: str) -> ChipTable:
    """Return the table of a chip.

    Raises:
        ValueError: there is none.
    """
    if chip not in TABLES:
        raise ValueError(f"chip is {chip!r}, expected one of {', '.join(TABLES)}: the clock has numbers of no other")
    return TABLES[chip]
