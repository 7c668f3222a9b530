"""Tests that only listed functions reach DuckDB, and that DuckDB itself opens no file or address."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import duckdb
import pyarrow as pa
import pytest
from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql import scopes
from seamark.connector.sql.choice import AUTO, DUCKDB, LARGE_BYTES, SPARK, TRINO, StatementProfile, choose
from seamark.connector.sql.duckdb_engine import DuckDBLimits, open_connection
from seamark.connector.sql.queries import DuckDBQuery, translate
from seamark.connector.sql.rows import convert_to_json_rows
from seamark.connector.sql.scopes import VisibleColumn
from seamark.connector.sql.spark_engine import write_spark_text
from seamark.connector.sql.statement import Kind, parse
from seamark.connector.sql.types import (
    BIGINT,
    DATE,
    DOUBLE,
    INTEGER,
    TIME,
    VARCHAR,
    SqlType,
    UnsupportedInDuckDB,
    make_decimal,
    name_duckdb_type,
)

COLUMNS = {"id": BIGINT, "k": INTEGER, "name": VARCHAR, "x": DOUBLE, "price": make_decimal(12, 2)}
TPCH = Path(__file__).parents[2] / "deploy" / "tpch.sql"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def translate_text(text: str) -> DuckDBQuery:
    return translate(parse(text).tree, lambda _: COLUMNS, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_parquet('s3://bucket/x')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM TABLE(read_text('/etc/passwd'))",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM pragma_version()",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM s.t, LATERAL (SELECT 1)",
        "SELECT * FROM UNNEST(ARRAY[1])",
        "SELECT getenv('HOME')",
        "SELECT current_setting('secret_directory')",
        "SELECT version()",
        "SELECT read_blob('/etc/passwd')",
        "SELECT error('x')",
        "SELECT list_transform(ARRAY[1], x -> x)",
        "SELECT reduce(ARRAY[1], 0, (s, x) -> s + x, s -> s)",
        "SELECT name COLLATE nocase FROM s.t",
        "SELECT id FROM s.t TABLESAMPLE BERNOULLI (10)",
        "SELECT COLUMNS('x') FROM s.t",
        "SELECT repeat('x', 1000000000)",
        "SELECT id FROM s.t QUALIFY row_number() OVER (ORDER BY id) = 1",
        "WITH RECURSIVE w(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM w) SELECT * FROM w",
        "SELECT CAST(name AS integer) FROM s.t",
        "SELECT DISTINCT ON (id) id FROM s.t",
    ],
)
def test_functions_that_are_not_listed_are_not_translated(text: str) -> None:
    with pytest.raises((UnsupportedInDuckDB, InvalidRequest)):
        translate_text(text)


def test_each_column_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def count_calls(field: VisibleColumn, qualifiers: tuple[str, ...]) -> bool:
        calls[field.name] += 1
        return is_qualified(field, qualifiers)

    is_qualified = scopes._is_qualified
    monkeypatch.setattr(scopes, "_is_qualified", count_calls)
    names = [f"c{number}" for number in range(300)]
    outputs = ", ".join(f"id AS {name}" for name in names)
    translate_text(f"SELECT {outputs} FROM s.t ORDER BY {', '.join(f'{name} + 1' for name in names)}")
    assert calls["id"] == len(names)
    assert {calls[name] for name in names} == {1}


@pytest.mark.parametrize(
    "text",
    [
        "ATTACH '/tmp/x.db' AS x",
        "COPY (SELECT 1) TO '/tmp/x'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "PRAGMA version",
        "CALL pragma_version()",
        "EXPORT DATABASE '/tmp/x'",
        "CREATE MACRO m() AS 1",
        "CREATE SECRET s (TYPE s3)",
        "EXECUTE IMMEDIATE 'SELECT 1'",
        "SHOW TABLES",
        "USE x",
    ],
)
def test_statement_that_is_no_query_is_not_translated(text: str) -> None:
    try:
        kind = parse(text).kind
    except InvalidRequest:
        return
    assert kind is not Kind.QUERY


@pytest.mark.parametrize("text", ["SELECT 1; SELECT 2", "", ";", "SELECT 1; DROP TABLE s.t", "SELEC 1", "SELECT (1"])
def test_text_that_is_not_one_statement_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 5_000 + "1" + ")" * 5_000,
        "SELECT " + "NOT " * 5_000 + "TRUE",
        "SELECT 1" + " + 1" * 30_000,
        "SELECT '" + "x" * 200_000 + "'",
        "SELECT " + "CASE WHEN id > 1 THEN " * 900 + "1" + " END" * 900 + " FROM s.t",
        "SELECT " + "price / (" * 60 + "price" + ")" * 60 + " FROM s.t",
        "SELECT " + "(x = " * 40 + "x" + ")" * 40 + " FROM s.t",
        "SELECT " + "9" * 5_000,
        "SELECT id FROM s.t LIMIT " + "9" * 5_000,
        "SELECT id FROM s.t ORDER BY " + "9" * 5_000,
        "SELECT CAST(price AS DECIMAL(" + "9" * 5_000 + ", 2)) FROM s.t",
        "SELECT substr(name, " + "9" * 5_000 + ") FROM s.t",
        "SELECT INTERVAL '" + "9" * 5_000 + "' DAY",
    ],
)
def test_query_that_expands_without_limit_is_refused(text: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedInDuckDB)):
        translate_text(text)


@pytest.mark.parametrize(
    ("condition", "expected_names"),
    [
        ("name LIKE 'a%'", ["a_b", "ab"]),
        ("name NOT LIKE 'a%'", ["b"]),
        ("NOT name NOT LIKE 'a%'", ["a_b", "ab"]),
        ("name LIKE 'a!_%' ESCAPE '!'", ["a_b"]),
        ("name NOT LIKE 'a!_%' ESCAPE '!'", ["ab", "b"]),
        ("name IS NULL", [None]),
        ("name IS NOT NULL", ["a_b", "ab", "b"]),
        ("NOT name IS NOT NULL", [None]),
        ("name NOT IN ('b')", ["a_b", "ab"]),
        ("name NOT BETWEEN 'ab' AND 'b'", ["a_b"]),
        ("name IS DISTINCT FROM 'b'", ["a_b", "ab", None]),
    ],
)
def test_negated_condition_is_true_for_the_other_rows(condition: str, expected_names: list[str | None]) -> None:
    query = translate_text(f"SELECT name FROM s.t WHERE {condition} ORDER BY name NULLS LAST")
    with duckdb.connect() as db:
        db.execute("CREATE TABLE t0 AS SELECT * FROM (VALUES ('a_b'), ('ab'), ('b'), (NULL)) AS t (c2)")
        assert list(query.tables[0].used) == ["name"]
        assert [row[0] for row in db.execute(query.text).fetchall()] == expected_names


def test_upper_converts_character_by_character_and_repeats_no_expression() -> None:
    """Trino's `upper` keeps a character whose capital form has several letters."""
    texts = [None, "", "ß", "ßß", "aßbßc", "ßa", "ẞß", "é", "a part", "Straße"]
    expected = [
        None if text is None else "".join(letter.upper() if len(letter.upper()) == 1 else letter for letter in text)
        for text in texts
    ]
    single_query, nested_query = (
        translate_text(f"SELECT {expression} FROM s.t") for expression in ("upper(name)", "upper(upper(name))")
    )
    with duckdb.connect() as db:
        db.execute("CREATE TABLE t0 (c2 VARCHAR)")
        db.executemany("INSERT INTO t0 VALUES (?)", [(text,) for text in texts])
        for query in (single_query, nested_query):
            assert [row[0] for row in db.execute(query.text).fetchall()] == expected
    assert single_query.text.count("c2") == nested_query.text.count("c2")


