"""Tests of replicas that are slow, gone, full, wrong or of another version. Every read returns the right bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.peers import files as peer_files
from seamark.metaserver.peers.latencies import CircuitBreaker, Percentile
from seamark.metaserver.peers.protocol import FILE_PATH, HEAD_BYTES, SOURCE_HEADER, VERSION
from seamark.metaserver.store.model import Replica
from tests.peers.rig import Node, introduce_nodes, open_node
from tests.peers.test_files import count_reads, create_files, set_long_timeouts


def build_replica(address: str, *, protocol: int = VERSION) -> Replica:
    return Replica(address=address, weight=1, version="0", protocol=protocol, started_ms=0)


def set_peers(node: Node, *replicas: Replica) -> None:
    """Make `replicas` the only other replicas that the node knows."""
    node.peers.membership.replace([node.peers.membership.replica, *replicas])


def select_owned(node: Node, address: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files that the replica at `address` owns. The owner of a file caches it for all replicas."""
    return {
        location: content
        for location, content in files.items()
        if node.peers.membership.rank_replicas(location)[0] == address
    }


@pytest.fixture
def lasting_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an open breaker open.

    By default it allows a trial after a second, which is too soon on a busy machine.
    """
    monkeypatch.setattr(peer_files, "CircuitBreaker", partial(CircuitBreaker, pause_s=3600.0))


@asynccontextmanager
async def serve_peer(handler: object) -> AsyncIterator[str]:
    """Yield the address of a peer whose requests `handler` answers."""
    app = web.Application()
    app.router.add_get("/{any:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.usefixtures("lasting_breakers")
async def test_missing_replica_is_avoided_after_a_few_reads_and_its_substitute_is_used(
    tmp_path: Path,
) -> None:
    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b") as second_node:
        with closing(socket.socket()) as bound_socket:
            bound_socket.bind(("127.0.0.1", 0))  # The socket is bound but does not listen, so connections are refused.
            missing_replica = build_replica(f"127.0.0.1:{bound_socket.getsockname()[1]}")
            for node, other_node in ((first_node, second_node), (second_node, first_node)):
                set_peers(node, other_node.peers.membership.replica, missing_replica)
                set_long_timeouts(node)
            files = await create_files([first_node], count=60, size=100)
            files_of_missing_replica = select_owned(first_node, missing_replica.address, files)
            assert len(files_of_missing_replica) > 6  # More than the three failures of each of the two nodes
            for location, content in files.items():
                assert await first_node.read(location) == content
                assert await second_node.read(location) == content
            assert first_node.peers.objects.open_breakers == second_node.peers.objects.open_breakers == 1
            for node in (first_node, second_node):
                counts = node.peers.objects.counts
                assert counts.failed == 3  # After three failures the breaker is open, and the substitute is used.
                assert counts.skipped == len(files_of_missing_replica) - 3
            # Each of the two nodes read the storage itself after its three failures.
            assert sum(count_reads([first_node, second_node], location) for location in files) <= len(files) + 2 * 3


@pytest.mark.usefixtures("lasting_breakers")
async def test_hanging_replica_costs_a_short_wait_and_is_then_avoided(tmp_path: Path) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)  # Twice the time that the test allows
        return web.Response()

    async with serve_peer(hang) as address, open_node(tmp_path, "a") as first_node:
        set_peers(first_node, build_replica(address))
        files = select_owned(first_node, address, await create_files([first_node], count=40, size=100))
        for location, content in files.items():
            async with asyncio.timeout(30):  # The hanging replica would take twice as long.
                assert await first_node.read(location) == content
        counts = first_node.peers.objects.counts
        # After three slow answers the breaker is open, and the replica is skipped.
        assert counts.hedged == 3
        assert counts.skipped == len(files) - 3
        assert first_node.peers.objects.open_breakers == 1


async def test_storage_is_read_if_an_answer_of_a_replica_never_ends(tmp_path: Path) -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={SOURCE_HEADER: "storage"})
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async with serve_peer(begin) as address, open_node(tmp_path, "a") as first_node:
        set_peers(first_node, build_replica(address))
        # The acknowledgement always arrives before this limit, so only the limit for the whole answer can end the wait.
        first_node.peers.objects._first_byte_latency = Percentile(30.0, min_s=30.0, max_s=30.0)
        files = select_owned(first_node, address, await create_files([first_node], 10, 100))
        for location, content in files.items():
            assert await first_node.read(location) == content
        assert first_node.peers.objects.counts.hedged == len(files)


async def test_answer_of_the_replica_is_used_when_the_storage_is_slow_and_a_hedged_read_fails(tmp_path: Path) -> None:
    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b") as second_node:
        await introduce_nodes(first_node, second_node)
        files = await create_files([first_node], 20, 100)
        first_node.stored_objects.is_away = True
        # With limits of 0 s, the first node also reads the storage at once, and this hedged read fails.
        first_node.peers.objects._first_byte_latency = first_node.peers.objects._storage_latency = Percentile(
            0.0, min_s=0.0, max_s=0.0
        )
        second_node.stored_objects.delay_s = 0.05
        for location, content in select_owned(first_node, second_node.address, files).items():
            assert await first_node.read(location) == content
        for location in select_owned(first_node, first_node.address, files):
            with pytest.raises(RetryLater):
                await first_node.read(location)


async def test_answer_changed_in_transit_is_never_used(tmp_path: Path) -> None:
    """A relay between two replicas changes one byte of each answer.

    It first changes the `HEAD_BYTES` bytes before the content, then the content.
    """
    changed_offset = -1  # Nothing is changed.

    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b") as second_node:
        host, port = second_node.address.rsplit(":", 1)

        async def relay(request: web.Request) -> web.StreamResponse:
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = [f"GET {request.raw_path} HTTP/1.1", f"Host: {second_node.address}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in request.headers.items() if name.startswith("Seamark")]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            answer = await reader.read(-1)
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0], head
            data = bytearray(decode_chunks(body) if b"transfer-encoding: chunked" in head.lower() else body)
            if 0 <= changed_offset < len(data):
                data[changed_offset] ^= 1 << changed_offset % 8
            return web.Response(body=bytes(data), headers={SOURCE_HEADER: "cache"})

        async with serve_peer(relay) as address:
            # `second_node` announces the address of the relay, as behind a forwarded port.
            second_node.peers._server._address = address
            set_peers(first_node, build_replica(address))
            set_long_timeouts(first_node)
            location, content = next(
                iter(select_owned(first_node, address, await create_files([first_node], count=30, size=120)).items())
            )
            assert await first_node.read(location) == content
            assert first_node.peers.objects.counts.hits == 1
            for changed_offset in range(HEAD_BYTES + len(content)):  # noqa: B007  `relay` reads the variable.
                first_node.peers.objects._breakers.clear()
                assert await first_node.read(location) == content
            assert first_node.peers.objects.counts.hits == 1
            # After a damaged answer, the node requests the file once more from the replica.
            assert first_node.peers.read_counts()["damaged"] == 2 * (HEAD_BYTES + len(content))


def decode_chunks(body: bytes) -> bytes:
    """Return the content of a body in HTTP's chunked coding."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return content


