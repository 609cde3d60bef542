"""From one warpgroup to another and back: by mbarriers, by named barriers, with and without data in shared memory."""

from __future__ import annotations

import torch

from .frame import Bench, Section, init, timed, wait

TRIPS = 32  # there and back, in a repetition
_GROUP = 128  # threads


def _trips(there: str, back: str) -> str:
    """PTX of the loop of both warpgroups. there: how the first hands over and is handed back; back: the second's."""
    return f"""
    mov.b32 trip, 0;
    TRIP:
    @!one bra SECOND;
    {there}
    bra NEXT;
    SECOND:
    {back}
    NEXT:
    xor.b32 parity, parity, 1;
    add.u32 trip, trip, 1;
    setp.lt.u32 q, trip, {TRIPS};
    @q bra TRIP;
    """


def _bench(name: str, there: str, back: str, counts: tuple[int, ...], vectors: int = 0) -> Bench:
    registers = "".join(f"v{i}, w{i}, " for i in range(vectors))
    first = "".join(f"cvt.rn.f32.u32 v{i}, thread; add.f32 w{i}, v{i}, 0f3F800000;" for i in range(vectors))
    keep = "".join(f"st.global.v2.b32 [place+{8 * _GROUP * i}], {{v{i}, w{i}}};" for i in range(vectors))
    if not vectors:
        keep = "cvt.rn.f32.u32 none, round; st.global.b32 [place], none;"
    each = 2 * max(vectors, 1)

    def initial() -> torch.Tensor:
        return torch.zeros(_GROUP * each)

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        if not vectors:
            after = before.clone()
            after[::2] = rounds
            return after
        start = torch.arange(_GROUP, dtype=torch.float32)
        pairs = torch.stack([start, start + 1], dim=1) + rounds * TRIPS
        return pairs.flatten().repeat(vectors)

    return Bench(
        name, (Section("one way", 2 * TRIPS, "hand-over"),), timed(0, _trips(there, back)), initial, expected,
        declared=f".reg .b32 trip, parity, mine; .reg .f32 {registers} none; .reg .b64 place; .reg .pred one;",
        before=f"{init(*counts)} setp.lt.u32 one, thread, {_GROUP}; mov.b32 parity, 0; and.b32 mine, thread, 127;"
               f"shl.b32 mine, mine, 3; add.u32 mine, mine, room; mad.wide.u32 place, thread, 8, data; {first}",
        after=f"@!one bra DONE; {keep} DONE:", threads=2 * _GROUP, smem_bytes=8 * _GROUP * max(vectors, 1),
    )  # fmt: skip


def _mbarrier(vectors: int = 0) -> Bench:
    """All threads of one warpgroup arrive, all of the other wait. vectors: of 8 bytes that each thread hands over."""
    stores = "".join(f"st.shared.v2.b32 [mine+{8 * _GROUP * i}], {{v{i}, w{i}}};" for i in range(vectors))
    loads = "".join(f"ld.shared.v2.b32 {{v{i}, w{i}}}, [mine+{8 * _GROUP * i}];" for i in range(vectors))
    add = "".join(f"add.f32 v{i}, v{i}, 0f3F800000; add.f32 w{i}, w{i}, 0f3F800000;" for i in range(vectors))
    arrive = "mbarrier.arrive.shared::cta.b64 _, [{}];"
    there = stores + arrive.format("smem") + wait("smem+8", "parity", "BACK") + loads
    back = wait("smem", "parity", "THERE") + loads + add + stores + arrive.format("smem+8")
    name = f"registers, shared memory, registers, {vectors} KiB" if vectors else "mbarrier"
    return _bench(name, there, back, (_GROUP, _GROUP), vectors)


_NAMED = _bench(
    "named barrier", "bar.arrive 1, 256; bar.sync 2, 256;", "bar.sync 1, 256; bar.arrive 2, 256;", (1, 1)
)  # fmt: skip


def _meet(warps: int) -> Bench:
    return Bench(
        f"barrier of {warps} warps", (Section("meet", TRIPS, "barrier"),),
        timed(0, "bar.sync 0;\n" * TRIPS, together=False), lambda: torch.zeros(1, dtype=torch.int32),
        lambda before, rounds: before + rounds, after="@first st.global.b32 [data], round;", threads=32 * warps,
    )  # fmt: skip


BENCHES = (
    _mbarrier(), _NAMED, *(_mbarrier(kib) for kib in (1, 2, 4, 8, 16)), *(_meet(n) for n in (4, 8, 16)),
)  # fmt: skip
