"""docs/results/public-kernels.md, made from the outcomes of runs, which lie beside it as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from warpcheck.findings import Severity

from tests.emulator.public.rows import Outcome

_SHOWN = 4  # places of one finding
DATA, PAGE = "public-kernels.json", "public-kernels.md"

HEAD = """\
# Kernels of public packages

Kernels of public packages in CuTe DSL and Triton, as pip installs them and called through their public functions with
the settings that these have by default, on [the emulator](../emulator.md). The rows of Triton are kernels of this
repository, which its compiler translates. Each call runs in three orders of events, one of each schedule, each with
inputs of its own, and every result is judged by value: its error against float64 is at most twice that of the same
formula in the same precision (the column "error" is in units of what is allowed). What is *found* in the kernels is
listed below each table, the same thing once, by [kind](../findings.md) and place.

Findings are statements about the PTX that one version of a package compiled to with one version of the compiler, by
the text of PTX ISA 9.1. An *error* says that the ISA does not promise the result; it does not say that a chip was seen
to give a wrong one. A *letter* is what the ISA does not grant and every chip so far does; *redundant* are unordered
writes of equal bytes.

```
warpcheck catalogue --packages --write docs/results
```

makes this page again; it installs nothing, and leaves out what is not installed. Warp-instructions and seconds are of
one order; seconds are those of the launches, with all checks on, on a busy machine of two cores.

cuDNN's attention with head_dim 512 gives tiles back to another CTA by a relaxed arrival, after it has waited until its
copies have read them: `mbarrier.arrive` orders other threads' accesses only with `.release` (ISA 8.8). Nothing is left
to be read there by then, so that this is told as a letter.

flash-attn-4's forward in parts of the keys ends with a kernel that joins them in tiles of 8 or 16 rows. Rows past the
end are not loaded, and are worked through all the same: how many parts such a row has is counted from shared memory
that nobody wrote, and that count says how often the loop of its threads (line 654) turns. It turns at most 32 times,
each thread has one row, and nothing of these rows is loaded or stored: the results do not depend on it. It is listed as
an error because the emulator sees a branch on an undefined value, not what hangs on it.

## What the errors mean

