"""Tests that no text of a client makes a regular expression backtrack more than a few times at each character.

During a match, no other thread of the process runs. Texts are as long as their limits allow. With backtracking, each of
them would take minutes to hours.
"""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest

from seamark.connector.analysis.lexer import UnsupportedStatement, normalize_numerals, tokenize_trino
from seamark.connector.analysis.scans import STATEMENT_CHARACTERS_MAX
from seamark.connector.client.errors import InvalidRequest as StatementRefused
from seamark.connector.jobs.statements import TEXT_MAX, parse_statement
from seamark.formats.iceberg.expressions.binding import parse_literal
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS, TtlPolicy
from seamark.formats.iceberg.metadata.properties import (
    PROPERTY_NAME_CHARACTERS_MAX,
    check_client_properties,
    configures_client,
    remove_client_properties,
)
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.types import canonicalize_primitive
from seamark.formats.iceberg.types.values import DECIMAL_CHARACTERS_MAX
from seamark.formats.protocol.wire import encode_json, fold_name, fold_path
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.store.operations import CreateNamespace
from tests.attacks.patterns import PatternUse, find_superlinear_texts, generate_by_size, measure_excessive_growth
from tests.attacks.world import SCHEMA
from tests.server.rig import run_server

pytestmark = pytest.mark.timeout(60)
REPO = Path(__file__).resolve().parents[2]
COMBINING_MARKS = "\u0300\u0316"
"""Marks in the wrong order, which the normalisation of a name sorts."""
BLANKS = " " * 1_000_000


