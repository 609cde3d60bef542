"""Chrome trace of an emulated chip (open it in https://ui.perfetto.dev or chrome://tracing).

One process per CTA, one track per warp, and one per kind of asynchronous agent. Time is the number of steps that the
emulator has executed: it shows order and overlap, not duration on a chip.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from warpcheck.machine import LaunchReport

_FIRST_AGENT_TRACK = 100  # above every warp index of a CTA


def write(path: str | Path, launches: Iterable[LaunchReport]) -> int:
    """Write the traces of `launches`, one after the other; returns the number of events.

    Launches that ran without `emulate(..., trace=True)` have none.
    """
    events: list[dict[str, Any]] = []
    offset = 0
    for number, launch in enumerate(launches):
        events += _launch_events(number, launch, offset)
        offset += 1 + max((event[0] for event in launch.trace), default=0)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    return len(events)


def _launch_events(number: int, launch: LaunchReport, offset: int) -> Iterator[dict[str, Any]]:
    agents: dict[str, int] = {}
    named: set[tuple[int, int]] = set()
    for time, cta, warp, location, count, what in launch.trace:
        process = number * 100_000 + cta
        if warp >= 0:
            role = launch.roles.get(warp)
            track, label = warp, f"warp {warp} ({role})" if role else f"warp {warp}"
            # A warp ran `count` instructions up to `time`, starting at `location`, until `what` stopped it.
            name, start, duration = f"until {what}" if what else "until its turn ends", time - count, count
        else:
            track = _FIRST_AGENT_TRACK + agents.setdefault(what, len(agents))
            label, name, start, duration = what, what, time, 1
        if (process, track) not in named:
            named.add((process, track))
            title = f"{launch.entry[:60]} CTA {cta}"
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": label}}
        yield {
            "ph": "X", "name": name, "pid": process, "tid": track, "ts": offset + start, "dur": max(1, duration),
            "args": {"at": str(location) if location is not None else ""},
        }  # fmt: skip
