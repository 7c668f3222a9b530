"""Tests of the memory that a read of the log uses."""

from __future__ import annotations

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.log.port import Batch, Shard
from seamark.metaserver.streams.log_reads import read_log
from tests.log.memory import open_memory_log

SHARDS = 8


async def test_read_returns_few_large_batches_and_rows_of_all_shards() -> None:
    async with open_memory_log(SystemClock()) as log:
        for _ in range(2):
            await log.append({Shard("t", number): Batch(1, bytes(1_000)) for number in range(SHARDS)})
        positions = dict.fromkeys(range(SHARDS), 0)
        for _ in range(2 * SHARDS):
            rows = await read_log(
                log, "t", {shard: (positions[shard], 2) for shard in positions if positions[shard] < 2}, limit_bytes=1
            )
            assert rows.rows == 1
            positions |= rows.offsets
        assert set(positions.values()) == {2}


async def test_read_reserves_memory_for_its_rows() -> None:
    def refuse(size_bytes: int) -> None:
        raise RetryLater(f"{size_bytes} bytes")

    async with open_memory_log(SystemClock()) as log:
        await log.append({Shard("t", 0): Batch(1, bytes(1_000))})
        with pytest.raises(RetryLater, match="1000 bytes"):
            await read_log(log, "t", {0: (0, 1)}, limit_bytes=1, count_bytes=refuse)
