"""The words that docs/glossary.md avoids are in no name and in no sentence."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
# They are plain English, too: only names are held to them.
VERBS = {"turn", "walk", "idle"}


def avoided() -> list[str]:
    table = GLOSSARY.read_text().split("## Words to avoid")[1]
    cells = re.findall(r"^\| ([a-z][^|]*?) \|", table, re.M)[1:]
    return [word.strip() for cell in cells for word in re.sub(r"\(.*?\)", "", cell).split(",")]


def sources() -> list[Path]:
    """The packages fa4 and warpcheck, and tests on the emulator."""
    folders = ("fa4", "warpcheck/src", "warpcheck/tests", "tests/emulator", "tests/timing")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parts(name: str) -> list[str]:
    """Words of a name: `dq_teams` and `TeamOf` have team."""
    spaced = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
    return [part.removesuffix("s") if len(part) > 4 else part for part in spaced.split("_")]


def tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(path.read_text()).readline)


def test_the_table_is_read():
    assert {"team", "turn", "let go", "pass on"} <= set(avoided())


def test_no_name_and_no_sentence_of_the_code_has_them():
    words, found = avoided(), []
    for path in sources():
        for token in tokens(path):
            where = f"{path.relative_to(ROOT)}:{token.start[0]}"
            if token.type == tokenize.NAME and "ast.walk(" not in token.line:  # a name of Python's
                mine = set(parts(token.string))
                found += [f"{where} {token.string}" for word in words if set(word.split()) <= mine]
            elif token.type in (tokenize.STRING, tokenize.COMMENT):
                found += [f"{where} {word!r}" for word in in_prose(token.string, words)]
    assert not found, f"docs/glossary.md says what to write instead: {found}"


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "warpcheck" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_of_a_page_has_them(page):
    text = page.read_text().split("## Words to avoid")[0] if page == GLOSSARY else page.read_text()
    assert not in_prose(text, avoided())


def in_prose(text: str, words: list[str]) -> list[str]:
    return [w for w in words if w not in VERBS and re.search(rf"\b{w.replace(' ', r's? +')}s?\b", text, re.I)]
