"""Tests that groups of a cube are written as VALUES outside of the event loop, up to the limit of a statement."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.analysis.statement_cache import StatementReader, StatementText
from seamark.connector.client.errors import NoSuchResource
from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.trino import cube_rewrites, cube_values
from seamark.connector.trino.cube_rewrites import rewrite_over_cube
from seamark.connector.trino.cube_values import write_values
from seamark.connector.trino.rewrite_results import explain_cube_failure

CUBE = SimpleNamespace(name="cube", id="1", terms=[SimpleNamespace(source="string")])


def make_statement() -> Any:
    """Return a statement on a cube whose answer has a dimension (`d0`, a name) and a measure (`m0`, a count).

    Its condition is not true for all rows of the table, so files must be checked.
    """

    def write_query(groups: str, *_: str, has_rows: bool) -> str:
        assert not has_rows
        return f"SELECT 1 FROM {groups}"

    return SimpleNamespace(
        columns=("d0", "m0"),
        cube=CUBE,
        alias="t",
        negated_row_condition="n >= 5",
        row_condition="n < 5",
        used_columns=frozenset(),
        write=write_query,
    )


def build_groups(rows: int) -> pa.Table:
    return pa.table({"d0": [f"it's {n}" if n else None for n in range(rows)], "m0": list(range(rows))})


def test_few_groups_are_values_and_more_are_one_text() -> None:
    rows = [f"('it''s {n}', {n})" if n else "(NULL, 0)" for n in range(50)]
    assert write_values(build_groups(50), make_statement(), 10_000) == (
        f"(VALUES {', '.join(rows)}) AS seamark_groups (d0, m0)"
    )
    names = ",".join(f"\"it''s {n}\"" if n else "null" for n in range(250))
    counts = ",".join(map(str, range(250)))
    arrays = f"CAST(json_parse('[{names}]') AS ARRAY(VARCHAR)), CAST(json_parse('[{counts}]') AS ARRAY(BIGINT))"
    assert write_values(build_groups(250), make_statement(), 10_000) == (
        f"(SELECT d0 AS d0, m0 AS m0 FROM UNNEST({arrays}) AS seamark_groups (d0, m0)) AS seamark_groups (d0, m0)"
    )


SHORTEST_TEXT = 3 * 2 * 2000
"""The characters of the shortest text of 2,000 groups: each of the two values of a group has at least 3 characters."""


@pytest.mark.parametrize(("characters_max", "written_max"), [(SHORTEST_TEXT - 1, 0), (SHORTEST_TEXT, 2000)])
def test_writing_ends_when_the_text_is_too_long(
    monkeypatch: pytest.MonkeyPatch, characters_max: int, written_max: int
) -> None:
    written_values = list[int]()

    def record_and_write(value: int) -> str:
        written_values.append(value)
        return str(value)

    monkeypatch.setattr(cube_values, "_find_json_form", lambda *_: cube_values._JsonForm(record_and_write))
    with pytest.raises(NotFromCube, match=f"more than {characters_max:,} characters"):
        write_values(build_groups(2000), make_statement(), characters_max)
    assert len(written_values) <= written_max, "at most half of the 4,000 values are written"


async def test_parsing_and_writing_run_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_ids = dict[str, int]()

    async def scan_cube(*_: object) -> Any:
        return SimpleNamespace(groups=build_groups(5000), plan_snapshot_id=None)

    def record_thread(name: str) -> None:
        run_function = getattr(cube_rewrites, name)

        def run_and_record(*arguments: Any, **options: Any) -> Any:
            thread_ids[name] = threading.get_ident()
            return run_function(*arguments, **options)

        monkeypatch.setattr(cube_rewrites, name, run_and_record)

    record_thread("find_scans")
    record_thread("write_values")
    monkeypatch.setattr(cube_rewrites, "scan_cube", scan_cube)
    text = "SELECT name, count(*) FROM db.t WHERE n < 5 GROUP BY 1"
    scan = SimpleNamespace(
        start=text.index("db.t"),
        end=text.index(" WHERE"),
        filter=None,
        snapshot_id=None,
        ref=None,
        version_span=None,
    )
    schema = SimpleNamespace(column=lambda _: None)
    table: Any = SimpleNamespace(columns={"n": "long"}, cube_metadata=SimpleNamespace(current_schema=schema))
    client: Any = None
    planned_scan: Any = SimpleNamespace(scan=scan, table=("db", "t"))
    until_s = asyncio.get_running_loop().time() + 60
    rewrite = await rewrite_over_cube(
        client, StatementReader(), StatementText(text), planned_scan, make_statement(), table, (), until_s
    )
    assert "json_parse('[null," in rewrite.text
    assert set(thread_ids) == {"find_scans", "write_values"}
    assert threading.get_ident() not in thread_ids.values()


def test_reason_why_no_cube_is_used_has_no_text_of_a_server_error() -> None:
    error = NoSuchResource("http://internal:8181 has no table finance.salaries")
    summary = explain_cube_failure(error)
    assert (summary.index, summary.reason) == (None, "the groups cannot be read: NoSuchResource")
    assert explain_cube_failure(NotFromCube("the query selects all columns")).reason == "the query selects all columns"
