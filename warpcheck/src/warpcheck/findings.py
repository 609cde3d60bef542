"""Findings: errors of a kernel as records, and the kinds of findings with severity, rule of the ISA and repair.

docs/findings.md has a section for every kind.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from warpcheck import errors
from warpcheck.errors import EmulationError, Location

_SHOWN = 60  # characters of a kernel's name
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class Severity(enum.Enum):
    """Severity of a finding.

    ERROR: the result may be wrong, or the kernel may hang. LETTER: the ISA does not guarantee it, but all chips so far
    do it. REDUNDANT: unordered writes of equal bytes. LEFTOVER: an operation is still in flight when its memory ends.
    """

    ERROR = "error"
    LETTER = "letter"
    REDUNDANT = "redundant"
    LEFTOVER = "leftover"


_LEVELS = {
    Severity.ERROR: "error",
    Severity.LETTER: "warning",
    Severity.REDUNDANT: "note",
    Severity.LEFTOVER: "note",
}  # fmt: skip  (of SARIF)


@dataclass(frozen=True)
class Kind:
    """A check. isa: section of PTX ISA 9.1. repair: the missing part; empty where `repair_of` derives it from the
    locations. asked: field of `Checks` that enables the check; empty if it is on by default."""

    name: str
    severity: Severity
    error: type[EmulationError]
    isa: str
    what: str
    repair: str = ""
    asked: str = ""


_E, _L, _R, _O = Severity.ERROR, Severity.LETTER, Severity.REDUNDANT, Severity.LEFTOVER
KINDS = {
    kind.name: kind
    for kind in (
        Kind("deadlock", _E, errors.Deadlock, "9.7.13.15", "nothing can run any more"),
        Kind("livelock", _E, errors.Livelock, "9.7.13.15", "the kernel did not end within its budget",
             "end the loops of the listed warps, or raise max_instructions and max_seconds"),
        Kind("unknown-instruction", _E, errors.UnknownInstruction, "9", "an instruction that is not modelled"),
        Kind("launch-refused", _E, errors.LaunchRefused, "5.1.7", "the driver would refuse the launch"),
        Kind("register-file", _E, errors.RegisterFileOverflow, "9.7.19.5", "more registers than there are"),
        Kind("divergent", _E, errors.DivergentAligned, "9.7.13.1", "a warp does not execute together what it must"),
        Kind("out-of-bounds", _E, errors.OutOfBounds, "5.1", "an access outside every allocation"),
        Kind("misaligned", _E, errors.Misaligned, "6.4.1", "an address that is not a multiple of what it must be"),
        Kind("uninitialized", _E, errors.UninitializedRead, "8.2.6", "a value that nobody wrote is used"),
        Kind("unwritten", _E, errors.UnwrittenOutput, "8.2.6", "elements of an output that nobody wrote",
             "a tile, or a grid, that covers the whole output", "outputs"),
        Kind("barrier-misuse", _E, errors.BarrierMisuse, "9.7.13.15", "a barrier used against its protocol"),
        Kind("tmem-misuse", _E, errors.TmemMisuse, "9.7.16.1", "tensor memory used against its protocol"),
        Kind("illegal-instruction", _E, errors.IllegalInstruction, "9", "operands that an instruction forbids"),
        Kind("race", _E, errors.DataRace, "8.7.1", "two accesses that nothing orders"),
        Kind("lane-race", _E, errors.DataRace, "9.7.13.2", "two lanes of a warp that nothing orders", "bar.warp.sync"),
        Kind("proxy-fence", _E, errors.DataRace, "8.6", "a generic write that the asynchronous proxy need not see",
             "fence.proxy.async, after the write and before the synchronisation that hands it over"),
        Kind("tensormap-fence", _E, errors.DataRace, "9.7.13.4", "a tensor map that its readers need not see",
             "fence.proxy.tensormap::generic: .release after the write, .acquire before the use"),
        Kind("barrier-init-fence", _E, errors.DataRace, "9.7.13.4", "an mbarrier whose init others need not see",
             "fence.mbarrier_init.release.cluster after mbarrier.init, before the synchronisation"),
        Kind("wgmma-fence", _E, errors.DataRace, "9.7.15.7.1", "registers that wgmma need not see",
             "wgmma.fence.sync.aligned before the first wgmma that uses the register"),
        Kind("wgmma-wait", _E, errors.UninitializedRead, "9.7.15.7.3", "registers that a wgmma still owns",
             "wgmma.wait_group before the register is touched"),
        Kind("grid-dependency", _E, errors.DataRace, "9.7.13.13", "memory that the grid before may still use",
             "griddepcontrol.wait before the access"),
        Kind("cta-end", _E, errors.DataRace, "5.1.7", "shared memory in use after its CTA has ended",
             "a wait for the copy, or a cluster barrier, before the CTA ends"),
        Kind("co-residency", _E, errors.CoResidency, "2.2.3", "a CTA waits for one that need not be resident",
             "wait only for CTAs of the same cluster or of a lower launch index, or launch cooperatively"),
        Kind("weak-poll", _E, errors.DataRace, "8.4", "a loop waits by weak loads, which need not be repeated",
             "ld.relaxed, ld.acquire, ld.volatile or an atomic instead of the weak load"),
        Kind("early-phase", _E, errors.BarrierMisuse, "9.7.13.15.6", "a phase may end before its bytes are expected",
             "expect all bytes of a phase before, or with, its last arrival: mbarrier.arrive.expect_tx of their sum"),
        Kind("lapped-wait", _E, errors.BarrierMisuse, "9.7.13.15.16", "a wait by parity may come one phase late",
             "an arrival at this phase that comes after the wait: by the warp itself, or by one that waits for it"),
        Kind("cp-async-proxy", _L, errors.DataRace, "8.6", "what cp.async wrote is read by the asynchronous proxy",
             "fence.proxy.async after the wait for cp.async, before the synchronisation that hands it over"),
        Kind("relaxed-arrival", _L, errors.DataRace, "9.7.13.15.13", "a relaxed arrival after a wait for a copy",
             "mbarrier.arrive with .release (the default), at the scope of the cluster if another CTA waits"),
        Kind("copy-arrival", _L, errors.DataRace, "8.9.1.1", "an arrival of cp.async hands over what was not copied",
             "a separate mbarrier.arrive, after the thread's other accesses", "letter"),
        Kind("barrier-init-lanes", _L, errors.BarrierMisuse, "9.7.13.15.9", "an mbarrier is initialised by many lanes",
             "mbarrier.init by one elected lane"),
        Kind("tensor-fence", _L, errors.DataRace, "9.7.16.6", "tensor memory handed over without its fences",
             "tcgen05.wait, then tcgen05.fence::before_thread_sync, the synchronisation, and "
             "tcgen05.fence::after_thread_sync", "letter"),
        Kind("wait-scope", _L, errors.DataRace, "8.7", "CTAs hand over by an arrival or a wait of the scope of one CTA",
             "mbarrier.arrive.release.cluster, and .acquire.cluster at the wait", "letter"),
        Kind("tmem-quarter", _L, errors.TmemMisuse, "9.7.16.8.1", "an address of tensor memory lacks the warp's lanes",
             "the warp's number in its warpgroup, times 32, in bits 16 to 31 of the address"),
        Kind("mma-order", _L, errors.DataRace, "9.7.16.6.2", "products of one thread that need not execute in order",
             "tcgen05.commit and a wait for its mbarrier between the two", 'order="letter"'),
        Kind("setmaxnreg-count", _L, errors.IllegalInstruction, "9.7.19.5", "one warpgroup, two counts of registers",
             "one setmaxnreg that all warps of the warpgroup execute"),
        Kind("setmaxnreg-place", _L, errors.IllegalInstruction, "9.7.19.5", "one warpgroup, several setmaxnreg",
             "one setmaxnreg that all warps of the warpgroup execute", "letter"),
        Kind("equal-writes", _R, errors.DataRace, "8.7.1", "unordered writes of the same bytes",
             "one writer; or nothing, if the bytes can never differ"),
        Kind("barrier-leftover", _O, errors.BarrierMisuse, "9.7.13.15.3", "a CTA ends in the middle of a phase",
             "a wait for the phase, or one arrival less", "leftovers"),
        Kind("store-leftover", _O, errors.DataRace, "9.7.9.25", "a CTA ends before its bulk store has read its source",
             "cp.async.bulk.wait_group.read 0 before the CTA ends", "leftovers"),
        Kind("tmem-leftover", _O, errors.DataRace, "9.7.16.7", "tensor memory is given back while in use",
             "a wait and a barrier between the last use and tcgen05.dealloc", "leftovers"),
    )
}  # fmt: skip
# The launch ends with one of these, so they cannot be switched off.
FINAL = ("deadlock", "livelock", "unknown-instruction", "launch-refused", "register-file", "divergent")


@dataclass(frozen=True)
class Finding:
    """An error of a kernel.

    location: the instruction; None for an error of the whole launch. others: further locations, each with a sentence
    (the other access of a race, every waiter of a deadlock). barrier: the mbarrier involved, by name if it has one.
    repair: the missing synchronisation, or the end of the misuse. kernel: PTX entry. chip, seed, schedule: reproduce
    the finding. count: occurrences in all launches and seeds.
    """

    kind: str
    severity: Severity
    message: str
    location: Location | None = None
    others: tuple[tuple[str, Location | None], ...] = ()
    barrier: str = ""
    repair: str = ""
    kernel: str = ""
    chip: str = ""
    seed: int = 0
    schedule: str = ""
    count: int = 1

    @property
    def error(self) -> EmulationError:
        """The exception that `on_finding="raise"` raises for it."""
        return KINDS[self.kind].error(self.message, self.location, self.others, self)

    @property
    def identity(self) -> tuple:
        """Equal for the same error at the same source lines; PTX lines where there is no line information."""
        if self.kind == "livelock":  # the warps are anywhere in their loops
            return (self.kind, self.kernel)
        if self.kind == "unwritten":
            return (self.kind, self.message.partition(":")[0])
        locations = [self.location, *(location for _, location in self.others[:1])]
        keys = [self._source(location) if location else ("", 0) for location in locations]
        if self.kind in ("race", "equal-writes"):  # the schedule decides which of the two comes first
            return ("race", *sorted(keys))
        return (self.kind, *keys)

    def _source(self, location: Location) -> tuple[Any, ...]:
        if location.file is None:
            return (self.kernel, location.ptx_line)
        return (location.file, location.line or 0, *chain.from_iterable(location.calls))

    def __str__(self) -> str:
        times = f", {self.count:,} times" if self.count > 1 else ""
        kernel = self.kernel if len(self.kernel) <= _SHOWN else self.kernel[:_SHOWN] + "..."
        lines = [f"{self.severity.value} [{self.kind}] {EmulationError(self.message, self.location, self.others)}"]
        if self.repair:
            lines.append(f"  repair: {self.repair}")
        lines.append(f"  seen on {self.chip} with seed {self.seed}, {self.schedule}{times}, in {kernel}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """With JSON's types only."""
        others = [{"text": text, "place": location.as_dict() if location else None} for text, location in self.others]
        own = {name: value for name, value in vars(self).items() if name not in ("severity", "location", "others")}
        return {
            "severity": self.severity.value, "place": self.location.as_dict() if self.location else None,
            "others": others, **own,
        }  # fmt: skip


