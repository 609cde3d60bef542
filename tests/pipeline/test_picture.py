"""Pages of kernels show the tables that the kernels are built from."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.pipeline.picture import tables

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "sm100.fwd": "blackwell-forward.md",
    "sm100.bwd": "blackwell-backward.md",
    "sm100.bwd.wide": "blackwell-backward-wide.md",
    "sm100.fwd.widest": "blackwell-widest.md",
    "sm100.bwd.widest": "blackwell-widest.md",
    "sm120.fwd": "consumer-blackwell.md",
    "sm90.fwd": "hopper-forward.md",
    "sm90.bwd": "hopper-backward.md",
    "sm90.fwd.widest": "hopper-widest.md",
    "sm90.latent": "hopper-latent.md",
}


@pytest.mark.parametrize("kernel", PAGES)
def test_the_page_shows_the_tables(kernel):
    assert tables(kernel) in (DOCS / PAGES[kernel]).read_text(), (
        f"run `python -m fa4.pipeline.picture {kernel}`, paste it into {PAGES[kernel]}"
    )
