"""Tests of JSON rows. If a column cannot store a value exactly, the server refuses the value and does not change it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.streams.incoming.rows import to_batch


def convert_rows(kind: Any, *values: Any) -> list[Any]:
    schema = Schema((Field(1, "a", False, kind),), 0)
    read_values: list[Any] = to_batch([{"a": value} for value in values], schema).column(0).to_pylist()
    return read_values


@pytest.mark.parametrize(
    ("kind", "number"),
    [("double", 2**53 + 1), ("double", -(2**53) - 1), ("double", 123456789012345678901234567890), ("float", 2**24 + 1)],
)
def test_integer_that_a_floating_point_column_would_change_is_refused(kind: str, number: int) -> None:
    for column, value in ((kind, number), (ListType(2, kind, False), [0.5, number])):
        with pytest.raises(BadRequest, match=rf"Row 1, column a: .*{number}.*the nearest {kind} is"):
            convert_rows(column, None, value)


def test_integer_beyond_the_range_of_a_column_is_refused() -> None:
    for kind, number in (("float", 10**39), ("double", 10**400)):
        with pytest.raises(BadRequest, match="Row 0, column a"):
            convert_rows(kind, number)


def test_integer_that_identifies_a_floating_point_number_is_accepted() -> None:
    numbers = [2**53, -(2**60), 2**100, 10**22, 1152921504606847000]  # The last number is 2^60 as JavaScript prints it.
    assert convert_rows("double", *numbers, 0.5) == [*map(float, numbers), 0.5]
    assert convert_rows("float", 2**24, 2**30) == [float(2**24), float(2**30)]


@pytest.mark.parametrize("entries", [{"1": "a", "01": "b"}, {"keys": [1, 2, 1], "values": ["a", "b", "c"]}])
def test_map_with_a_repeated_key_is_refused(entries: dict[str, Any]) -> None:
    kind = MapType(2, "long", 3, "string", False)
    with pytest.raises(BadRequest, match=r"Row 0, column a: .*the map has the key 1 twice"):
        convert_rows(kind, entries)
    assert convert_rows(kind, {"1": "a", "2": "b"}) == [[(1, "a"), (2, "b")]]


def test_repeated_key_of_a_large_map_is_found_in_linear_time() -> None:
    entries = {"keys": [*range(16_000), 15_999], "values": [None] * 16_001}
    start_s = time.process_time()
    with pytest.raises(BadRequest, match="the map has the key 15999 twice"):
        convert_rows(MapType(key_id=2, key="int", value_id=3, value="string", value_required=False), entries)
    assert time.process_time() - start_s < 1  # Comparing each key with all other keys would take several seconds.