def test_identifiers_of_a_statement_do_not_reach_duckdb() -> None:
    query = translate_text('SELECT "id" AS "a; DROP", t."NAME" FROM s."t" AS "t" WHERE name = \'it\'\'s\'')
    source = "(SELECT * FROM t0 LIMIT 4611686018427387904) AS r0"
    expected = ("SELECT r0.c0 AS c0, r0.c2 AS c1", f"FROM {source}", "WHERE (r0.c2 = 'it''s')")
    assert query.text == " ".join(expected)
    assert [name for name, _ in query.columns] == ["a; DROP", "NAME"]
    assert list(query.tables[0].used) == ["id", "name"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SELECT nope FROM s.t", "does not exist$"),
        ("SELECT nmae FROM s.t", "The column nmae does not exist; did you mean name\\?"),
        ("SELECT (SELECT max(k) FROM s.t AS b WHERE a.pric = 1) FROM s.t AS a", "did you mean price\\?"),
        ('SELECT id FROM s.t WHERE name = "ab-12"', "write a text in single quotes"),
        ("SELECT id FROM s.t a, s.t b", "ambiguous"),
        ("SELECT name + 1 FROM s.t", "not defined for the types"),
        ("SELECT id FROM s.t WHERE name = 1", "convert one of them with CAST"),
        ("SELECT 1 UNION SELECT 'a'", "use CAST"),
        ("SELECT 1, 2 UNION SELECT 1", "2 and 1 columns"),
        ("SELECT DATE '2024-13-01'", "not a valid date"),
        ("SELECT id FROM s.t LIMIT -1", "need a whole number of at most"),
        ("SELECT id FROM s.t ORDER BY 3", "has 1 columns"),
        ("SELECT 99999999999999999999", "out of the range"),
    ],
)
def test_invalid_query_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        translate_text(text)


