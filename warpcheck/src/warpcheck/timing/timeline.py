"""Write a replay as a Chrome trace with real time (open it in https://ui.perfetto.dev).

One process per SM; tracks for the tensor core, for copies in and out, and one per warp, which shows its waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from warpcheck.timing.replay import TRACKS, Times

_WARP, _WAITS = TRACKS.index("warp"), TRACKS.index("waits")


def write(path: str | Path, launches: Iterable[Times]) -> int:
    """Write launches in sequence and return the number of slices. Launches replayed without `timeline` have none."""
    events: list[dict[str, Any]] = []
    offset = 0.0
    for times in launches:
        events += _events(times, offset)
        offset += times.cycles / times.chip.clock.value / 1000
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    return sum(event["ph"] == "X" for event in events)


def _events(times: Times, offset: float) -> Iterator[dict[str, Any]]:
    code, roles, clock = times.record.kernel.instructions, times.record.roles, times.chip.clock.value
    named: set[tuple[int, int]] = set()
    for track, sm, index, what, start, end in times.intervals:
        is_wait = track == _WAITS
        thread = 100 + index if is_wait else track
        if (sm, thread) not in named:
            named.add((sm, thread))
            role = roles.get(index)
            label = f"warp {index} ({role})" if is_wait and role else f"warp {index}" if is_wait else TRACKS[track]
            title = f"{times.chip.gpu} SM {sm}, predicted"
            yield {"ph": "M", "name": "process_name", "pid": sm, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_name", "pid": sm, "tid": thread, "args": {"name": label}}
        if is_wait:
            ins = code[what] if what >= 0 else None
            name = f"waits: {ins.opcode}" if ins else "waits"
            where = f"PTX line {ins.line}: {ins.text}" if ins else ""
        else:
            name = f"{what:,} FLOPs" if TRACKS[track] == "tensor core" else f"{what:,} bytes"
            where = ""
        yield {
            "ph": "X", "name": name, "pid": sm, "tid": thread, "ts": offset + start / clock / 1000,
            "dur": (end - start) / clock / 1000, "args": {"cycles": [round(start), round(end)], "at": where},
        }  # fmt: skip
