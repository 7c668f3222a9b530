"""Tests of the gateway's cache with a store in memory. Each answer has bytes that the store had during the request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.gateway.backend import BrokenAnswer, S3Call, StartedAnswer
from seamark.metaserver.gateway.caching.caching import CachingBackend
from seamark.metaserver.gateway.caching.tiers import open_tiers
from seamark.metaserver.gateway.caching.written_once import find_written_once_kind
from seamark.metaserver.gateway.conditions import read_range
from seamark.metaserver.gateway.connection import SentAnswer
from seamark.metaserver.gateway.s3_errors import S3Error, build_error_answer, convert_error
from seamark.metaserver.objects.s3_scope import parse_target
from seamark.metaserver.settings.settings import Settings
from tests.gateway.fake_store import FakeStore
from tests.seeds import first_seed

AFTER_RECHECK_MS = 301_000
"""A second longer than the default of `gateway_cache_recheck_s`, in milliseconds."""
BLOCK_BYTES = 64 << 10
PREFIX = "/b/t/data/"


def build_settings(folder: Path, **changes: object) -> Settings:
    defaults = Settings(
        home=folder,
        gateway_cache_block_bytes=BLOCK_BYTES,
        gateway_cache_request_bytes=4 * BLOCK_BYTES,
        gateway_cache_fetch_bytes=2 << 20,
        gateway_cache_memory_bytes=1 << 20,
        gateway_cache_disk_bytes=8 << 20,
        gateway_hedged_percent=0,  # Hedged requests would change the number of requests, which tests count.
    )
    return replace(defaults, **changes)  # type: ignore[arg-type]


class Worker:
    """A worker of the gateway: the cache behind HTTP, without logins."""

    def __init__(self, session: aiohttp.ClientSession, url: str, backend: CachingBackend, store: FakeStore) -> None:
        self.session, self.url, self.backend, self.store = session, url, backend, store

    async def send(self, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        """Send a request, and return (status, body, headers). An incomplete answer raises aiohttp's error."""
        request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, self.url + path, data=data, headers=request_headers) as answer:
            return answer.status, await answer.read(), answer.headers

    async def get(self, path: str, **headers: str) -> bytes:
        status, data, _ = await self.send("GET", path, **headers)
        assert status in (200, 206), (status, data[:200])
        return data

    def read_served_bytes(self) -> dict[str, int]:
        return dict(self.backend.served_bytes)


@asynccontextmanager
async def open_worker(
    store: FakeStore, folder: Path, clock: SimulatedClock, *, principal: str = "me", **changes: object
) -> AsyncIterator[Worker]:
    """Serve a gateway worker with a cache over the store. Each second request tries the synchronous path first."""
    tiers = await open_tiers(build_settings(folder, **changes), clock, store)
    backend = CachingBackend(store, tiers, clock)

    request_numbers = itertools.count()

    def begin(call: S3Call) -> StartedAnswer | None:
        """Start an answer from the cache. The gateway tries the cache before each read."""
        transport = call.request.transport
        if call.method not in ("GET", "HEAD") or transport is None or transport.get_write_buffer_size():
            return None
        return backend.begin(call, transport)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        address, name = parse_target(request.raw_path), headers.get("test-who", principal)
        call = S3Call(request.method, address, headers, "id", name, "test-pinned" in headers, request, None, None)
        try:
            if next(request_numbers) % 2 and (started_answer := begin(call)) is not None:
                if started_answer.send_body is not None:
                    await started_answer.send_body(request.writer)
                return SentAnswer(started_answer.status, started_answer.length)
            return await backend.answer(call)
        except BrokenAnswer:
            assert request.transport is not None
            request.transport.abort()
            return SentAnswer(200, 0)
        except S3Error as error:
            return build_error_answer(error, "", "", is_head=request.method == "HEAD")
        except SeamarkError as error:
            return build_error_answer(convert_error(error), "", "", is_head=request.method == "HEAD")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{target:.*}", handle)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Worker(session, str(server.make_url("")).rstrip("/"), backend, store)
        await server.close()
    await backend.close()
    tiers.fetches.check_invariants()
    tiers.blocks.memory.check_invariants()


def draw_name(rng: random.Random, extension: str = "parquet") -> str:
    return f"{PREFIX}00000-0-{uuid.UUID(bytes=rng.randbytes(16), version=4)}.{extension}"


