"""The conditions of Spark that the shared rules accept."""

from __future__ import annotations

import sys

from sqlglot import exp

from seamark.connector.spark.query.expressions import can_list_uppercase_texts, make_column


def build_upper_case_comparison(text: str) -> exp.Expr:
    return exp.EQ(this=exp.Upper(this=make_column("c")), expression=exp.Literal.string(text))


def test_conditions_on_expanding_upper_case_texts_are_left_to_spark() -> None:
    """A condition on `upper(c)` can leave out files only if all texts with this upper case can be listed.

    For `upper(c) = 'J̌ANE'`, only texts that begin with j or J would be listed, and a text with ǰ would be missed.
    """
    expanded_letters = {letter.upper() for letter in map(chr, range(sys.maxunicode)) if len(letter.upper()) > 1}
    expansions_with_ascii_start = {text for text in expanded_letters if text[0].isascii()}
    assert {"SS", "J\u030c"} <= expansions_with_ascii_start
    for text in expansions_with_ascii_start:
        assert not can_list_uppercase_texts(build_upper_case_comparison(text)), ascii(text)
        assert not can_list_uppercase_texts(build_upper_case_comparison(f"A{text}B")), ascii(text)
    assert can_list_uppercase_texts(build_upper_case_comparison("ÄRGER"))
    assert can_list_uppercase_texts(exp.EQ(this=make_column("c"), expression=exp.Literal.string("SS")))
