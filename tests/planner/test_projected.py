"""Tests of filters projected onto indexes: columns with other types, keys of many columns, and no time left."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression import Bound, Op, join_by_and
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import IndexDefinition, define_index
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.planner.indexes.coverage import Coverage, compute_view_file_ids
from seamark.metaserver.planner.indexes.index_predicates import TRANSFORMED_MAX, project_onto_indexes
from seamark.metaserver.planner.indexes.probe import Probe
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.selection import FileSelection
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.open import open_store
from tests.planner.lakes.indexing import IndexedTable, create_namespace, open_planning
from tests.planner.lakes.tables import Table


def build_index(kind: str, term: str, index_kind: str = "bitmap") -> IndexDefinition:
    """Return an index on the column `c` with the id 1, which has the type `kind` now."""
    return define_index("i", index_kind, [term], Schema((Field(1, "c", False, kind),), schema_id=1))


def build_equality(value: Any, kind: str, transform: str = "identity", column_id: int = 1) -> Bound:
    """Return an equality that is bound by a schema in which the column has the type `kind`."""
    result_kind = "int" if transform.startswith("bucket") else kind
    return Bound(Op.EQ, column_id, "c", kind, transform, result_kind, (value,))


@pytest.mark.parametrize(
    ("filter_kind", "index_kind", "term", "serves"),
    [
        ("int", "long", "c", True),
        ("float", "double", "c", True),
        ("decimal(9, 2)", "decimal(20, 2)", "c", True),
        ("date", "timestamp", "c", False),  # The index has days, and the filter has microseconds.
        ("date", "timestamp", "bucket[16](c)", False),
        ("date", "timestamp", "day(c)", False),
        ("int", "long", "truncate[10](c)", False),  # For the least int values, the result is not an int.
        ("int", "int", "truncate[10](c)", True),
        ("string", "string", "lower(c)", True),
    ],
)
def test_filter_with_an_older_type_uses_an_index_only_for_values_with_equal_keys(
    filter_kind: str, index_kind: str, term: str, serves: bool
) -> None:
    projected_predicate = project_onto_indexes(
        build_equality("A" if filter_kind == "string" else 7, filter_kind), [build_index(index_kind, term)]
    )
    assert (projected_predicate is not None) == serves


def test_composite_key_is_used_only_if_each_part_has_the_filters_type() -> None:
    schema = Schema((Field(1, "c", False, "timestamp"), Field(2, "d", False, "long")), schema_id=1)
    definition = define_index("i", "record", ["c", "d"], schema)
    old_filter, new_filter = (
        join_by_and(build_equality(7, kind), build_equality(7, "int", column_id=2)) for kind in ("date", "timestamp")
    )
    assert project_onto_indexes(old_filter, [definition]) is None
    assert project_onto_indexes(new_filter, [definition]) is not None


def test_composite_key_with_many_zeros_is_not_expanded_into_signs() -> None:
    column_ids = range(1, 23)  # The zeros of 22 columns would have four million combinations of signs.
    schema = Schema(tuple(Field(number, f"c{number}", False, "double") for number in column_ids), schema_id=1)
    definition = define_index("i", "record", [f"c{number}" for number in column_ids], schema)
    projected_predicate = project_onto_indexes(
        join_by_and(*(build_equality(0.0, "double", column_id=number) for number in column_ids)), [definition]
    )
    assert projected_predicate is not None
    view = TableView((), ())
    probe = Probe(view, projected_predicate, {definition.id: Coverage(compute_view_file_ids(view), ())}, {})
    # The combinations of signs would need far more than 10 MB.
    tracemalloc.start()
    try:
        probe.narrow(FileSelection.select_all(view), frozenset({"record"}), lambda: False)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert not probe.counts


@pytest.mark.parametrize("kind", ["bloom", "bitmap", "record"])
async def test_index_files_that_miss_the_time_limit_prune_nothing(tmp_path: Path, kind: str) -> None:
    clock = SystemClock()
    async with open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock) as store:
        await create_namespace(store)
        table = Table(tmp_path / "t")
        table.commit(1, [table.write_manifest("a", range(6))])
        indexed_table = IndexedTable(table, store, Registry(store, clock), {"i": f"{kind}(id)"})
        await indexed_table.register()
        for number in range(6):
            await indexed_table.index("i", [number])
        async with open_planning(tmp_path, indexed_table.registry) as planning:
            view = await planning.planner.view(indexed_table.metadata, ScanRequest())
            files = [
                index
                for file in await indexed_table.list_files()
                if (index := await planning.indexes.open(file)) is not None
            ]
    definition = indexed_table.definitions["i"]
    # No file has the odd id 13, so each index file that is searched leaves out its data file.
    projected_predicate = project_onto_indexes(Bound(Op.EQ, 1, "id", "long", "identity", "long", (13,)), [definition])
    assert projected_predicate is not None
    for searched_count in range(7):
        coverage = {definition.id: Coverage(compute_view_file_ids(view), files)}
        probe = Probe(view, projected_predicate, coverage, {file.location: file for file in files})
        # The first check precedes the search of all index files; another check precedes each file.
        expiry_checks = iter([False] * (1 + searched_count))
        selection = FileSelection.select_all(view)
        probe.narrow(selection, frozenset({kind}), lambda expiry_checks=expiry_checks: next(expiry_checks, True))
        assert selection.count() == 6 - searched_count


def test_long_list_is_transformed_for_a_limited_number_of_indexes() -> None:
    schema = Schema((Field(1, "id", False, "long"),))
    terms = ["id", *(f"bucket[{n}](id)" for n in range(2, 12))]
    definitions = [define_index(f"i{n}", "bitmap", [term], schema) for n, term in enumerate(terms)]
    # An index with identity needs no transformation, so four of the indexes on buckets can be used.
    values = tuple(range(TRANSFORMED_MAX // 4))
    projected_predicate = project_onto_indexes(Bound(Op.IN, 1, "id", "long", "identity", "long", values), definitions)
    assert projected_predicate is not None
    assert [definition.name for definition in projected_predicate.definitions] == ["i0", "i1", "i2", "i3", "i4"]
    few_values = project_onto_indexes(Bound(Op.IN, 1, "id", "long", "identity", "long", (1, 2)), definitions)
    assert few_values is not None
    assert len(few_values.definitions) == len(terms), "all indexes serve a short list"