def to_location(path: str) -> str:
    return f"s3:/{path}"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("w/t/data/00000-0-2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1-00001.parquet", "data"),
        ("w/t/data/p=1/20261125_084512_00003_abcde-2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.orc", "data"),
        ("w/t/metadata/2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1-m0.avro", "metadata"),
        ("w/t/metadata/snap-123-1-2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.avro", "metadata"),
        ("w/t/metadata/00001-2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.metadata.json", "metadata"),
        ("w/t/metadata/00001-2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.gz.metadata.json", "metadata"),
        ("w/t/_seamark/index/2f0b7d2c87b14c529e2540c9a1d3e0b1.puffin", "metadata"),
        ("w/t/metadata/version-hint.text", None),
        ("w/t/metadata/v1.metadata.json", None),
        ("w/t/data/part-0.parquet", None),
        ("w/2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1/data/part-0.parquet", None),
        ("w/t/data/2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.csv", None),
        ("w/t/data/2f0b7d2c-87b1-4c52-9e25-40c9a1d3e0b1.parquet.tmp", None),
    ],
)
def test_only_objects_with_names_that_are_written_once_are_cached(key: str, kind: str | None) -> None:
    assert find_written_once_kind(key) == kind


async def test_blocks_come_from_memory_then_disk_after_a_restart_then_the_store(tmp_path: Path) -> None:
    rng, clock = random.Random(1), SimulatedClock(1)
    store, path = FakeStore(rng), draw_name(rng)
    data = rng.randbytes(5 * BLOCK_BYTES + 100)
    store.put(to_location(path), data)
    async with open_worker(store, tmp_path, clock) as first_worker:
        assert (
            await first_worker.get(path, Range=f"bytes={BLOCK_BYTES}-{2 * BLOCK_BYTES}")
            == data[BLOCK_BYTES : 2 * BLOCK_BYTES + 1]
        )
        assert len(store.requests) == 1
        assert (
            await first_worker.get(path, Range=f"bytes={BLOCK_BYTES}-{2 * BLOCK_BYTES}")
            == data[BLOCK_BYTES : 2 * BLOCK_BYTES + 1]
        )
        assert await first_worker.get(path, Range="bytes=-10") == data[-10:]
        assert len(store.requests) == 2
        assert await first_worker.get(path) == data
        assert await first_worker.get(path, Range="bytes=1-1") == data[1:2]
        status, body, headers = await first_worker.send("HEAD", path)
        assert (status, body, headers["Content-Length"], headers["x-amz-meta-kept"]) == (
            200,
            b"",
            str(len(data)),
            "yes",
        )
        request_count = len(store.requests)
        assert first_worker.read_served_bytes()["memory"] >= BLOCK_BYTES
    async with open_worker(store, tmp_path, clock) as second_worker:
        assert await second_worker.get(path) == data
        assert second_worker.read_served_bytes() == {"disk": len(data)}
    assert len(store.requests) == request_count
    async with open_worker(store, tmp_path / "other", clock) as third_worker:
        assert await third_worker.get(path) == data
        assert third_worker.read_served_bytes().keys() <= {"fetch", "memory"}


async def test_concurrent_readers_of_a_block_share_one_request(tmp_path: Path) -> None:
    rng = random.Random(1)
    store, path = FakeStore(rng), draw_name(rng)
    data = rng.randbytes(3 * BLOCK_BYTES)
    store.put(to_location(path), data)
    async with open_worker(store, tmp_path, SimulatedClock(1)) as worker:
        answers = await asyncio.gather(*(worker.get(path) for _ in range(30)))
    assert all(answer == data for answer in answers)
    assert len(store.requests) == 1


async def test_gateway_prefetches_the_next_blocks_of_sequential_reads(tmp_path: Path) -> None:
    rng = random.Random(1)
    store, path = FakeStore(rng), draw_name(rng)
    data = rng.randbytes(40 * BLOCK_BYTES)
    store.put(to_location(path), data)
    changes = {"gateway_cache_fetch_bytes": 32 << 20, "gateway_cache_request_bytes": 16 * BLOCK_BYTES}
    async with open_worker(store, tmp_path, SimulatedClock(1), gateway_cache_memory_bytes=8 << 20, **changes) as worker:
        for start in range(0, len(data), BLOCK_BYTES):
            assert (
                await worker.get(path, Range=f"bytes={start}-{start + BLOCK_BYTES - 1}")
                == data[start : start + BLOCK_BYTES]
            )
    # Without prefetching, each of the 40 blocks needs a request. With it, at most every second block does.
    assert len(store.requests) < 20, store.requests


