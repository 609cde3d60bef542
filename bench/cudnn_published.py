"""cuDNN's kernels in CuTe DSL on a predicted B200, beside what NVIDIA publishes of cuDNN 9.22 on a GB200.

    python -m bench.cudnn_published predict --into ROWS.jsonl    # nvidia-cudnn-frontend is installed
    python -m bench.cudnn_published page ROWS.jsonl

The published rows (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training, April 2026) are of kernels inside of
libcudnn, which is closed; the predicted ones of those that the frontend has as source. They need not be the same.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from warpcheck.findings import FINAL
from warpcheck.machine import Checks
from warpcheck.timing.chips import GPUS

from fa4.emulator import emulate

from .row_pages import rows_of


@dataclass(frozen=True)
class Published:
    """TFLOP/s of a forward. The batch of the rows is published for Llama only (2)."""

    model: str
    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    tflops: int

    @property
    def flops(self) -> float:
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        return 2 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)


PUBLISHED = (
    Published("Llama", 2, 4096, 64, 8, 128, 128, False, 1599),
    Published("Llama", 2, 4096, 64, 8, 128, 128, True, 1408),
    Published("Llama", 2, 8192, 64, 8, 128, 128, False, 1771),
    Published("Llama", 2, 8192, 64, 8, 128, 128, True, 1574),
    Published("Qwen", 2, 4096, 32, 2, 256, 256, True, 1441),
    Published("Qwen", 2, 8192, 32, 2, 256, 256, True, 1708),
    Published("DeepSeek", 1, 4096, 128, 128, 192, 128, True, 1406),
    Published("DeepSeek", 1, 4096, 128, 128, 192, 128, False, 1666),
    Published("DeepSeek", 1, 8192, 128, 128, 192, 128, False, 1759),
)


def predicted(row: Published, sample: int = 12) -> float:
    """Return the cycles of a forward of `SdpaFwdDslSm100` on a B200."""
    table = GPUS["B200"]
    options = {"sms": table.sms, "timing": True, "sample": sample, "progress": 0, "on_finding": "collect"}
    with emulate(table.chip, checks=Checks(races=False, poison=False), tells_devices_apart=True, **options) as gpu:
        from cudnn.sdpa.fwd.api_dsl import SdpaFwdDslSm100

        def normal(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(row.batch, row.seqlen, heads, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

        q, k, v = normal(row.heads_q, row.head_dim), normal(row.heads_kv, row.head_dim), normal(
            row.heads_kv, row.head_dim_v
        )  # fmt: skip
        out = normal(row.heads_q, row.head_dim_v)
        lse = torch.empty(row.batch, row.heads_q, row.seqlen, device="cuda")
        api = SdpaFwdDslSm100(q, k, v, out, lse, is_causal=row.causal)
        api.check_support()
        api.compile()
        size = api.scratch_workspace_bytes()
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        api.execute(q, k, v, out, lse, workspace=workspace)
    for finding in gpu.findings:
        if finding.kind in FINAL:
            raise finding.error
    return gpu.timing(table=table).cycles


def page(rows: list[dict]) -> str:
    """A table, with the mean and the largest error."""
    clock = GPUS["B200"].clock.value
    lines = ["| forward | published, GB200 | predicted, B200 | error |", "|---|--:|--:|--:|"]
    errors = []
    for row in rows:
        case = Published(**{field.name: row[field.name] for field in dataclasses.fields(Published)})
        tflops = case.flops * clock / row["cycles"] / 1000
        errors.append(tflops / case.tflops - 1)
        dims = case.head_dim if case.head_dim == case.head_dim_v else f"({case.head_dim}, {case.head_dim_v})"
        heads = f"{case.heads_q}/{case.heads_kv}"
        name = f"d{dims} {'causal' if case.causal else 'full'} {case.seqlen // 1024}k, heads {heads}"
        lines.append(f"| {name} | {case.tflops} | {tflops:.0f} | {errors[-1]:+.1%} |")
    mean = sum(map(abs, errors)) / len(errors)
    lines += ["", f"Mean absolute error of these ({len(errors)}): {mean:.1%}, the largest {max(errors, key=abs):+.1%}."]
    return "\n".join(lines) + "\n"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("predict")
@click.option("--into", type=click.Path(path_type=Path), required=True)
def predict(into: Path) -> None:
    """Predict every published row that is not in --into."""
    known = rows_of(into) if into.exists() else []
    for row in map(dataclasses.asdict, PUBLISHED):
        if not any(row.items() <= old.items() for old in known):
            made = {**row, "cycles": predicted(Published(**row))}
            click.echo(json.dumps(made))
            with into.open("a") as file:
                file.write(json.dumps(made) + "\n")


@main.command("page")
@click.argument("rows", type=click.Path(exists=True, path_type=Path))
def _page(rows: Path) -> None:
    """Print the table."""
    click.echo(page(rows_of(rows)), nl=False)


if __name__ == "__main__":
    main()
