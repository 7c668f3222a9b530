"""Tests of indexes on columns that were promoted or renamed, and of indexes on files that were replaced.

File 0 was written and indexed under the older schema, file 1 under the newer schema. Both are in one manifest and
have no column statistics, so only the index narrows a plan. The tests compare values in plain Python.
"""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.terms import resolve_term_by_id
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from tests.planner.lakes.indexing import (
    IndexedTable,
    build_array,
    build_definition_as_of,
    create_namespace,
    open_planning,
)
from tests.planner.lakes.kinds import DAY_US, to_float32
from tests.planner.lakes.literal_forms import render
from tests.planner.lakes.partitioning import infer_result_kind
from tests.planner.lakes.tables import SCHEMA, Table, list_file_numbers

DAYS = [-700_000, -1, 0, 1, 19_000]


class Promotion(NamedTuple):
    """A type promotion with its values.

    Attributes:
        old_values: Values as they were written.
        new_values: Values of the new type, with which the old values are compared.
        read_value: Converts an old value to the value that a reader sees.
    """

    old_kind: str
    new_kind: str
    old_values: list[Any]
    new_values: list[Any]
    transforms: tuple[str, ...] = ()
    read_value: Callable[[Any], Any] = lambda value: value


PROMOTIONS = [
    Promotion(
        "int",
        "long",
        [-(2**31), -7, 0, 12, 2**31 - 1],
        [-(2**31) - 8, -7, 13, 2**40],
        ("bucket[4]", "truncate[10]"),
    ),
    Promotion("float", "double", [to_float32(0.1), -0.0, 2.5], [0.1, 0.0, 2.5, 1e300]),
    Promotion(
        "decimal(9, 2)",
        "decimal(18, 2)",
        [-(10**9) + 1, 0, 1234],
        [-(10**17), 1234, 10**18 - 1],
        ("bucket[4]", "truncate[10]"),
    ),
    Promotion(
        "decimal(18, 2)",
        "decimal(20, 2)",
        [-(10**18) + 1, 0, 1234],
        [-(10**19), 1234, 10**20 - 1],
        ("bucket[4]", "truncate[10]"),
    ),
    Promotion(
        "date",
        "timestamp",
        DAYS,
        [day * DAY_US + 1 for day in DAYS],
        ("bucket[4]", "day", "month", "year"),
        lambda day: day * DAY_US,
    ),
]
CASES = [
    pytest.param(promotion, kind, transform, id=f"{promotion.old_kind}-{promotion.new_kind}-{kind}-{transform}")
    for promotion in PROMOTIONS
    for kind in ("bloom", "bitmap", "record")
    for transform in ("identity", *promotion.transforms)
]


class TableOfTwoSchemas(Table):
    """A table with a column 3 whose type differs between schema 0 and schema 1."""

    def __init__(self, folder: Path, old_columns: list[dict[str, Any]], new_columns: list[dict[str, Any]]) -> None:
        super().__init__(folder)
        self._fields = (old_columns, new_columns)

    def _build_json(self) -> dict[str, Any]:
        schemas = [
            {"type": "struct", "schema-id": number, "fields": SCHEMA["fields"] + fields}
            for number, fields in enumerate(self._fields)
        ]
        return {
            **super()._build_json(),
            "format-version": 3,
            "next-row-id": 1000,
            "schemas": schemas,
            "current-schema-id": 1,
            "last-column-id": 9,
        }


def build_column(number: int, name: str, kind: str) -> dict[str, Any]:
    return {"id": number, "name": name, "required": False, "type": kind}


class EvolvedTable(IndexedTable):
    """A table after its schema has changed. `arrays` has the columns of each file, by file number and column id."""

    arrays: dict[int, dict[int, pa.Array]]

    def read_columns(self, number: int) -> dict[int, pa.Array]:
        return self.arrays[number]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[PointerStore]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(f"sqlite:///{tmp_path / 's.db'}", clock=SystemClock()))
        await create_namespace(store)
        yield store


async def create_evolved_table(
    folder: Path,
    store: PointerStore,
    old_columns: list[dict[str, Any]],
    new_columns: list[dict[str, Any]],
    definition: str,
) -> EvolvedTable:
    evolved_lake = TableOfTwoSchemas(folder / "t", old_columns, new_columns)
    evolved_lake.commit(1, [evolved_lake.write_manifest("a", range(2))])
    table = EvolvedTable(evolved_lake, store, Registry(store, SystemClock()), {"i": definition})
    await table.register()
    return table


def read_definition_under_schema_0(table: EvolvedTable) -> IndexDefinition:
    """Return the index definition as it was under schema 0."""
    return build_definition_as_of(table.definitions["i"], table.metadata, table.metadata.schemas[0])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("promotion", "kind", "transform"), CASES)
