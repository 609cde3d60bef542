"""Random small pipelines as PTX, right by construction, with each synchronising instruction marked.

A chain of groups of warps. Group g takes a tile of words from ring g - 1, computes, and puts it into ring g; the first
takes it from global memory, the last stores it there. Rings differ in how they are filled, in who may be early (their
depth), and in what hands a slot over. All code is straight: every tile has its own instructions, so that each of them
can be left out alone.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np

WORDS = 64  # of a tile
BYTES = 4 * WORDS
FILLS = ("generic", "cp_async", "cp_async_noinc", "bulk", "tensor")
PEER_FILLS = ("remote", "st_async", "multicast")  # into the ring of the other CTA, or of both
FROM_GLOBAL = ("cp_async", "cp_async_noinc", "bulk", "tensor", "multicast")  # what no group that computes can use
BY_COPY = ("bulk", "tensor", "multicast")
BY_BYTES = (*BY_COPY, "st_async")


@dataclass(frozen=True)
class Ring:
    """Between two groups. named: handed over by named barriers, else by mbarriers. elected: one lane of a warp arrives
    for all. scrubbed: the consumers write into a slot that they have read. tail: slots are given back that nobody
    waits for."""

    fill: str
    depth: int
    named: bool = False
    elected: bool = False
    scrubbed: bool = False
    tail: bool = False

    @property
    def remote(self) -> bool:
        return self.fill in PEER_FILLS


@dataclass(frozen=True)
class Pipeline:
    """warps: of each group, one more than there are rings. stage: slots that bulk stores read from; 0 if threads store
    to global memory themselves."""

    rings: tuple[Ring, ...]
    warps: tuple[int, ...]
    tiles: int
    stage: int
    cluster: int = 1

    @property
    def block(self) -> int:
        return 32 * sum(self.warps)

    @property
    def smem_bytes(self) -> int:
        slots = sum(ring.depth for ring in self.rings) + self.stage
        return slots * BYTES + 16 * sum(ring.depth for ring in self.rings)


@dataclass(frozen=True)
class Site:
    """A synchronising instruction. broken: its substitutes in mutants, by what was done. redundant: why the kernel
    is right without it; empty if it is not."""

    what: str
    code: str
    broken: dict[str, str]
    redundant: str = ""


@dataclass
class Program:
    """lines of PTX; those that are sites by their index."""

    pipeline: Pipeline
    lines: list[str] = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)

    @property
    def ptx(self) -> str:
        return "\n".join(self.lines)

    def without(self, index: int, how: str) -> str:
        return "\n".join([*self.lines[:index], self.sites[index].broken[how], *self.lines[index + 1 :]])


def drawn(rng: random.Random) -> Pipeline:
    """A random pipeline."""
    cluster = rng.choice((1, 1, 2))
    count = rng.choice((1, 1, 2, 2, 3))
    rings = []
    for position in range(count):
        fills = [fill for fill in FILLS if position == 0 or fill not in FROM_GLOBAL]
        if cluster == 2:
            fills += [fill for fill in PEER_FILLS if position == 0 or fill not in FROM_GLOBAL]
        fill = rng.choice(fills)
        named = fill in ("generic", "cp_async") and rng.random() < 0.4
        depth = rng.randint(1, 2 if named else 4)
        tail = not named and fill != "multicast" and rng.random() < 0.5  # half a phase of two CTAs would be left over
        rings.append(Ring(fill, depth, named, rng.random() < 0.5, rng.random() < 0.3, tail))
    warps = tuple(rng.choice((1, 1, 2)) for _ in range(count + 1))
    return Pipeline(tuple(rings), warps, rng.randint(2, 6), rng.choice((0, 1, 2, 3)), cluster)


def result(pipeline: Pipeline, x: np.ndarray) -> np.ndarray:
    """What the pipeline leaves in memory for the tiles `x` (CTA, tile, word) of uint32."""
    y = x[:1].repeat(len(x), 0) if pipeline.rings[0].fill == "multicast" else x.copy()
    for group in range(1, len(pipeline.warps)):
        y = y[:, :, np.arange(WORDS) ^ _shuffle(group)] * np.uint32(3) + np.uint32(group)
        ring = pipeline.rings[group] if group < len(pipeline.rings) else None
        if ring is not None and ring.fill in ("remote", "st_async"):
            y = y[np.arange(len(y)) ^ 1]
    if pipeline.rings[0].fill in ("remote", "st_async"):
        y = y[np.arange(len(y)) ^ 1]
    return y


def _shuffle(group: int) -> int:
    return (0, 1, 33, 5, 18)[group]


class Writer:
    """Writes the PTX of a pipeline. Registers: %r0 thread of the group, %r1 the CTA's first input word, %r2 shared
    memory, %r3 the other CTA's, %p0 the group's first thread, %p1 its warps' first lanes."""

    def __init__(self, pipeline: Pipeline, target: str) -> None:
        self.pipeline = pipeline
        self.program = Program(pipeline)
        self._labels = itertools.count()
        self._named = itertools.count(1)
        offset = 0
        self.slots: list[int] = []  # first byte of each ring
        self.full: list[int] = []  # mbarriers, or numbers of named barriers
        self.empty: list[int] = []
        for ring in pipeline.rings:
            self.slots.append(offset)
            offset += ring.depth * BYTES
        self.staged = offset
        offset += pipeline.stage * BYTES
        for ring in pipeline.rings:
            if ring.named:
                self.full.append(next(self._named))
                for _ in range(2 * ring.depth - 1):
                    next(self._named)
                self.empty.append(self.full[-1] + ring.depth)
            else:
                self.full.append(offset)
                self.empty.append(offset + 8 * ring.depth)
                offset += 16 * ring.depth
        self.last_group = next(self._named)  # the named barrier of those who store; 15 is the largest there is
        self._module(target)

    def line(self, *lines: str) -> None:
        self.program.lines += lines

    def site(self, what: str, code: str, redundant: str = "", **broken: str) -> None:
        self.program.sites[len(self.program.lines)] = Site(what, code, {"removed": "", **broken}, redundant)
        self.line(code)

    # The module.

    def _module(self, target: str) -> None:
        self.line(
            f".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];",
            ".visible .entry pipeline(.param .u64 px, .param .u64 py, .param .align 64 .b8 pmap[128]) {",
            ".reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .b32 %v<4>; .reg .b16 %h<2>;",
            "ld.param.u64 %d0, [px]; ld.param.u64 %d1, [py]; mov.b64 %d2, pmap; cvta.param.u64 %d2, %d2;",
            "mov.b32 %r2, smem; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;",
            f"mul.lo.u32 %r1, %r1, {self.pipeline.tiles * WORDS}; and.b32 %r4, %r0, 31; setp.eq.u32 %p1, %r4, 0;",
        )
        if self.pipeline.cluster == 2:
            self.line("mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r3, %r2, %r6;")
            self.line("setp.eq.u32 %p6, %r5, 0;")
        self._initialise()
        starts = itertools.accumulate(self.pipeline.warps, initial=0)
        for group, (start, warps) in enumerate(zip(starts, self.pipeline.warps)):
            self.line(f"setp.ge.u32 %p2, %r0, {32 * (start + warps)}; @%p2 bra AFTER{group};")
            self.line(f"sub.u32 %r0, %r0, {32 * start}; setp.eq.u32 %p0, %r0, 0;")
            self._group(group)
            self.line("bra END;", f"AFTER{group}:")
        self.line("END:")
        if self.pipeline.cluster == 2:
            needed = any(self._outlives(r) for r in range(len(self.pipeline.rings)))
            waited = "every remote arrival was waited for, or one that comes after it"
            self._cluster_barrier("before the end", "" if needed else waited)
        self.line("ret;", "}", "")

    def _outlives(self, r: int) -> bool:
        """May ring r give a slot back to a CTA that has ended? Not if its consumers then hand a tile to that CTA."""
        ring, later = self.pipeline.rings[r], self.pipeline.rings[r + 1 :]
        return ring.remote and ring.tail and not any(other.remote for other in later)

    def _initialise(self) -> None:
        """One thread initialises; a fence and a barrier show it to the others."""
        pipeline = self.pipeline
        counted = [(r, ring) for r, ring in enumerate(pipeline.rings) if not ring.named]
        self.line("setp.ne.u32 %p2, %r0, 0; @%p2 bra READY;")
        for r, ring in counted:
            produce, consume = pipeline.warps[r], pipeline.warps[r + 1]
            by = (1 if ring.elected else 32) * produce
            full = 1 if ring.fill in BY_BYTES else 32 * produce if ring.fill == "cp_async_noinc" else by
            empty = (1 if ring.elected else 32) * consume * (2 if ring.fill == "multicast" else 1)
            for slot in range(ring.depth):
                self.line(f"mbarrier.init.shared.b64 [%r2+{self.full[r] + 8 * slot}], {full};")
                self.line(f"mbarrier.init.shared.b64 [%r2+{self.empty[r] + 8 * slot}], {empty};")
        others = pipeline.cluster == 2 and any(ring.remote for _, ring in counted)
        if counted:
            seen = others or any(ring.fill in BY_BYTES for _, ring in counted)
            self.site("fence after mbarrier.init", "fence.mbarrier_init.release.cluster;",
                      "" if seen else "only threads of the CTA use the barriers")  # fmt: skip
        self.line("READY:")
        if others:
            self._cluster_barrier("after mbarrier.init")
        else:
            self.site("bar.sync after mbarrier.init", "bar.sync 0;", "" if counted else "there is no mbarrier")

    def _cluster_barrier(self, where: str, redundant: str = "") -> None:
        code = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        self.site(f"cluster barrier {where}", code, redundant)

    # A group.

    def _group(self, group: int) -> None:
        last = group == len(self.pipeline.rings)
        for tile in range(self.pipeline.tiles):
            if group:
                self._take(group, tile)
            if last:
                self._store(group, tile)
            else:
                self._put(group, tile)
        if last and self.pipeline.stage:
            self.site("wait for the stores at the end", "@%p0 cp.async.bulk.wait_group.read 0;")

    def _words(self, group: int) -> list[int]:
        """First words of the parts that the group's threads handle, one word each."""
        return list(range(0, WORDS, 32 * self.pipeline.warps[group]))

    def _wait(self, what: str, barrier: int, parity: int, *, scope: str = "", first: bool = False) -> None:
        """first: by the group's first thread alone."""
        label = f"L{next(self._labels)}"
        guard = f"@!%p0 bra {label}E; " if first else ""

        def code(how: str) -> str:
            return (
                f"{guard}{label}: mbarrier.try_wait.parity{how}.shared::cta.b64 %p3, [%r2+{barrier}], {parity}; "
                f"@!%p3 bra {label};{f' {label}E:' if first else ''}"
            )

        weaker = {"relaxed": code(scope.replace("acquire", "relaxed") or ".relaxed.cta")}
        self.site(what, code(scope), **weaker)

    def _arrive(self, what: str, group: int, ring: Ring, barrier: int, redundant: str, *, to: str = "own") -> None:
        """One arrival a thread, or a warp. to: "own", the "other" CTA's barrier, or that of "both"."""
        if ring.elected:
            self.site(f"warp barrier before {what}", "bar.warp.sync -1;", redundant)
        guard = "@%p1 " if ring.elected else ""
        targets = {"own": ["%r2"], "other": ["%r3"], "both": ["%r2", "%r3"]}[to]
        for target in targets:
            if target == "%r3":
                code = f"{guard}mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3+{barrier}];"
                relaxed = code.replace("release", "relaxed")
            else:
                scope = "cluster" if ring.remote else "cta"
                code = f"{guard}mbarrier.arrive.release.{scope}.shared::cta.b64 _, [%r2+{barrier}];"
                relaxed = code.replace("release", "relaxed")
            self.site(what, code, redundant, relaxed=relaxed)

    def _take(self, group: int, tile: int) -> None:
        """Registers %v0, %v1: the words of this thread, shuffled and computed with."""
        r = group - 1
        ring, pipeline = self.pipeline.rings[r], self.pipeline
        slot, round_ = tile % ring.depth, tile // ring.depth
        count = 32 * (pipeline.warps[r] + pipeline.warps[group])
        scope = ".acquire.cluster" if ring.remote else ""
        if ring.named:
            self.site(f"wait for tile {tile} of ring {r}", f"bar.sync {self.full[r] + slot}, {count};")
        else:
            if ring.fill == "st_async":
                self._expect(r, slot, tile, guard="@%p0 ")
            self._wait(f"wait for tile {tile} of ring {r}", self.full[r] + 8 * slot, round_ & 1, scope=scope)
        start = self.slots[r] + slot * BYTES
        for k, first in enumerate(self._words(group)):
            self.line(
                f"add.u32 %r10, %r0, {first}; xor.b32 %r10, %r10, {_shuffle(group)}; shl.b32 %r10, %r10, 2; "
                f"add.u32 %r10, %r10, %r2; ld.shared.b32 %v{k}, [%r10+{start}];"
            )
            if ring.scrubbed:
                self.line(f"st.shared.b32 [%r10+{start}], %v{k};")
            self.line(f"mad.lo.u32 %v{k}, %v{k}, 3, {group};")
        awaited = tile + ring.depth < pipeline.tiles
        unneeded = "" if awaited else "nobody waits for the slot"
        if ring.named:
            if awaited:
                self.site(f"ring {r} gives back tile {tile}", f"bar.arrive {self.empty[r] + slot}, {count};")
        elif awaited or ring.tail:
            if ring.scrubbed and ring.fill in BY_BYTES:
                self.site(f"proxy fence after scrubbing tile {tile} of ring {r}", "fence.proxy.async;", unneeded)
            to = {"multicast": "both", "remote": "other", "st_async": "other"}.get(ring.fill, "own")
            self._arrive(f"ring {r} gives back tile {tile}", group, ring, self.empty[r] + 8 * slot, unneeded, to=to)

    def _expect(self, r: int, slot: int, tile: int, guard: str) -> None:
        barrier = f"[%r2+{self.full[r] + 8 * slot}]"
        self.site(
            f"expected bytes of tile {tile} of ring {r}",
            f"{guard}mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {BYTES};",
            **{
                "16 bytes less": f"{guard}mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {BYTES - 16};",
                "16 bytes more": f"{guard}mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {BYTES + 16};",
                "arrives alone": f"{guard}mbarrier.arrive.shared::cta.b64 _, {barrier};",
            },
        )

    def _put(self, group: int, tile: int) -> None:
        """Fills a slot of the group's ring: from global memory by the first group, else from %v0, %v1."""
        r, ring, pipeline = group, self.pipeline.rings[group], self.pipeline
        slot, round_ = tile % ring.depth, tile // ring.depth
        count = 32 * (pipeline.warps[r] + pipeline.warps[r + 1])
        start = self.slots[r] + slot * BYTES
        full = self.full[r] + (slot if ring.named else 8 * slot)
        if round_:
            what = f"wait for the slot of tile {tile} of ring {r}"
            if ring.named:
                self.site(what, f"bar.sync {self.empty[r] + slot}, {count};")
            else:
                scope = ".acquire.cluster" if ring.remote else ""
                self._wait(what, self.empty[r] + 8 * slot, round_ - 1 & 1, scope=scope, first=ring.fill in BY_COPY)
        if ring.fill in BY_COPY:
            self._expect(r, slot, tile, guard="@%p0 ")
            self._copy(ring, start, full, tile)
            return
        words = self._words(group)
        if ring.fill in ("cp_async", "cp_async_noinc"):
            for first in words:
                self._global_address(first, tile, "%d0", "%d4")
                self.line(f"add.u32 %r10, %r0, {first}; shl.b32 %r10, %r10, 2; add.u32 %r10, %r10, %r2;")
                self.line(f"cp.async.ca.shared.global [%r10+{start}], [%d4], 4;")
        else:
            self._values(group, tile, words, start, full, ring)
        what = f"ring {r} hands over tile {tile}"
        if ring.fill == "cp_async_noinc":
            self.site(what, f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2+{full}];")
        elif ring.fill != "st_async":
            if ring.fill == "cp_async":
                self.site(f"cp.async commit of tile {tile}", "cp.async.commit_group;")
                self.site(f"cp.async wait for tile {tile}", "cp.async.wait_group 0;",
                          **{"leaves one group": "cp.async.wait_group 1;"})  # fmt: skip
            if ring.named:
                self.site(what, f"bar.arrive {full}, {count};")
            else:
                self._arrive(what, group, ring, full, "", to="other" if ring.fill == "remote" else "own")

    def _values(self, group: int, tile: int, words: list[int], start: int, full: int, ring: Ring) -> None:
        for k, first in enumerate(words):
            if group == 0:
                self._global_address(first, tile, "%d0", "%d4")
                self.line(f"ld.global.b32 %v{k}, [%d4];")
            self.line(f"add.u32 %r10, %r0, {first}; shl.b32 %r10, %r10, 2;")
            if ring.fill == "generic":
                self.line(f"add.u32 %r10, %r10, %r2; st.shared.b32 [%r10+{start}], %v{k};")
            elif ring.fill == "remote":
                self.line(f"add.u32 %r10, %r10, %r3; st.shared::cluster.b32 [%r10+{start}], %v{k};")
            else:
                self.line(
                    f"add.u32 %r10, %r10, %r3; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
                    f"[%r10+{start}], %v{k}, [%r3+{full}];"
                )

    def _copy(self, ring: Ring, start: int, full: int, tile: int) -> None:
        into, barrier = f"[%r2+{start}]", f"[%r2+{full}]"
        if ring.fill == "tensor":
            self.line(
                f"add.u32 %r11, %r1, {tile * WORDS}; @%p0 cp.async.bulk.tensor.1d.shared::cta.global.tile"
                f".mbarrier::complete_tx::bytes {into}, [%d2, {{%r11}}], {barrier};"
            )
            return
        self.line(f"add.u32 %r11, %r1, {tile * WORDS}; mul.wide.u32 %d4, %r11, 4; add.s64 %d4, %d0, %d4;")
        if ring.fill == "multicast":
            self.line(
                "and.pred %p4, %p0, %p6; mov.b16 %h0, 3; @%p4 cp.async.bulk.shared::cluster.global"
                f".mbarrier::complete_tx::bytes.multicast::cluster {into}, [%d4], {BYTES}, {barrier}, %h0;"
            )
        else:
            self.line(
                f"@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes {into}, [%d4], {BYTES}, {barrier};"
            )

    def _global_address(self, first: int, tile: int, base: str, to: str) -> None:
        self.line(f"add.u32 %r11, %r0, %r1; mul.wide.u32 {to}, %r11, 4; add.s64 {to}, {to}, {base};")
        self.line(f"add.s64 {to}, {to}, {4 * (tile * WORDS + first)};")

    def _store(self, group: int, tile: int) -> None:
        pipeline, words = self.pipeline, self._words(group)
        if not pipeline.stage:
            for k, first in enumerate(words):
                self._global_address(first, tile, "%d1", "%d4")
                self.line(f"st.global.b32 [%d4], %v{k};")
            return
        warps = pipeline.warps[group]
        together = "bar.warp.sync -1;" if warps == 1 else f"bar.sync {self.last_group}, {32 * warps};"
        start = self.staged + tile % pipeline.stage * BYTES
        if tile >= pipeline.stage:
            pending = pipeline.stage - 1
            self.site(f"wait for the store before tile {tile}", f"@%p0 cp.async.bulk.wait_group.read {pending};",
                      **{"leaves one group more": f"@%p0 cp.async.bulk.wait_group.read {pending + 1};"})  # fmt: skip
            self.site(f"barrier before staging tile {tile}", together)
        for k, first in enumerate(words):
            self.line(f"add.u32 %r10, %r0, {first}; shl.b32 %r10, %r10, 2; add.u32 %r10, %r10, %r2;")
            self.line(f"st.shared.b32 [%r10+{start}], %v{k};")
        self.site(f"proxy fence before the store of tile {tile}", "fence.proxy.async.shared::cta;")
        self.site(f"barrier before the store of tile {tile}", together)
        self.line(f"add.u32 %r11, %r1, {tile * WORDS}; mul.wide.u32 %d4, %r11, 4; add.s64 %d4, %d1, %d4;")
        self.line(f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r2+{start}], {BYTES};")
        joins = pipeline.tiles <= pipeline.stage and tile + 1 < pipeline.tiles
        self.site(f"commit of the store of tile {tile}", "@%p0 cp.async.bulk.commit_group;",
                  "the next commit takes the store along, and only the last wait counts" if joins else "")  # fmt: skip


def written(pipeline: Pipeline, target: str) -> Program:
    """The PTX of a pipeline."""
    return Writer(pipeline, target).program
