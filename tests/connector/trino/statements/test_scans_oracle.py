"""Random queries give the same rows when each scanned table is cut down to the rows that its predicate is true for, and
that have partners in what it is joined to.

DuckDB runs both: the statement as it is, and as spliced, over tables that hold what the predicates and the joins leave
(and now and then some of the other rows, as files do). It shares no code with what reads the statements.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import duckdb
import msgspec
import pytest

from seamark.connector.plans.scan import Scan
from seamark.connector.plans.splices import splice
from seamark.connector.trino.statements.scans import find_scans, read_from_view
from seamark.metaserver.iceberg.expressions.sql import parse_sql
from seamark.metaserver.iceberg.types import schema as ours
from tests.connector.trino.statements.statements import Statements, Stored, quoted
from tests.planner.lakes.schemas import Field, Schema

QUERIES_PER_LAKE = 40


def lakes(seed: int, count: int) -> Iterator[tuple[random.Random, Statements, duckdb.DuckDBPyConnection]]:
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        statements = Statements(rng)
        with duckdb.connect() as connection:
            for text in statements.make_tables():
                connection.execute(text)
            yield rng, statements, connection


def rows_of(connection: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    return Counter(map(repr, connection.execute(text).fetchall()))


class Told:
    """What the metastore would know of the tables' columns: all, some, or nothing."""

    def __init__(self, rng: random.Random, tables: list[Stored]) -> None:
        known = rng.choice([tables, tables, tables, [], [one for one in tables if rng.random() < 0.5]])
        self._columns = {one.name.lower(): {name.lower(): kind for name, kind in one.columns.items()} for one in known}

    def __call__(self, names: tuple[str | None, str | None, str]) -> dict[str, str] | None:
        return self._columns.get(names[2])


def pruned(
    rng: random.Random, connection: duckdb.DuckDBPyConnection, text: str, found: tuple[Scan, ...]
) -> tuple[str, list[str], int]:
    """The statement over plan tables, the names of these, and how many rows the joins alone have left out."""
    replacements, names, left_out = [], [], 0
    loose, joined = rng.random() < 0.3, rng.random() < 0.8
    for number, scan in enumerate(found):
        name = f"{scan.table}~plan~{number}"
        kept = "TRUE" if scan.predicate is None else f"({scan.predicate})"
        dimensions = "".join(partners_of(rng, found, (number,))) if joined else ""
        either = f" OR (rowid * 7 + {rng.randint(0, 9)}) % 3 = 0" if loose else ""
        rows = f"FROM {quoted(scan.table)} AS j1 WHERE"
        connection.execute(f"CREATE TABLE {quoted(name)} AS SELECT * {rows} ({kept}{dimensions}){either}")
        if dimensions:
            left_out += connection.execute(f"SELECT count(*) {rows} {kept} AND NOT (TRUE{dimensions})").fetchall()[0][0]
        replacements.append(read_from_view(scan, name))
        names.append(name)
    return splice(text, replacements), names, left_out


def partners_of(rng: random.Random, found: tuple[Scan, ...], path: tuple[int, ...]) -> Iterator[str]:
    """Conditions on the last of `path`, by its joins to scans that are not on it: some of them, and some of theirs."""
    for join in found[path[-1]].joins:
        if join.scan in path or len(path) > 3 or rng.random() < 0.2:
            continue
        other, here, there = found[join.scan], f"j{len(path)}", f"j{len(path) + 1}"
        kept = "" if other.predicate is None else f" WHERE {other.predicate}"
        equal = " AND ".join(f"{here}.{quoted(one)} = {there}.{quoted(two)}" for one, two in join.on)
        more = "".join(partners_of(rng, found, (*path, join.scan)))
        yield f" AND EXISTS (SELECT 1 FROM (SELECT * FROM {quoted(other.table)}{kept}) AS {there} WHERE {equal}{more})"


