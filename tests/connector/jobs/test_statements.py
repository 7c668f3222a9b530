"""Tests of statements that maintain tables.

They check which statements the grammar accepts, which statements it leaves to the engine, and what the statements do.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs.server_jobs import remove_orphan_files
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import (
    DropColumns,
    MergeFiles,
    StatementAnswer,
    StatementJob,
    TableStatement,
    parse_statement,
)
from seamark.connector.write.appends import append
from tests.connector.jobs.test_file_merges import build_rows, create_table, read_rows_by_id
from tests.connector.server_thread import ServerThread
from tests.faults.rigs.mortal_statement import run_killed_at
from tests.seeds import first_seed

DAY_CONDITION = "day < DATE '2026-01-01'"


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("ALTER TABLE db.t MERGE FILES", MergeFiles(("db", "t"))),
        ("alter table t merge files;", MergeFiles(("t",))),
        ("ALTER TABLE a.b.t MERGE FILES TARGET SIZE '512MB' ; ", MergeFiles(("a", "b", "t"), None, 512 << 20)),
        (f"ALTER TABLE db.t PARTITION ({DAY_CONDITION}) MERGE FILES", MergeFiles(("db", "t"), DAY_CONDITION)),
        (
            "ALTER TABLE db.t PARTITION ( (a IN (1, 2)) AND b = ')' ) DROP COLUMNS (payload, ext)",
            DropColumns(("db", "t"), "(a IN (1, 2)) AND b = ')'", ("payload", "ext")),
        ),
        (
            'ALTER TABLE "D b".`t``x` PARTITION (TRUE) DROP COLUMNS ("Pay""load", `a`.b)',
            DropColumns(("D b", "t`x"), "TRUE", ('Pay"load', "a.b")),
        ),
        (
            "-- a comment\nALTER /* of */ TABLE t -- 'x\nPARTITION(x = 'it''s -- (')DROP COLUMNS(c)",
            DropColumns(("t",), "x = 'it''s -- ('", ("c",)),
        ),
    ],
)
def test_maintenance_statement_is_parsed(text: str, statement: TableStatement) -> None:
    assert parse_statement(text) == statement


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "ALTER TABLE t DROP COLUMNS (a, b)",
        "ALTER TABLE t DROP COLUMN a",
        "ALTER TABLE t ADD COLUMNS (a int)",
        "ALTER TABLE t PARTITION (a = 1) RENAME TO PARTITION (a = 2)",
        "ALTER TABLE MERGE FILES",
        "ALTER TABLE t PARTITION () DROP COLUMNS (a)",
        "ALTER TABLE t PARTITION (a = 1 DROP COLUMNS (b)",
        "ALTER VIEW v MERGE FILES",
        "alternative",
        "",
        "-" * 40,
    ],
)
def test_statement_outside_the_grammar_is_left_to_the_engine(text: str) -> None:
    assert parse_statement(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ALTER TABLE t MERGE FILES TARGET SIZE 512", "TARGET SIZE and a size in quotes"),
        ("ALTER TABLE t MERGE FILES TARGET SIZE '0MB'", "a size"),
        ("ALTER TABLE t MERGE FILES TARGET SIZE '12 parsecs'", "a size"),
        ("ALTER TABLE t MERGE FILES NOW", "the end of the statement"),
        ("ALTER TABLE t\nMERGE FILES NOW", "line 2, column 13, near 'NOW'"),
        ("ALTER TABLE t PARTITION (a = 1) DROP COLUMNS b", "the columns in parentheses"),
        ("ALTER TABLE t PARTITION (a = 1) DROP COLUMNS ()", "the names of columns"),
        ("ALTER TABLE t PARTITION (a = 1) DROP COLUMNS (b c)", "closing parenthesis"),
        ("ALTER TABLE t PARTITION (a = 1) DROP COLUMNS (b,)", "the names of columns"),
    ],
)
def test_syntax_error_is_reported_with_its_position(text: str, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        parse_statement(text)


def test_spacing_quotes_and_comments_do_not_change_the_parsed_statement() -> None:
    seed = first_seed()
    rng = random.Random(seed)
    blanks = [" ", "\n", "\t ", " /* ; ( */ ", " -- '(\n"]
    for _ in range(300):
        levels = tuple(rng.choice(["db", "T", "über", "t_1", "a b", 'x"y', "merge"]) for _ in range(rng.randint(1, 3)))
        columns = tuple(rng.choice(["c", "Files", "e f", "g`h"]) for _ in range(rng.randint(1, 4)))
        where = rng.choice(["a = 1", "True", "(x = ')') AND y IN (1, 2)", "b LIKE '%''(%'"])
        is_drop = rng.random() < 0.5
        quote = rng.choice('"`')

        def quote_name(name: str, quote: str = quote) -> str:
            is_plain = name.isidentifier() and rng.random() < 0.5
            return name if is_plain else quote + name.replace(quote, quote * 2) + quote

        words = ["ALTER", "TABLE", ".".join(map(quote_name, levels)), "PARTITION", f"({where})"]
        words += ["DROP", "COLUMNS", f"({', '.join(map(quote_name, columns))})"] if is_drop else ["MERGE", "FILES"]
        # Keywords are written in upper or lower case. Word 2 is the name of the table, whose case must not change.
        cased_words = [
            rng.choice([word, word.lower()]) if n != 2 and word.isupper() else word for n, word in enumerate(words)
        ]
        text = "".join(word + rng.choice(blanks) for word in cased_words)
        expected = DropColumns(levels, where, columns) if is_drop else MergeFiles(levels, where)
        assert parse_statement(text) == expected, (seed, text)


def test_drop_columns_sets_null_only_in_the_named_partitions(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    rng = random.Random(1)
    for first_id in range(0, 1200, 400):
        append(client, "db.t", build_rows(rng, range(first_id, first_id + 400)))
    rows_before = read_rows_by_id(client)
    merge = parse_statement("ALTER TABLE db.t PARTITION (part = 0) MERGE FILES TARGET SIZE '1MB'")
    assert merge is not None
    report = run_statement(client, merge, utc=False)
    assert (report.files_before, report.files_after, report.commits) == (3, 1, 1)
    assert read_rows_by_id(client) == rows_before
    drop = parse_statement("ALTER TABLE db.t PARTITION (part = 0) DROP COLUMNS (PAYLOAD, place.note)")
    assert drop is not None
    # The Trino proxy runs the statement with these arguments.
    job = StatementJob(server.url, None, drop, utc=True)
    argv = [sys.executable, "-m", "seamark.connector.jobs.statement_runs"]
    output = subprocess.run(argv, input=msgspec.json.encode(job), capture_output=True, check=True, timeout=120).stdout
    answer = msgspec.json.decode(output, type=StatementAnswer)
    assert answer.error == ""
    assert answer.result is not None
    assert answer.result.files_before == 1
    for row in rows_before.values():
        if row["part"] == 0:
            row["payload"] = None
            if row["place"] is not None:
                row["place"]["note"] = None
    assert read_rows_by_id(client) == rows_before


def test_statement_that_the_table_refuses_reports_the_reason(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    append(client, "db.t", build_rows(random.Random(1), range(10)))
    for name, reason in (("fixed", "is required"), ("part", "is the source of a partition field")):
        with pytest.raises(InvalidRequest, match=reason):
            run_statement(client, DropColumns(("db", "t"), "TRUE", (name,)), utc=True)
    with pytest.raises(InvalidRequest, match="part of the partition"):
        run_statement(client, MergeFiles(("db", "t"), "id < 5"), utc=True)


@pytest.mark.parametrize(
    ("statement", "version", "interval"),
    [
        ("ALTER TABLE db.t PARTITION (TRUE) DROP COLUMNS (payload)", 2, 120),
        pytest.param("ALTER TABLE db.t PARTITION (TRUE) DROP COLUMNS (payload)", 2, 41, marks=pytest.mark.slow),
        pytest.param("ALTER TABLE db.t PARTITION (TRUE) DROP COLUMNS (payload)", 3, 3, marks=pytest.mark.slow),
        pytest.param("ALTER TABLE db.t MERGE FILES", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_killed_statement_leaves_the_table_intact_and_its_files_are_removed(
    client: IndexClient, server: ServerThread, statement: str, version: int, interval: int
) -> None:
    """The process of the statement is killed before or after every `interval`-th of its writes and requests."""
    create_table(server, version)
    rng = random.Random(first_seed())
    for first_id in range(0, 2400, 800):
        append(client, "db.t", build_rows(rng, range(first_id, first_id + 800)))
    rows_before, rows_after = read_rows_by_id(client), read_rows_by_id(client)
    if "DROP" in statement:
        for row in rows_after.values():
            row["payload"] = None
    parsed_statement = parse_statement(statement)
    assert parsed_statement is not None
    job = StatementJob(server.url, None, parsed_statement, utc=True)
    killed_count, killed_step, answer = 0, rng.randint(1, interval), None
    while answer is None:
        answer = run_killed_at(killed_step, job)
        actual = read_rows_by_id(client)
        if answer is None:
            killed_count += 1
            assert actual in (rows_before, rows_after), killed_step
        killed_step += interval
    assert killed_count > 1
    assert answer.error == ""
    assert actual == rows_after
    location = Path(json.loads(client.load_table("db.t").metadata)["location"].removeprefix("file://"))
    for path in location.rglob("*.parquet"):
        os.utime(path, (1, 1))  # A removal of orphan files deletes only old files.
    day_ago_ms = time.time_ns() // 1_000_000 - 86_400_000
    assert remove_orphan_files(client, "db.t", older_than_ms=day_ago_ms).is_complete
    known_paths = {path for snapshot in list_snapshot_ids(client) for path in list_paths_at(client, snapshot)}
    assert {str(path) for path in location.rglob("*.parquet")} == known_paths
    assert read_rows_by_id(client) == rows_after


def list_snapshot_ids(client: IndexClient) -> list[int]:
    metadata = json.loads(client.load_table("db.t", history=True).metadata)
    return [snapshot["snapshot-id"] for snapshot in metadata["snapshots"]]


def list_paths_at(client: IndexClient, snapshot_id: int) -> list[str]:
    files = client.files("db.t", at=At(snapshot_id=snapshot_id))["file_path"].to_pylist()
    return [path.removeprefix("file://") for path in files]
