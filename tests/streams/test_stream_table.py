"""Tests of a stream table's protocol.

Readers get each acknowledged row exactly once, despite failures and two owners.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from contextlib import suppress
from typing import Any, cast

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, RetryLater
from seamark.metaserver.log.port import StreamProducer, parse_owner
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams import stream_table
from seamark.metaserver.streams.appends import ProducerKey
from seamark.metaserver.streams.fresh_parts import MERGED_ROWS_MAX, FreshPart, FreshParts
from seamark.metaserver.streams.row_files import EncodedFile
from seamark.metaserver.streams.stream_table import StreamTable
from tests.seeds import examples, first_seed
from tests.streams.world import build_batch, open_world

FLUSH_FAILS = (CommitConflict, CommitUnknown, RetryLater)


async def test_a_row_is_read_after_its_acknowledgement_and_once_after_its_flush() -> None:
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(1, 2)})
        assert await world.read(table) == [1, 2]
        await table.append({0: build_batch(3)})
        assert await world.read(table) == [1, 2, 3]
        assert await table.flush() == 3
        assert world.read_files(world.files) == [1, 2, 3]
        assert await world.read(table) == [1, 2, 3]
        assert await table.flush() == 0
        table.check_invariants()


async def test_many_waiting_rows_become_several_fresh_files() -> None:
    async with open_world() as world:
        table = world.open(part_bytes_max=2 * build_batch(10).size_bytes)
        for number in range(10, 29):
            await table.append({0: build_batch(number)})
        assert await world.read(table) == list(range(10, 29))
        assert [file.rows for file in table.list_fresh_files()] == [2] * 9 + [1]
        await table.append({0: build_batch(29)})
        assert await world.read(table) == list(range(10, 30))
        table.check_invariants()
        assert await table.flush() == 20
        assert await world.read(table) == list(range(10, 30))


async def test_readers_get_all_rows_after_some_of_several_fresh_files_were_not_stored() -> None:
    for seed in range(20):
        async with open_world(seed) as world:
            table = world.open(part_bytes_max=build_batch(10).size_bytes)
            world.busy_chance = 0.1
            for number in range(10, 30):
                await table.append({0: build_batch(number)})
            refused_count = 0
            while True:
                try:
                    assert await world.read(table) == list(range(10, 30))
                    break
                except RetryLater:
                    refused_count += 1
                    table.check_invariants()
            await table.clean()
            listed_locations = {file.location for file in table.list_fresh_files()}
            assert listed_locations == {location for location in world.objects if location.startswith("fresh/")}, (
                refused_count
            )


async def test_a_pointer_from_before_a_flush_is_refused() -> None:
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(1)})
        offsets_before_flush = dict(world.flushed)
        await table.flush()
        with pytest.raises(CommitConflict, match="load it again"):
            await table.get_fresh_rows(offsets_before_flush)


async def test_the_flush_of_a_second_owner_adds_no_row_twice() -> None:
    async with open_world() as world:
        first_table, second_table = world.open(), world.open()
        await first_table.append({0: build_batch(1, 2)})
        await second_table.append({0: build_batch(3)})
        outcomes = await asyncio.gather(first_table.flush(), second_table.flush(), return_exceptions=True)
        assert sum(result for result in outcomes if isinstance(result, int)) == 3
        assert world.read_files(world.files) == [1, 2, 3]
        for owner in (first_table, second_table):
            assert await world.read(owner) == [1, 2, 3]
            owner.check_invariants()


@pytest.mark.parametrize("outcome", ["lost", "found"])
async def test_a_flush_with_an_unknown_outcome_loses_and_repeats_no_row(outcome: str) -> None:
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(1, 2)})
        await world.read(table)
        world.scripted_outcomes = [outcome]
        with pytest.raises(CommitUnknown):
            await table.flush()
        assert await world.read(table) == [1, 2]
        assert await table.flush() == (2 if outcome == "lost" else 0)
        assert await world.read(table) == [1, 2]


async def test_fresh_files_stay_few_and_replaced_files_are_deleted() -> None:
    async with open_world() as world:
        table = world.open()
        for number in range(100):
            await table.append({0: build_batch(number)})
            assert await world.read(table) == list(range(number + 1))
            table.check_invariants()
        # A new file replaces earlier files of at most twice its rows, so few of 100 files remain.
        assert len(table.list_fresh_files()) <= 8
        await table.clean()
        assert len(world.objects) == len(table.list_fresh_files())
        await table.flush()
        await table.clean()
        assert world.objects.keys() == set(world.files)


async def test_a_new_owner_reads_rows_of_the_log_that_it_did_not_append() -> None:
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(*range(10))})
        await table.flush()
        await table.append({0: build_batch(10)})
        reopened_table = world.open()
        assert await world.read(reopened_table) == list(range(11))
        assert await reopened_table.flush() == 1


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(60, number_in_ordinary_runs=6)))
async def test_readers_get_each_row_once_in_order_with_random_writers_owners_and_flushes(seed: int) -> None:
    """Every reader gets each row that was acknowledged before its read, no row twice, and the rows of each shard in
    order.
    """
    async with open_world(seed, shards=2) as world:
        rng, acknowledged_numbers, owners = world.rng, set[int](), [world.open(), world.open()]
        world.busy_chance, sent_count = 0.02, 0

        async def write(table: StreamTable) -> None:
            nonlocal sent_count
            numbers = [sent_count := sent_count + 1 for _ in range(rng.randint(1, 3))]
            # The numbers are in the two shards alternately.
            shards = {shard: build_batch(*numbers[shard::2]) for shard in (0, 1) if numbers[shard::2]}
            await table.append(shards)
            acknowledged_numbers.update(numbers)

        async def read(table: StreamTable) -> None:
            acknowledged_before = set(acknowledged_numbers)
            with suppress(RetryLater):
                rows = await world.read(table)
                assert len(rows) == len(set(rows)), "a row is repeated"
                assert acknowledged_before <= set(rows), "an acknowledged row is missing"
                assert set(rows) <= acknowledged_numbers | set(range(1, sent_count + 1))

        async def flush(table: StreamTable) -> None:
            if rng.random() < 0.3:
                world.scripted_outcomes.append(rng.choice(["refused", "lost", "found"]))
            with suppress(*FLUSH_FAILS):
                await table.flush()

        for _ in range(60):
            if rng.random() < 0.1:
                owners[rng.randrange(2)] = world.open()
            steps = [
                rng.choice([write, write, read, read, flush])(rng.choice(owners)) for _ in range(rng.randint(1, 6))
            ]
            await asyncio.gather(*steps)
            for owner in owners:
                owner.check_invariants()
        world.scripted_outcomes.clear()
        while True:
            with suppress(*FLUSH_FAILS):
                await owners[0].flush()
                break
        assert sorted(world.read_files(world.files)) == list(range(1, sent_count + 1))


async def test_reader_sees_all_rows_of_an_append_after_half_of_its_fresh_files_failed() -> None:
    """A fresh file has rows of the log that are not flushed yet. A read of the table writes it."""
    async with open_world(shards=2) as world:
        table = world.open(interval_s=0.05)
        await table.append({0: build_batch(1), 1: build_batch(2)})
        assert await world.read(table) == [1, 2]
        await table.append({0: build_batch(3)})
        store = world.create

        async def fail_at_second_shard(location: str, data: bytes, *, durable: bool = True) -> None:
            if json.loads(data)[-1] == 5:  # The file has the row of the shard 1.
                world.create = store  # type: ignore[method-assign]
                raise RetryLater("the storage is busy")
            await store(location, data)

        world.create = fail_at_second_shard  # type: ignore[method-assign]
        first_task = asyncio.create_task(world.read(table))
        await asyncio.sleep(0)  # The first reader begins to write a file.
        second_task = asyncio.create_task(world.read(table))  # The second reader waits for the first reader.
        await asyncio.sleep(0)
        await table.append({0: build_batch(4), 1: build_batch(5)})
        with pytest.raises(RetryLater):
            await first_task
        assert sorted(await second_task) == [1, 2, 3, 4, 5]


async def test_reader_sees_all_rows_of_an_append_after_a_flush_during_the_write_of_a_fresh_file() -> None:
    """A fresh file has rows of the log that are not flushed yet. A read of the table writes it."""
    async with open_world(shards=2) as world:
        table, other_table = world.open(interval_s=0.05), world.open()
        await table.append({0: build_batch(*range(10))})
        assert await world.read(table) == [*range(10)]
        await other_table.append({1: build_batch(10)})
        first_task = asyncio.create_task(world.read(table))
        await asyncio.sleep(0)  # The first reader begins to write a file.
        await other_table.flush()
        # The second reader knows the files of the flush, and waits for the first reader.
        second_task = asyncio.create_task(world.read(table))
        await asyncio.sleep(0)
        await other_table.append({0: build_batch(11), 1: build_batch(12)})
        await first_task
        assert sorted(await second_task) == [*range(13)]


async def test_flush_leaves_out_rows_that_arrive_after_the_table_was_loaded() -> None:
    """The rows may have a schema that the loaded metadata do not have."""
    async with open_world() as world:
        table, other_table = world.open(), world.open()
        await table.append({0: build_batch(1)})
        load = world.load

        async def load_before_an_append(uuid: str) -> tuple[Entry, TableMetadata]:
            loaded_table = await load(uuid)
            await other_table.append({0: build_batch(2)})
            return loaded_table

        world.load = load_before_an_append  # type: ignore[method-assign]
        assert await table.flush() == 1
        assert world.read_files(world.files) == [1]


async def test_readers_that_wait_for_a_write_that_fails_late_share_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they did not share the error, each of them would wait for the storage, one after another."""
    monkeypatch.setattr(stream_table, "_SLOW_WRITE_S", 0.01)  # A write below takes longer, so it is slow.
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(1)})
        attempt_count, create = 0, world.create

        async def fail(location: str, data: bytes, *, durable: bool = True) -> None:
            nonlocal attempt_count
            attempt_count += 1
            await asyncio.sleep(0.02)
            raise RetryLater("the storage does not answer")

        world.create = fail  # type: ignore[method-assign]
        reads = [asyncio.create_task(world.read(table)) for _ in range(20)]
        errors = await asyncio.gather(*reads, return_exceptions=True)
        assert {str(error) for error in errors} == {"the storage does not answer"}
        assert attempt_count <= 2  # Without a shared error, each of the 20 readers would make an attempt.
        world.create = create  # type: ignore[method-assign]
        assert await world.read(table) == [1]