async def test_metadata_files_are_read_completely_and_pinned(tmp_path: Path) -> None:
    rng = random.Random(1)
    store = FakeStore(rng)
    path = draw_name(rng, "avro").replace("/data/", "/metadata/")
    data = rng.randbytes(3 * BLOCK_BYTES)
    store.put(to_location(path), data)
    other_names = [draw_name(rng) for _ in range(60)]
    for other_name in other_names:
        store.put(to_location(other_name), rng.randbytes(2 * BLOCK_BYTES))
    async with open_worker(store, tmp_path, SimulatedClock(1)) as first_worker:
        assert await first_worker.get(path, Range="bytes=0-9") == data[:10]
        assert await first_worker.get(path) == data
        for other_name in other_names:
            await first_worker.get(other_name)
        request_count = len(store.requests)
        assert await first_worker.get(path) == data
        assert len(store.requests) == request_count
        assert first_worker.read_served_bytes()["memory"] >= len(data)


async def test_answer_is_passed_through_when_the_read_budget_is_exhausted(tmp_path: Path) -> None:
    rng = random.Random(1)
    store, path = FakeStore(rng), draw_name(rng)
    data = rng.randbytes(12 * BLOCK_BYTES)
    store.put(to_location(path), data)
    changes = {"gateway_cache_fetch_bytes": BLOCK_BYTES - 1, "gateway_cache_disk_bytes": 0}
    async with open_worker(store, tmp_path, SimulatedClock(1), **changes) as worker:
        assert await worker.get(path) == data
        assert await worker.get(path, Range="bytes=5-9") == data[5:10]
        assert worker.read_served_bytes() == {"direct": len(data) + 5}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("disk_bytes", [0, 8 << 20])
async def test_blocks_of_other_principals_stay_cached_while_one_principal_reads_and_pins_much(
    tmp_path: Path, disk_bytes: int
) -> None:
    """A principal has a share of the cache for each kind of entry: data, pinned data, metadata files and records.

    The principal `loud` reads 300 objects, far more than its shares. It evicts only its own entries.
    """

    rng = random.Random(first_seed())
    store = FakeStore(rng)
    hot_name, pinned_name, metadata_name = draw_name(rng), draw_name(rng), draw_name(rng, "avro")
    for name in (hot_name, pinned_name, metadata_name):
        store.put(to_location(name), rng.randbytes(BLOCK_BYTES))
    other_names = [draw_name(rng, rng.choice(["parquet", "avro"])) for _ in range(300)]
    for number, name in enumerate(other_names):
        store.put(to_location(name), rng.randbytes(2 * BLOCK_BYTES if number % 4 else 100))
    settings = {"auth": "token", "gateway_cache_memory_bytes": 4 << 20, "gateway_cache_disk_bytes": disk_bytes}
    async with open_worker(store, tmp_path, SimulatedClock(seed=1), **settings) as worker:
        for _ in range(4):
            await worker.get(hot_name)
            await worker.get(pinned_name, test_pinned="yes")
            await worker.get(metadata_name)
        for number, name in enumerate(other_names):
            pin_headers = {"test_pinned": "yes"} if number % 2 else {}
            await worker.get(name, test_who="loud", **pin_headers)
        store.requests.clear()
        served_bytes = worker.read_served_bytes()
        for name, pin_headers in ((hot_name, {}), (pinned_name, {"test_pinned": "yes"}), (metadata_name, {})):
            assert await worker.get(name, **pin_headers) == store.objects[to_location(name)].data
        assert store.requests == []
        assert worker.read_served_bytes()["memory"] == served_bytes["memory"] + 3 * BLOCK_BYTES


async def test_unavailable_store_fails_only_reads_of_uncached_objects(tmp_path: Path) -> None:
    rng, clock = random.Random(1), SimulatedClock(1)
    store, path = FakeStore(rng), draw_name(rng)
    data = rng.randbytes(2 * BLOCK_BYTES)
    store.put(to_location(path), data)
    async with open_worker(store, tmp_path, clock) as worker:
        await worker.get(path)
        store.is_unavailable = True
        assert await worker.get(path) == data
        clock.advance(10 * AFTER_RECHECK_MS)
        assert await worker.get(path) == data, "an immutable object is served although its record is old"
        status, _, _ = await worker.send("GET", draw_name(rng))
        assert status == 503


