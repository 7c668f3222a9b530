"""Tests of how plans use indexes: projection of filters, coverage, and index files that are late, damaged or
replaced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression import collect_predicates
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import PREFIX, read_definitions
from seamark.formats.index.index_file import open_index_file
from seamark.formats.index.keys.case_folding import UNKNOWN_CASE
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.queries import COMBINATIONS_MAX, KEYS_MAX
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.index.files import remote as cold
from seamark.metaserver.index.files.indexes import OpenIndex
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.indexes.coverage import Coverage, FileIds
from seamark.metaserver.planner.indexes.index_predicates import IndexProjection, project_onto_indexes
from seamark.metaserver.planner.indexes.resolver import IndexResolver
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import IndexFileState
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from tests.planner.lakes.indexing import IndexedTable, Planning, create_namespace, open_planning
from tests.planner.lakes.tables import RecordingObjects, Table, list_file_numbers

FILES = range(6)
ODD_ID_FILTER = {"type": "eq", "term": "id", "value": 13}
"""A filter for a value in the range of file 1 that no row of the file has."""


Wrap = Callable[[ObjectStore], ObjectStore]


def build_eq_filter(value: int) -> dict[str, Any]:
    return {"type": "eq", "term": "id", "value": value}


def build_and_filter(left: Any, right: Any) -> dict[str, Any]:
    return {"type": "and", "left": left, "right": right}


def build_or_filter(left: Any, right: Any) -> dict[str, Any]:
    return {"type": "or", "left": left, "right": right}


class IndexedPlans:
    """An indexed table, and functions that plan scans of it."""

    def __init__(self, folder: Path, store: PointerStore, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.store = store
        self.registry = Registry(store, SystemClock())
        self._stack = stack
        self.table: IndexedTable

    async def create(self, **properties: str) -> IndexedTable:
        """Create a table of six files: file 0 has the ids from 0 to 8, file 1 the ids from 10 to 18, and so on."""
        table = Table(self.folder / "t")
        table.commit(1, [table.write_manifest("a", range(3)), table.write_manifest("b", range(3, 6))])
        self.table = IndexedTable(table, self.store, self.registry, properties)
        await self.table.register()
        return self.table

    async def open_planning(
        self, wrap: Callable[[ObjectStore], ObjectStore] = lambda inner: inner, **options: Any
    ) -> Planning:
        return await self._stack.enter_async_context(open_planning(self.folder, self.registry, wrap=wrap, **options))

    async def scan(self, planning: Planning, filter: Any) -> ScanPlan:
        request = ScanRequest(filter=parse_expression(filter))
        return await planning.planner.bind_and_plan(self.table.metadata, request, await self.table.build_entry())

    async def plan_files(self, planning: Planning, filter: Any) -> list[int]:
        return list_file_numbers(await self.scan(planning, filter))


@pytest.fixture
async def indexed_plans(tmp_path: Path) -> AsyncIterator[IndexedPlans]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=SystemClock()))
        await create_namespace(store)
        yield IndexedPlans(tmp_path, store, stack)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


# Predicates on index terms that follow from a filter

SCHEMA = [(1, "id", "long"), (2, "name", "string"), (3, "ts", "timestamp"), (4, "kind", "int")]


def project_filter(filter: Any, **properties: str) -> IndexProjection | None:
    metadata = decode_table(
        json.dumps(
            {
                "format-version": 2,
                "table-uuid": "u",
                "location": "file:///t",
                "last-sequence-number": 0,
                "last-updated-ms": 0,
                "last-column-id": 4,
                "current-schema-id": 0,
                "schemas": [
                    {
                        "type": "struct",
                        "schema-id": 0,
                        "fields": [
                            {"id": number, "name": name, "required": False, "type": kind}
                            for number, name, kind in SCHEMA
                        ],
                    }
                ],
                "default-spec-id": 0,
                "partition-specs": [{"spec-id": 0, "fields": []}],
                "last-partition-id": 999,
                "default-sort-order-id": 0,
                "sort-orders": [{"order-id": 0, "fields": []}],
                "properties": {PREFIX + name: text for name, text in properties.items()},
            }
        ).encode(),
        "file:///t/metadata/v1.json",
    )
    definitions = read_definitions(metadata)
    assert not definitions.problems
    bound_scan = BoundScan.bind(metadata, ScanRequest(filter=parse_expression(filter, functions=True)))
    return project_onto_indexes(bound_scan.bound, definitions.enabled)


def list_predicates(projected_filter: IndexProjection | None) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Return (index, operation, values) of each predicate on a term."""
    assert projected_filter is not None
    predicates = [
        (projected_filter.by_field[predicate.column_id].name, predicate.op.value, predicate.values)
        for predicate in collect_predicates(projected_filter.expression)
    ]
    composite = [
        (definition.name, item.op.value, item.values)
        for definition, literals in projected_filter.composite
        for item in literals
    ]
    return sorted(predicates + composite)


