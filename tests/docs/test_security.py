"""Each attack on the security page names a test that exists."""

from __future__ import annotations

import re

from tests.docs.pages import REPO

PAGE = REPO / "docs" / "explanation" / "security.md"
_NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_DEFINED_TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def _list_attack_rows() -> list[str]:
    """Return the rows of the table of attacks, without its head."""
    section = PAGE.read_text().partition("\n## Attacks and answers\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_each_attack_has_an_answer_and_one_test() -> None:
    rows = _list_attack_rows()
    assert len(rows) > 50
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
        assert _NAMED_TEST.fullmatch(cells[2]), row


def test_each_test_that_the_security_page_names_exists() -> None:
    matches = _NAMED_TEST.findall(PAGE.read_text())
    assert len(matches) == len(_list_attack_rows())
    missing_names = [
        f"{path}::{name}"
        for path, name in matches
        if not (REPO / path).is_file() or name not in _DEFINED_TEST.findall((REPO / path).read_text())
    ]
    assert not missing_names
