"""Tests of the cache stack over a real disk tier: order of tiers, stored values, and failing parts."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seamark.cache.claims import Claims
from seamark.cache.disk import DiskTier
from seamark.cache.memory import ENTRY_OVERHEAD_BYTES, MemoryCache
from seamark.cache.stack import Stack
from tests.cache.payloads import make_payload
from tests.cache.test_disk import get_path

REPO = Path(__file__).resolve().parents[2]
SIZE_BYTES = 200_000


class PayloadSource:
    """A source that returns the payload of each key. It records fetches, and waits for `gate` if a test sets one."""

    def __init__(self) -> None:
        self.fetched_keys: list[str] = []
        self.gate: asyncio.Event | None = None

    def make_fetch(self, key: str) -> Callable[[], Awaitable[bytes]]:
        async def fetch() -> bytes:
            self.fetched_keys.append(key)
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
            return make_payload(key, SIZE_BYTES)

        return fetch


def return_unchanged(view: memoryview) -> memoryview:
    return view


def make_stack(
    folder: Path,
    *,
    memory_bytes: int = 64 << 20,
    pending_bytes_max: int = 64 << 20,
    claims: Claims | None = None,
    claim_wait_s: float = 10,
    executor: ThreadPoolExecutor | None = None,
    disk: bool = True,
) -> Stack[memoryview]:
    """Return a cache of a memory tier and, if `disk` is true, a disk tier of 32 MiB."""
    return Stack(
        MemoryCache(memory_bytes),
        DiskTier(folder, 32 << 20) if disk else None,
        weigh=len,
        pending_bytes_max=pending_bytes_max,
        claims=claims,
        claim_wait_s=claim_wait_s,
        executor=executor,
    )


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack[memoryview]]:
    stack = make_stack(tmp_path)
    yield stack
    await stack.close()
    stack.check_invariants()


async def wait_until_settled(stack: Stack[memoryview]) -> None:
    async with asyncio.timeout(60):
        while stack.read_stats().pending_bytes:
            await asyncio.sleep(0.005)
    stack.check_invariants()


async def test_value_is_fetched_once_then_read_from_memory_and_after_a_restart_from_the_disk(tmp_path: Path) -> None:
    source = PayloadSource()
    stack = make_stack(tmp_path)
    first_value = await stack.get("k", source.make_fetch("k"), return_unchanged)
    assert first_value == make_payload("k", SIZE_BYTES)
    assert stack.get_cached("k") is first_value
    assert await stack.get("k", source.make_fetch("k"), return_unchanged) is first_value
    await stack.close()
    stack = make_stack(tmp_path)
    assert stack.get_cached("k") is None
    assert await stack.get("k", source.make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)
    assert source.fetched_keys == ["k"]
    stats = stack.read_stats()
    assert stats.disk is not None
    assert (stats.fetches, stats.disk.hits) == (0, 1)
    await stack.close()


async def test_many_callers_share_one_fetch(stack: Stack[memoryview]) -> None:
    source = PayloadSource()
    values = await asyncio.gather(*(stack.get("k", source.make_fetch("k"), return_unchanged) for _ in range(50)))
    assert source.fetched_keys == ["k"]
    assert all(value is values[0] for value in values)


async def test_memory_holds_the_mapped_copy_once_the_disk_has_the_value(
    tmp_path: Path, stack: Stack[memoryview]
) -> None:
    value = await stack.get("k", PayloadSource().make_fetch("k"), return_unchanged)
    await wait_until_settled(stack)
    mapped_value = stack.get_cached("k")
    assert mapped_value == value
    assert mapped_value is not value
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert any(str(get_path(tmp_path, "k")) in line for line in lines)


async def test_value_over_a_mapped_file_is_counted_with_its_size_in_memory(tmp_path: Path) -> None:
    stack = Stack(
        MemoryCache(1 << 20),
        DiskTier(tmp_path, 32 << 20),
        weigh=len,
        weigh_mapped=lambda value: len(value) // 8,
        pending_bytes_max=64 << 20,
    )
    source = PayloadSource()
    for number in range(20):  # The payloads are four times the budget, but an eighth of their size fits.
        await stack.get(f"k{number}", source.make_fetch(f"k{number}"), return_unchanged)
        await wait_until_settled(stack)
    assert all(stack.get_cached(f"k{number}") == make_payload(f"k{number}", SIZE_BYTES) for number in range(20))

    async def read_small_buffer() -> bytes:
        return bytes(1000)

    used_bytes_before = stack.read_stats().memory.used_bytes
    await stack.get("small", read_small_buffer, return_unchanged)
    await wait_until_settled(stack)
    assert stack.read_stats().memory.used_bytes - used_bytes_before == 1000 + ENTRY_OVERHEAD_BYTES
    await stack.close()


async def test_stored_parts_are_opened_as_one_value(stack: Stack[memoryview]) -> None:
    async def fetch() -> list[bytes]:
        return [b"a", b"bc", b""]

    assert await stack.get("k", fetch, bytes) == b"abc"


async def test_bulk_read_returns_stored_keys_and_fetches_nothing(tmp_path: Path) -> None:
    source = PayloadSource()
    stack = make_stack(tmp_path)
    names = [f"k{number}" for number in range(150)]
    stored_names = [name for number, name in enumerate(names) if number % 3]
    for name in stored_names:
        await stack.get(name, source.make_fetch(name), return_unchanged)
        await wait_until_settled(stack)
    await stack.close()
    damaged_path, other_keys = get_path(tmp_path, stored_names[0]), stored_names[1:]
    damaged_path.write_bytes(damaged_path.read_bytes()[:-1])
    stack = make_stack(tmp_path)
    memory_value = await stack.get(stored_names[1], source.make_fetch(stored_names[1]), return_unchanged)
    stored_values = dict(zip(names, await stack.get_stored_values(names, return_unchanged), strict=True))
    assert {name for name, value in stored_values.items() if value is not None} == set(other_keys)
    assert all(stored_values[name] == make_payload(name, SIZE_BYTES) for name in other_keys)
    assert stored_values[stored_names[1]] is memory_value
    assert all(stack.get_cached(name) is stored_values[name] for name in names)
    assert source.fetched_keys == stored_names
    assert not damaged_path.exists()
    stats = stack.read_stats().disk
    assert stats is not None
    assert (stats.hits, stats.misses, stats.damaged) == (len(other_keys), 1, 1)
    await stack.close()
    assert await stack.get_stored_values([stored_names[1], "k0"], return_unchanged) == [memory_value, None]


async def test_failed_fetch_fails_its_callers_and_is_not_remembered(stack: Stack[memoryview]) -> None:
    async def fail() -> bytes:
        raise LookupError("the store is away")

    results = await asyncio.gather(*(stack.get("k", fail, return_unchanged) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["the store is away"] * 3
    assert await stack.get("k", PayloadSource().make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)


async def test_fetched_value_that_cannot_be_opened_fails_its_callers_and_is_not_stored(
    tmp_path: Path, stack: Stack[memoryview]
) -> None:
    def refuse(view: memoryview) -> memoryview:
        raise LookupError("not a block")

    with pytest.raises(LookupError, match="not a block"):
        await stack.get("k", PayloadSource().make_fetch("k"), refuse)
    await wait_until_settled(stack)
    assert not get_path(tmp_path, "k").exists()


async def test_file_with_an_unknown_layout_is_removed_and_fetched_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 32 << 20)
    tier.put("k", b"of an older program")
    tier.close()

    def reject_view(view: memoryview) -> memoryview:
        if len(view) != SIZE_BYTES:
            raise LookupError("another layout")
        return view

    stack = make_stack(tmp_path)
    assert await stack.get("k", PayloadSource().make_fetch("k"), reject_view) == make_payload("k", SIZE_BYTES)
    await wait_until_settled(stack)
    assert stack.read_stats().unreadable == 1
    await stack.close()
    tier = DiskTier(tmp_path, 32 << 20)
    assert tier.get("k") == make_payload("k", SIZE_BYTES)
    tier.close()


async def test_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    await stack.get("k", PayloadSource().make_fetch("k"), return_unchanged)
    await stack.close()
    path = get_path(tmp_path, "k")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    stack, source = make_stack(tmp_path), PayloadSource()
    assert await stack.get("k", source.make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)
    assert source.fetched_keys == ["k"]
    await stack.close()


async def test_stack_works_without_a_disk(tmp_path: Path) -> None:
    stack, source = make_stack(tmp_path, disk=False), PayloadSource()
    for _ in range(2):
        assert await stack.get("k", source.make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)
    assert source.fetched_keys == ["k"]
    assert stack.read_stats().disk is None
    await stack.close()
    assert list(tmp_path.iterdir()) == []


async def test_queue_of_disk_writes_is_limited_and_drained_on_close(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        stack = make_stack(tmp_path, pending_bytes_max=3 * SIZE_BYTES, executor=executor)
        source = PayloadSource()
        await stack.get("k0", source.make_fetch("k0"), return_unchanged)
        release = threading.Event()
        await wait_until_settled(stack)
        # From here on the disk does not write. The lookups of the next keys have already read the disk.
        misses = [
            asyncio.create_task(stack.get(f"k{number}", source.make_fetch(f"k{number}"), return_unchanged))
            for number in range(1, 8)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        executor.submit(release.wait)
        for number, miss in enumerate(misses, 1):
            assert await miss == make_payload(f"k{number}", SIZE_BYTES), "a get must not wait for the disk writes"
        stats = stack.read_stats()
        # Of the seven values, three wait in the queue, and the others are not written to the disk.
        assert (stats.pending_bytes, stats.dropped) == (3 * SIZE_BYTES, 4)
        release.set()
        await stack.close()
        stats = stack.read_stats()
        assert stats.pending_bytes == 0
        assert stats.disk is not None
        assert stats.disk.puts == 4  # k0, and the three values from the queue.


async def test_closed_stack_fetches_values_without_caching_them(tmp_path: Path) -> None:
    stack, source = make_stack(tmp_path), PayloadSource()
    await stack.get("k", source.make_fetch("k"), return_unchanged)
    await stack.close()
    await stack.close()
    assert await stack.get("k", source.make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)
    assert await stack.get("l", source.make_fetch("l"), return_unchanged) == make_payload("l", SIZE_BYTES)
    assert source.fetched_keys == ["k", "l"]


async def test_cancelled_caller_leaves_no_claim(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    stack, source = make_stack(tmp_path / "cache", claims=claims), PayloadSource()
    source.gate = asyncio.Event()
    caller = asyncio.create_task(stack.get("k", source.make_fetch("k"), return_unchanged))
    async with asyncio.timeout(60):
        while not source.fetched_keys:
            await asyncio.sleep(0.001)
    assert not claims.take("k"), "the stack holds the claim while it fetches"
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0)
    assert claims.take("k")
    await stack.close()


async def test_caller_fetches_a_key_itself_if_another_process_takes_too_long(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    stack, source = make_stack(tmp_path / "cache", claims=claims, claim_wait_s=0.1), PayloadSource()
    assert claims.take("k")
    assert await stack.get("k", source.make_fetch("k"), return_unchanged) == make_payload("k", SIZE_BYTES)
    stats = stack.read_stats()
    assert (stats.waits, stats.timed_out_waits, stats.fetches) == (1, 1, 1)
    await stack.close()


FETCHER = """
import asyncio, pathlib, sys
from seamark.cache.claims import Claims
from seamark.cache.disk import DiskTier
from seamark.cache.memory import MemoryCache
from seamark.cache.stack import Stack