async def test_index_older_than_a_promotion_prunes_no_matching_row(
    promotion: Promotion, kind: str, transform: str, tmp_path: Path, store: PointerStore
) -> None:
    term = "c" if transform == "identity" else f"{transform}(c)"
    old_columns, new_columns = [build_column(3, "c", promotion.old_kind)], [build_column(3, "c", promotion.new_kind)]
    table = await create_evolved_table(tmp_path, store, old_columns, new_columns, f"{kind}({term})")
    table.arrays = {
        0: {3: build_array(promotion.old_kind, promotion.old_values)},
        1: {3: build_array(promotion.new_kind, promotion.new_values)},
    }
    await table.index(read_definition_under_schema_0(table), [0])
    await table.index("i", [1])
    # The index covers the first file only if its definition has the same id under both schemas. Only a bitmap of the
    # column itself gives exact answers.
    is_covered = read_definition_under_schema_0(table).id == table.definitions["i"].id
    is_exact = kind == "bitmap" and transform == "identity"
    await _check_promotion(promotion, table, tmp_path, exact=is_exact and is_covered)
    # The older file is indexed by a reader of the newer schema.
    await table.index("i", [0])
    await _check_promotion(promotion, table, tmp_path, exact=is_exact)


async def _check_promotion(promotion: Promotion, table: EvolvedTable, folder: Path, *, exact: bool) -> None:
    rows = {0: [promotion.read_value(value) for value in promotion.old_values], 1: promotion.new_values}
    literals = sorted({*rows[0], *rows[1]})
    comparisons = {"eq": operator.eq, "not-eq": operator.ne, "lt": operator.lt, "lt-eq": operator.le, "gt": operator.gt}
    async with open_planning(folder, table.registry) as planning:
        entry = await table.build_entry()
        for op, comparison in comparisons.items():
            for literal in literals:
                rendered_literal = render(infer_result_kind("identity", promotion.new_kind), literal, "spec")
                filter = {"type": op, "term": "c", "value": rendered_literal}
                request = ScanRequest(filter=parse_expression(filter))
                planned_numbers = set(
                    list_file_numbers(await planning.planner.bind_and_plan(table.metadata, request, entry))
                )
                expected = {
                    number for number, values in rows.items() if any(comparison(value, literal) for value in values)
                }
                assert expected <= planned_numbers, filter
                assert not exact or planned_numbers == expected, filter


async def test_renamed_column_keeps_its_index_and_its_old_name_has_none(tmp_path: Path, store: PointerStore) -> None:
    """Column 3 was named `c` and is now named `d`; column 4 is now named `c`."""
    text = json.dumps({"kind": "bitmap", "columns": ["c"], "field-ids": [3]})
    old_columns, new_columns = (
        [build_column(3, "c", "long")],
        [build_column(4, "c", "long"), build_column(3, "d", "long")],
    )
    table = await create_evolved_table(tmp_path, store, old_columns, new_columns, text)
    table.arrays = {number: {3: pa.array([number, number + 10]), 4: pa.nulls(2, pa.int64())} for number in range(2)}
    await table.index(read_definition_under_schema_0(table), range(2))
    async with open_planning(tmp_path, table.registry) as planning:
        for name, value, expected in (("d", 11, [1]), ("d", 5, []), ("c", 11, [0, 1])):
            request = ScanRequest(filter=parse_expression({"type": "eq", "term": name, "value": value}))
            scan = await planning.planner.bind_and_plan(table.metadata, request, await table.build_entry())
            assert list_file_numbers(scan) == expected, (name, value)


async def test_column_dropped_and_added_again_does_not_reuse_the_index(tmp_path: Path, store: PointerStore) -> None:
    old_columns, new_columns = [build_column(3, "c", "long")], [build_column(4, "c", "long")]
    table = await create_evolved_table(tmp_path, store, old_columns, new_columns, "bitmap(c)")
    assert [term.column_id for term in table.definitions["i"].terms] == [4]
    table.arrays = {0: {3: pa.array([1, 2]), 4: pa.nulls(2)}, 1: {4: pa.array([7, 8])}}
    schemas = table.metadata.schemas
    old_definition = IndexDefinition("i", "bitmap", (resolve_term_by_id("identity", 3, schemas[0]),))
    await table.index(old_definition, [0])
    async with open_planning(tmp_path, table.registry) as planning:
        request = ScanRequest(filter=parse_expression({"type": "eq", "term": "c", "value": 7}))
        assert list_file_numbers(
            await planning.planner.bind_and_plan(table.metadata, request, await table.build_entry())
        ) == [0, 1]
        await table.index("i", [0, 1])
        assert list_file_numbers(
            await planning.planner.bind_and_plan(table.metadata, request, await table.build_entry())
        ) == [1]
