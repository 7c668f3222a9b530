"""Tests of the limited memory for answers that clients read slowly.

The more slow readers there are, the less each gets.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.caching.sending import STEP_BYTES, STEP_MIN_BYTES, AnswerBudget, SendBudget
from tests.gateway.fake_store import FakeStore
from tests.gateway.test_cache import BLOCK_BYTES, draw_name, open_worker, to_location
from tests.seeds import first_seed
from tests.waits import until

BUDGET_BYTES = 8 << 20


def test_answers_stay_within_the_budget_and_the_share_of_their_principal() -> None:
    rng, budget = random.Random(first_seed()), SendBudget(BUDGET_BYTES, BUDGET_BYTES // 2)
    answers: dict[AnswerBudget, tuple[str, int]] = {}
    for _ in range(2_000):
        if answers and rng.random() < 0.45:
            answer_budget = rng.choice(list(answers))
            answer_budget.set_charge(0)
            answer_budget.set_charge(0)  # The second release must change nothing.
            del answers[answer_budget]
        else:
            principal = rng.choice(("a", "a", "a", "b", "c"))
            answer_budget = AnswerBudget(budget, principal)
            size = min(answer_budget.next_bytes, rng.randrange(1, 2 * STEP_BYTES))
            answer_budget.set_charge(size)
            answers[answer_budget] = (principal, size)
        budget.check_invariants()
        total = sum(size for _, size in answers.values())
        assert budget.taken_bytes == total <= BUDGET_BYTES + STEP_MIN_BYTES * len(answers)
        bytes_by_principal: Counter[str] = Counter()
        for principal, size in answers.values():
            bytes_by_principal[principal] += size
        answer_counts = Counter(principal for principal, _ in answers.values())
        assert all(
            held_bytes <= BUDGET_BYTES // 2 + STEP_MIN_BYTES * answer_counts[principal]
            for principal, held_bytes in bytes_by_principal.items()
        )
    assert len(answers) > 100


def test_principal_with_many_slow_readers_leaves_large_steps_to_other_principals() -> None:
    # 5,000 answers of at least 16 KiB need more than the share of 32 MiB.
    budget = SendBudget(64 << 20, 32 << 20)
    for _ in range(5000):
        answer_budget = AnswerBudget(budget, "crowd")
        answer_budget.set_charge(answer_budget.next_bytes)
    assert budget.compute_next_bytes("crowd") == STEP_MIN_BYTES
    # 2,000 answers exceed the share of 128 MiB by at most 16 KiB each. An eighth of the other bytes is more than a
    # step of 1 MiB.
    budget = SendBudget(256 << 20, 128 << 20)
    for _ in range(2000):
        answer_budget = AnswerBudget(budget, "crowd")
        answer_budget.set_charge(answer_budget.next_bytes)
    assert budget.compute_next_bytes("other") == STEP_BYTES


@pytest.mark.slow
async def test_slow_readers_get_every_byte_and_keep_no_copies_of_blocks(tmp_path: Path) -> None:
    """Without a memory tier, each reader would have its own copy of a block.

    There are 10 readers of 8 MiB, and a budget of 1 MiB.
    """
    rng = random.Random(1)
    store, paths = FakeStore(rng), [draw_name(rng) for _ in range(2)]
    for path in paths:
        store.put(to_location(path), rng.randbytes(128 * BLOCK_BYTES))
    limits = {
        "gateway_cache_memory_bytes": 0,
        "gateway_send_bytes": 1 << 20,
        "gateway_cache_fetch_bytes": 64 << 20,
        "gateway_cache_disk_bytes": 64 << 20,
    }
    async with open_worker(store, tmp_path, SimulatedClock(1), **limits) as worker:
        for path in paths:
            assert await worker.get(path) == store.objects[to_location(path)].data
        budget, address = worker.backend._send_budget, urlsplit(worker.url)
        readers = []
        for number in range(10):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
            path = paths[number % 2]
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            readers.append((path, reader, writer))
        taken_bytes_max = 0

        async def read_answer(path: str, reader: asyncio.StreamReader) -> None:
            nonlocal taken_bytes_max
            await reader.readuntil(b"\r\n\r\n")
            data, received_bytes = store.objects[to_location(path)].data, 0
            while received_bytes < len(data):
                piece = await reader.read(65_536)
                assert piece, f"the answer ended after {received_bytes} of {len(data)} bytes"
                assert piece == data[received_bytes : received_bytes + len(piece)]
                received_bytes += len(piece)
                taken_bytes_max = max(taken_bytes_max, budget.taken_bytes)

        await asyncio.gather(*(read_answer(path, reader) for path, reader, _ in readers))
        for _, _, writer in readers:
            writer.close()
    assert 0 < taken_bytes_max <= (1 << 20) + 10 * STEP_MIN_BYTES
    budget.check_invariants()
    assert budget.taken_bytes == 0


async def test_data_waiting_for_slow_readers_is_counted_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 40 readers that read nothing, and a budget of 1 MiB.

    Each connection holds only counted bytes, and at most 1 KiB of headers.
    """
    rng = random.Random(1)
    store, path = FakeStore(rng), draw_name(rng)
    store.put(to_location(path), rng.randbytes(16 * BLOCK_BYTES))
    transports: list[asyncio.Transport] = []
    limits = {"gateway_send_bytes": 1 << 20, "gateway_cache_memory_bytes": 8 << 20}  # Every block stays in memory.
    async with open_worker(store, tmp_path, SimulatedClock(1), **limits) as worker:
        assert await worker.get(path) == store.objects[to_location(path)].data
        answer = worker.backend.answer

        async def answer_to_slow(call: S3Call) -> web.StreamResponse:
            transport = call.request.transport
            assert transport is not None
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            transport.set_write_buffer_limits(high=1)  # A connection of the gateway has this limit.
            transports.append(transport)
            return await answer(call)

        monkeypatch.setattr(worker.backend, "answer", answer_to_slow)
        monkeypatch.setattr(worker.backend, "begin", lambda *_: None)
        address, sockets = urlsplit(worker.url), []
        try:
            for _ in range(40):
                sock = socket.socket()
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(sock, (address.hostname, address.port))
                await loop.sock_sendall(sock, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await until(
                lambda: len(transports) == 40 and all(transport.get_write_buffer_size() for transport in transports)
            )
            taken_bytes = worker.backend._send_budget.taken_bytes
            assert 0 < sum(transport.get_write_buffer_size() for transport in transports) <= taken_bytes + 40 * 1024
            assert taken_bytes <= (1 << 20) + 40 * STEP_MIN_BYTES
        finally:
            for sock in sockets:
                sock.close()
        await until(lambda: worker.backend._send_budget.taken_bytes == 0)
