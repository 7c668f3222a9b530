"""Tests that an index on lower(c) or upper(c) leaves files out for both functions, and loses no row."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from unittest.mock import patch

import pyarrow as pa
import pytest
from click.testing import CliRunner

import seamark.duckdb
from seamark.commands.main import cli
from seamark.connector.duckdb.queries import rewrite_query
from seamark.connector.sql import reads
from seamark.connector.sql.session import SqlResult, SqlSession
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows
from tests.index.case_folding.texts import change_case, draw_texts
from tests.seeds import examples, first_seed

SCHEMA = pa.schema([("id", pa.int64()), ("email", pa.string())])
FILES = 12


def run_seamark(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments), env={"SEAMARK_URL": url}, prog_name="seamark")
    assert result.exit_code == 0, result.output
    return result.output


def create_table(url: str, build_texts: Callable[[int], list[str | None]], files: int = FILES) -> None:
    with open_catalog(url) as catalog:
        table = catalog.create_table("db.people", schema=SCHEMA)
        for number in range(files):
            texts = build_texts(number)
            ids = pa.array([number * 100 + row_number for row_number in range(len(texts))], pa.int64())
            table.append(pa.table({"id": ids, "email": pa.array(texts, pa.string())}))


def create_index(url: str, column: str, kind: str = "bloom") -> None:
    run_seamark(url, "index", "create", "db.people", "--kind", kind, "--columns", column)
    run_seamark(url, "index", "build", "db.people")


def build_emails(number: int) -> list[str | None]:
    """Return the addresses of the file with this number, of which the second occurs in no other file.

    The row with this second address has the id 100 * `number` + 1. The first and the last address make the bounds of
    each file contain all addresses.
    """
    return ["0@example.com", f"Person.Number{number}@Example.COM", None, "~@example.com"]


def list_ids(result: SqlResult) -> list[int]:
    return sorted(result.to_arrow()["id"].to_pylist())


def read_without_pruning(url: str, query: str) -> Counter[str]:
    """Return the rows of a query whose plans leave out no file."""
    with patch.object(reads, "collect_scans", lambda *_, **__: ()), SqlSession(url) as session:
        return count_rows(session.sql(query))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("indexed_function", ["lower(email)", "upper(email)"])
def test_index_on_lower_or_upper_is_used_for_both_functions(server: ServerThread, indexed_function: str) -> None:
    create_table(server.url, build_emails)
    text = "SELECT id FROM db.people WHERE lower(email) = 'person.number7@example.com'"
    advice = run_seamark(server.url, "explain", "db.people", text.partition("WHERE ")[2])
    assert "seamark index create db.people --kind bloom --columns 'lower(email)'" in advice
    with SqlSession(server.url) as session:
        assert session.explain(text).tables[0].files == FILES
        create_index(server.url, indexed_function)
        for where, ids in (
            ("lower(email) = 'person.number7@example.com'", [701]),
            ("'PERSON.NUMBER7@EXAMPLE.COM' = upper(email)", [701]),
            ("lower(email) IN ('person.number7@example.com', 'person.number3@example.com')", [301, 701]),
            ("upper(email) IN ('PERSON.NUMBER7@EXAMPLE.COM', 'nobody')", [701]),
            ("email = 'Person.Number7@Example.COM'", [701]),
            ("lower(email) = 'person.number70@example.com'", []),
            ("lower(email) LIKE 'person.number7@example.com'", [701]),
        ):
            actual = session.sql(f"SELECT id FROM db.people WHERE {where}")
            assert list_ids(actual) == ids, where
            assert actual.explanation.tables[0].files == len(ids), where
        change_report = session.sql(
            "UPDATE db.people SET email = 'x' WHERE lower(email) = 'person.number7@example.com'"
        )
        assert change_report.to_arrow().to_pylist() == [{"rows": 1}]
        assert list_ids(session.sql("SELECT id FROM db.people WHERE upper(email) = 'X'")) == [701]
    output = run_seamark(server.url, "index", "show", "db.people", f"{indexed_function.partition('(')[0]}_email_bloom")
    assert indexed_function in output


@pytest.mark.slow
def test_bitmap_index_on_lower_is_used_for_prefix_patterns(server: ServerThread) -> None:
    create_table(server.url, build_emails)
    create_index(server.url, "lower(email)", "bitmap")
    with SqlSession(server.url) as session:
        actual = session.sql("SELECT id FROM db.people WHERE lower(email) LIKE 'person.number7%'")
        assert list_ids(actual) == [701]
        assert actual.explanation.tables[0].files == 1


def test_duckdb_reads_the_files_that_the_index_keeps(server: ServerThread) -> None:
    create_table(server.url, build_emails)
    create_index(server.url, "lower(email)")
    text = "SELECT id FROM sea.db.people WHERE lower(email) = 'person.number7@example.com'"
    with closing(seamark.duckdb.connect(server.url)) as connection:
        assert "db.people=1/12" in rewrite_query(connection, text, None, lease_s=60, max_kept_fraction=0.9).summary
        assert seamark.duckdb.sql(connection, text).fetchall() == [(701,)]


def test_random_texts_of_all_scripts_are_found_in_any_case(server: ServerThread) -> None:
    seed = first_seed()
    rng = random.Random(seed)
    texts = [draw_texts(rng, 6) for _ in range(FILES)]
    create_table(server.url, lambda number: [*texts[number]])
    create_index(server.url, "lower(email)")
    omitted_count, query_count = 0, examples(150, 8)
    with SqlSession(server.url) as session:
        for _ in range(query_count):
            function = rng.choice(["lower", "upper"])
            substrings = [change_case(rng, rng.choice(rng.choice(texts))) for _ in range(rng.choice([1, 1, 3]))]
            values = ", ".join(f"'{text.replace(chr(39), chr(39) * 2)}'" for text in substrings)
            query = f"SELECT id FROM db.people WHERE {function}(email) IN ({values})"
            actual = session.sql(query)
            omitted_count += FILES - actual.explanation.tables[0].files
            assert count_rows(actual) == read_without_pruning(server.url, query), f"seed {seed}: {query}"
    assert omitted_count > 4 * query_count, "a query leaves out more than 4 of 12 files on average"
