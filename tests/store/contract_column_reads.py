"""The contract of pointer stores for column reads: they add up by day, and are deleted with the table."""

from __future__ import annotations

import pytest

from seamark.formats.runtime.errors import NoSuchTable
from seamark.metaserver.store.model import ALL_AGES, ColumnReads
from seamark.metaserver.store.operations import AddColumnReads, CreateEntry, DropEntry
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.opened import OpenedStores
from tests.store.samples import NS, TABLE, make_entry

UUID = "uuid-of-t"


class ColumnReadsContract(OpenedStores):
    async def test_reads_of_a_day_add_up_and_keep_the_oldest_age(
        self, store: GeneratorStore, other: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        await store.transact([AddColumnReads(UUID, 5, ((1, 30, 2), (2, ALL_AGES, 1)))])
        await other.transact([AddColumnReads(UUID, 5, ((1, 10, 3),)), AddColumnReads("uuid-of-u", 5, ((1, 99, 1),))])
        await store.transact([AddColumnReads(UUID, 6, ((1, 30, 1), (-1, 0, 2**40))), AddColumnReads(UUID, 7, ())])
        assert await other.column_reads(UUID, 0, 10) == [
            ColumnReads(-1, 0, 2**40, 6, 6),
            ColumnReads(1, 30, 6, 5, 6),
            ColumnReads(2, ALL_AGES, 1, 5, 5),
        ]
        assert await other.column_reads(UUID, 6, 1) == [ColumnReads(-1, 0, 2**40, 6, 6)]

    async def test_many_columns_are_added_together(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        reads = tuple((column, column % 7, 1) for column in range(300, 0, -1))
        for _ in range(2):
            await store.transact([AddColumnReads(UUID, 1, reads)])
        assert {
            (column_read.column_id, column_read.reads) for column_read in await store.column_reads(UUID, 0, 1000)
        } == {(column, 2) for column in range(1, 301)}

    async def test_old_days_are_pruned_within_the_limit(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        for day in range(6):
            await store.transact([AddColumnReads(UUID, day, ((1, 0, 1),))])
        assert await store.prune_column_reads(4, 3) == 3
        assert await store.prune_column_reads(4, 3) == 1
        assert await store.prune_column_reads(4, 3) == 0
        assert await store.column_reads(UUID, 0, 10) == [ColumnReads(1, 0, 2, 4, 5)]

    async def test_reads_are_deleted_with_the_last_name_of_the_table(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), AddColumnReads(UUID, 1, ((1, 0, 1),))])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await store.column_reads(UUID, 0, 10) == []
        with pytest.raises(NoSuchTable):
            await store.transact([AddColumnReads(UUID, 1, ((1, 0, 1),))])