def test_index_on_a_transform_receives_the_projected_filter() -> None:
    filter = build_and_filter(build_eq_filter(7), {"type": "lt", "term": "ts", "value": "2020-01-02T03:00:00"})
    predicates = list_predicates(
        project_filter(filter, b="bloom(bucket[16](id))", t="bitmap(truncate[5](id))", d="bitmap(day(ts))")
    )
    assert [(name, op) for name, op, _ in predicates] == [("b", "eq"), ("d", "lt"), ("t", "eq")]
    assert predicates[1][2] == (18264,)
    assert predicates[2][2] == (5,)


def test_index_on_lower_answers_equality_and_prefixes_of_the_column() -> None:
    lower = {"l": "bitmap(lower(name))"}
    assert list_predicates(project_filter({"type": "in", "term": "name", "values": ["Ab", "aB", "c"]}, **lower)) == [
        ("l", "in", ("ab", "c"))
    ]
    assert list_predicates(project_filter({"type": "starts-with", "term": "name", "value": "AB"}, **lower)) == [
        ("l", "eq", (UNKNOWN_CASE,)),
        ("l", "starts-with", ("ab",)),
    ]
    truncated_filter = {"type": "transform", "transform": "truncate[2]", "term": "name"}
    for unanswered_filter in (
        {"type": "eq", "term": truncated_filter, "value": "Ab"},
        {"type": "lt", "term": "name", "value": "B"},
        {"type": "not-eq", "term": "name", "value": "B"},
        {"type": "is-null", "term": "name"},
    ):
        assert project_filter(unanswered_filter, **lower) is None, unanswered_filter


@pytest.mark.parametrize("indexed_function", ["lower", "upper"])
@pytest.mark.parametrize("function", ["lower", "upper"])
def test_index_on_lower_or_upper_answers_filters_on_either_function(function: str, indexed_function: str) -> None:
    """Both indexes contain texts with folded case.

    All texts with a character that Unicode does not assign have the same key, `UNKNOWN_CASE` (U+10FFFF). It is unknown
    which of these texts are equal without case, so the index does not answer a function's filter on such a text.
    """
    term = {"type": "transform", "transform": function, "term": "name"}
    index = {"l": f"bitmap({indexed_function}(name))"}
    in_filter = {"type": "in", "term": term, "values": ["Straße", "STRASSE", "ab"]}
    assert list_predicates(project_filter(in_filter, **index)) == [("l", "in", ("ab", "strasse", UNKNOWN_CASE))]
    prefix = {"type": "starts-with", "term": term, "value": "AB"}
    assert list_predicates(project_filter(prefix, **index)) == [
        ("l", "eq", (UNKNOWN_CASE,)),
        ("l", "starts-with", ("ab",)),
    ]
    for unanswered_filter in (
        {"type": "eq", "term": term, "value": "ab\U0010ffff"},
        {"type": "starts-with", "term": term, "value": "\U0010ffff"},
        {"type": "in", "term": term, "values": ["ab", "\U0010ffff"]},
        {"type": "not-eq", "term": term, "value": "ab"},
        {"type": "lt", "term": term, "value": "ab"},
        {"type": "is-null", "term": term},
    ):
        assert project_filter(unanswered_filter, **index) is None, unanswered_filter
    assert list_predicates(project_filter({"type": "eq", "term": "name", "value": "\U0010ffff"}, **index)) == [
        ("l", "eq", (UNKNOWN_CASE,))
    ]


