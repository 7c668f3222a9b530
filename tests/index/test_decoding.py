"""Tests of manifests decoded in processes: the same bytes and errors, whatever happens to the processes."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.decoding import Decoders, decode_block_memory
from tests.api.plans.planned import KINDS, STYLE, build_data_file
from tests.index.test_block import SCHEMA
from tests.planner.lakes.manifests import ADDED, Entry, build_manifest_bytes

THREADS = 3


def build_manifest(number: int) -> bytes:
    files = [
        build_data_file(f"file:///t/{number}/{n}.parquet", n, n + number, text=("a", "b" * n))
        for n in range(30 + number)
    ]
    entries = [Entry(ADDED, 1, None, None, file) for file in files]
    return build_manifest_bytes(
        entries, version=2, content=0, style=STYLE, spec_id=0, fields=(), kinds=KINDS, schema=SCHEMA
    )


MANIFESTS = [(build_manifest(number), f"file:///t/m{number}.avro") for number in range(8)]
BLOCKS = [decode_block_memory(*item) for item in MANIFESTS]


def list_decoding_processes() -> list[psutil.Process]:
    processes = []
    for item in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # A process that has just ended may still be a zombie.
            processes += [item] if any("blocks.decoding" in part for part in item.cmdline()) else []
    return processes


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    executor = ThreadPoolExecutor(THREADS)
    decoders = Decoders(executor, THREADS, processes_min_bytes=1000)
    yield decoders
    executor.shutdown(wait=True, cancel_futures=True)
    decoders.close()
    assert list_decoding_processes() == []


async def decode_until_processes_answer(decoders: Decoders) -> None:
    """Decode manifests repeatedly until the helper processes have decoded at least `THREADS` manifests."""
    async with asyncio.timeout(60):
        count_before = decoders.manifests_decoded_by_processes
        while decoders.manifests_decoded_by_processes < count_before + THREADS:
            blocks = await asyncio.gather(*(decoders.decode(*item) for item in MANIFESTS))
            assert [bytes(result) for result in blocks] == BLOCKS


@pytest.mark.slow
async def test_decoding_processes_return_the_same_blocks_and_end_when_idle(decoders: Decoders) -> None:
    """Processes decode while at least 1,000 bytes of manifests are expected, and end after the outermost `with`."""
    with decoders.expect_manifests(1000):
        with decoders.expect_manifests(1_000_000):
            await decode_until_processes_answer(decoders)
        assert 1 <= len(list_decoding_processes()) <= THREADS
        await decode_until_processes_answer(decoders)
    by_processes = decoders.manifests_decoded_by_processes
    async with asyncio.timeout(60):
        while list_decoding_processes():
            await asyncio.sleep(0.01)
    assert bytes(await decoders.decode(*MANIFESTS[0])) == BLOCKS[0]
    assert decoders.manifests_decoded_by_processes == by_processes
    with decoders.expect_manifests(1000):  # New processes start after the idle processes have ended.
        await decode_until_processes_answer(decoders)


async def test_no_process_is_started_for_few_manifests(decoders: Decoders) -> None:
    with decoders.expect_manifests(999):
        await asyncio.gather(*(decoders.decode(*item) for item in MANIFESTS))
        assert list_decoding_processes() == []


async def test_no_process_is_started_on_one_core() -> None:
    with ThreadPoolExecutor(1) as executor:
        serial_decoders = Decoders(executor, 1, processes_min_bytes=0)
        with serial_decoders.expect_manifests(1 << 40):
            assert bytes(await serial_decoders.decode(*MANIFESTS[0])) == BLOCKS[0]
            assert list_decoding_processes() == []


@pytest.mark.slow
async def test_broken_manifest_has_the_same_error_and_ends_no_process(decoders: Decoders) -> None:
    data, location = MANIFESTS[0]
    with pytest.raises(Corrupt) as first_error:
        decode_block_memory(data[:-9], location)
    with decoders.expect_manifests(1000):
        await decode_until_processes_answer(decoders)
        pids_before = {helper.pid for helper in list_decoding_processes()}
        for _ in range(20):
            with pytest.raises(Corrupt) as error:
                await decoders.decode(data[:-9], location)
            assert error.value.message == first_error.value.message
        await decode_until_processes_answer(decoders)
        assert pids_before <= {helper.pid for helper in list_decoding_processes()}


async def test_every_block_is_right_when_a_process_is_killed(decoders: Decoders) -> None:
    source = random.Random(17)
    with decoders.expect_manifests(1000):
        for _ in range(6):
            await decode_until_processes_answer(decoders)
            decoding_tasks = asyncio.gather(*(decoders.decode(*item) for item in MANIFESTS * 4))
            await asyncio.sleep(source.uniform(0, 0.005))
            source.choice(list_decoding_processes()).kill()
            assert [bytes(item) for item in await decoding_tasks] == BLOCKS * 4


async def test_threads_decode_when_no_process_can_be_started(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with decoders.expect_manifests(1000):
        for _ in range(3):
            blocks = await asyncio.gather(*(decoders.decode(*item) for item in MANIFESTS))
            assert [bytes(result) for result in blocks] == BLOCKS
    assert decoders.manifests_decoded_by_processes == 0


@pytest.mark.slow
async def test_process_with_nonsensical_answers_is_abandoned(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process without a valid answer is used once. A thread then decodes the manifest, and a new process starts."""
    script, starts = tmp_path / "nonsense", tmp_path / "starts"
    # 9 zeros are the message that a process is ready. Then the process returns each request as the answer.
    script.write_text(f"#!/bin/sh\necho started >> {starts}\nhead -c 9 /dev/zero\nexec cat\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with decoders.expect_manifests(1000):
        await decode_until_processes_answer(decoders)
    assert len(starts.read_text().splitlines()) >= THREADS, "each process with an invalid answer must be replaced"
