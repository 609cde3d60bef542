"""The pages are true where a machine can tell: links lead somewhere, files and modules that they name exist."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fa4

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "warpcheck" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Below these folders every path in backticks is a file or folder of the repository.
_PATH = re.compile(r"`((?:fa4|warpcheck|bench|tests|docs)/[\w./-]*)`")
_MODULE = re.compile(r"python -m ((?:fa4|warpcheck|bench)[\w.]*)")
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


@pytest.mark.parametrize("page", ["index", "training", "fp8", "indexer"])
def test_code_of_a_guide_runs(page, seed):
    """All of a page's Python, in its order."""
    torch.manual_seed(seed)
    there = dict(attention_mask=torch.arange(256) < torch.tensor([[256], [100]]))
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL):
        exec(compile(code, f"{page}.md", "exec"), there)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fa4.flash_attn_func(x, x, x, 0.0, None, True),
        lambda x: fa4.flash_attn_func(x, x, x, alibi_slopes=None),
        lambda x: fa4.flash_attn_func(x, x, x, return_attn_probs=True),
        lambda x: fa4.flash_attn_func(x, x, x, attn_mask=None),
        lambda x: fa4.flash_attn_func(x, x, x, is_causal=True),
        lambda x: fa4.flash_attn_func(x, torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)),
        lambda x: fa4.flash_attn_with_kvcache(x, x, x, None, None, None, None, 3),
        lambda x: fa4.flash_attn_with_kvcache(x, x, x, alibi_slopes=None),
        lambda x: fa4.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True),
    ],
    ids=[
        "positions",
        "alibi_slopes",
        "return_attn_probs",
        "attn_mask",
        "is_causal",
        "heads_first",
        "of_a_cache",
        "alibi_on_a_cache",
        "return_softmax_lse",
    ],
)
def test_errors_of_a_migration_are_on_the_page(call):
    """A text in bold there is part of what is said."""
    texts = re.findall(r"\*\*`(.*?)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text())
    with pytest.raises((TypeError, ValueError)) as said:
        call(torch.zeros(1, 4, 2, 8))
    assert any(text in str(said.value) for text in texts), said.value


@pytest.mark.parametrize(
    "given, parts",
    [
        (dict(page_table=[[0, 1], [0, 1]], new=True), ("page_table has page ", " for new rows of sequence")),
        (dict(expanded=True, new=True), ("has stride 0 on axis",)),
        (dict(positions=5, new=True), ("rotary_cos has ", " positions, expected at least")),
        (dict(grad=True), ("and flash_attn_with_kvcache has no gradients",)),
    ],
    ids=["page_twice", "expanded", "positions", "gradients"],
)
def test_errors_of_a_cache_are_on_the_page(given, parts):
    """In bold there, with ... for what differs, is part of what is said."""
    texts = re.findall(r"\*\*`(.*?)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert "...".join(parts) in texts
    x = torch.zeros(2, 4, 2, 8)
    arguments = dict(q=x, k_cache=x.clone(), v_cache=x.clone(), cache_seqlens=3)
    if given.get("new"):
        arguments |= dict(k=x[:, :1], v=x[:, :1])
    if "page_table" in given:
        arguments |= dict(page_table=torch.tensor(given["page_table"], dtype=torch.int32))
    if given.get("expanded"):
        arguments |= dict(k_cache=x[:1].expand(2, 4, 2, 8))
    if "positions" in given:
        arguments |= dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(given["positions"], 4)) | dict(causal=True)
    if given.get("grad"):
        arguments |= dict(q=x.clone().requires_grad_())
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as said:
        fa4.flash_attn_with_kvcache(**arguments)
    assert all(part in str(said.value) for part in parts), said.value
