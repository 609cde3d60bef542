"""The pages are true where a machine can tell: links lead somewhere, files and modules that they name exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Below these folders every path in backticks is a file or folder of the repository.
_PATH = re.compile(r"`((?:fa4|bench|tests|docs)/[\w./-]*)`")
_MODULE = re.compile(r"python -m ((?:fa4|bench)[\w.]*)")
_LINK = re.compile(r"\]\(([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_modules_exist(page):
    text = page.read_text().replace("smNN", "sm100")  # stands for any chip
    links = [link for link in _LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    missing += [name for name in _MODULE.findall(text) if importlib.util.find_spec(name.rstrip(".")) is None]
    assert not missing, f"{page.name} names what does not exist: {sorted(set(missing))}"


def test_the_site_lists_every_page():
    """`make docs` would build a page that nobody finds."""
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == sorted(pages)
