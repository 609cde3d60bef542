"""Write what a machine with a GPU needs to run the pairs, into a folder: see `on_gpu.py`, which is part of it.

PYTHONPATH=warpcheck/tests python -m warpcheck_cases.pairs.bundle FOLDER
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from warpcheck.tools import libcuda
from warpcheck_cases.pairs import BOX, FOLDER, Pair, pairs


def described(pair: Pair) -> dict[str, Any]:
    arrays = pair.arrays()
    args: list[dict[str, Any]] = []
    for arg, array in zip(pair.args, arrays):
        if array is None:
            of = int(arg.removeprefix("map="))
            args.append({"map": of, "shape": list(arrays[of].shape), "box": list(BOX)})
        else:
            content = base64.b64encode(array.tobytes()).decode()
            args.append({"content": content, "nbytes": array.nbytes, "fresh": arg.endswith("=fresh")})
    return {
        "id": pair.id, "area": pair.area, "name": pair.name, "grid": pair.grid, "block": pair.block,
        "cluster": pair.cluster, "smem": pair.smem, "hangs": pair.hangs, "args": args,
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for area in {pair.area: pair for pair in pairs()}.values():
        for side in ("right", "wrong"):
            (folder / f"{area.area}_{side}.ptx").write_text(area.ptx(side == "wrong", "-DHARDWARE"))
    (folder / "manifest.json").write_text(json.dumps([described(pair) for pair in pairs()]))
    shutil.copy(FOLDER / "on_gpu.py", folder)
    shutil.copy(libcuda.__file__, folder)


if __name__ == "__main__":
    main()
