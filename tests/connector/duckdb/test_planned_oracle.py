"""Random statements over a served catalog: DuckDB's own reading, and `seamark.duckdb.sql`, give the same rows.

Tables have several files, deleted and updated rows, NaN, and added, renamed and dropped columns.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import duckdb
import pytest

import seamark.duckdb
from tests.connector.duckdb.loose_statements import LooseStatements
from tests.connector.trino.statements.statements import TABLE_NAMES, quoted
from tests.seeds import first_seed
from tests.services.seamark import Seamark


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("duckdb")) as server:
        yield server


class PlannedStatements(LooseStatements):
    """Their tables lie in a schema of the catalog, each INSERT in a file of its own. DuckDB does not always find a
    table whose name is spelled in another case."""

    def spelled(self, name: str) -> str:
        return quoted(name) if name in TABLE_NAMES else super().spelled(name)

    def make_tables(self) -> list[str]:
        made = super().make_tables()
        for one in self.tables:
            name = quoted(one.name)
            if self.chance(0.5):
                one.columns["added"] = "long"
                made.append(f"ALTER TABLE {name} ADD COLUMN added BIGINT")
                made.append(f"INSERT INTO {name} (added) VALUES (1), (3)")
            for _ in range(self.rng.choice([0, 1])):
                column, kind = self.rng.choice(list(one.columns.items()))
                condition = f"{quoted(column)} = {self.value(kind)}"
                value = "NULL" if self.chance(0.3) else self.value(kind)
                change = f"UPDATE {name} SET {quoted(column)} = {value} WHERE"
                made.append(f"{self.rng.choice([f'DELETE FROM {name} WHERE', change])} {condition}")
        return made


def campaign(server: Seamark, seed: int, lakes: int, queries: int) -> Counter[str]:
    told: Counter[str] = Counter()
    for number in range(lakes):
        rng = random.Random(f"{seed}/{number}")
        statements = PlannedStatements(rng)
        with closing(seamark.duckdb.connect(server.base_url)) as con:
            con.execute(f"CREATE SCHEMA sea.s{seed}_{number}")
            con.execute(f"USE sea.s{seed}_{number}")
            for text in statements.make_tables():
                con.execute(text)
            for _ in range(queries):
                text = statements.query(rng.choice([1, 1, 1, 2])).replace("main", f"s{seed}_{number}")
                check(con, text, told, f"seed {seed}/{number}")
    return told


def check(con: duckdb.DuckDBPyConnection, text: str, told: Counter[str], seed: str) -> None:
    try:
        expected = Counter(map(repr, con.sql(text).fetchall()))
    except duckdb.Error:
        told["invalid"] += 1
        return
    done = seamark.duckdb.rewritten(con, text)
    told["queries"] += 1
    told[done.summary.partition("=")[0] if done.statement is None else "rewritten"] += 1
    told["files left out"] += done.considered_files - done.files
    if done.statement is not None:
        try:
            rows = Counter(map(repr, con.sql(done.statement).fetchall()))
        except duckdb.InternalException:  # a fault of DuckDB's optimizer, which gives no rows
            told["internal errors"] += 1
            return
        assert rows == expected, f"{seed}\n{text}\n-- became\n{done.statement}\n{done.summary}"


def check_worth(told: Counter[str]) -> None:
    """One in nine is rewritten on average, one in twenty of sixty statements by chance."""
    assert told["rewritten"] > 0.04 * told["queries"], told
    assert told["files left out"] > 0.1 * told["queries"], told
    assert told["internal errors"] <= 0.02 * told["queries"], told


def test_planned_statements_give_the_rows_of_direct_ones(server: Seamark) -> None:
    check_worth(campaign(server, first_seed(), 2, 30))


@pytest.mark.slow
def test_many_planned_statements_give_the_rows_of_direct_ones(server: Seamark) -> None:
    check_worth(campaign(server, first_seed() + 1, 25, 40))
