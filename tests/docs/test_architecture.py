"""ARCHITECTURE.md, CONTRIBUTING.md and the glossary name paths, targets, classes and terms that exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.docs.pages import REPO, Page, read_all_pages

PACKAGES = ("commands", "metaserver", "connector", "formats", "cache")
ROOTS = (*PACKAGES, "tests", "bench", "docs", "deploy")
_PATH = re.compile(rf"(?:{'|'.join(ROOTS)})/[\w./-]*")
GLOSSARY = REPO / "docs" / "glossary.md"


def _find_paths(page: Page) -> set[str]:
    return {code for code in page.inline_code if _PATH.fullmatch(code)}


@pytest.mark.parametrize(("name", "count_min"), [("ARCHITECTURE.md", 30), ("CONTRIBUTING.md", 5)])
def test_paths_of_the_page_exist(name: str, count_min: int) -> None:
    paths = _find_paths(Page(REPO / name))
    assert len(paths) >= count_min
    assert {path for path in paths if not (REPO / path).exists()} == set()


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_decorators_of_the_page_exist(name: str) -> None:
    decorators = set(re.findall(r"`@(\w+)", (REPO / name).read_text()))
    defined_names = set(re.findall(r"^(?:class|def) (\w+)", _read_code(), flags=re.MULTILINE))
    assert decorators or name != "ARCHITECTURE.md"
    assert decorators - defined_names == set()


def test_architecture_page_names_every_package() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text()
    contracts = (REPO / ".importlinter").read_text()
    words_of_page = set(re.findall(r"\w+", text))
    for contract in ("layers", "planner", "formats", "index-formats", "iceberg", "api", "connector"):
        section = contracts.partition(f"[importlinter:contract:{contract}]")[2].partition("\nexhaustive")[0]
        packages = set(re.findall(r"\w+", section.partition("layers =")[2]))
        assert packages
        assert packages - words_of_page - {"app", "openapi"} == set(), contract  # `app` and `openapi` are modules.


def test_make_targets_of_the_contributing_page_exist() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
    named_targets = set(re.findall(r"\bmake ([\w-]+)", "\n".join(Page(REPO / "CONTRIBUTING.md").inline_code)))
    named_targets |= set(re.findall(r"^make ([\w-]+)", text, flags=re.MULTILINE))
    assert {"test", "lint", "venv"} <= named_targets
    assert named_targets - targets == set()


def _list_glossary_rows() -> list[tuple[str, str, str]]:
    """Return (term, meaning, source) of all rows of the glossary."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", GLOSSARY.read_text(), flags=re.MULTILINE)
    return [(term, meaning, source) for term, meaning, source in rows if term != "term"]  # The first is the header.


def _list_glossary_classes() -> list[str]:
    """Return the class names in the first two columns of the glossary.

    The third column, the source, may name classes of other projects.
    """
    texts = " ".join(f"{term} {meaning}" for term, meaning, _ in _list_glossary_rows())
    return sorted({name for name in re.findall(r"`(\w+)`", texts) if name[0].isupper()})


@cache
def _read_code() -> str:
    paths = [path for root in PACKAGES for ending in ("py", "pyx") for path in (REPO / root).rglob(f"*.{ending}")]
    return "\n".join(path.read_text() for path in paths)


@cache
def _read_sources() -> str:
    """Return the code and the documents except the glossary, as one text in lower case."""
    pages = [page.text for page in read_all_pages() if page.path != GLOSSARY]
    return "\n".join((_read_code(), *pages)).lower()


@pytest.mark.parametrize("name", _list_glossary_classes())
def test_class_of_the_glossary_exists(name: str) -> None:
    assert re.search(rf"^class {name.lower()}\b", _read_sources(), flags=re.MULTILINE)


def test_terms_of_the_glossary_are_used() -> None:
    patterns = {
        term: re.escape(term.strip("`").lower()).replace(r"\ ", r"[\s_-]*").replace(r"\-", r"[\s_-]*")
        for term, _, _ in _list_glossary_rows()
    }
    assert [term for term, pattern in patterns.items() if not re.search(pattern, _read_sources())] == []


def test_glossary_has_each_term_once_with_meaning_and_source() -> None:
    rows = _list_glossary_rows()
    assert len(rows) > 60
    assert len({term for term, _, _ in rows}) == len(rows)
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    head_lines = [line for line in lines if line.startswith("| term ")]
    assert len(lines) - len(head_lines) == len(rows), "each line of a table must have three cells"