def check_bound(statements: Statements, scan: Scan) -> None:
    """The catalog takes the predicate, and uses all of it but patterns' ends."""
    stored = next(one for one in statements.tables if one.name.lower() == scan.table)
    fields = [Field(number, name, False, kind) for number, (name, kind) in enumerate(stored.columns.items(), 1)]
    schema = msgspec.convert(Schema(0, tuple(fields)).json(), type=ours.Schema)
    unused = parse_sql(str(scan.predicate), schema).unused
    assert all("LIKE" in one for one in unused), (scan.predicate, unused)


def campaign(seed: int, lakes_count: int) -> Counter[str]:
    told: Counter[str] = Counter()
    for rng, statements, connection in lakes(seed, lakes_count):
        for _ in range(QUERIES_PER_LAKE):
            text = statements.query(rng.choice([1, 1, 2, 2, 3]))
            try:
                expected = rows_of(connection, text)
            except duckdb.Error:
                told["invalid"] += 1
                continue
            found = find_scans(text, columns_of=Told(rng, statements.tables))
            told["queries"] += 1
            told["with rows"] += bool(expected)
            told["understood"] += bool(found)
            told["scans"] += len(found)
            told["predicates"] += sum(one.predicate is not None for one in found)
            told["joins"] += sum(len(one.joins) for one in found)
            told["rows left out by joins"] += check_same(rng, connection, text, found, expected, f"seed {seed}")
            for scan in found:
                if scan.predicate is not None:
                    check_bound(statements, scan)
    return told


def check_same(
    rng: random.Random,
    connection: duckdb.DuckDBPyConnection,
    text: str,
    found: tuple[Scan, ...],
    expected: Counter[str],
    seed: str,
) -> int:
    """How many rows the joins alone have left out."""
    new, names, left_out = pruned(rng, connection, text, found)
    asked = "\n".join(f"{one.table} [{one.start}, {one.end}): {one.predicate} {one.joins}" for one in found)
    shown = f"{seed}\n{text}\n-- became\n{new}\n-- by\n{asked}"
    try:
        rows = rows_of(connection, new)
    except duckdb.Error as error:
        raise AssertionError(f"{error}\n{shown}") from error
    assert rows == expected, shown
    for name in names:
        connection.execute(f"DROP TABLE {quoted(name)}")
    return left_out


def check_worth(told: Counter[str]) -> None:
    """It was not about nothing."""
    assert told["invalid"] < 0.1 * told["queries"], told
    assert told["understood"] > 0.8 * told["queries"], told
    assert told["with rows"] > 0.3 * told["queries"], told
    assert told["predicates"] > 0.2 * told["scans"], told
    assert told["joins"] > 0.05 * told["scans"], told
    assert told["rows left out by joins"] > 0.2 * told["queries"], told


def test_a_query_in_a_text_within_the_statement_is_read_as_it_would_be_alone() -> None:
    for rng, statements, _ in lakes(13, 3):
        told = Told(rng, statements.tables)
        for _ in range(20):
            text = statements.query(rng.choice([1, 2]))
            alone, inside = find_scans(text, columns_of=told), immediate(text)
            found = find_scans(inside, columns_of=told)
            assert [one.predicate for one in found] == [one.predicate for one in alone], text
            expected = immediate(splice(text, [read_from_view(scan, f"it's {scan.table}") for scan in alone]))
            assert splice(inside, [read_from_view(scan, f"it's {scan.table}") for scan in found]) == expected


def immediate(text: str) -> str:
    return "EXECUTE IMMEDIATE '" + text.replace("'", "''") + "'"


@pytest.mark.parametrize("seed", [11, 12])
def test_the_answer_stays_when_only_rows_that_the_predicates_are_true_for_are_left(seed: int) -> None:
    check_worth(campaign(seed, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_thousands_of_answers_stay(seed: int) -> None:
    check_worth(campaign(seed, 40))
