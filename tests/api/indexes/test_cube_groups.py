"""Tests of the groups that the server reads from parts of cubes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import define_index
from seamark.metaserver.api.lookups import cube_groups
from seamark.metaserver.api.lookups.cube_groups import GroupReading
from seamark.metaserver.planner.cubes.encoded_groups import EncodedGroups
from seamark.metaserver.planner.cubes.segments import GroupPart

SCHEMA = pa.schema([("d0", pa.string()), ("m0", pa.int64())])
FUNCTIONS = {"m0": "count"}


def aggregate_file(file_position: int, *dimension_values: str, count: int = 1) -> GroupPart:
    """Return the groups of one data file. Each dimension value is a group of `count` rows."""
    table = pa.table(
        [pa.array(dimension_values, pa.string()), pa.array([count] * len(dimension_values), pa.int64())], schema=SCHEMA
    )
    return GroupPart(EncodedGroups(table), np.array([file_position]))


def decode_groups(reading: GroupReading) -> pa.Table:
    return pa.ipc.open_stream(reading.encode()).read_all()


def test_groups_of_several_files_are_combined() -> None:
    reading = GroupReading(SCHEMA, FUNCTIONS, 3)
    reading.enqueue(aggregate_file(0, "a", "b"))
    reading.enqueue(aggregate_file(2, "a"))
    reading.finish()
    table = decode_groups(reading)
    assert sorted(table.to_pylist(), key=str) == [{"d0": "a", "m0": 2}, {"d0": "b", "m0": 1}]
    assert table.schema.metadata[b"covered"] == b"BQ==", "files 0 and 2 are covered, and file 1 is not"


def test_reading_stops_at_the_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cube_groups, "_COMBINED_BYTES", 1000)
    monkeypatch.setattr(cube_groups, "BYTES_MAX", 2000)
    reading = GroupReading(SCHEMA, FUNCTIONS, 5)
    for number in range(5):
        reading.enqueue(aggregate_file(number, f"{number}" * 1500))
        reading.process()
        if reading.is_done:
            break
    table = decode_groups(reading)
    assert table.num_rows == 2
    assert table.schema.metadata[b"covered"] == b"Aw==", "only the files 0 and 1 are covered"


def test_groups_with_an_overflowing_sum_are_left_to_the_engine() -> None:
    reading = GroupReading(SCHEMA, FUNCTIONS, 2)
    for number in (0, 1):
        reading.enqueue(aggregate_file(number, "a", count=2**62))
    reading.finish()
    assert decode_groups(reading).to_pylist() == [{"d0": "a", "m0": 2**62}] * 2


def test_condition_that_takes_too_long_excludes_no_groups() -> None:
    """A condition over a limit is read as true, so it excludes no group."""
    schema = Schema((Field(1, "name", False, "string"),))
    cube = define_index("sums", "cube", ["name"], schema, measures=["count(*)"])

    def parse_values(count: int) -> Expression:
        return parse_condition({"type": "in", "term": "d0", "values": [f"v{number}" for number in range(count)]})

    def parse_transforms(count: int) -> Expression:
        condition: dict[str, Any] = {"type": "eq", "term": "d0", "value": "a"}
        for width in range(1, count + 1):
            term = {"type": "transform", "transform": f"truncate[{width}]", "term": "d0"}
            condition = {"type": "and", "left": condition, "right": {"type": "eq", "term": term, "value": "a"}}
        return parse_condition(condition)

    def parse_condition(condition: dict[str, Any]) -> Expression:
        return cube_groups.read_condition(msgspec.json.encode(condition), cube)

    # The limits are 1,000 values and 16 transforms.
    assert parse_values(1000) != TRUE
    assert parse_values(1001) == TRUE
    assert parse_transforms(16) != TRUE
    assert parse_transforms(17) == TRUE
