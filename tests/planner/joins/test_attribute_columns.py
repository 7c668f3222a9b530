"""Filters name attributes of dimension tables by their indexes."""

from __future__ import annotations

from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.metaserver.planner.scan.attribute_columns import find_attribute_columns, list_attribute_names
from tests.index.test_definitions import build_table


def test_names_of_columns_are_read_only_for_a_filter_that_names_an_attribute() -> None:
    """An index on a fact table may contain a column of a dimension table. This attribute has the name of the index.

    A table may have hundreds of schemas with a thousand columns. Reading all names would occupy the event loop.
    """
    schemas = tuple(
        Schema((Field(1, "shop", False, "int"), Field(2, name, False, "int")), schema_id=number)
        for number, name in enumerate(("town", "size"))
    )
    # The lookup of column shop in snapshot 5 of table n.shops: its key has field id 1, the attribute has id 2.
    definition = "bitmap(lookup[n.shops@5:1:2:string](shop))"
    metadata = build_table({f"seamark.index.{name}": definition for name in ("city", "Town")}, schemas=schemas)
    assert list_attribute_names(metadata) == ("Town", "city")
    assert find_attribute_columns(metadata, ["size"]) == ()
    assert "index" not in schemas[0].__dict__, "the names of the older schema are not read"
    assert [column.name for column in find_attribute_columns(metadata, ["CITY", "town"])] == ["city"]