[Recall](recall.md#what-the-errors-of-the-packages-as-they-are-mean) explains most errors of cuDNN, and that of
flash-attn-4's backward. Of the others:

* **cuDNN, `prefill_d256_f16.py:1712` and `:1875`, `mma.py:243`**: softmax leaves a tile's statistics in column 0 of
  tensor memory, the correction warps read them there, and S of the CTA's next tile overwrites them. In
  `prefill_d128_f16.py` the MMA warp waits for `mb_stats_read` first ([recall](recall.md) takes that wait out); the
  kernel of head_dim 256 has no such barrier. It shows when a CTA takes a second tile.
* **quack, `tile_scheduler.py:874`**: all lanes of the scheduler warp read the answer of `clusterlaunchcontrol`, and an
  elected lane asks for the next one into the same bytes, without a warp barrier between the two.
* **FlashInfer, `fmha_resources.py`**: a CTA stores O of its next tile in shared memory from which copies of the last
  tile may still read. `cp.async.bulk.wait_group.read` is compiled only with `head_paired` or `stage_o_by_head_dim`.
* **Triton**: one warp initialises mbarriers, `bar.sync` follows, and another warp starts a copy that signals them. The
  PTX has neither `fence.mbarrier_init` nor a proxy fence between the two, with and without `warp_specialize=True`. The
  ISA asks for one (9.7.13.4); no wrong result was seen.
"""


def load(folder: Path) -> list[Outcome]:
    """The outcomes of earlier runs that `folder` keeps."""
    path = folder / DATA
    return [Outcome(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def write(folder: Path, outcomes: Iterable[Outcome], examples: Mapping[str, str]) -> None:
    """Keep `outcomes`, in place of earlier ones of the same rows, and write the page of all."""
    known = {outcome.key: outcome for outcome in [*load(folder), *outcomes]}
    ordered = sorted(known.values(), key=lambda outcome: (outcome.package, outcome.chip))
    lines = ",\n".join(json.dumps(outcome.as_dict()) for outcome in ordered)
    (folder / DATA).write_text(f"[\n{lines}\n]\n")
    (folder / PAGE).write_text(page(ordered, examples))


def page(outcomes: Sequence[Outcome], examples: Mapping[str, str]) -> str:
    """The page's text. examples: for what is found, by kind and place, the script that shows the same."""
    packages = [list(group) for _, group in groupby(outcomes, lambda outcome: outcome.package)]
    parts = [HEAD, _summary(packages)]
    for rows in packages:
        parts.append(_package(rows, examples))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _summary(packages: Sequence[Sequence[Outcome]]) -> str:
    head = ["package", "version", "calls", "right", "kernels", *(severity.value for severity in Severity)]
    rows = []
    for outcomes in packages:
        found = _findings(outcomes)
        counts = [sum(finding["severity"] == severity.value for finding in found) for severity in Severity]
        right, kernels = sum(outcome.right for outcome in outcomes), sum(outcome.kernels for outcome in outcomes)
        rows.append([outcomes[0].package, outcomes[0].version, len(outcomes), right, kernels, *counts])
    return _table(head, rows)


def _package(outcomes: Sequence[Outcome], examples: Mapping[str, str]) -> str:
    head = ["call", "chip", "orders", "launches", "warp-instructions", "seconds", "error", "result"]
    rows = [
        [
            outcome.name, outcome.chip, outcome.runs, outcome.launches, f"{outcome.instructions:,}",
            f"{outcome.running:.1f}", f"{outcome.ratio:.2f}", _result(outcome),
        ]
        for outcome in outcomes
    ]  # fmt: skip
    text = f"## {outcomes[0].package} {outcomes[0].version}\n\n{_table(head, rows)}"
    found = _findings(outcomes)
    if not found:
        return f"{text}\nNothing was found.\n"
    head = ["severity", "kind", "place", "what", "calls", "the same in a few lines, or what it means"]
    listed = [
        [
            finding["severity"], f"[{finding['kind']}](../findings.md#{finding['kind']})", _places(finding),
            finding["message"].replace("|", "\\|"), finding["calls"], _example(finding, examples),
        ]
        for finding in found
    ]  # fmt: skip
    return f"{text}\n{_table(head, listed)}"


def _result(outcome: Outcome) -> str:
    if outcome.failure:
        return f"not run: {outcome.failure}".replace("|", "\\|")
    if outcome.wrong:
        return f"wrong: {outcome.wrong[0]}".replace("|", "\\|")
    return "right"


def _places(finding: Mapping) -> str:
    shown = [f"`{place}`" for place in finding["places"][:_SHOWN]]
    return ", ".join(shown) + (
        f" and {len(finding['places']) - _SHOWN} more" if len(finding["places"]) > _SHOWN else ""
    )


def _example(finding: Mapping, examples: Mapping[str, str]) -> str:
    shown = examples.get(example_key(finding), "")
    if "#" in shown:  # a section of a page
        return f"[explained]({shown})"
    return f"`examples/emulator/{shown}`" if shown else ""


def example_key(finding: Mapping) -> str:
    """What `examples` are found by."""
    return f"{finding['kind']} {(finding['place'] or finding['other']).partition(':')[0]}"


def _findings(outcomes: Iterable[Outcome]) -> list[dict]:
    """Findings of all rows, errors first: one for each kind, file and sentence, with all its `places` and the number of
    `calls` that show it."""
    known: dict[tuple, dict] = {}
    for outcome in outcomes:
        of_call: set[tuple] = set()
        for finding in outcome.findings:
            identity = (finding["kind"], finding["place"].partition(":")[0], re.sub(r"\d\w*", "N", finding["message"]))
            one = known.setdefault(identity, {**finding, "calls": 0, "places": []})
            for place in (finding["place"], finding["other"]):
                if place and place not in one["places"]:
                    one["places"].append(place)
            one["calls"] += identity not in of_call
            of_call.add(identity)
    order = [severity.value for severity in Severity]
    return sorted(known.values(), key=lambda finding: (order.index(finding["severity"]), finding["place"]))