async def test_reader_misses_no_row_if_another_owner_flushes_half_of_a_fresh_file() -> None:
    """A fresh file has rows of the log that are not flushed yet.

    When rows 1 and 2 are flushed, the fresh file of rows 1 to 3 is removed. Row 3 must then be in a new file.
    """
    async with open_world() as world:
        table = world.open()
        await table.append({0: build_batch(1, 2, 3)})
        assert await world.read(table) == [1, 2, 3]
        create, is_flushed = world.create, False

        async def create_after_a_flush(location: str, data: bytes, *, durable: bool = True) -> None:
            nonlocal is_flushed
            if not is_flushed:
                is_flushed = True
                await create("data/flushed", json.dumps([1, 2]).encode())
                file = EncodedFile("data/flushed", data=b"", content_file=b"{}", rows=2)
                await world.commit(world.entry(), cast("Any", None), [file], [FlushedRange(shard=0, start=0, end=2)])
                await table.drop_flushed_rows()
            await create(location, data)

        world.create = create_after_a_flush  # type: ignore[method-assign]
        await table.append({0: build_batch(4)})
        assert sorted(await world.read(table)) == [1, 2, 3, 4]
        assert sorted(await world.read(table)) == [1, 2, 3, 4]
        table.check_invariants()


def test_name_of_the_table_producer_is_the_same_as_in_earlier_versions() -> None:
    owner = hashlib.sha256(b"ann").hexdigest()[:16]
    producer = ProducerKey("ann", "0190-uuid", "job/1", 7).to_producer()
    assert producer == StreamProducer(f"0190-uuid/{owner}/job/1", 7)
    assert parse_owner(producer.name) == owner