@pytest.mark.parametrize("status", [200, 302, 404, 500, 503])
async def test_peer_that_does_not_speak_the_protocol_is_ignored(tmp_path: Path, status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == FILE_PATH
        return web.Response(status=status, body=b"x" * 200, headers={"Location": "http://127.0.0.1:9/"})

    async with serve_peer(answer) as address, open_node(tmp_path, "a") as first_node:
        set_peers(first_node, build_replica(address))
        for location, content in select_owned(first_node, address, await create_files([first_node], 8, 100)).items():
            assert await first_node.read(location) == content
        assert first_node.peers.objects.counts.hits == first_node.peers.objects.counts.fetched == 0


async def test_replicas_with_another_protocol_version_are_not_used(tmp_path: Path) -> None:
    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b") as second_node:
        set_peers(first_node, second_node.peers.membership.replica, build_replica("127.0.0.1:9", protocol=VERSION + 1))
        assert [replica.address for replica in first_node.peers.membership.replicas] == [
            first_node.address,
            second_node.address,
        ]
        for location, content in (await create_files([first_node], 20, 100)).items():
            assert await first_node.read(location) == content
        assert first_node.peers.objects.counts.failed == 0


async def test_changed_file_of_the_disk_cache_is_read_from_the_storage_again(tmp_path: Path) -> None:
    """The disk cache maps large files into memory. The test overwrites four bytes of each file, also in its mapping."""
    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b") as second_node:
        await introduce_nodes(first_node, second_node)
        set_long_timeouts(first_node), set_long_timeouts(second_node)
        files = select_owned(first_node, second_node.address, await create_files([first_node], count=24, size=200_000))
        for location, content in files.items():
            assert await first_node.read(location) == content
        await second_node.peers.cache._stack._queue.join()
        paths = list((tmp_path / "b" / "cache" / "files").rglob("*.block"))
        assert len(paths) == len(files)
        for path in paths:
            with path.open("r+b") as file:
                file.seek(1000)
                file.write(b"\x00\x01\x02\x03")
        for location, content in files.items():
            assert await first_node.read(location) == content
            assert await second_node.read(location) == content
        assert second_node.peers.read_counts()["damaged"] == len(files)
        assert first_node.peers.read_counts()["damaged"] == len(files)
        assert first_node.peers.objects.counts.failed == 0  # The owner reads the file from the storage and answers.


async def test_requests_over_the_limit_are_rejected_and_read_the_storage(tmp_path: Path) -> None:
    async with open_node(tmp_path, "a") as first_node, open_node(tmp_path, "b", peer_requests_limit=1) as second_node:
        await introduce_nodes(first_node, second_node)
        set_long_timeouts(first_node)
        second_node.stored_objects.delay_s = 0.05
        files = select_owned(first_node, second_node.address, await create_files([first_node], 20, 100))
        results = await asyncio.gather(*(first_node.read(location) for location in files))
        assert results == list(files.values())
        assert first_node.peers.objects.counts.failed > 0


def test_breaker_opens_after_consecutive_failures_and_allows_trials() -> None:
    breaker = CircuitBreaker(failures_max=3, pause_s=1.0, pause_max_s=4.0)
    for _ in range(2):
        breaker.record_failure(0.0)
    breaker.record_success()
    for now in (0.0, 0.1, 0.2):
        assert breaker.admit_request(now)
        breaker.record_failure(now)
    # The first pause ends at 0.2 + 1.0.
    assert not breaker.admit_request(1.1)
    assert breaker.admit_request(1.25)  # The breaker allows a trial request.
    assert not breaker.admit_request(1.3)
    breaker.record_failure(1.4)
    # The second pause is twice as long, and ends at 1.4 + 2.0.
    assert not breaker.admit_request(3.3)
    assert breaker.admit_request(3.5)
    breaker.record_failure(3.6)
    breaker.record_failure(3.6)
    assert breaker.admit_request(3.6 + 4.0)  # No pause is longer than `pause_max_s`.
    breaker.record_success()
    assert breaker.admit_request(3.7)
    assert not breaker.is_open


def test_percentile_adapts_to_the_durations_within_its_limits() -> None:
    # The value is computed after every 16 durations, from the last 128 durations.
    percentile = Percentile(0.5, min_s=0.01, max_s=2.0, factor=1.5)
    for _ in range(15):
        percentile.add(0.1)
    assert percentile.value_s == 0.5
    percentile.add(0.1)
    assert percentile.value_s == pytest.approx(0.15)
    for _ in range(128):
        percentile.add(0.0001)
    assert percentile.value_s == 0.01
    for _ in range(128):
        percentile.add(60.0)
    assert percentile.value_s == 2.0
