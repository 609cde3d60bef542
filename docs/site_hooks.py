"""What `make docs` needs besides the pages: plots of the measurements, which lie with their rows in bench/results."""

from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def on_files(files, config):
    for plot in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown.replace("](../bench/results/", "](results/")
