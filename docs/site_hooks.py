"""Hooks of `make docs`: add the plots of bench/results to the site, and load mermaid only on pages with a diagram."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def on_files(files, config):
    """Add each plot as results/NAME.png."""
    for plot in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Replace links to bench/results, relative to the page in docs/, by links to the added files."""
    folder = posixpath.dirname(page.file.src_uri)
    in_repository = posixpath.relpath("bench/results", posixpath.join("docs", folder))
    in_site = posixpath.relpath("results", folder or ".")
    return markdown.replace(f"]({in_repository}/", f"]({in_site}/")


def on_post_page(output, page, config):
    """Remove the script of mermaid, 3 MB, from a page without a diagram."""
    if 'class="mermaid"' in output:
        return output
    return re.sub(r'<script src="[^"]*mermaid\.min\.js"></script>', "", output)
