"""Pipe and cost of each machine instruction, as a table.

`occupancy`: clocks that the pipe is busy with the instruction of one warp, which is the least distance of two
instructions on the pipe. `latency`: clocks from the issue until the result can be used; 0 if a unit behind the pipe
determines it (memory, barriers, tensor cores). Each of the four schedulers of an SM has its own pipes; pipes marked
`shared` belong to the SM.

Sources. "stalls": the fewest clocks that ptxas leaves between such an instruction and the first reader of its result,
over this repository's kernels for sm_90a and sm_100a and flash-attn-4's forward (`python -m warpcheck.timing.sass`).
"guide": the table of arithmetic throughputs in the CUDA C++ Programming Guide, for 9.0 and 10.0. Other sources are
publications.

sure: A raw data, or several sources that agree; B one credible source; C an estimate between similar instructions.
`bench.calibrate` can measure B and C.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """Row of the table; see the head of the module for pipe, occupancy, latency and sure.

    opcodes: as nvdisasm writes them. An opcode matches with any further modifiers; the longest match counts. chips: of
    the row; () for all. released: clocks from the issue until its operands may be overwritten; 0: as late as the
    result. takes, slowed: beside a wgmma, clocks that it takes from the product, and clocks by which its own pipe is
    busy longer. holds: clocks that it occupies the register ports of its scheduler; the pipes fma, alu and tensor issue
    only while the ports are free.
    """

    opcodes: tuple[str, ...]
    pipe: str
    occupancy: float
    latency: float
    sure: str
    source: str
    shared: bool = False
    chips: tuple[str, ...] = ()
    takes: float = 0
    slowed: float = 0
    released: float = 0
    holds: float = 0


_SM12X = ("sm_120a", "sm_121a")
_HOLD = ("fma", "alu", "xu", "lsu")  # pipes whose instructions occupy the register ports for one clock


def _row(opcodes: str, pipe: str, occupancy: float, latency: float, sure: str, source: str, **more) -> Rate:
    more = {"holds": 1 if pipe in _HOLD else 0} | more
    return Rate(tuple(opcodes.split()), pipe, occupancy, latency, sure, source, **more)


_ALU = """
    FMNMX FMNMX3 FSEL FSET FSETP FCHK LOP LOP3 LOP32I IADD IADD3 VIADD VIADD3 VIADDMNMX VIMNMX VIMNMX3 IMNMX IABS ISETP
    ICMP SEL SHF SHL SHR LEA PRMT PLOP3 MOV MOV32I BMSK SGXT BREV FLO POPC R2P P2R CS2R I2FP I2IP VABSDIFF
"""
_UNIFORM = """
    UIADD3 ULOP3 UISETP USEL ULEA USHF UIMAD UPRMT UPLOP3 UFLO UPOPC UBREV UBMSK USGXT UIABS UVIADD UVIMNMX UFADD
    UFMUL UFFMA UFMNMX UFSEL UFSETP UF2FP UI2FP UF2I UI2F UP2UR UR2UP UCS2UR ULOP UFRND UI2I UF2F
"""
_GLOBAL = "LDG LD LDL STG ST STL RED ATOMG ATOM LDGSTS REDG CCTL CCTLL QSPC"
_TCGEN05 = "UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCMXQMMA UTCBAR UTCCP UTCSHIFT UTCATOMSWS"
_TMA = "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF"
_HAND_OFFS = "SYNCS UCGABAR_ARV UCGABAR_WAIT BAR ARRIVES LDGDEPBAR WARPGROUP WARPGROUPSET WARPSYNC"
_BRANCHES = """
    BRA BRX BRXU JMP JMX EXIT RET CALL BSSY BSYNC BREAK BMOV KILL YIELD NOP NANOSLEEP BPT PMTRIG RPCMOV LEPC