def test_operations_of_times_and_intervals_run_on_trino() -> None:
    """Operations that Trino defines raise `UnsupportedInDuckDB`, so a session with Trino runs the statement there.

    Operations that Trino does not define raise `InvalidRequest`, which refuses the statement in each session.
    """
    day, interval = "DATE '2024-01-02'", "INTERVAL '1' DAY"
    moment, zoned = "TIMESTAMP '2024-01-02 10:00:00'", "TIMESTAMP '2024-01-02 10:00:00 UTC'"
    columns = {"t": TIME, "k": INTEGER}
    for expression in (
        *(f"{day} - {day}", f"{moment} - {day}", f"{zoned} - {moment}", "t - t", "t + NULL"),
        *(f"t + {interval}", f"{interval} + t", f"t - {interval}", f"{interval} - {interval}", f"-{interval}"),
        *(f"{interval} * k", f"k * {interval}", f"{interval} / k", f"sum({interval} * k)", f"year({interval})"),
    ):
        with pytest.raises(UnsupportedInDuckDB, match="is not translated for the type"):
            translate(parse(f"SELECT {expression} FROM s.t").tree, lambda _: columns, NOW)
    for expression in (f"{day} + {day}", f"{interval} - {day}", f"k - {interval}", f"{day} * {interval}", "t - k"):
        with pytest.raises(InvalidRequest, match="is not defined for the types"):
            translate(parse(f"SELECT {expression} FROM s.t").tree, lambda _: columns, NOW)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("id + k", BIGINT),
        ("k + 1", INTEGER),
        ("price * price", make_decimal(24, 4)),
        ("price / 8", make_decimal(23, 13)),
        ("sum(price) / 3", make_decimal(38, 6)),
        ("avg(price)", make_decimal(12, 2)),
        ("avg(k)", DOUBLE),
        ("sum(k)", BIGINT),
        ("1.50", make_decimal(3, 2)),
        ("1e0", DOUBLE),
    ],
)
def test_expression_has_the_same_type_as_in_trino(text: str, kind: SqlType) -> None:
    assert translate_text(f"SELECT {text} FROM s.t").columns[0][1] == kind


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('/*')",
        "COPY (SELECT 1) TO '{file}.out'",
        "ATTACH '{file}.db'",
        "INSTALL httpfs",
        "LOAD '{file}'",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "RESET memory_limit",
        "SET profiling_output = '{file}.out'",
        "EXPORT DATABASE '{file}.d'",
        "CREATE SECRET s (TYPE s3)",
        "SELECT getenv('HOME')",
        "SELECT * FROM a_python_variable",
        "IMPORT DATABASE '{file}'",
    ],
)
def test_duckdb_connection_opens_no_file_for_any_statement(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("secret\n1\n")
    a_python_variable = [1]  # Outside of this connection, a statement can read variables of Python.
    assert a_python_variable
    with closing(open_connection(DuckDBLimits(memory_bytes=256 << 20))) as con, pytest.raises(duckdb.Error):
        con.execute(text.format(file=file)).fetchall()
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_engine_is_chosen_by_bytes_and_kind_of_the_statement() -> None:
    both_engines = frozenset({DUCKDB, TRINO})
    small_profile, large_profile = StatementProfile(Kind.QUERY, 10), StatementProfile(Kind.QUERY, LARGE_BYTES)
    assert choose(small_profile, AUTO, both_engines).engine == DUCKDB
    assert choose(large_profile, AUTO, both_engines).engine == TRINO
    assert choose(large_profile, AUTO, frozenset({DUCKDB})).engine == DUCKDB
    assert choose(small_profile, TRINO, both_engines).engine == TRINO
    assert choose(StatementProfile(Kind.QUERY, 0, "of a function"), AUTO, both_engines).engine == TRINO
    assert choose(StatementProfile(Kind.MERGE), AUTO, frozenset({DUCKDB, SPARK})).engine == SPARK
    assert choose(StatementProfile(Kind.INSERT), AUTO, both_engines).engine == DUCKDB


@pytest.mark.parametrize(
    ("profile", "wanted_engine"),
    [
        (StatementProfile(Kind.QUERY, 0, "of a function"), AUTO),
        (StatementProfile(Kind.QUERY, 0, "of a function"), DUCKDB),
        (StatementProfile(Kind.MERGE), AUTO),
        (StatementProfile(Kind.OTHER), AUTO),
        (StatementProfile(Kind.QUERY), TRINO),
        (StatementProfile(Kind.QUERY), "presto"),
    ],
)
def test_missing_engine_is_reported_with_the_reason(profile: StatementProfile, wanted_engine: str) -> None:
    with pytest.raises(InvalidRequest, match=r"DuckDB|Spark|not a query|not configured|must be"):
        choose(profile, wanted_engine, frozenset({DUCKDB}))


_DECIMAL_COLUMNS = (
    "acctbal",
    "retailprice",
    "supplycost",
    "totalprice",
    "quantity",
    "extendedprice",
    "discount",
    "tax",
)
_COLUMN_PREFIXES = {
    "region": "r",
    "nation": "n",
    "supplier": "s",
    "customer": "c",
    "part": "p",
    "partsupp": "ps",
    "orders": "o",
    "lineitem": "l",
}


def _find_tpch_columns(node: exp.Table, names: Iterable[str]) -> dict[str, SqlType]:
    types = {}
    for name in sorted(names):
        prefix, _, column = name.partition("_")
        if prefix == _COLUMN_PREFIXES[node.name.lower()]:
            kind = (
                BIGINT
                if column.endswith("key")
                else INTEGER
                if column in ("size", "availqty", "linenumber")
                else VARCHAR
            )
            kind = make_decimal(12, 2) if column in _DECIMAL_COLUMNS else DATE if column.endswith("date") else kind
            types[name] = kind
    return types


def test_all_22_queries_of_tpc_h_are_translated_and_run_in_duckdb() -> None:
    text = "\n".join(line for line in TPCH.read_text().splitlines() if not line.startswith("--"))
    names = set(re.findall(r"\b(?:r|n|s|c|p|ps|o|l)_\w+", text))
    queries = [part for part in text.split(";") if part.strip()]
    with closing(open_connection(DuckDBLimits(memory_bytes=256 << 20))) as con:
        for query in queries:
            result = translate(parse(query).tree, lambda node: _find_tpch_columns(node, names), NOW)
            for table in result.tables:
                null_columns = (
                    f"CAST(NULL AS {name_duckdb_type(kind)}) AS c{n}" for n, kind in enumerate(table.columns.values())
                )
                con.execute(f"CREATE OR REPLACE TEMP VIEW {table.name} AS SELECT {', '.join(null_columns)} LIMIT 0")
            con.execute(result.text).fetchall()
    assert len(queries) == 22


def test_merge_is_translated_for_spark_only_if_its_meaning_is_kept() -> None:
    text = "MERGE INTO s.t USING s.u AS u ON t.id = u.id WHEN MATCHED THEN UPDATE SET x = u.x + 1"
    translated_text = write_spark_text(parse(text).tree, "sea", "lake", None)
    assert translated_text.startswith("MERGE INTO `lake`.s.t USING `lake`.s.u AS u ON")
    for expression in ("u.x / 2", "CAST(u.name AS integer)", "length(u.name)"):
        with pytest.raises(InvalidRequest, match="may have a different meaning"):
            write_spark_text(parse(text.replace("u.x + 1", expression)).tree, "sea", "lake", None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("-1_0_0", -100),
        ("0xFF + 0b1_01 + 0O17", 275),
        ("1_0.2_5", Decimal("10.25")),
        ("'1_000 0xFF'", "1_000 0xFF"),
        ('/* 1_ */ "1_0"', 7),
        ("UUID '12345678-ABCD-1234-1234-123456789ABC'", UUID("12345678-abcd-1234-1234-123456789abc")),
        ("BIGINT '5' + INTEGER '-2'", 3),
        ("DOUBLE '1.5'", 1.5),
        ("REAL '0.5'", 0.5),
        ("BOOLEAN 'true'", True),
        ("CASE 9007199254740992 WHEN 9007199254740993 THEN 1 WHEN 1e0 THEN 2 ELSE 3 END", 1),
        ("CASE 1 WHEN NULL THEN 1 ELSE 3 END", 3),
    ],
)
def test_trino_literals_have_their_values(text: str, value: object) -> None:
    query = translate(parse(f'SELECT {text} FROM (SELECT 7 AS "1_0") q').tree, lambda _: COLUMNS, NOW)
    with closing(open_connection(DuckDBLimits())) as con:
        assert con.execute(query.text).fetchall() == [(value,)]


