"""python -m bench.plot FILE: TFLOP/s against seqlen from a result file, one panel per direction, head_dim and mask."""

from __future__ import annotations

from pathlib import Path

import click

from .compare import read_rows


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Default: the file's name with .png")
def main(results: Path, output: Path | None) -> None:
    """Draw the timed rows of a result file; nothing is timed again."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    rows = read_rows(results)
    timed = [row for row in rows if "median_ms" in row]
    if not timed:
        raise click.ClickException(f"{results} has no timed row")
    frame = pd.DataFrame(timed).drop_duplicates(["provider", "label"], keep="last")
    panels = list(frame.groupby(["direction", "head_dim", "head_dim_v", "causal"], sort=True))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.7 * lines), squeeze=False)
    colors = {provider: f"C{i}" for i, provider in enumerate(frame["provider"].unique())}
    lines_of = {}
    for axis, ((direction, head_dim, head_dim_v, causal), panel) in zip(axes.flat, panels):
        for provider, series in panel.groupby("provider", sort=False):
            series = series.sort_values("seqlen_k")
            spread = [series["tflops"] * (1 - series["median_ms"] / series["q75_ms"])] * 2
            style = {"marker": "o", "capsize": 2, "color": colors[provider]}
            lines_of[provider] = axis.errorbar(series["seqlen_k"], series["tflops"], yerr=spread, **style)
        dims = head_dim if head_dim == head_dim_v else f"({head_dim}, {head_dim_v})"
        axis.set(
            title=f"{direction}, head_dim {dims}, {'causal' if causal else 'full'}",
            xlabel="seqlen",
            ylabel="TFLOP/s",
            xscale="log",
            ylim=(0, None),
        )
        ticks = sorted(panel["seqlen_k"].unique())
        axis.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.legend(lines_of.values(), lines_of, loc="lower center", ncols=8, frameon=False)
    gemm = timed[0]["gemm_tflops"]
    figure.suptitle(f"{timed[0]['machine']['device']}, GEMM {gemm[0]:.3g} TFLOP/s in the same run")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    output = output or results.with_suffix(".png")
    figure.savefig(output, dpi=150)
    click.echo(output)


if __name__ == "__main__":
    main()