class Findings(tuple[Finding, ...]):
    """Findings in the order in which they were first seen."""

    @classmethod
    def merged(cls, findings: Iterable[Finding]) -> Findings:
        """Merge equal findings of several instructions, launches or seeds, and add their counts.

        Unordered writes that were equal in one run and different in another are a race.
        """
        merged: dict[tuple, Finding] = {}
        for finding in findings:
            before = merged.get(finding.identity)
            if before is None:
                merged[finding.identity] = finding
            else:
                worse = finding if before.kind == "equal-writes" else before
                merged[finding.identity] = replace(worse, count=before.count + finding.count)
        return cls(merged.values())

    def of(self, *severities: Severity | str) -> Findings:
        """Return the findings of the given severities."""
        wanted = {Severity(severity) for severity in severities}
        return Findings(finding for finding in self if finding.severity in wanted)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no finding"

    def to_json(self) -> str:
        return json.dumps([finding.as_dict() for finding in self], indent=1)

    def to_sarif(self, root: str | Path = ".") -> str:
        """Return SARIF 2.1.0, which code hosts show at the source lines. root: base folder of file names."""
        rules = [_rule(KINDS[kind]) for kind in dict.fromkeys(finding.kind for finding in self)]
        results = [_result(finding, Path(root).resolve()) for finding in self]
        driver = {"name": "warpcheck", "rules": rules}
        return json.dumps(
            {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]},
            indent=1,
        )