async def main(folder):
    fetched = 0
    async def fetch():
        nonlocal fetched
        fetched += 1
        await asyncio.sleep(0.2)
        return bytes(500_000)
    # The cached values are the lengths of the fetched bytes.
    stack = Stack(MemoryCache(1 << 26), DiskTier(folder, 1 << 26), weigh=lambda value: value,
                  pending_bytes_max=1 << 26, claims=Claims(folder / "claims"))
    print("ready", flush=True)
    sys.stdin.readline()
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(stack.get(f"k{number}", fetch, len))
    print(fetched)
    await stack.close()

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


def test_processes_that_need_the_same_keys_fetch_each_once_in_total(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCHER, str(tmp_path)]
    processes = [
        subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(int(process.communicate(timeout=120)[0]))
        assert process.returncode == 0
    assert sum(outputs) == 20, outputs


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", range(5))
async def test_every_answer_is_the_value_of_its_key_under_random_traffic(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stack = make_stack(
        tmp_path, memory_bytes=5 * SIZE_BYTES, pending_bytes_max=2 * SIZE_BYTES, claims=Claims(tmp_path / "claims")
    )
    source = PayloadSource()
    tasks: list[tuple[str, asyncio.Task[memoryview]]] = []
    for _ in range(300):
        key = f"k{rng.randrange(12)}"
        match rng.randrange(12):
            case 0:
                get_path(tmp_path, key).unlink(missing_ok=True)
            case 1:
                stack.discard(key)
            case _:
                tasks.append((key, asyncio.create_task(stack.get(key, source.make_fetch(key), return_unchanged))))
        if rng.random() < 0.1:
            rng.choice(tasks)[1].cancel() if tasks else None
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() / 200)
    results = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    for (key, _), result in zip(tasks, results, strict=True):
        assert isinstance(result, asyncio.CancelledError) or result == make_payload(key, SIZE_BYTES), (
            f"seed {seed}: {key}"
        )
    await stack.close()
    stack.check_invariants()
    assert len(source.fetched_keys) < len(tasks)


async def test_computed_value_is_found_in_memory_and_after_a_restart_on_the_disk(tmp_path: Path) -> None:
    first_stack = make_stack(tmp_path)
    value = memoryview(make_payload("k", SIZE_BYTES))
    assert not first_stack.may_have("k")
    first_stack.put("k", value, value, return_unchanged)
    assert first_stack.get_cached("k") is value
    await first_stack.close()
    second_stack = make_stack(tmp_path)
    assert second_stack.may_have("k")
    assert not second_stack.may_have("other")
    assert await second_stack.get_stored_values(["k", "other"], return_unchanged) == [value, None]
    await second_stack.close()
    assert not second_stack.may_have("other")
