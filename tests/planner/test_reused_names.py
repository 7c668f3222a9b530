"""Filters on names that columns swapped, lost or reused with other types: no row that matches under either meaning
is lost.

The oracle uses rows and no bound expressions: if a row of the snapshot matches the filter under today's names or
under the snapshot's names, the planner's expression must be able to match it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.evaluation import may_match
from seamark.formats.iceberg.expressions.expression import collect_predicates
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.planner.scan.request import ScanRequest, bind_for_java
from tests.seeds import first_seed

VALUES: dict[str, list[Any]] = {"int": [0, 3, 7, None], "long": [0, 3, 1 << 40, None], "string": ["", "x", "3", None]}
NAMES = ("f", "g", "h")
Column = dict[str, Any]


def evolve_columns(rng: random.Random, columns: list[Column], last_id: int) -> tuple[list[Column], int]:
    """Return the columns after a schema change, and the last column id.

    The change is a reused name with a different type, two swapped names, a wider type, or a new name.
    """
    new_columns = [dict(column) for column in columns]
    change = rng.choice(("reuse", "swap", "widen", "rename"))
    first, second = rng.sample(new_columns, 2)
    if change == "reuse":
        last_id += 1
        name = first["name"]
        new_columns.remove(first)
        new_columns.append({"id": last_id, "name": name, "required": False, "type": rng.choice([*VALUES])})
    elif change == "swap":
        first["name"], second["name"] = second["name"], first["name"]
    elif change == "widen" and first["type"] == "int":
        first["type"] = "long"
    else:
        free_names = [name for name in NAMES if name not in {item["name"] for item in new_columns}]
        first["name"] = rng.choice(free_names) if free_names else first["name"]
    return new_columns, last_id


def draw_filter(rng: random.Random, columns: list[Column], depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.4:
        sides = [draw_filter(rng, columns, depth + 1) for _ in range(2)]
        return {"type": rng.choice(("and", "or")), "left": sides[0], "right": sides[1]}
    column = rng.choice(columns)
    literals = [item for item in VALUES[column["type"]] if item is not None]
    if rng.random() < 0.15:
        return {"type": rng.choice(("is-null", "not-null")), "term": column["name"]}
    op = rng.choice(("eq", "lt", "gt-eq", "not-eq", "in"))
    if op == "in":
        return {"type": op, "term": column["name"], "values": rng.sample(literals, 2)}
    return {"type": op, "term": column["name"], "value": rng.choice(literals)}


def matches(where: Any, row: dict[int, Any], names: dict[str, int]) -> bool:
    if where["type"] in ("and", "or"):
        sides = [matches(where[side], row, names) for side in ("left", "right")]
        return all(sides) if where["type"] == "and" else any(sides)
    value = row.get(names[where["term"]])
    match where["type"]:
        case "is-null":
            return value is None
        case "not-null":
            return value is not None
        case "not-eq":
            return bool(value != where["value"])
        case "in":
            return value in where["values"]
    if value is None:
        return False
    literal = where["value"]
    return bool({"eq": value == literal, "lt": value < literal, "gt-eq": value >= literal}[where["type"]])


def build_table(schemas: list[list[Column]], last_id: int) -> TableMetadata:
    """Return a table with one snapshot, which has the first schema. The last schema is current."""
    metadata_json = {
        "format-version": 2,
        "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "location": "file:///t",
        "last-sequence-number": 1,
        "last-updated-ms": 1,
        "last-column-id": last_id,
        "schemas": [{"type": "struct", "schema-id": n, "fields": schema} for n, schema in enumerate(schemas)],
        "current-schema-id": len(schemas) - 1,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "default-spec-id": 0,
        "last-partition-id": 999,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
        "current-snapshot-id": 1,
        "snapshots": [
            {
                "snapshot-id": 1,
                "sequence-number": 1,
                "timestamp-ms": 1,
                "manifest-list": "file:///t/l",
                "summary": {"operation": "append"},
                "schema-id": 0,
            }
        ],
        "refs": {"main": {"snapshot-id": 1, "type": "branch"}},
    }
    return decode_table(encode_json(metadata_json), "file:///t/m.json")


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_rows_that_match_under_either_meaning_of_a_reused_name_are_kept(first: int) -> None:
    for number in range(first, first + 30):
        _check_reused_names(1_000 * first_seed() + number)


def _check_reused_names(seed: int) -> None:
    rng = random.Random(seed)
    schemas = [
        [{"id": n, "name": name, "required": False, "type": rng.choice([*VALUES])} for n, name in ((1, "f"), (2, "g"))]
    ]
    last_id = 2
    for _ in range(rng.randint(1, 4)):
        columns, last_id = evolve_columns(rng, schemas[-1], last_id)
        schemas.append(columns)
    metadata = build_table(schemas, last_id)
    context = f"seed {seed}: {schemas}"
    for _ in range(10):
        # In time travel, a filter has column names of the snapshot's schema. In another read, it has names of the
        # current schema. In both cases, Java sends the same options.
        used_schema = rng.choice([schemas[0], schemas[-1]])
        where = draw_filter(rng, used_schema)
        request = ScanRequest(filter=parse_expression(where), snapshot_id=1, use_snapshot_schema=True)
        try:
            bound = bind_for_java(metadata, request, request.filter).bound
        except BadRequest as error:
            raise AssertionError(f"{context}, {where}: {error.message}") from None
        predicate_columns = {predicate.column_id for predicate in collect_predicates(bound)}
        for _ in range(10):
            row = {column["id"]: rng.choice(VALUES[column["type"]]) for column in schemas[0]}
            if matches(where, row, {item["name"]: item["id"] for item in used_schema}):
                values = {column_id: row.get(column_id) for column_id in predicate_columns}
                assert may_match(bound, values), f"{context}, {where} of {row}: {bound}"
