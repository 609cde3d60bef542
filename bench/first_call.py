"""python -m bench.first_call: seconds that the first call of a process takes, beside `import torch`.

Fresh processes, with an empty disk cache, with a filled one, and with a filled one where CuTe DSL cannot be imported.
A process imports torch and starts CUDA, imports fa4, and makes the call twice, each time until the GPU is done. Where
there is no GPU, kernels are compiled for sm_90 and loaded, but not launched. Rows, one for each process, go to --out.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from . import machine

_PROCESS = """
import contextlib, json, sys, time
is_importable = sys.argv[1] == "installed"
if not is_importable:
    sys.modules["cutlass"] = None
clock = [time.perf_counter()]
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
def done():
    torch.zeros(1, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    clock.append(time.perf_counter())
done()
import fa4
done()
inside = contextlib.nullcontext()
if device == "cpu":
    from fa4.runtime import jit
    from fa4.runtime.device import chip_by_number, emulating
    inside, load = emulating(chip_by_number(90)), jit._load
    jit._load = lambda entry: load(entry) and (lambda *arguments: None)
def new(*shape, grad=False):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=grad)
def integers(*values):
    return torch.tensor(values, device=device, dtype=torch.int32)
PROBLEM
with inside:
    done()
    for _ in range(2):
        call()
        done()
seconds = [after - before for before, after in zip(clock, clock[1:])]
row = dict(zip(("torch_s", "fa4_s", "tensors_s", "first_s", "second_s"), seconds))
print(json.dumps(row | dict(imports_dsl=is_importable and "cutlass" in sys.modules)))
"""

PROBLEMS = {
    "forward": """
q, k, v = (new(1, 1024, heads, 128) for heads in (16, 4, 4))
def call():
    fa4.flash_attn_func(q, k, v, causal=True)
""",
    "training": """
q, k, v = (new(1, 1024, heads, 128, grad=True) for heads in (16, 4, 4))
def call():
    fa4.flash_attn_func(q, k, v, causal=True).sum().backward()
""",
    "decode": """
q, k, v = (new(2, 1, heads, 128) for heads in (16, 4, 4))
pages, table = [new(64, 128, 4, 128) for _ in range(2)], torch.arange(64, device=device, dtype=torch.int32).view(2, 32)
used = integers(3000, 500)
def call():
    fa4.flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=used, page_table=table, causal=True)
""",
    "latent": """
q = [new(2, 1, 16, columns) for columns in (512, 64)]
rows, table = new(64, 64, 1, 576), torch.arange(64, device=device, dtype=torch.int32).view(2, 32)
used = integers(1500, 500)
def call():
    fa4.mla_attention_with_kvcache(*q, rows, softmax_scale=0.1, cache_seqlens=used, page_table=table, causal=True)
""",
}
# (disk cache, CuTe DSL)
STATES = (("empty", "installed"), ("filled", "installed"), ("filled", "not importable"))


def measure(problem: str, compiler: str, cache: str) -> dict:
    """Return the seconds of one process."""
    program = _PROCESS.replace("PROBLEM", PROBLEMS[problem])
    environment = {**os.environ, "FA4_CACHE_DIR": cache, "FA4_CACHE": "1"}
    command = [sys.executable, "-c", program, compiler]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise click.ClickException(f"{problem}, CuTe DSL {compiler}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(problem: str, times: int, cache: str | None) -> list[dict]:
    """Return a row for each process. cache: a filled one, of `fa4 compile`; None to fill one here."""
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as own:
        for state, compiler in STATES:
            if state == "empty" and cache is not None:
                continue
            for _ in range(1 if state == "empty" else times):
                seconds = measure(problem, compiler, cache or own)
                rows.append(dict(problem=problem, cache=state, compiler=compiler, **seconds))
    return rows


@click.command(help=__doc__)
@click.option("--problem", "problems", multiple=True, type=click.Choice([*PROBLEMS]), help="Default: all.")
@click.option("--times", default=5, show_default=True, type=click.IntRange(1), help="Processes with a filled cache.")
@click.option(
    "--cache", default=None, type=click.Path(exists=True, file_okay=False), help="Directory of `fa4 compile`."
)
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="File for the rows, JSON lines.")
def main(problems: tuple[str, ...], times: int, cache: str | None, out: str | None) -> None:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: loaded for sm_90, not launched"
    rows = [row for problem in problems or PROBLEMS for row in rows_of(problem, times, cache)]
    facts = dict(device=where, torch=torch.__version__, commit=machine.commit(), date=f"{datetime.date.today()}")
    if out:
        Path(out).write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    table = Table(title=f"first call of a process, medians in seconds ({where})")
    for column in (
        "problem",
        "cache",
        "CuTe DSL",
        "import fa4",
        "first call",
        "both",
        "second call",
        "imports CuTe DSL",
    ):
        table.add_column(column)
    for problem in problems or PROBLEMS:
        for state, compiler in STATES:
            mine = [
                row for row in rows if (row["problem"], row["cache"], row["compiler"]) == (problem, state, compiler)
            ]
            if mine:
                names = ("fa4_s", "first_s", "second_s")
                fa4_s, first, second = (statistics.median(row[name] for row in mine) for name in names)
                imports = "yes" if any(row["imports_dsl"] for row in mine) else "no"
                both = statistics.median(row["fa4_s"] + row["first_s"] for row in mine)
                seconds = (f"{x:.3f}" for x in (fa4_s, first, both, second))
                table.add_row(problem, state, compiler, *seconds, imports)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