def test_composite_key_index_receives_folded_values() -> None:
    """The index on lower(name) contains texts with folded case, and one key for all texts whose folding is unknown.

    The constant `UNKNOWN_CASE` is this key.
    """
    term = {"type": "transform", "transform": "upper", "term": "name"}
    predicates = list_predicates(
        project_filter(
            build_and_filter(build_eq_filter(7), {"type": "eq", "term": term, "value": "AB"}),
            r="record(id, lower(name))",
        )
    )
    assert predicates == [("r", "eq", (7,)), ("r", "in", ("ab", UNKNOWN_CASE))]
    projected_filter = project_filter(
        build_and_filter(build_eq_filter(7), {"type": "eq", "term": "name", "value": "AB"}), r="record(id, lower(name))"
    )
    assert projected_filter is not None
    ((_, equalities),) = projected_filter.composite
    assert [equality.values for equality in equalities] == [(7,), ("ab",)]


def test_bloom_and_record_indexes_answer_equality_only() -> None:
    indexes = {"b": "bloom(id)", "r": "record(id)"}
    for unanswered_filter in (
        {"type": "lt", "term": "id", "value": 5},
        {"type": "not-eq", "term": "id", "value": 5},
        {"type": "is-null", "term": "id"},
        {"type": "in", "term": "id", "values": list(range(KEYS_MAX + 1))},
    ):
        assert project_filter(unanswered_filter, **indexes) is None
    assert [
        name
        for name, _, _ in list_predicates(project_filter({"type": "in", "term": "id", "values": [1, 2]}, **indexes))
    ] == ["b", "r"]


def test_composite_key_index_is_used_when_each_column_has_values() -> None:
    index = {"r": "record(id, kind)"}
    kinds = {"type": "in", "term": "kind", "values": [1, 2]}
    assert list_predicates(project_filter(build_and_filter(build_eq_filter(7), kinds), **index)) == [
        ("r", "eq", (7,)),
        ("r", "in", (1, 2)),
    ]
    assert project_filter(build_eq_filter(7), **index) is None
    assert project_filter(build_or_filter(build_eq_filter(7), kinds), **index) is None
    assert (
        project_filter(build_and_filter(build_eq_filter(7), {"type": "gt", "term": "kind", "value": 1}), **index)
        is None
    )
    value_count = int(COMBINATIONS_MAX**0.5) + 1
    long_filters = [{"type": "in", "term": name, "values": list(range(value_count))} for name in ("id", "kind")]
    assert project_filter(build_and_filter(*long_filters), **index) is None


def test_index_that_covers_one_side_of_an_or_is_used_beside_statistics() -> None:
    other_side = {"type": "eq", "term": "kind", "value": 1}
    mixed_filter = project_filter(build_or_filter(build_eq_filter(7), other_side), b="bloom(id)")
    assert list_predicates(mixed_filter) == []
    assert mixed_filter is not None
    (disjunction,) = mixed_filter.disjunctions
    assert [predicate.name for predicate in collect_predicates(disjunction)] == ["id", "b", "kind"]
    assert [definition.name for definition in mixed_filter.definitions] == ["b"]
    assert project_filter(build_or_filter(build_eq_filter(7), other_side), b="bloom(name)") is None
    projected_filter = project_filter(build_or_filter(build_eq_filter(7), build_eq_filter(8)), b="bloom(id)")
    assert [op for _, op, _ in list_predicates(projected_filter)] == ["eq", "eq"]


# Coverage


