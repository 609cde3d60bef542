"""TMA without a tensor map: latency by bytes, bytes a clock of one SM and of all, stores, reductions; and atomics."""

from __future__ import annotations

import torch

from .frame import SCRATCH, Bench, Section, init, timed, wait

SIZES = (1024, 4096, 16384, 32768)
STAGES, LOADS = 4, 64  # of a stream
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{source}], {bytes}, [{barrier}];"
_EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};"


def _words(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


def _loads() -> Bench:
    """One load at a time, waited for. The last one's bytes are stored behind the source to be looked at."""
    most = max(SIZES)
    body = ""
    for i, size in enumerate(SIZES):
        one = _EXPECT.format(barrier="smem", bytes=size)
        one += _LOAD.format(to="room", source="data", bytes=size, barrier="smem") + wait("smem", "parity", f"HERE{i}")
        body += timed(i, f"@!first bra OTHERS{i};\n{one}\nOTHERS{i}:", together=False)
        body += "xor.b32 parity, parity, 1; bar.sync 0;"
    copy = f"""
    bar.sync 0; shl.b32 place, thread, 2; cvt.u64.u32 wide, place; add.u64 out, data, wide; add.u32 from, room, place;
    COPY: ld.shared.b32 word, [from]; st.global.b32 [out+{most}], word;
    add.u32 from, from, 512; add.u64 out, out, 512; add.u32 place, place, 512; setp.lt.u32 p, place, {most};
    @p bra COPY;
    """

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        return before[: most // 4].repeat(2)

    return Bench(
        "bulk load, one at a time", tuple(Section(f"{size} bytes", 1, "load") for size in SIZES), body,
        lambda: torch.cat([_words(most // 4), torch.zeros(most // 4, dtype=torch.int32)]), expected,
        declared=".reg .b32 parity, place, from, word; .reg .b64 wide, out;",
        before="mov.b32 parity, 0;" + init(1),
        # The thread that waited has seen the bytes; others meet it first.
        after=copy, smem_bytes=most,
    )  # fmt: skip


STREAM = ".reg .b32 again, load, stage, barrier, to, parity, limit; .reg .b64 source;"  # registers of a stream


def stream(issue: str, nbytes: int, loads: int | str = LOADS) -> str:
    """PTX of thread 0: loads of `nbytes` each, STAGES in flight.

    issue: PTX of the load with the number `load` to `to`, counted by `barrier`. loads: their number, a multiple of
    STAGES, or a register that holds it.
    """
    return f"""
    @!first bra OTHERS;
    mov.b32 load, 0; mov.b32 limit, {loads};
    NEXT:
    and.b32 stage, load, {STAGES - 1};
    mad.lo.u32 barrier, stage, 8, smem;
    mad.lo.u32 to, stage, {nbytes}, room;
    setp.lt.u32 q, load, {STAGES};
    @q bra FREE;
    shr.u32 parity, load, {STAGES.bit_length() - 1}; add.u32 parity, parity, 1; xor.b32 parity, parity, again;
    and.b32 parity, parity, 1;
    {wait("barrier", "parity", "BUSY")}
    FREE:
    {_EXPECT.format(barrier="barrier", bytes=nbytes)}
    {issue}
    add.u32 load, load, 1;
    setp.lt.u32 q, load, limit;
    @q bra NEXT;
    shr.u32 load, limit, {STAGES.bit_length() - 1}; and.b32 load, load, 1; xor.b32 again, again, load;
    xor.b32 parity, again, 1;
    mov.b32 stage, 0;
    LAST:
    mad.lo.u32 barrier, stage, 8, smem;
    {wait("barrier", "parity", "DRAIN")}
    add.u32 stage, stage, 1;
    setp.lt.u32 q, stage, {STAGES};
    @q bra LAST;
    OTHERS:
    """


def bulk_load(nbytes: int) -> str:
    """PTX: load bytes from `source`, as `stream` issues them."""
    return _LOAD.format(to="to", source="source", bytes=nbytes, barrier="barrier")


def _stream(size: int, everywhere: bool, readers: int = 0) -> Bench:
    """STAGES loads in flight, from an L2-resident megabyte; a grid of one CTA, or one for each SM. readers: so many
    neighbours read the same bytes, the next ones others [default: all the same]."""
    span = STAGES * size
    whose = "" if not readers else ", each its own" if readers == 1 else f", {readers} the same"
    return Bench(
        f"bulk loads, {STAGES} of {size} bytes in flight, {'all SMs' if everywhere else 'one SM'}{whose}",
        (Section("stream", LOADS * size / 1024, "KiB"),),
        timed(0, stream(f"mad.wide.u32 source, stage, {size}, data; {bulk_load(size)}", size)),
        lambda: _words(SCRATCH // 4 if readers else span // 4), lambda before, rounds: before, declared=STREAM,
        before="mov.b32 again, 0;" + init(*[1] * STAGES)
               + (f"div.u32 rank, cta, {readers}; mad.wide.u32 data, rank, {span}, data; add.u64 data, data, {SCRATCH};"
                  if readers else ""),
        scratch=span if readers else 0, ctas=-1 if everywhere else 1, smem_bytes=span,
    )  # fmt: skip


_FAR = 2 << 20  # bytes of each CTA: more than L2 holds, of all SMs together


def _from_dram(everywhere: bool, size: int = 16384) -> Bench:
    """One load at a time from where nobody has been since the memory was cleared, a grid of one CTA or one for each
    SM. L2 may still hold what was cleared last."""
    one = _EXPECT.format(barrier="smem", bytes=size)
    one += _LOAD.format(to="room", source="source", bytes=size, barrier="smem") + wait("smem", "parity", "HERE")
    apart = _FAR // 16
    body = f"mad.wide.u32 source, round, {apart}, far;" + timed(0, f"@!first bra OTHERS;\n{one}\nOTHERS:")
    return Bench(
        f"bulk load from DRAM, {'all SMs' if everywhere else 'one SM'}", (Section(f"{size} bytes", 1, "load"),),
        body + "xor.b32 parity, parity, 1;", lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32),
        lambda before, rounds: before, declared=".reg .b32 parity; .reg .b64 source, far;",
        before=f"mov.b32 parity, 0; mad.wide.u32 far, cta, {_FAR}, data; add.u64 far, far, {SCRATCH};" + init(1),
        scratch=_FAR if everywhere else 64 * _FAR, ctas=-1 if everywhere else 1, smem_bytes=size,
    )  # fmt: skip


def _stores() -> Bench:
    """Stores and reductions until they are complete, and until shared memory may be written again."""
    most = max(SIZES)
    fill = f"""
    mov.f32 one, 0f3F800000; shl.b32 place, thread, 2;
    FILL: add.u32 to, room, place; st.shared.f32 [to], one; add.u32 place, place, 512;
    setp.lt.u32 p, place, {most}; @p bra FILL;
    fence.proxy.async.shared::cta; bar.sync 0;
    """
    body, sections = "", []
    kinds = (("store", "cp.async.bulk.global.shared::cta.bulk_group", ""),
             ("add", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", most))  # fmt: skip
    for kind, opcode, offset in kinds:
        for size in SIZES:
            for until, read in (("complete", ""), ("read", ".read")):
                i = len(sections)
                one = f"{opcode} [data+{offset or 0}], [room], {size}; cp.async.bulk.commit_group;"
                one += f"cp.async.bulk.wait_group{read} 0;"
                body += timed(i, f"@!first bra OTHERS{i};\n{one}\nOTHERS{i}:", together=False)
                body += f"@!first bra DRAINED{i}; cp.async.bulk.wait_group 0; DRAINED{i}: bar.sync 0;"
                sections.append(Section(f"{kind} {size} bytes until {until}", 1, "copy"))

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[: most // 4] = 1
        for size in SIZES:
            after[most // 4 : most // 4 + size // 4] += 2 * rounds
        return after

    return Bench(
        "bulk stores", tuple(sections), body, lambda: torch.zeros(2 * most // 4), expected,
        declared=".reg .b32 place, to; .reg .f32 one;", before=fill, smem_bytes=most,
    )  # fmt: skip


_BULK_ADDS, _ADD_BYTES = 16, 16384


def _stream_of_adds(sharers: int) -> Bench:
    """Bulk additions of all SMs, one after the other as soon as shared memory has been read, to the bytes of so many
    neighbours. 0: of all CTAs."""
    target, shared = ("own", False) if sharers else ("data", True)
    whose = "to the same bytes" if shared else "each to its own" if sharers == 1 else f"{sharers} to the same"
    one = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{target}+{{}}], [room], {_ADD_BYTES};"
    one += "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;\n"
    adds = "".join(one.format((SCRATCH if shared else 0) + _ADD_BYTES * (i % 4)) for i in range(_BULK_ADDS))
    return Bench(
        f"bulk additions, all SMs, {whose}",
        (Section("stream", _BULK_ADDS * _ADD_BYTES / 1024, "KiB"),),
        timed(0, f"@!first bra OTHERS;\n{adds} cp.async.bulk.wait_group 0;\nOTHERS:"), lambda: torch.zeros(1),
        lambda before, rounds: torch.ones_like(before), declared=".reg .f32 one; .reg .b64 own; .reg .b32 place;",
        before=f"""
        mov.f32 one, 0f3F800000; div.u32 place, cta, {sharers or 1};
        mad.wide.u32 own, place, {4 * _ADD_BYTES}, data; add.u64 own, own, {SCRATCH};
        shl.b32 place, thread, 2; FILL: add.u32 lane, room, place; st.shared.f32 [lane], one; add.u32 place, place, 512;
        setp.lt.u32 p, place, {_ADD_BYTES}; @p bra FILL; fence.proxy.async.shared::cta; bar.sync 0;
        """,
        after="setp.eq.and.u32 p, cta, 0, first; @p st.global.f32 [data], one;", ctas=-1, smem_bytes=_ADD_BYTES,
        scratch=4 * _ADD_BYTES,
    )  # fmt: skip


def _atomics() -> Bench:
    """Adds of float32: a chain of one thread's, and a CTA's to one word and to a word each."""
    steps = 16
    chain = "atom.global.add.f32 was, [data], one; mul.f32 zero, was, nil; add.f32 one, zero, one;\n" * steps
    body = timed(0, f"@!first bra OTHERS;\n{chain}OTHERS:")
    body += timed(1, "red.global.add.f32 [data+4], one;\n" * steps)
    body += timed(2, "red.global.add.f32 [mine+8], one;\n" * steps)

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = torch.full_like(before, steps * rounds)
        after[1] = 128 * steps * rounds
        return after

    return Bench(
        "atomic adds", (Section("chain", steps, "add"), Section("one word", steps, "instruction of 4 warps"),
                        Section("a word each", steps, "instruction of 4 warps")),
        body, lambda: torch.zeros(130), expected,
        declared=".reg .f32 one, zero, nil, was; .reg .b64 mine; .reg .b32 unknown;",
        # A zero that the compiler does not know keeps the chain a chain.
        before="mov.f32 one, 0f3F800000; mov.u32 unknown, %ctaid.y; cvt.rn.f32.u32 nil, unknown;"
               "mad.wide.u32 mine, thread, 4, data;",
    )  # fmt: skip


BENCHES = (
    _loads(), *(_stream(size, everywhere) for size in (8192, 16384, 32768) for everywhere in (False, True)),
    *(_stream(size, True, readers) for size in (16384, 32768) for readers in (1, 2, 4, 8, 16, 33, 66)),
    _from_dram(False), _from_dram(True), _stores(), *map(_stream_of_adds, (1, 0, 2, 4, 8, 16, 33)), _atomics(),
)  # fmt: skip
