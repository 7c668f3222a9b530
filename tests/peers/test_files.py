"""Tests that replicas read an immutable file once for all of them. A fault of a replica fails no read of another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import UUID

import pytest

from seamark.formats.runtime.errors import BadRequest, ObjectMissing, TooLarge
from seamark.metaserver.peers.latencies import Percentile
from tests.peers.rig import Node, introduce_nodes, open_node
from tests.seeds import first_seed


def create_name(rng: random.Random, number: int) -> str:
    return f"{number}-{UUID(int=rng.getrandbits(128), version=4)}.avro"


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(open_node(tmp_path, f"n{number}")) for number in range(3)]
        await introduce_nodes(*nodes)
        # With long timeouts, a busy machine does not look like a slow replica.
        for node in nodes:
            set_long_timeouts(node)
        yield nodes


def set_long_timeouts(node: Node) -> None:
    objects = node.peers.objects
    objects._first_byte_latency = objects._cached_latency = objects._storage_latency = Percentile(
        30.0, min_s=30.0, max_s=30.0
    )


async def create_files(nodes: list[Node], count: int, size: int, seed: int = 1) -> dict[str, bytes]:
    rng = random.Random(seed)
    warehouse = nodes[0].settings.warehouse
    files = {f"{warehouse}/t/metadata/{create_name(rng, number)}": rng.randbytes(size) for number in range(count)}
    for location, content in files.items():
        await nodes[0].stored_objects.create(location, content)
    return files


def count_reads(nodes: list[Node], location: str) -> int:
    return sum(node.stored_objects.reads[location] for node in nodes)


async def test_storage_is_read_once_for_all_replicas(nodes: list[Node]) -> None:
    seed = first_seed()
    files = await create_files(nodes, 30, 1000, seed)
    for node in nodes:
        node.stored_objects.delay_s = 0.05
    for _ in range(2):
        results = await asyncio.gather(*(node.read(location) for location in files for node in nodes for _ in range(2)))
        assert results == [content for content in files.values() for _ in range(6)], f"seed {seed}"
    assert {count_reads(nodes, location) for location in files} == {1}
    assert {node.address: sum(node.stored_objects.reads.values()) for node in nodes} == {
        node.address: sum(node.owns(location) for location in files) for node in nodes
    }
    assert all(sum(node.owns(location) for location in files) for node in nodes)
    for node in nodes:
        counts = node.peers.objects.counts
        assert counts.failed == counts.hedged == counts.direct == 0
        assert counts.hits > 0
        assert counts.fetched > 0


async def test_large_file_arrives_completely_and_a_file_over_the_limit_comes_from_the_storage(tmp_path: Path) -> None:
    async with (
        open_node(tmp_path, "a", peer_file_limit_bytes=3 << 20) as first_node,
        open_node(tmp_path, "b") as second_node,
    ):
        await introduce_nodes(first_node, second_node)
        set_long_timeouts(first_node), set_long_timeouts(second_node)
        # The files have exactly the limit of the first node, or one byte more.
        small_files = await create_files([first_node], count=6, size=3 << 20)
        large_files = await create_files([first_node], count=6, size=(3 << 20) + 1, seed=2)
        for files in (small_files, large_files):
            for location, content in files.items():
                assert await second_node.read(location) == content
                assert await first_node.read(location) == content
        assert {count_reads([first_node, second_node], location) for location in small_files} == {1}
        # The first node sends no file over its limit, so the second node reads the first node's files from the storage.
        for location in large_files:
            assert count_reads([first_node, second_node], location) >= (2 if first_node.owns(location) else 1)


async def test_errors_for_limits_and_missing_files_equal_the_errors_of_the_storage(nodes: list[Node]) -> None:
    files = await create_files(nodes, 6, 1000)
    rng = random.Random(7)
    for location in files:
        for node in nodes:
            assert len(await node.read(location, 1000)) == 1000
            with pytest.raises(TooLarge):
                await node.read(location, 999)
        missing_location = location.rpartition("/")[0] + "/" + create_name(rng, 0)
        for node in nodes:
            with pytest.raises(ObjectMissing):
                await node.read(missing_location)


async def test_files_outside_the_warehouse_are_rejected_before_any_cache(nodes: list[Node]) -> None:
    outside_location = f"file:///etc/{create_name(random.Random(1), 0)}"
    for node in nodes:
        with pytest.raises(BadRequest):
            await node.read(outside_location)
    assert count_reads(nodes, outside_location) == 0


async def test_file_with_a_reusable_name_is_read_from_the_storage_each_time(nodes: list[Node]) -> None:
    location = f"{nodes[0].settings.warehouse}/t/metadata/v1.metadata.json"
    await nodes[0].stored_objects.create(location, b"first")
    assert [await node.read(location) for node in nodes] == [b"first"] * 3
    await nodes[0].stored_objects.delete(location)
    await nodes[0].stored_objects.create(location, b"second")
    assert [await node.read(location) for node in nodes] == [b"second"] * 3
    assert count_reads(nodes, location) == 6


async def test_single_replica_reads_the_storage(tmp_path: Path) -> None:
    async with open_node(tmp_path, "a") as first_node:
        files = await create_files([first_node], 3, 100)
        assert [await first_node.read(location) for location in files] == list(files.values())
        assert first_node.peers.objects.counts.direct == 3