async def test_object_replaced_behind_the_gateway_is_detected_within_the_recheck_time(tmp_path: Path) -> None:
    rng, clock = random.Random(1), SimulatedClock(1)
    store, path = FakeStore(rng), draw_name(rng)
    store.put(to_location(path), b"old" * BLOCK_BYTES)
    async with open_worker(store, tmp_path, clock) as worker:
        assert await worker.get(path) == b"old" * BLOCK_BYTES
        store.put(to_location(path), b"new" * BLOCK_BYTES)
        clock.advance(AFTER_RECHECK_MS)
        assert await worker.get(path) == b"new" * BLOCK_BYTES
        del store.objects[to_location(path)]
        clock.advance(AFTER_RECHECK_MS)
        status, _, _ = await worker.send("GET", path)
        assert status == 404


async def test_write_through_one_worker_is_visible_to_all_workers_after_its_answer(tmp_path: Path) -> None:
    rng, clock = random.Random(1), SimulatedClock(1)
    store, path = FakeStore(rng), draw_name(rng)
    async with (
        open_worker(store, tmp_path, clock) as first_worker,
        open_worker(store, tmp_path, clock) as second_worker,
    ):
        for round_number in range(6):
            data = rng.randbytes(2 * BLOCK_BYTES + round_number)
            writer = (first_worker, second_worker)[round_number % 2]
            await writer.send("PUT", path, data)
            assert await first_worker.get(path) == data
            assert await second_worker.get(path) == data
        await first_worker.send("DELETE", path)
        assert (await second_worker.send("GET", path))[0] == 404
        assert (await second_worker.send("HEAD", path))[0] == 404


def _damage_blocks(folder: Path, rng: random.Random) -> None:
    """Flip a bit in a sixth of the cached blocks, and change the length of another sixth. Skip evicted blocks."""
    for file in sorted(folder.rglob("*.block")):
        with contextlib.suppress(FileNotFoundError), file.open("r+b") as opened_file:
            content = opened_file.read()
            kind = rng.randrange(6)
            if kind == 0 and content:
                offset = rng.randrange(len(content))
                opened_file.seek(offset)
                opened_file.write(bytes([content[offset] ^ 1 << rng.randrange(8)]))
            elif kind == 1:
                opened_file.truncate(rng.randrange(200))


async def test_damaged_blocks_are_read_again_and_never_served(tmp_path: Path) -> None:
    rng, clock = random.Random(first_seed()), SimulatedClock(1)
    store = FakeStore(rng)
    objects = {draw_name(rng): rng.randbytes(rng.randrange(1, 5 * BLOCK_BYTES)) for _ in range(12)}
    for path, data in objects.items():
        store.put(to_location(path), data)
    for _ in range(4):
        async with open_worker(store, tmp_path, clock, gateway_cache_memory_bytes=0) as worker:
            for path, data in objects.items():
                assert await worker.get(path) == data
            _damage_blocks(tmp_path, rng)
            for path, data in objects.items():
                assert await worker.get(path) == data
        _damage_blocks(tmp_path, rng)


UNFINISHED_TICK = 1 << 60
"""The end of a write that has not finished: later than every tick."""


