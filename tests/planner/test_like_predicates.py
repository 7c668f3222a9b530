"""Tests of LIKE on the rows of a dimension, compared with DuckDB's LIKE on the same texts."""

from __future__ import annotations

import random

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from seamark.metaserver.planner.joins.dimension_columns import DimensionColumn, FileColumn
from seamark.metaserver.planner.joins.like_predicates import BoundLike, LikePredicate, match_rows_by_like
from tests.seeds import first_seed, mark_fast

LETTERS = "aAbB%_#\\.*[(\n éÉßİK"
COLUMN = DimensionColumn(1, "string")


def draw_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(0, length)))


def draw_pattern(rng: random.Random) -> str:
    """Return a random pattern in which # occurs only as the escape character."""
    parts = [rng.choice(["%", "_", "#%", "#_", "##", *LETTERS.replace("#", "")]) for _ in range(rng.randint(0, 4))]
    return "".join(parts)


@pytest.mark.parametrize("number", mark_fast(range(6), 1))
def test_like_keeps_matching_rows_and_is_exact_without_case_conversions(number: int) -> None:
    rng = random.Random(f"{first_seed()}/{number}")
    texts = [None if rng.random() < 0.1 else draw_text(rng, 6) for _ in range(rng.choice([0, 1, 300]))]
    texts += ["a" * 2000 + rng.choice("ab") for _ in range(rng.choice([0, 3]))]  # Some texts are longer than a key.
    array = pa.chunked_array([pa.array(texts, pa.string())])
    column = FileColumn.from_array(array.dictionary_encode() if rng.random() < 0.5 else array, "string")
    table = pa.table({"i": pa.array(range(len(texts)), pa.int64()), "c": array})
    excluded_count = 0
    with duckdb.connect() as con:
        con.register("t", table)
        for _ in range(60):
            function, negated = rng.choice([None, None, "lower", "upper"]), rng.random() < 0.4
            predicate = LikePredicate("c", draw_pattern(rng), "#", function, negated)
            term = "c" if function is None else f"{function}(c)"
            condition = f"{term} {'NOT ' if negated else ''}LIKE $1 ESCAPE '#'"
            rows = con.execute(f"SELECT i FROM t WHERE {condition} ORDER BY i", [predicate.pattern]).fetchall()
            expected = np.zeros(len(texts), dtype=np.bool_)
            expected[[row for (row,) in rows]] = True
            matching_rows = match_rows_by_like([(BoundLike(COLUMN, predicate),)], {COLUMN: column})
            assert matching_rows is not None
            # Texts that are longer than a key, and conversions of the case of other letters than ASCII, are inexact.
            exact_rows = np.array(
                [text is None or (len(text) <= 1000 and (function is None or text.isascii())) for text in texts],
                dtype=np.bool_,
            )
            assert not (expected & ~matching_rows).any(), (predicate, texts)
            assert (matching_rows == expected)[exact_rows].all(), (predicate, texts)
            excluded_count += int((~matching_rows).sum())
    assert excluded_count or len(texts) < 10, "some of the patterns must exclude texts"


def test_row_matches_if_each_list_has_a_matching_predicate() -> None:
    column = FileColumn.from_array(pa.chunked_array([pa.array(["ab", "cd", "abcd", None])]), "string")
    likes = {pattern: BoundLike(COLUMN, LikePredicate("c", pattern)) for pattern in ("%b%", "%c%", "_b")}
    columns = {COLUMN: column}
    assert match_rows_by_like([], columns) is None
    masks = [
        match_rows_by_like([(likes["%b%"], likes["%c%"])], columns),
        match_rows_by_like([(likes["%b%"],), (likes["%c%"],)], columns),
        match_rows_by_like([(likes["_b"],)], columns),
    ]
    assert [list(map(bool, result)) for result in masks if result is not None] == [
        [True, True, True, False],
        [False, False, True, False],
        [True, False, False, False],
    ]


def test_escape_before_an_ordinary_character_is_rejected() -> None:
    with pytest.raises(ValueError, match="must precede"):
        _ = LikePredicate("c", "a#b", "#").regex