async def test_index_file_covers_the_rows_of_the_files_it_describes(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    path = await table.index("b", [4, 1])
    second_index = await table.index("b", [1])
    other_table = Table(indexed_plans.folder / "other")
    other_table.commit(1, [other_table.write_manifest("a", [0])])
    planning = await indexed_plans.open_planning()
    view = await planning.planner.view(table.metadata, ScanRequest())
    ids = FileIds(view)
    opened_indexes = [await planning.indexes.open(file) for file in await table.list_files()]
    files = [item for item in opened_indexes if item is not None]
    coverage = Coverage(ids, files)
    assert coverage.uncovered.tolist() == [1, 0, 1, 1, 0, 1]
    assert coverage.files == 2
    assert [(part.location, part.positions.tolist()) for part in coverage.parts] == [
        (path.as_uri(), [4, 1]),
        (second_index.as_uri(), [1]),
    ]
    parts_by_position, files_by_position = coverage.by_position
    assert (parts_by_position[4], files_by_position[4]) == (0, 0)
    assert (parts_by_position[1], files_by_position[1]) in ((0, 1), (1, 0))
    assert parts_by_position[0] == -1
    elsewhere = await planning.planner.view(other_table.metadata, ScanRequest())
    assert Coverage(FileIds(elsewhere), files).parts == ()
    assert Coverage(ids, []).uncovered.tolist() == [1] * 6


# Plans


async def test_plan_keeps_files_without_index_entries(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    planning = await indexed_plans.open_planning()
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == [1]
    await table.index("b", [0, 2, 3])
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == [1]
    await table.index("b", [1])
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []
    assert await indexed_plans.plan_files(planning, build_eq_filter(14)) == [1]
    assert await indexed_plans.plan_files(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(55))) == [5]


async def test_only_bitmaps_prune_by_values_that_never_share_a_row(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)", l="bloom(id)", r="record(id)")
    planning = await indexed_plans.open_planning()
    false_filter = build_and_filter(build_eq_filter(12), build_eq_filter(14))
    for name in ("l", "r"):
        await table.index(name, FILES)
        assert await indexed_plans.plan_files(planning, false_filter) == [1]
    await table.index("b", FILES)
    scan = await indexed_plans.scan(planning, false_filter)
    assert list_file_numbers(scan) == []
    assert [stage.name for stage in scan.stages][-4:] == ["bloom", "bitmap", "record", "bitmap_rows"]


@pytest.mark.parametrize("kind", ["bloom", "bitmap", "record"])
async def test_plan_reports_what_each_index_pruned(indexed_plans: IndexedPlans, kind: str) -> None:
    table = await indexed_plans.create(
        i=f"{kind}(id)", paused=json.dumps({"kind": "bitmap", "columns": ["id"], "state": "paused"})
    )
    await table.index("i", FILES)
    planning = await indexed_plans.open_planning()
    scan = await indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(14)))
    assert list_file_numbers(scan) == [1]
    scan = await indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(24)))
    assert list_file_numbers(scan) == [2]
    (use,) = scan.indexes
    assert (use.name, use.kind) == ("i", kind)
    assert use.files_removed >= 1
    usage = planning.usage.find_usage(table.metadata.table_uuid, table.definitions["i"].id)
    assert usage is not None
    assert usage.plans == 2


async def test_plan_skips_an_index_that_loads_slowly_and_the_next_plan_uses_it(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    late_index = await table.index("b", [1])
    await table.index("b", [3])
    stores: list[RecordingObjects] = []

    def record_objects(inner: ObjectStore) -> ObjectStore:
        stores.append(RecordingObjects(inner))
        stores[0].hold = late_index.name
        return stores[0]

    planning = await indexed_plans.open_planning(record_objects, index_wait_s=0.2)
    scan = await indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(35)))
    assert list_file_numbers(scan) == [1]
    assert not scan.complete
    hits = planning.planner.read_stats().plan_hits
    plans = await asyncio.gather(
        *(
            indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(value)))
            for value in (31, 33, 35, 37)
        )
    )
    assert [list_file_numbers(result) for result in plans] == [[1]] * 4
    assert stores[0].reads.count(late_index.name) == 1
    stores[0].resume()
    (file,) = [file for file in await table.list_files() if file.location == late_index.as_uri()]
    await wait_until(lambda: planning.indexes.find_in_memory(file) is not None)
    scan_result = await indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(35)))
    assert (list_file_numbers(scan_result), scan_result.complete) == ([], True)
    assert planning.planner.read_stats().plan_hits == hits
    assert await indexed_plans.scan(planning, build_or_filter(ODD_ID_FILTER, build_eq_filter(35))) is scan_result