class _Model:
    """The contents that each object has had, with the times of the writes.

    An answer must equal a content that was current at some time during the request.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[tuple[int, int, bytes | None]]] = {}
        """(begin of the write, end of the write, content) by path, in the order of the ends."""
        self.tick = 0

    def advance_tick(self) -> int:
        """Return a tick that is later than all earlier ticks."""
        self.tick += 1
        return self.tick

    def list_possible_contents(self, path: str, begin_tick: int) -> list[bytes | None]:
        """Return the contents that a read from `begin_tick` until now may return."""
        history = self.history.get(path, [])
        settled_content: bytes | None = None
        results: list[bytes | None] = []
        for _, end, content in history:
            if end < begin_tick:
                settled_content = content
            else:
                results.append(content)
        return [settled_content, *results]


async def _run_campaign(seed: int, folder: Path, steps: int) -> None:
    """Read and write random objects through several workers, and check each answer against the history."""
    rng, clock = random.Random(seed), SimulatedClock(seed)
    store, model = FakeStore(rng), _Model()
    paths = [draw_name(rng, rng.choice(("parquet", "avro", "puffin"))) for _ in range(8)] + [f"{PREFIX}plain.parquet"]
    locks = {path: asyncio.Lock() for path in paths}
    changes = {
        "gateway_cache_memory_bytes": rng.choice((0, BLOCK_BYTES * 6, 4 << 20)),
        "gateway_cache_disk_bytes": rng.choice((0, 3 << 20, 16 << 20)),
        "gateway_cache_fetch_bytes": rng.choice((BLOCK_BYTES * 2, 2 << 20)),
        "gateway_cache_request_bytes": rng.choice((BLOCK_BYTES, BLOCK_BYTES * 8)),
    }
    store.failure_rate = rng.choice((0.0, 0.0, 0.1))

    async def write(worker: Worker, path: str) -> None:
        async with locks[path]:
            content = (
                None
                if rng.random() < 0.2
                else rng.randbytes(rng.choice((0, 1, BLOCK_BYTES, rng.randrange(9 * BLOCK_BYTES))))
            )
            begin_tick = model.advance_tick()
            entry = (begin_tick, UNFINISHED_TICK, content)
            model.history.setdefault(path, []).append(entry)
            status, _, _ = await worker.send("DELETE" if content is None else "PUT", path, content)
            assert status in (200, 204)
            model.history[path][model.history[path].index(entry)] = (begin_tick, model.advance_tick(), content)

    async def read(worker: Worker, path: str) -> None:
        begin_tick, method = model.advance_tick(), rng.choice(("GET", "GET", "GET", "HEAD"))
        start = rng.randrange(8 * BLOCK_BYTES)
        range_text = rng.choice(
            (
                None,
                f"bytes={start}-",
                f"bytes={start}-{start + rng.randrange(4 * BLOCK_BYTES)}",
                f"bytes=-{start}",
                "bytes=9-3",
            )
        )
        headers = {} if range_text is None else {"Range": range_text}
        if rng.random() < 0.2:
            headers[rng.choice(("If_Match", "If_None_Match"))] = rng.choice(('"none"', "*"))
        headers["test_who"] = rng.choice("abc")
        if rng.random() < 0.2:
            headers["test_pinned"] = "yes"
        try:
            status, body, answer_headers = await worker.send(method, path, **headers)
        except aiohttp.ClientError:
            assert store.failure_rate or len(model.list_possible_contents(path, begin_tick)) > 1, (
                "the answer is incomplete, but neither the store failed nor the object changed"
            )
            return
        if status == 503:
            assert store.failure_rate
            return
        assert any(
            _is_correct_answer(content, method, range_text, headers, status, body, answer_headers)
            for content in model.list_possible_contents(path, begin_tick)
        ), (seed, path, method, range_text, headers, status, len(body))

    async with (
        open_worker(store, folder, clock, **changes) as first_worker,
        open_worker(store, folder, clock, **changes) as second_worker,
    ):
        for _ in range(steps):
            match rng.randrange(12):
                case 0:
                    await write(rng.choice((first_worker, second_worker)), rng.choice(paths))
                case 1:
                    clock.advance(rng.randrange(400_000))
                case 2:
                    _damage_blocks(folder, rng)
                case _:
                    operations = [
                        read(rng.choice((first_worker, second_worker)), rng.choice(paths))
                        for _ in range(rng.randrange(1, 8))
                    ]
                    operations += [
                        write(rng.choice((first_worker, second_worker)), rng.choice(paths))
                        for _ in range(rng.randrange(2))
                    ]
                    await asyncio.gather(*operations)


def _is_correct_answer(
    content: bytes | None,
    method: str,
    range_text: str | None,
    conditions: dict[str, str],
    status: int,
    body: bytes,
    answer_headers: Any,
) -> bool:
    """Return True if an answer equals that of an S3 store.

    Args:
        content: The bytes of the object, or None if it does not exist.
        method: GET or HEAD.
        range_text: The requested range, or None.
        conditions: The headers with conditions, such as If_Match.
        status: The status of the answer.
        body: The body of the answer.
        answer_headers: The headers of the answer.
    """
    if content is None:
        return status == 404
    if conditions.get("If_Match") == '"none"':
        return status == 412
    if conditions.get("If_None_Match") == "*":
        return status == 304
    try:
        part = read_range(range_text, len(content))
    except S3Error:
        return status == 416
    # An answer to HEAD may ignore the range.
    if method == "HEAD":
        part = part if status == 206 else None
    start, length = part or (0, len(content))
    if status != (206 if part else 200):
        return False
    if method == "GET" and body != content[start : start + length]:
        return False
    return (
        int(answer_headers.get("Content-Length", 0)) == length
        and answer_headers["ETag"] == f'"{hashlib.md5(content).hexdigest()}"'
    )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("number", range(4))
async def test_every_answer_agrees_with_the_store(tmp_path: Path, number: int) -> None:
    await _run_campaign(first_seed() + number, tmp_path, 60)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
async def test_every_answer_agrees_with_the_store_in_long_runs(tmp_path: Path, number: int) -> None:
    await _run_campaign(first_seed() + 100 + number, tmp_path, 300)