def _rule(kind: Kind) -> dict[str, Any]:
    return {
        "id": kind.name,
        "shortDescription": {"text": kind.what},
        "fullDescription": {"text": f"{kind.what} (PTX ISA {kind.isa})"},
        "help": {"text": kind.repair or kind.what},
        "defaultConfiguration": {"level": _LEVELS[kind.severity]},
    }


def _result(finding: Finding, root: Path) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message + (f"; repair: {finding.repair}" if finding.repair else "")},
        "occurrenceCount": finding.count,
        "properties": {
            name: getattr(finding, name) for name in ("kernel", "barrier", "chip", "seed", "schedule")
        } | {"severity": finding.severity.value},
    }  # fmt: skip
    if finding.location is not None:
        result["locations"] = [_location(finding.location, "", root)]
    further = [_location(location, text, root) for text, location in finding.others if location is not None]
    if further:
        result["relatedLocations"] = further
    return result


def _location(location: Location, text: str, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"message": {"text": f"{text}: {location}" if text else str(location)}}
    if location.file is not None:
        path = Path(location.file).resolve()
        uri = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_uri()
        found["physicalLocation"] = {
            "artifactLocation": {"uri": uri}, "region": {"startLine": max(1, location.line or 1)},
        }  # fmt: skip
    return found


