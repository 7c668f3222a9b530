"""Text in the place of other text: only what was meant changes."""

from __future__ import annotations

import pytest

from seamark.connector.plans.splices import Replacement, splice


def test_everything_else_stays_as_it_was() -> None:
    text = "SELECT  a -- b\n FROM\tb , c"
    assert (
        splice(text, [Replacement(25, 26, '"x"'), Replacement(21, 22, '"yy"')]) == 'SELECT  a -- b\n FROM\t"yy" , "x"'
    )


def test_nothing_to_replace_leaves_the_text() -> None:
    assert splice("SELECT 1", []) == "SELECT 1"


@pytest.mark.parametrize(
    "replacements",
    [[Replacement(0, 3, "a"), Replacement(2, 4, "b")], [Replacement(5, 9, "a")], [Replacement(3, 2, "a")]],
)
def test_replacements_that_overlap_or_leave_the_text_are_refused(replacements: list[Replacement]) -> None:
    with pytest.raises(ValueError, match="overlaps another replacement, or is not within the text"):
        splice("12345678", replacements)