@pytest.mark.parametrize("text", ["1__0", "1_", "1_a", "0x", "0b2", "12abc", "0x" + "f" * 5000])
def test_invalid_number_literal_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a number"):
        parse(f"SELECT {text} FROM s.t")


def test_sum_of_decimals_beyond_38_digits_fails() -> None:
    """DuckDB's sum overflows at 2 to the power of 127 without an error.

    Each of the two values has 38 digits, and their sum has 39.
    """
    wide_type = make_decimal(38, 2)
    values = ", ".join(["(CAST('999999999999999999999999999999999999.99' AS DECIMAL(38, 2)))"] * 2)
    with closing(open_connection(DuckDBLimits())) as con:
        for aggregate in ("sum(price)", "avg(price)", "sum(price) OVER (ORDER BY price)"):
            query = translate(parse(f"SELECT {aggregate} FROM s.t").tree, lambda _: {"price": wide_type}, NOW)
            con.execute(f"CREATE OR REPLACE TEMP VIEW t0 AS SELECT * FROM (VALUES {values}) v (c0)")
            with pytest.raises(duckdb.Error, match="verflow"):
                con.execute(query.text).fetchall()
            con.execute(f"CREATE OR REPLACE TEMP VIEW t0 AS SELECT * FROM (VALUES {values}) v (c0) LIMIT 1")
            assert len(con.execute(query.text).fetchall()) == 1