# Synchronisation with the end of an operation, by prefix of its opcode; the first match counts.
_ENDS = (
    ("cp.async.bulk.commit", ""),
    ("cp.async.bulk.prefetch", ""),
    ("tcgen05.mma", "tcgen05.commit to an mbarrier after the product, and a wait for that phase"),
    ("tcgen05.cp", "tcgen05.commit to an mbarrier after the copy, and a wait for that phase"),
    ("tcgen05.shift", "tcgen05.commit to an mbarrier after the shift, and a wait for that phase"),
    ("tcgen05.ld", "tcgen05.wait::ld, and a barrier if another warp goes on"),
    ("tcgen05.st", "tcgen05.wait::st, and a barrier if another warp goes on"),
    ("wgmma", "wgmma.commit_group and wgmma.wait_group, and a barrier if another warp goes on"),
    ("st.async", "a wait for the phase of the mbarrier that the store completes"),
    ("red.async", "a wait for the phase of the mbarrier that the operation completes"),
    ("clusterlaunchcontrol", "a wait for the phase of the mbarrier that the answer completes"),
)


def repair_of(
    kind: str, location: Location | None, others: tuple[tuple[str, Location | None], ...], barrier: str
) -> str:
    """Return the synchronisation that orders the two accesses of a finding, or the end of the misuse."""
    other = others[0][1] if others else None
    if kind != "race" or other is None:
        return KINDS[kind].repair
    opcode = other.ptx_text.split()[0] if other.ptx_text else ""
    if opcode.startswith("@"):
        opcode = other.ptx_text.split()[1]
    if opcode.startswith("cp.") and "bulk" in opcode:
        if "bulk_group" in opcode:
            return "cp.async.bulk.wait_group (.read is enough for its source), and a barrier if another thread goes on"
        return f"a wait for the phase of {barrier or 'the mbarrier'} that the copy completes"
    if opcode.startswith("cp.async"):
        return "cp.async.wait_group, and a barrier for what other threads copied"
    for start, repair in _ENDS:
        if opcode.startswith(start):
            return repair
    if location is None or location.cta is None or other.cta is None:
        return "a barrier between the two"
    if location.cta != other.cta:
        return (
            "within a cluster a cluster barrier, or an arrival at a remote mbarrier; else a release and an acquire of "
            "a flag at the scope of the chip, or two launches"
        )
    if location.warp == other.warp:
        return "bar.warp.sync between the lanes"
    return "between the two warps an mbarrier (arrive after the first, wait before the second) or bar.sync"
