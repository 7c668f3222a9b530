"""The contract of pointer stores for column reads and the query history.

Reads add up by day. Statements add up by hour, and later by day. The number of shapes is limited. All records are
deleted with the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from seamark.formats.runtime.errors import CommitConflict, NoSuchTable
from seamark.metaserver.store.model import (
    ALL_AGES,
    OTHER_SHAPES,
    AppliedAdvice,
    ColumnReads,
    QueryRecord,
    QuerySums,
)
from seamark.metaserver.store.operations import (
    AddColumnReads,
    AddQueryRecords,
    ChangeAppliedAdvice,
    CreateEntry,
    CreateNamespace,
    DropEntry,
    SaveAppliedAdvice,
)
from seamark.metaserver.store.sql import recorded_reads
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.statement import Steps
from tests.store.samples import NS, TABLE, make_entry
from tests.store.store_pair import StorePair

UUID = "uuid-of-t"


class ColumnReadsContract(StorePair):
    """The tests of the counted column reads that each store passes."""

    async def test_reads_of_a_day_add_up_and_keep_the_oldest_age(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        await store.transact([AddColumnReads(UUID, 5, ((1, 30, 2), (2, ALL_AGES, 1)))])
        await other_store.transact(
            [AddColumnReads(UUID, 5, ((1, 10, 3),)), AddColumnReads("uuid-of-u", 5, ((1, 99, 1),))]
        )
        await store.transact([AddColumnReads(UUID, 6, ((1, 30, 1), (-1, 0, 2**40))), AddColumnReads(UUID, 7, ())])
        assert await other_store.list_column_reads(UUID, 0, 10) == [
            ColumnReads(-1, 0, 2**40, 6, 6),
            ColumnReads(1, 30, 6, 5, 6),
            ColumnReads(2, ALL_AGES, 1, 5, 5),
        ]
        assert await other_store.list_column_reads(UUID, 6, 1) == [ColumnReads(-1, 0, 2**40, 6, 6)]

    async def test_reads_of_many_columns_are_added_in_one_transaction(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        reads = tuple((column, column % 7, 1) for column in range(300, 0, -1))
        for _ in range(2):
            await store.transact([AddColumnReads(UUID, 1, reads)])
        assert {
            (read_counts.column_id, read_counts.reads) for read_counts in await store.list_column_reads(UUID, 0, 1000)
        } == {(column, 2) for column in range(1, 301)}

    async def test_old_days_are_pruned_within_the_limit(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for day in range(6):
            await store.transact([AddColumnReads(UUID, day, ((1, 0, 1),))])
        assert await store.prune_column_reads(4, 3) == 3
        assert await store.prune_column_reads(4, 3) == 1
        assert await store.prune_column_reads(4, 3) == 0
        assert await store.list_column_reads(UUID, 0, 10) == [ColumnReads(1, 0, 2, 4, 5)]

    async def test_reads_are_deleted_with_the_last_name_of_the_table(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), AddColumnReads(UUID, 1, ((1, 0, 1),))])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await store.list_column_reads(UUID, 0, 10) == []
        with pytest.raises(NoSuchTable):
            await store.transact([AddColumnReads(UUID, 1, ((1, 0, 1),))])


def build_add_records(hour: int, *records: tuple[str, str], samples: str = "", shapes_max: int = 10) -> AddQueryRecords:
    """Return an operation that adds a statement for each (fingerprint, owner) in `records`.

    A fingerprint identifies a shape: a statement without the values that it compares.
    """
    sums = QuerySums(statements=1, files_in=10, files_left=2, sized=1, bytes_in=1000, bytes_left=200, plan_us=5)
    query_records = tuple(QueryRecord(name, owner, f'"{name}"', samples, sums) for name, owner in records)
    return AddQueryRecords(UUID, hour, query_records, shapes_max, owner_shapes_max=2)


class QueryHistoryContract(StorePair):
    """The tests of the recorded query shapes that each store passes."""

    async def test_counts_of_statements_are_added_over_two_replicas(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        await store.transact([build_add_records(100, ("a", "x"), ("b", "x"))])
        await other_store.transact([build_add_records(101, ("a", "y"))])
        (shape_a, shape_b) = await store.query_shapes(UUID, 0, 10)
        assert (shape_a.fingerprint, shape_a.shape, shape_a.sums, shape_a.first_hour, shape_a.last_hour) == (
            "a",
            '"a"',
            QuerySums(2, 20, 4, 2, 2000, 400, 10),
            100,
            101,
        )
        assert (shape_b.fingerprint, shape_b.sums.statements) == ("b", 1)
        assert [shape.fingerprint for shape in await store.query_shapes(UUID, 101, 10)] == ["a"]
        (totals,) = await other_store.load_query_totals(0, None, 10)
        assert (totals.uuid, totals.shapes, totals.sums.statements) == (UUID, 2, 3)

    async def test_shapes_with_equal_digests_are_counted_separately(
        self, store: GeneratorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorded_reads, "_number_shape", lambda uuid, fingerprint, attempt=0: 1 + attempt)
        await store.transact([CreateEntry(make_entry("t"))])
        for _ in range(2):
            await store.transact([build_add_records(1, ("a", "x"), ("b", "x"), ("c", "y"))])
        counts = {shape.fingerprint: shape.sums.statements for shape in await store.query_shapes(UUID, 0, 10)}
        assert counts == {"a": 2, "b": 2, "c": 2}

    async def test_shape_that_another_replica_stores_at_the_same_time_is_counted_once(
        self, store: GeneratorStore, other_store: GeneratorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A shape is a statement without the values that it compares. Its fingerprint identifies it."""
        await store.transact([CreateEntry(make_entry("t"))])
        await store.transact([build_add_records(1, ("a", "x"))])
        find_stored_shapes, calls = recorded_reads._find_stored_shapes, list[Sequence[str]]()

        def find_late(uuid: str, fingerprints: Sequence[str]) -> Steps[dict[str, Any]]:
            """Find shapes as if the other replica had stored them after the first search."""
            calls.append(fingerprints)
            stored_shapes = yield from find_stored_shapes(uuid, fingerprints)
            return {} if len(calls) == 1 else stored_shapes

        monkeypatch.setattr(recorded_reads, "_find_stored_shapes", find_late)
        # The stored number may differ from the number that a replica computes.
        monkeypatch.setattr(recorded_reads, "_number_shape", lambda uuid, fingerprint, attempt=0: 1 + attempt)
        await other_store.transact([build_add_records(1, ("a", "x"))])
        (shape,) = await store.query_shapes(UUID, 0, 10)
        assert (shape.fingerprint, shape.sums.statements) == ("a", 2)

    async def test_huge_sums_stop_at_a_limit_and_stay_readable(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        huge_sums = QuerySums(
            statements=1, files_in=1 << 70, files_left=2, sized=1, bytes_in=(1 << 63) - 1, bytes_left=200, plan_us=5
        )
        huge_record = QueryRecord("a", "x", '"a"', "", huge_sums)
        for hour in range(20, 30):
            for _ in range(3):
                await store.transact([AddQueryRecords(UUID, hour, (huge_record,), shapes_max=10, owner_shapes_max=2)])
        sum_max = 1 << 61  # The greatest sum that is stored.
        expected = QuerySums(
            statements=30, files_in=sum_max, files_left=60, sized=30, bytes_in=sum_max, bytes_left=6000, plan_us=150
        )
        for _ in range(2):
            (shape,) = await store.query_shapes(UUID, 0, 10)
            (totals,) = await store.load_query_totals(0, None, 10)
            assert (shape.sums, totals.sums) == (expected, expected)
            # The first call merges the hours 20 to 23 and 25 to 29, and the second call none.
            assert await store.merge_query_hours(before_hour=48, limit=100, period_hours=24) in (9, 0)

    async def test_shapes_beyond_the_limits_are_counted_together(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        await store.transact([build_add_records(1, ("a", "x"))])
        await store.transact([build_add_records(1, *((f"n{number}", "mallory") for number in range(50)))])
        await store.transact([build_add_records(1, ("b", "x"), ("c", "y"), shapes_max=4)])
        counts = {shape.fingerprint: shape.sums.statements for shape in await store.query_shapes(UUID, 0, 100)}
        assert counts == {"a": 1, "n0": 1, "n1": 1, "b": 1, OTHER_SHAPES: 49}

    async def test_newest_samples_are_kept_within_their_limit(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for number in range(20):
            await store.transact([build_add_records(number, ("a", "x"), samples=f"[{number}]")])
        await store.transact([build_add_records(21, ("a", "x"))])
        (shape,) = await store.query_shapes(UUID, 0, 10)
        assert shape.samples == f"[{','.join(map(str, range(4, 20)))}]"

    async def test_hours_of_older_days_are_merged_without_loss_of_statements(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for hour in range(20, 60):
            await store.transact([build_add_records(hour, ("a", "x"))])
        shapes_before = await store.query_shapes(UUID, 0, 10)
        merge_count = 0
        while count := await store.merge_query_hours(before_hour=48, limit=7, period_hours=24):
            merge_count += count
        assert merge_count == 27  # The hours 20 to 23 are merged into hour 0, and the hours 25 to 47 into hour 24.
        (shapes_after,) = await store.query_shapes(UUID, 0, 10)
        assert shapes_after.sums == shapes_before[0].sums
        assert (shapes_after.first_hour, shapes_after.last_hour) == (0, 59)
        assert [shape.sums.statements for shape in await store.query_shapes(UUID, 24, 10)] == [36]

    async def test_days_are_merged_into_weeks_without_loss_of_statements(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for day in range(3, 12):
            await store.transact([build_add_records(24 * day, ("a", "x"), ("b", "x"))])
        shapes_before = await store.query_shapes(UUID, 0, 10)
        # The days 3 to 6 of the first week have two shapes each. The second week has not ended yet.
        assert await store.merge_query_hours(before_hour=168, limit=100, period_hours=168) == 8
        assert await store.merge_query_hours(before_hour=168, limit=100, period_hours=168) == 0
        shapes_after = await store.query_shapes(UUID, 0, 10)
        assert [shape.sums for shape in shapes_after] == [shape.sums for shape in shapes_before]
        assert [(shape.first_hour, shape.last_hour) for shape in shapes_after] == [(0, 264)] * 2
        assert [shape.sums.statements for shape in await store.query_shapes(UUID, 168, 10)] == [5, 5]

    async def test_shapes_are_removed_with_their_last_sums(self, store: GeneratorStore) -> None:
        """A shape is a statement without the values that it compares. Sums over its statements are stored by hour."""
        await store.transact([CreateEntry(make_entry("t"))])
        await store.transact([build_add_records(1, ("a", "x"), ("b", "x"))])
        await store.transact([build_add_records(50, ("b", "x"))])
        assert await store.prune_queries(24, 10) == 2
        # The shape of "a" is removed, so its owner can be the first user of another shape.
        await store.transact([build_add_records(51, ("c", "x"))])
        assert [shape.fingerprint for shape in await store.query_shapes(UUID, 0, 10)] == ["b", "c"]

    async def test_totals_include_only_tables_in_the_requested_namespaces(self, store: GeneratorStore) -> None:
        paths = {"a": ("db",), "b": ("db", "x"), "c": ("db2",), "d": ("dc",)}
        for name, path in paths.items():
            for depth in range(1, len(path) + 1):
                if await store.load_namespace(path[:depth]) is None:
                    await store.transact([CreateNamespace(path[:depth], {})])
            entry = make_entry(name, namespace=path)
            sums = QuerySums(1 + len(path), 10, 2, 1, 1000, 200, 5)
            record = QueryRecord("s", "x", '"s"', "", sums)
            await store.transact([CreateEntry(entry), AddQueryRecords(entry.uuid, 1, (record,), 10, 2)])
        for namespaces, names in (
            (None, ["b", "a", "c", "d"]),
            ([], []),
            ([("db",)], ["b", "a"]),
            ([("db", "x"), ("dc",)], ["b", "d"]),
            ([("none",), ("db2",)] * 16, ["c"]),
        ):
            totals = await store.load_query_totals(0, namespaces, 10)
            assert [total.name for total in totals] == names
            assert [total.namespace for total in totals] == [paths[name] for name in names]
            assert len(await store.load_query_totals(0, namespaces, 1)) == min(1, len(names))

    async def test_newest_applied_advice_is_kept(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for number in range(4):
            await store.transact([SaveAppliedAdvice(AppliedAdvice(UUID, f"id{number}", number, "{}"), 3)])
        await store.transact([SaveAppliedAdvice(AppliedAdvice(UUID, "id3", 3, '{"measured":1}'), 3)])
        advice_records = await store.list_applied_advice(UUID, 10)
        assert [advice.id for advice in advice_records] == ["id3", "id2", "id1"]
        assert advice_records[0].advice == '{"measured":1}'

    async def test_applied_advice_changes_only_from_the_expected_text(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        first_advice, second_advice = AppliedAdvice(UUID, "a", 1, "first"), AppliedAdvice(UUID, "a", 2, "second")
        await store.transact([ChangeAppliedAdvice(first_advice, None, 3)])
        for advice, expected in ((second_advice, None), (second_advice, "other")):
            with pytest.raises(CommitConflict):
                await store.transact([ChangeAppliedAdvice(advice, expected, 3)])
        await store.transact([ChangeAppliedAdvice(second_advice, "first", 3)])
        assert await store.list_applied_advice(UUID, 10) == [second_advice]

    async def test_history_is_deleted_with_the_last_name_of_the_table(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), build_add_records(1, ("a", "x"))])
        await store.transact([SaveAppliedAdvice(AppliedAdvice(UUID, "id", 1, "{}"), 3)])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await store.query_shapes(UUID, 0, 10) == []
        assert await store.list_applied_advice(UUID, 10) == []
        with pytest.raises(NoSuchTable):
            await store.transact([build_add_records(1, ("a", "x"))])