@pytest.mark.parametrize("length", [900, 1_000_000])
@pytest.mark.parametrize("text", ["geometry({0}", "geography({0}", "geography({0},{0}", "geometry{0}", "decimal({0}"])
def test_long_type_texts_are_parsed_in_linear_time(text: str, length: int) -> None:
    with pytest.raises(BadRequest) as error:
        canonicalize_primitive(text.format(BLANKS[: length // text.count("{0}")]))
    assert len(str(error.value)) < 1200


def test_types_with_blanks_are_parsed() -> None:
    assert canonicalize_primitive(f"geography(  srid:1 ,{BLANKS[:900]}Karney )") == "geography(srid:1, karney)"
    assert canonicalize_primitive(f"geometry{BLANKS[:900]}( OGC:CRS84 )") == "geometry"


@pytest.mark.parametrize("text", [f"a{BLANKS}", f"a{BLANKS}b,", f'"a{BLANKS}', '"' * 999_999, "a:1," * 250_000])
def test_long_column_ttls_are_parsed_in_linear_time(text: str) -> None:
    with pytest.raises(BadRequest):
        TtlPolicy.from_properties({COLUMNS: text})


def test_column_ttls_with_blanks_are_parsed() -> None:
    policy = TtlPolicy.from_properties({COLUMNS: f' a b {BLANKS}: 2d,{BLANKS}"c""d"{BLANKS}={BLANKS}1 w '})
    assert policy is not None
    assert policy.ages_h == {"a b": 48, 'c"d': 168}


@pytest.mark.parametrize("part", ["/* ", "/*a", "'", '"', "`", "1e", "1.", "1_", "-", "/", "--"])
def test_long_statements_are_parsed_in_linear_time(part: str) -> None:
    text = part * (STATEMENT_CHARACTERS_MAX // len(part) - 1) + "!"
    for parse, value in (
        (tokenize_trino, text),
        (normalize_numerals, text),
        (parse_statement, f"ALTER TABLE t {text[: TEXT_MAX - 100]}"),
    ):
        with suppress(UnsupportedStatement, StatementRefused):
            parse(value)


def _run_module(module: str, timeout_s: float) -> list[str]:
    """Run a module that measures CPU times in a separate process, and return its output.

    The process has a time limit, so a text whose analysis never ends does not block the test.
    """
    result = subprocess.run(
        [sys.executable, "-m", module], cwd=REPO, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.timeout(600)
def test_no_regular_expression_takes_more_than_linear_time() -> None:
    *faults, summary = _run_module("tests.attacks.patterns", timeout_s=500)
    assert faults == []
    assert int(summary.split()[0]) > 150  # Fewer expressions would mean that the search misses most of them.


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_function_of_text_takes_more_than_linear_time() -> None:
    *faults, summary = _run_module("tests.attacks.text_functions", timeout_s=1700)
    assert faults == []
    assert int(summary.split()[0]) > 300  # Fewer functions would mean that the search misses most of them.


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"[+-]?(\d+\.?\d*|\.\d+)", "fullmatch"),
        (r"\s*(\d+)\s*(Z)?\s*", "fullmatch"),
        (r"\s+$", "search"),
        (r"<.*?>!", "search"),
    ],
)
def test_measurement_finds_expressions_that_are_not_linear(pattern: str, method: str) -> None:
    assert list(find_superlinear_texts(PatternUse("here", re.compile(pattern), frozenset([method]))))
    linear = PatternUse("here", re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)"), frozenset([method]))
    assert not list(find_superlinear_texts(linear))


def test_numbers_in_filters_have_a_limited_length() -> None:
    assert parse_literal("long", "1" * 30) is not None
    assert parse_literal("double", "0." + "0" * 1_000 + "1") == 1e-1001
    for text in ("1" * (DECIMAL_CHARACTERS_MAX + 1), "1" * 1_000_000 + "x", "." * 1_000_000):
        for kind in ("int", "long", "float", "double", "decimal(38, 2)"):
            with pytest.raises(BadRequest) as error:
                parse_literal(kind, text)
            assert len(str(error.value)) < 500


@pytest.mark.parametrize("number", ["1", "1.", ".1", "1.5", "-1.5", "+0", "1E5", "1.e+5", ".5E-3"])
def test_valid_numbers_are_parsed(number: str) -> None:
    assert parse_literal("double", number) == float(number)


@pytest.mark.parametrize("text", ["", ".", "1x", "1..2", "1.2.3", "E5", "1E", "1 ", "--1", "+"])
def test_invalid_texts_are_not_parsed_as_numbers(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_literal("double", text)


@pytest.mark.parametrize("name", ["a" + COMBINING_MARKS * 50_000, "\u0f73" * 50_000, "\ufdfa" * 50_000, "x" * 100_000])
def test_names_are_folded_in_linear_time(name: str) -> None:
    for fold in (fold_name, fold_path):
        texts = generate_by_size(lambda size: [name[:size]], len(name) // 2)
        assert measure_excessive_growth(fold, next(texts)) is None
    with pytest.raises(BadRequest, match=f"{PROPERTY_NAME_CHARACTERS_MAX:,} characters"):
        check_client_properties({name: "x"}, "A namespace")


@pytest.mark.parametrize(
    "name",
    ["Ｓ３.endpoint", " s3.endpoint\u3000", "cafe\u0301", "\u212b", "ﬁle", "İx", "write.Ｘ", "x" * 200 + "-impl"],
)
def test_folded_names_equal_names_folded_by_unicodedata(name: str) -> None:
    assert fold_name(name) == unicodedata.normalize("NFKC", name).strip().casefold()


def test_client_properties_are_recognised_in_long_names() -> None:
    marks = COMBINING_MARKS * 500
    for name in (f"s3.endpoint{marks}", f"{marks}-impl", f"  ｒｅｓｔ-x{marks}"):
        assert configures_client(name), name
    assert not configures_client(f"note{marks}")
    assert remove_client_properties({f"s3.{marks}": "x", "note": "y"}) == {"note": "y"}


@pytest.mark.parametrize("part", ["[0]", "[a]", "[f(1)]"])
def test_long_chains_of_brackets_are_rejected_before_they_are_parsed(part: str) -> None:
    schema = convert_json(encode_json(SCHEMA), Schema)
    assert parse_sql("id = ARRAY[1, 2][1] AND data = 'x'", schema).unused
    with pytest.raises(BadRequest, match="too many ways"):
        parse_sql(f"id = a{part * 3_000}", schema)


async def test_server_starts_with_a_stored_property_name_that_folds_slowly(tmp_path: Path) -> None:
    stored_properties = {"a" + COMBINING_MARKS * 200_000: "x", "note": "y", "s3.endpoint": "http://elsewhere"}
    async with run_server(tmp_path) as server:
        await server.components.store.transact([CreateNamespace(path=("old",), properties=stored_properties)])
    async with run_server(tmp_path) as server:
        status, answer = await server.get("/v1/namespaces/old")
        assert status == 200
        assert answer["properties"]["note"] == "y"
