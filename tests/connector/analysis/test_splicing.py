"""Tests that replacements in a text change only the spans that they name."""

from __future__ import annotations

import pytest

from seamark.connector.plans.splices import Replacement, splice


def test_splice_keeps_all_other_text() -> None:
    text = "SELECT  a -- b\n FROM\tb , c"
    assert (
        splice(text, [Replacement(25, 26, '"x"'), Replacement(21, 22, '"yy"')]) == 'SELECT  a -- b\n FROM\t"yy" , "x"'
    )


def test_splice_without_replacements_keeps_the_text() -> None:
    assert splice("SELECT 1", []) == "SELECT 1"


@pytest.mark.parametrize(
    "replacements",
    [[Replacement(0, 3, "a"), Replacement(2, 4, "b")], [Replacement(5, 9, "a")], [Replacement(3, 2, "a")]],
)
def test_overlapping_or_outlying_replacements_are_refused(replacements: list[Replacement]) -> None:
    with pytest.raises(ValueError, match="overlaps another replacement, or is not within the text"):
        splice("12345678", replacements)
