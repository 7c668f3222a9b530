"""Tests that a text and the results of every engine's `lower` and `upper` have the same folded form."""

from __future__ import annotations

import hashlib
import random

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark.formats.index.keys import case_folding_table
from seamark.formats.index.keys.case_folding import UNKNOWN_CASE, fold_case, fold_column, has_known_case
from seamark.formats.index.keys.functions import CASE_KEYS
from tests.index.case_folding.mappings import Mappings, read_duckdb_mappings, read_java_mappings, read_python_mappings
from tests.index.case_folding.texts import draw_texts
from tests.seeds import examples, first_seed
from tests.services.java import find_java_17

ALL_POINTS = [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]
FRAME_ROWS = 100_000
"""Rows of one data frame, few because the JVM of the tests has 1.5 GB."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ann@Example.COM", "ann@example.com"),
        ("", ""),
        ("Straße STRASSE", "strasse strasse"),
        ("İıIi", "iiii"),
        ("i\u0307", "i"),
        ("ΣΑΣ σας", fold_case("σασ ΣΑς")),
        ("\u212a", "k"),
        ("ﬁ", "fi"),
        ("日本 😀", "日本 😀"),
        ("a\u0378", UNKNOWN_CASE),
        (UNKNOWN_CASE, UNKNOWN_CASE),
        ("\ud800", UNKNOWN_CASE),
        ("x\U0001fffe", UNKNOWN_CASE),
    ],
)
def test_texts_have_one_folded_form_for_all_engines(text: str, expected: str) -> None:
    assert fold_case(text) == expected
    assert has_known_case(text) == (expected != UNKNOWN_CASE)


def test_columns_are_folded_like_their_values() -> None:
    rng = random.Random(first_seed())
    texts = [None if rng.random() < 0.1 else text for text in draw_texts(rng, 300)]
    expected = [None if text is None else fold_case(text) for text in texts]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        plain_array = pa.array(texts, pa.string())
        array = plain_array.dictionary_encode() if pa.types.is_dictionary(kind) else plain_array.cast(kind)
        chunks = pa.chunked_array([array[:100], array[100:100], array[100:]])
        folded_column = fold_column(chunks)
        folded_column.validate(full=True)
        assert folded_column.to_pylist() == expected, kind
        for start in range(0, 300, 37):  # Most slices begin within a byte of the validity bitmap.
            piece = fold_column(pa.chunked_array([array[start : start + 90]]))
            piece.validate(full=True)
            assert piece.to_pylist() == expected[start : start + 90], (kind, start)
    assert fold_column(pa.chunked_array([pa.array(["AB", None])])).to_pylist() == ["ab", None]
    assert fold_column(pa.chunked_array([pa.nulls(2)])).to_pylist() == [None, None]


def test_random_texts_keep_their_folded_form_in_python_and_duckdb() -> None:
    texts = draw_texts(random.Random(first_seed()), examples(100_000, 2_000))
    table = pa.table({"text": texts})
    rows = duckdb.connect().from_arrow(table).project("text, lower(text), upper(text)").fetchall()
    for text, *other_rows in rows:
        check_fold(text, [*other_rows, text.lower(), text.upper()])


def check_fold(text: str, other_texts: list[str]) -> None:
    """Check that `text` has the same folded form as each of `other_texts`, which an engine made from it.

    Texts that have a character without a known case are left out.
    """
    for other in other_texts:
        if has_known_case(other):
            assert fold_case(text) in (fold_case(other), UNKNOWN_CASE), (text, other)


def check_mappings(mappings: Mappings) -> None:
    for point, texts in mappings.items():
        check_fold(chr(point), sorted(texts))


def test_folding_table_changes_only_together_with_its_version_name() -> None:
    """Indexes that were built with another table have different keys: change `CASE_KEYS` and this test together."""
    table = "".join((case_folding_table.MOVED, case_folding_table.REPLACED, case_folding_table.UNASSIGNED))
    assert (CASE_KEYS, hashlib.sha256(table.encode()).hexdigest()[:16]) == ("folded-16", "a0912a05fd7adc29")


@pytest.mark.slow
def test_all_characters_keep_their_folded_form_in_python_and_duckdb() -> None:
    check_mappings(read_python_mappings())
    check_mappings(read_duckdb_mappings())


@pytest.mark.slow
@pytest.mark.spark  # Start Java.
def test_all_characters_keep_their_folded_form_in_java_and_icu_in_all_locales() -> None:
    java_mappings, _ = read_java_mappings(find_java_17())  # The Java program also uses the ICU library of Spark.
    check_mappings(java_mappings)


@pytest.mark.slow
def test_spark_keeps_the_folded_form_of_all_characters_and_of_random_texts(spark: SparkSession) -> None:
    texts = [*map(chr, ALL_POINTS), *draw_texts(random.Random(first_seed()), 100_000)]
    for icu in ("true", "false"):
        spark.conf.set("spark.sql.icu.caseMappings.enabled", icu)
        for start in range(0, len(texts), FRAME_ROWS):
            rows = pa.table({"text": texts[start : start + FRAME_ROWS]})
            frame = spark.createDataFrame(rows).selectExpr("text", "lower(text)", "upper(text)")
            for row in frame.toArrow().to_pylist():
                text, *converted_texts = row.values()
                check_fold(text, converted_texts)
    spark.conf.unset("spark.sql.icu.caseMappings.enabled")