def test_json_rows_have_dates_of_any_year() -> None:
    # Days and microseconds since 1970-01-01, around the first and the last day of the years 1 to 9999.
    days = pa.array([2932896, 2932897, -719529, -719163, None, 2**31 - 1], pa.int32()).cast(pa.date32())
    micros = pa.array([253402300799999999, 253402300800000000, -62135596800000001, None, 0, 1], pa.int64())
    batch = pa.record_batch(
        {"d": days, "ts": micros.cast(pa.timestamp("us")), "tz": micros.cast(pa.timestamp("us", "UTC"))}
    )
    assert convert_to_json_rows(batch) == [
        ["9999-12-31", "9999-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999 UTC"],
        ["+10000-01-01", "+10000-01-01 00:00:00", "+10000-01-01 00:00:00 UTC"],
        ["-0001-12-31", "0000-12-31 23:59:59.999999", "0000-12-31 23:59:59.999999 UTC"],
        ["0000-12-31", None, None],
        [None, "1970-01-01 00:00:00", "1970-01-01 00:00:00 UTC"],
        ["+5881580-07-11", "1970-01-01 00:00:00.000001", "1970-01-01 00:00:00.000001 UTC"],
    ]
    nested_days = pa.record_batch({"days": pa.array([[2932897]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))})
    with pytest.raises(InvalidRequest, match="outside the years 1 to 9999"):
        convert_to_json_rows(nested_days)
