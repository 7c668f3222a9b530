"""Each attack on the security page names a test that exists."""

from __future__ import annotations

import re

from tests.docs.pages import REPO

PAGE = REPO / "docs" / "explanation" / "security.md"
_NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_DEFINED_TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def _list_attack_rows() -> list[str]:
    """Return the rows of the table of attacks, without its header."""
    _, _, text_from_section = PAGE.read_text().partition("\n## Attacks and answers\n")
    section, _, _ = text_from_section.partition("\n## ")
    _head, _separator, *rows = (line for line in section.splitlines() if line.startswith("|"))
    return rows


def test_each_attack_has_an_answer_and_one_test() -> None:
    rows = _list_attack_rows()
    assert len(rows) > 50
    for row in rows:
        attack, answer, test = (cell.strip() for cell in row.strip("|").split("|"))
        assert attack, row
        assert answer, row
        assert _NAMED_TEST.fullmatch(test), row


def test_each_test_that_the_security_page_names_exists() -> None:
    named_tests = _NAMED_TEST.findall(PAGE.read_text())
    assert len(named_tests) == len(_list_attack_rows())
    missing_names = [
        f"{path}::{name}"
        for path, name in named_tests
        if not (REPO / path).is_file() or name not in _DEFINED_TEST.findall((REPO / path).read_text())
    ]
    assert not missing_names