async def test_plan_skips_an_index_that_a_bug_keeps_from_opening(
    indexed_plans: IndexedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    await table.index("b", FILES)
    planning = await indexed_plans.open_planning()

    def raise_zero_division(_: memoryview) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(KINDS["bitmap"], "open", raise_zero_division)
    scan = await indexed_plans.scan(planning, ODD_ID_FILTER)
    assert (list_file_numbers(scan), scan.complete) == ([1], False)
    monkeypatch.undo()
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []


async def open_planner_with_remote_indexes(
    indexed_plans: IndexedPlans, path: Path, **options: Any
) -> tuple[Planning, RecordingObjects]:
    """Return a planner that probes index files of any size by range reads, and the storage of the planner.

    Reads of the whole index file `path` wait until `resume` of the storage is called.
    """
    stores: list[RecordingObjects] = []

    def record_objects(inner: ObjectStore) -> ObjectStore:
        stores.append(RecordingObjects(inner))
        stores[0].hold = path.name
        return stores[0]

    planning = await indexed_plans.open_planning(
        record_objects, **{"index_wait_s": 5.0, "index_whole_bytes": 0, **options}
    )
    return planning, stores[0]


async def test_large_bloom_index_is_probed_by_range_until_it_is_local(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(l="bloom(id)", b="bitmap(id)")
    path = await table.index("l", FILES)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path)
    first_scan = await indexed_plans.scan(planning, ODD_ID_FILTER)
    assert (list_file_numbers(first_scan), first_scan.complete) == ([], True)
    opening_reads = len(storage.ranges)
    assert set(storage.ranges) == {path.name}
    second_scan = await indexed_plans.scan(planning, build_or_filter(build_eq_filter(15), build_eq_filter(34)))
    assert (list_file_numbers(second_scan), second_scan.complete) == ([3], True)
    assert 1 <= len(storage.ranges) - opening_reads <= 2 * 7, "two values, each with 7 hash functions"
    assert await indexed_plans.scan(planning, ODD_ID_FILTER) is first_scan
    storage.resume()
    (file,) = await table.list_files()
    await wait_until(lambda: planning.indexes.find_in_memory(file) is not None)
    reads_before = len(storage.ranges)
    assert await indexed_plans.plan_files(planning, build_or_filter(build_eq_filter(17), build_eq_filter(36))) == [3]
    assert len(storage.ranges) == reads_before
    assert storage.reads.count(path.name) == 1


@pytest.mark.parametrize("kind", ["record", "bitmap"])
async def test_large_index_of_each_kind_is_probed_by_range(indexed_plans: IndexedPlans, kind: str) -> None:
    table = await indexed_plans.create(i=f"{kind}(id)")
    path = await table.index("i", FILES)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path)
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []
    opening_reads = len(storage.ranges)
    assert opening_reads <= 7
    assert await indexed_plans.plan_files(planning, build_or_filter(build_eq_filter(15), build_eq_filter(34))) == [3]
    assert len(storage.ranges) - opening_reads <= 4
    scan = await indexed_plans.scan(planning, build_eq_filter(14))
    assert (list_file_numbers(scan), scan.complete) == ([1], True)
    storage.resume()
    (file,) = await table.list_files()
    await wait_until(lambda: planning.indexes.find_in_memory(file) is not None)
    reads_before = len(storage.ranges)
    assert await indexed_plans.plan_files(planning, build_or_filter(build_eq_filter(17), build_eq_filter(36))) == [3]
    assert len(storage.ranges) == reads_before


async def test_remote_bitmaps_are_read_only_for_the_remaining_files(
    indexed_plans: IndexedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first read of an index file is small here, so that it does not include the sections of the data files.
    monkeypatch.setattr(cold, "_FIRST_READ_BYTES", 64)
    table = await indexed_plans.create(b="bitmap(id)")
    path = await table.index("b", FILES)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path)
    assert await indexed_plans.plan_files(planning, build_eq_filter(12)) == [1]
    request_count = len(storage.ranges)
    scan = await indexed_plans.scan(planning, build_and_filter(build_eq_filter(12), build_eq_filter(14)))
    assert (list_file_numbers(scan), scan.complete) == ([], True)
    assert [use.name for use in scan.indexes] == ["b"]
    assert len(storage.ranges) == request_count + 1, "the plan must read only the section of one file"
    plain_plan = await indexed_plans.scan(
        await indexed_plans.open_planning(), build_and_filter(build_eq_filter(12), build_eq_filter(14))
    )
    assert plain_plan.indexes == scan.indexes
    assert storage.reads.count(path.name) == 1