"""

# Measurements on an H100 (`bench.calibrate`).
# Beside a wgmma: products of N = 128 take 119 clocks instead of 69 with concurrent FFMA or FADD, and an FFMA takes 1.86
# instead of 1.30. FMNMX, F2FP and MUFU do not slow the product, but FMNMX and F2FP take 4.0 clocks instead of 2.06, and
# MUFU takes 10.5 instead of 8.1.
# mma.sync reads ten registers and occupies their ports for 6 clocks; 5 if its first operand is in the operand cache, 4
# if both are. Other instructions between products add to this: 8.28 clocks with two FFMA, 9.19 with two FMNMX (their
# pipe is busy for 2 clocks each). A concurrent store of 16 bytes per thread adds 3.1, stmatrix.x4 2, a shuffle 0.5.
# The operand of a MUFU is released late: softmax chains that overwrite it at once take 23.1 clocks per step.
_FLOAT = {"takes": 0.86, "slowed": 0.5}
_EXPONENTIAL = {"slowed": 2.4, "released": 14}
_OTHERS = {"slowed": 1.92}

TABLE = (
    # 128 float32 lanes per SM, 32 per scheduler; an instruction with two results occupies them twice.
    _row("FFMA FMUL FADD FHFMA FHADD FSWZADD", "fma", 1, 4, "A", "guide: 128 results; stalls", **_FLOAT),
    _row("FFMA2 FMUL2 FADD2", "fma", 2, 4, "A", "2 an SM and clock on B200 and on B300; stalls"),
    _row("HFMA2 HADD2 HMUL2 HMNMX2 HSETP2 HSET2", "fma", 1, 4, "B", "guide: 256 results, two an instruction"),
    _row("IMAD IMUL IDP", "fma", 2, 4, "B", "guide: 64 results of integer multiply and add"),
    _row("IMAD.WIDE IMAD.HI", "fma", 4, 4, "C", "twice IMAD: two registers of result; stalls"),
    # 64 lanes per SM.
    _row(_ALU, "alu", 2, 4, "B", "guide: 64 results of compare, minimum, logic, shift, integer add; stalls", **_OTHERS),
    _row("F2FP", "alu", 2, 4, "A", "2.05 on an H100 (the guide: 64 conversions)", chips=("sm_90a",), **_OTHERS),
    _row("F2FP", "alu", 4, 4, "B", "guide: 64 conversions, two elements an instruction: 32 lanes", **_OTHERS),
    # 16 lanes per SM.
    _row("MUFU", "xu", 8, 18, "A", "guide: 16 results; latency 14-18 by three lists; 17.3 on an H100", **_EXPONENTIAL),
    _row("MUFU.EX2", "xu", 4, 18, "B", "exponentials are twice as fast on B300", chips=("sm_103a", "sm_103f")),
    _row("F2I I2F F2F FRND I2I", "xu", 8, 18, "C", "same unit as MUFU"),
    # Uniform datapath: one scalar per warp.
    _row(_UNIFORM, "uniform", 2, 4, "C", "occupancy: as 16 lanes take for a warp; stalls"),
    _row("UMOV", "uniform", 2, 2, "C", "stalls"),
    _row("R2UR", "uniform", 2, 13, "B", "stalls"),
    _row("S2UR S2R", "uniform", 2, 24, "C", "as a load of shared memory"),
    _row("VOTE VOTEU MATCH ELECT", "alu", 2, 4, "C", "stalls"),
    # Load-store unit: memory, and exchange between lanes. One instruction of 32 lanes x 4 bytes per SM and clock.
    _row("LDS STS ATOMS LDSM STSM", "lsu", 1, 28, "A", "128 B an SM and clock; latency 24-29", shared=True),
    _row("LDS.64 STS.64", "lsu", 2, 29, "A", "256 B", shared=True),
    _row("LDS.128 LDSM.16.M88.4 LDSM.16.MT88.4", "lsu", 4, 33, "A", "512 B", shared=True),
    _row("STSM.16.M88.4 STSM.16.MT88.4", "lsu", 4, 33, "A", "512 B", shared=True, holds=2),
    _row("LDSM.16.M88.2 LDSM.16.MT88.2 STSM.16.M88.2 STSM.16.MT88.2", "lsu", 2, 30, "A", "256 B", shared=True),
    _row("STS.128", "lsu", 4, 33, "A", "512 B", shared=True, holds=3.1),
    _row("STAS", "lsu", 1, 0, "C", "as STS; the other CTA's memory decides", shared=True),
    _row("SHFL", "lsu", 1, 24, "A", "guide: 32 lanes", shared=True, holds=0.5),
    _row("REDUX CREDUX", "lsu", 2, 44, "C", "B300: half an instruction a clock", shared=True),
    _row("LDC LDCU ULDC", "constant", 1, 28, "C", "hits in the constant cache"),
    _row(_GLOBAL, "lsu", 4, 0, "C", "caches and memory decide", shared=True),
    # Units that the replay models by their own rules.
    _row("HMMA IMMA DMMA BMMA QMMA OMMA", "tensor", 8, 33, "B", "m16n8k16 on an A100: 512 FLOP a scheduler and clock"),
    _row("HMMA", "tensor", 6, 19, "A", "6.05 a scheduler, a chain 24.7, on an H100", chips=("sm_90a",), holds=6),
    # The least of all rates: `mma_flops` of the chip and its factors say how long a product takes.
    _row("HMMA QMMA OMMA IMMA", "tensor", 16, 28, "B", "stalls; chains 29 to 35 (sass-king)", chips=_SM12X, holds=6),
    _row("HMMA.1688", "tensor", 8, 28, "C", "half of m16n8k16", chips=_SM12X, holds=6),
    _row("HGMMA IGMMA QGMMA BGMMA", "tensor", 0, 0, "A", "law of wgmma"),
    _row(_TCGEN05, "tensor", 0, 0, "A", "law of tcgen05"),
    _row("LDTM STTM LDT STT", "tmem", 0, 0, "A", "ports of tensor memory"),
    _row(_TMA, "tma", 0, 0, "A", "law of TMA"),
    _row(_HAND_OFFS, "sync", 0, 0, "A", "laws of hand-offs"),
    _row("USETMAXREG UVIRTCOUNT ACQBULK PREEXIT ACQSHMINIT", "sync", 0, 0, "C", "rare"),
    _row("MEMBAR FENCE ERRBAR CGAERRBAR DEPBAR", "fence", 0, 0, "C", "memory decides"),
    _row(_BRANCHES, "branch", 1, 0, "C", "stalls say when the warp goes on"),
)
UNKNOWN = Rate((), "unknown", 2, 6, "C", "no row names this opcode")


@functools.cache
def rate(opcode: str, chip: str) -> Rate:
    """Return the row of an opcode on a chip such as "sm_90a"; `UNKNOWN` if there is none."""
    best, rank = UNKNOWN, (-1, False)
    for row in TABLE:
        if row.chips and chip not in row.chips:
            continue
        for name in row.opcodes:
            if (opcode == name or opcode.startswith(name + ".")) and (len(name), bool(row.chips)) > rank:
                best, rank = row, (len(name), bool(row.chips))
    return best
