"""Tests of change events whose values or schemas are invalid or have special forms."""

from __future__ import annotations

from typing import Any

import pytest

from seamark.formats.iceberg.types.schema import Field, ListType, Schema, StructType
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.streams.incoming import rows
from seamark.metaserver.streams.incoming.changes import read_debezium
from seamark.metaserver.streams.incoming.rows import to_batch

DECIMAL = "org.apache.kafka.connect.data.Decimal"


def build_message(value: Any, **column: Any) -> dict[str, Any]:
    fields = [{"field": "x", **column}]
    return {"schema": {"fields": [{"field": "after", "fields": fields}]}, "payload": {"op": "c", "after": {"x": value}}}


def read_value(value: Any, **column: Any) -> Any:
    (change,) = read_debezium(build_message(value, **column), ())
    return change.values["x"]


@pytest.mark.parametrize("scale", ["abc", [1], 1e300, "100000000000", "-100000000000", "9" * 5000, "--1", ""])
def test_decimal_with_invalid_or_huge_scale_is_refused(scale: Any) -> None:
    with pytest.raises(BadRequest, match="decimal of the scale"):
        read_value("AQ==", name=DECIMAL, parameters={"scale": scale})


def test_decimal_has_its_scale() -> None:
    values = [read_value("/4U=", name=DECIMAL, parameters={"scale": scale}) for scale in ("2", 0, "-2", "4")]
    assert values == ["-1.23", "-123", "-12300", "-0.0123"]


@pytest.mark.parametrize(
    "value",
    [
        "__debezium_unavailable_value",
        "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",  # The same text in Base64.
        b"__debezium_unavailable_value".hex(),
        ["__debezium_unavailable_value"],
    ],
)
def test_value_that_the_database_did_not_send_is_refused_in_each_form(value: Any) -> None:
    with pytest.raises(BadRequest, match="lacks the value of x"):
        read_value(value, type="bytes")


@pytest.mark.parametrize("value", [-1, 86_400_000_000, 10**30])
def test_duration_is_not_accepted_as_a_time_of_day(value: int) -> None:
    assert read_value(86_399_999_999, name="io.debezium.time.MicroTime") == "23:59:59.999999"
    with pytest.raises(BadRequest, match="does not fit the schema"):
        read_value(value, name="io.debezium.time.MicroTime")


def test_short_structs_of_many_fields_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_STRUCT_VALUES_MAX", 100)
    wide_type = StructType(
        tuple(Field(id=number, name=f"c{number}", required=False, type="long") for number in range(10, 20))
    )
    schema = Schema(
        (Field(id=1, name="items", required=False, type=ListType(2, wide_type, element_required=False)),), 0
    )
    assert to_batch([{"items": [{}] * 10}], schema).num_rows == 1
    with pytest.raises(TooLarge, match="more than 100 values"):
        to_batch([{"items": [{}] * 6}, {"items": [{}] * 6}], schema)


def test_row_of_a_table_without_columns_is_refused() -> None:
    with pytest.raises(BadRequest, match="no columns"):
        to_batch([{}], Schema((), 0))