async def test_plan_with_remote_bitmaps_waits_no_longer_than_its_limit(
    indexed_plans: IndexedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "_FIRST_READ_BYTES", 64)
    table = await indexed_plans.create(b="bitmap(id)")
    path = await table.index("b", FILES)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path, index_wait_s=60.0)
    assert await indexed_plans.plan_files(planning, build_eq_filter(12)) == [1]
    assert await indexed_plans.plan_files(planning, build_eq_filter(14)) == [1]
    request_count = len(storage.ranges)
    monkeypatch.setattr(planning.planner._index_selection, "_wait_s", 0.3)

    async def wait_forever(location: str, start: int, length: int) -> bytes:
        storage.ranges.append(location)
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(storage, "read_range", wait_forever)
    async with asyncio.timeout(60):
        scan = await indexed_plans.scan(planning, build_and_filter(build_eq_filter(12), build_eq_filter(14)))
    assert (list_file_numbers(scan), scan.complete) == ([1], False)
    assert len(storage.ranges) == request_count + 1


async def test_large_bloom_index_is_used_for_many_keys_once_it_is_local(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(l="bloom(id)")
    path = await table.index("l", FILES)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path, index_wait_s=0.2)
    long_filter = {"type": "in", "term": "id", "values": list(range(1, 59, 2))}
    scan = await indexed_plans.scan(planning, long_filter)
    assert (list_file_numbers(scan), scan.complete) == (list(FILES), False)
    assert storage.ranges == []
    storage.resume()
    (file,) = await table.list_files()
    await wait_until(lambda: planning.indexes.find_in_memory(file) is not None)
    assert len(await indexed_plans.plan_files(planning, long_filter)) < 6


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("damage_kind", ["a page", "the header", "the files table", "the footer", "missing"])
@pytest.mark.parametrize("kind", ["bloom", "bitmap", "record"])
async def test_damaged_remote_index_widens_the_plan_and_is_quarantined(
    indexed_plans: IndexedPlans, kind: str, damage_kind: str
) -> None:
    table = await indexed_plans.create(l=f"{kind}(id)")
    path = await table.index("l", FILES)
    data = bytearray(path.read_bytes())
    header = open_index_file(bytes(data), "x").header
    damaged_offsets = {
        "a page": header.offset + {"bloom": header.length - 1, "bitmap": 300, "record": 30}[kind],
        "the header": header.offset + (header.length - 40 if kind == "record" else 20),
        "the files table": header.files_offset + 80,
        "the footer": header.offset + header.length + 20,
    }
    if damage_kind == "missing":
        path.unlink()
    else:
        data[damaged_offsets[damage_kind]] ^= 1
        path.write_bytes(data)
    planning, storage = await open_planner_with_remote_indexes(indexed_plans, path, index_wait_s=0.5)
    scan = await indexed_plans.scan(planning, ODD_ID_FILTER)
    assert 1 in list_file_numbers(scan)
    assert not scan.complete
    storage.resume()
    await wait_until(lambda: planning.indexes.quarantined == 1)


