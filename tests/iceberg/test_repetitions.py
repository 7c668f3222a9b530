"""The search for repeated values: a long list of a client takes one pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seamark.connector.sql.changes import _check_distinct
from seamark.connector.write.delete_files import _select_key_schema
from seamark.connector.write.row_locations import find_key_fields
from seamark.formats.iceberg.manifests.content_file import _check_equality_ids
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.repetitions import find_repeated
from seamark.metaserver.api.streams.gets import _select_fields

_VALUES = 300
SCHEMA = Schema(tuple(Field(number, f"c{number}", True, "int") for number in range(1, _VALUES + 2)))


class CountedText(str):
    """A text that counts its comparisons."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedText.comparisons += 1
        return str.__eq__(self, other)


def test_first_repeated_value_is_found() -> None:
    assert find_repeated([1, 2, 3]) is None
    assert find_repeated([]) is None
    assert find_repeated(["a", "b", "c", "b", "a"]) == "b"


@pytest.mark.parametrize(
    "check",
    [
        lambda names: _select_fields(cast(Any, SimpleNamespace(current_schema=SCHEMA)), names),
        lambda names: _check_equality_ids(cast(Any, SimpleNamespace(equality_ids=tuple(names))), cast(Any, None)),
        lambda names: _select_key_schema(SCHEMA, names),
        lambda names: find_key_fields(SCHEMA, names),
        _check_distinct,
    ],
    ids=["select", "equality-ids", "delete-key", "row-key", "assignments"],
)
def test_repeated_value_is_found_in_one_pass(check: Callable[[list[str]], object]) -> None:
    names: list[str] = [CountedText(f"c{number}") for number in range(1, _VALUES + 1)]
    names.append(CountedText(names[-1]))
    CountedText.comparisons = 0
    with pytest.raises(Exception, match=f"c{_VALUES}.* twice"):
        check(names)
    # A comparison of all pairs would need 150 comparisons for each value.
    assert CountedText.comparisons < 5 * _VALUES


def test_select_with_more_columns_than_the_table_is_refused() -> None:
    table = cast(Any, SimpleNamespace(current_schema=SCHEMA))
    with pytest.raises(BadRequest, match="select has 302 columns, and the table has 301"):
        _select_fields(table, [field.name for field in SCHEMA.fields] + ["c1"])