# -- the choice of fresh files -----------------------------------------------------------------------------------------


def write_parts(parts: FreshParts, end: int, cut_offset: int | None = None) -> list[int]:
    """Write the parts with rows that are not flushed, up to an offset. Return the number of rows of each new part.

    No part crosses `cut_offset`, where a running flush ends.
    """
    ranges = parts.choose_ranges(0, end, cut_offset)
    new_parts = [
        FreshPart(0, new.start, new.end, (EncodedFile(f"{new.start}-{new.end}", b"", b"{}", new.end - new.start),))
        for new in ranges
    ]
    parts.replace(new_parts)
    parts.check_invariants()
    return [part.end - part.start for part in new_parts]


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(20, number_in_ordinary_runs=5)))
def test_reads_of_a_growing_table_write_small_parts_and_leave_few_parts(seed: int) -> None:
    rng, parts, end, written_rows = random.Random(seed), FreshParts(), 0, 0
    for _ in range(1_000):  # Each round appends rows and reads the table.
        added_rows = rng.choice((1, 100, 1_000, 3_000))
        end += added_rows
        (rows,) = write_parts(parts, end)
        written_rows += rows
        # A part has rows that are not flushed yet. A table with many rows has parts of about a sixteenth of its rows.
        assert rows <= max(MERGED_ROWS_MAX, end // 16, added_rows)
        assert len(parts.parts) <= 50
        assert parts.get_covered_offset(0) == end
    assert written_rows <= 10 * end  # The merges of parts write each row ten times or less on average.


def test_no_part_crosses_the_end_of_a_running_flush() -> None:
    parts = FreshParts()
    write_parts(parts, 100)
    assert write_parts(parts, 200, cut_offset=160) == [160, 40]
    assert write_parts(parts, 230, cut_offset=160) == [70]
    assert [(part.start, part.end) for part in parts.parts] == [(0, 160), (160, 230)]