async def test_cached_plan_is_replaced_when_an_index_file_is_added_or_removed(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    planning = await indexed_plans.open_planning()
    first_index = await table.index("b", [0])
    first_result = await indexed_plans.scan(planning, ODD_ID_FILTER)
    assert await indexed_plans.scan(planning, ODD_ID_FILTER) is first_result
    await table.index("b", FILES, remove=[first_index.as_uri()])
    first_index.unlink()
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []
    assert planning.indexes.failures == 0


async def test_coverage_of_a_view_is_computed_once_and_counted_in_the_planners_memory(
    indexed_plans: IndexedPlans,
) -> None:
    """A view has the decoded manifests of a table. The coverage says which files of a view an index has entries for."""
    table = await indexed_plans.create(b="bitmap(id)")
    await table.index("b", FILES)
    planning = await indexed_plans.open_planning()
    plain_plan = await planning.planner.bind_and_plan(
        table.metadata, ScanRequest(filter=parse_expression(build_eq_filter(14))), None
    )
    bytes_before = planning.planner.read_stats().added_bytes
    first_scan = await indexed_plans.scan(planning, build_eq_filter(16))
    bytes_after = planning.planner.read_stats().added_bytes
    # Each of the 6 files has a flag (1 byte), a position (8 bytes) and an identity with its position (24 bytes).
    assert bytes_after - bytes_before > 6 * (1 + 8 + 24)
    second_scan = await indexed_plans.scan(planning, build_eq_filter(18))
    assert (list_file_numbers(plain_plan), list_file_numbers(first_scan), list_file_numbers(second_scan)) == (
        [1],
        [1],
        [1],
    )
    assert planning.planner.read_stats().added_bytes - bytes_after < bytes_after - bytes_before
    resolver, definition, entry = IndexResolver(planning.indexes), table.definitions["b"], await table.build_entry()
    size_bytes = first_scan.view.derived.size_bytes
    opened_index = await resolver.open_bitmaps(first_scan.view, definition, entry)
    assert first_scan.view.derived.size_bytes == size_bytes, "lookups and plans must share the coverage"
    assert (await resolver.open_bitmaps(first_scan.view, definition, entry)).coverage is opened_index.coverage
    await table.index("b", [0])
    assert (
        await resolver.open_bitmaps(first_scan.view, definition, await table.build_entry())
    ).coverage is not opened_index.coverage


async def test_plan_keeps_more_files_if_an_index_file_is_damaged_and_the_file_is_quarantined(
    indexed_plans: IndexedPlans,
) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    path = await table.index("b", FILES)
    data = bytearray(path.read_bytes())
    header = open_index_file(bytes(data), "x").header
    data[header.offset + header.length - 16] ^= 0x10  # The changed byte is in the last section.
    path.write_bytes(data)
    planning = await indexed_plans.open_planning()
    # No row has the ids 52 and 54. File 5 has both ids, and its section is damaged, so it must be kept.
    scan = await indexed_plans.scan(
        planning, build_or_filter(build_and_filter(build_eq_filter(52), build_eq_filter(54)), build_eq_filter(13))
    )
    assert 5 in list_file_numbers(scan)
    assert not scan.complete
    (file,) = await table.list_files()
    await wait_until(lambda: planning.indexes.quarantined == 1)
    (file,) = await table.list_files()
    assert file.state is IndexFileState.QUARANTINED
    assert file.reason
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == [1]
    await table.index("b", FILES)
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []


async def test_bitmap_with_a_different_row_count_is_ignored(indexed_plans: IndexedPlans) -> None:
    table = await indexed_plans.create(b="bitmap(id)")
    await table.index("b", FILES)
    planning = await indexed_plans.open_planning()
    (file,) = await table.list_files()
    opened_index = await planning.indexes.open(file)
    assert opened_index is not None
    records = opened_index.files.records.copy()
    records[1] += 1
    wrong_index = OpenIndex(
        opened_index.location, replace(opened_index.files, records=records), opened_index.index, opened_index.size_bytes
    )
    planning.indexes._stack._memory.put(f"index/{file.location}", wrong_index, 1)
    scan = await indexed_plans.scan(planning, build_and_filter(build_eq_filter(12), build_eq_filter(14)))
    assert (list_file_numbers(scan), scan.complete) == ([1], False)


async def test_diverged_copies_of_a_table_keep_separate_index_definitions(indexed_plans: IndexedPlans) -> None:
    """The copy has the same UUID and properties, but the names of its columns `id` and `day` are exchanged.

    So the definition of index k, which names the column `day`, means another column in the copy.
    """
    table = await indexed_plans.create(b="bitmap(id)", k="bitmap(day)")
    await table.index("b", FILES)
    planning = await indexed_plans.open_planning()
    assert await indexed_plans.plan_files(planning, ODD_ID_FILTER) == []
    metadata_json: dict[str, Any] = json.loads(json.dumps(table.table._build_json()))
    metadata_json["properties"] = dict(table.metadata.properties)
    metadata_json["schemas"][0]["fields"][0]["name"], metadata_json["schemas"][0]["fields"][1]["name"] = "day", "id"
    other_metadata = decode_table(json.dumps(metadata_json).encode(), "file:///other")
    assert isinstance(other_metadata, TableMetadata)
    entry = await table.build_entry()
    swapped_request = ScanRequest(filter=parse_expression({"type": "eq", "term": "day", "value": 13}))
    for _ in range(2):
        scan = await planning.planner.bind_and_plan(other_metadata, swapped_request, entry)
        assert (list_file_numbers(scan), [use.name for use in scan.indexes]) == ([], ["k"])
        own_scan = await indexed_plans.scan(planning, build_and_filter(build_eq_filter(13), build_eq_filter(15)))
        assert {use.name for use in own_scan.indexes} == {"b"}
