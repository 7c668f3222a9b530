"""Tests of a real server with an unreliable S3 store: slow, failing, hanging, losing replies.

Acknowledged commits exist, rejected commits do not, the current metadata file exists, and requests that do not need the
storage are answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rigs.http import HttpClient, create_key
from tests.faults.rigs.writers import run_writers, wait_for_commits
from tests.objects.s3_proxy import Misbehaviour, run_misbehaving_proxy
from tests.services.process import choose_free_port, is_http_ok
from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.waits import until

TIMEOUT_S = 2


@asynccontextmanager
async def _start_behind_proxy(s3: S3, home: Path) -> AsyncIterator[tuple[Seamark, Misbehaviour]]:
    """Start a server that reaches the store through the proxy.

    The server gives up a request to the store after TIMEOUT_S, and repeats it once.
    """
    port = choose_free_port()
    env = {**s3.build_seamark_env(), "SEAMARK_S3_ENDPOINT": f"http://127.0.0.1:{port}"}
    env |= {"SEAMARK_STORAGE_TIMEOUT_S": str(TIMEOUT_S), "SEAMARK_STORAGE_RETRIES": "1"}
    async with run_misbehaving_proxy(s3.endpoint, port) as misbehaviour:
        server = Seamark(home, warehouse=f"s3://{s3.create_bucket()}/lake", env=env)
        await asyncio.to_thread(server.start)
        try:
            yield server, misbehaviour
        finally:
            misbehaviour.hang = misbehaviour.hang_all = False
            await asyncio.to_thread(server.kill9)


async def _change_faults(misbehaviour: Misbehaviour, rng: random.Random, seconds: float) -> None:
    """Select a random fault for the following PUTs every tenth of a second. After `seconds`, end all faults."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        match rng.randrange(5):
            case 0:
                misbehaviour.lose_replies += rng.randrange(1, 4)
            case 1:
                misbehaviour.drop_requests += rng.randrange(1, 4)
            case 2:
                misbehaviour.answer_500_after_storing += rng.randrange(1, 4)
            case 3:
                misbehaviour.delay_s = rng.random() * 0.2
            case _:
                misbehaviour.delay_s = 0.0
        await asyncio.sleep(0.1)
    misbehaviour.lose_replies = misbehaviour.drop_requests = misbehaviour.answer_500_after_storing = 0
    misbehaviour.delay_s = 0.0


async def _run_campaign(s3: S3, home: Path, seed: int, seconds: float) -> None:
    """Write while the proxy before the storage misbehaves, and check that commits resume and no file is missing."""
    print(f"storage faults: seed {seed}")
    async with _start_behind_proxy(s3, home) as (server, misbehaviour):
        client = HttpClient(server.base_url)
        assert (await asyncio.to_thread(client.create_table))[0] == 200

        def write() -> None:
            with run_writers([server.base_url], "t", seed) as recorded:
                asyncio.run_coroutine_threadsafe(
                    _change_faults(misbehaviour, random.Random(seed), seconds), loop
                ).result()
                assert wait_for_commits(recorded, count=3, timeout_s=60), (
                    f"seed {seed}: no commit after the faults ended: {recorded.unexplained_answers}"
                )
            recorded.check(
                HttpClient(server.base_url),
                "t",
                lambda location: (s3.root / location.removeprefix("s3://")).is_file(),
                f"seed {seed}, {dict(recorded.outcomes)}",
            )
            print(f"storage faults: {dict(recorded.outcomes)}")

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(write)
        assert any("dropped" in request for request in misbehaviour.requests), f"seed {seed} did not drop a request"


@pytest.mark.parametrize("seed", [41])
async def test_commits_to_unreliable_storage_exist_or_were_rejected(s3: S3, tmp_path: Path, seed: int) -> None:
    await _run_campaign(s3, tmp_path / "home", seed, seconds=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 405))
async def test_commits_to_unreliable_storage_exist_or_were_rejected_for_longer(
    s3: S3, tmp_path: Path, seed: int
) -> None:
    await _run_campaign(s3, tmp_path / "home", seed, seconds=20)


@pytest.mark.slow
async def test_hanging_storage_delays_only_requests_that_need_it(s3: S3, tmp_path: Path) -> None:
    async with _start_behind_proxy(s3, tmp_path / "home") as (server, misbehaviour):

        def create_table_with_one_snapshot() -> None:
            client = HttpClient(server.base_url)
            assert client.create_table()[0] == 200
            assert client.append(snapshot_id=1, parent=None, sequence=1)[0] == 200
            assert client.read_chain() == [1]

        def commit_append(key: str) -> tuple[int, Any]:
            return HttpClient(server.base_url).append(snapshot_id=2, parent=1, sequence=2, key=key)

        def check_other_requests() -> None:
            """Check the requests that need no storage."""
            client = HttpClient(server.base_url)
            for path in ("/healthz", "/v1/config", "/v1/namespaces/db/tables", "/v1/namespaces/db/tables/t"):
                assert client.call("GET", path)[0] == 200

        await asyncio.to_thread(create_table_with_one_snapshot)
        misbehaviour.hang_all = True
        first_key, *keys = [create_key() for _ in range(5)]
        first_task = asyncio.create_task(asyncio.to_thread(commit_append, first_key))
        await until(lambda: "PUT hung" in misbehaviour.requests)
        later_commits = [asyncio.create_task(asyncio.to_thread(commit_append, key)) for key in keys]
        await asyncio.to_thread(check_other_requests)
        assert not first_task.done()
        assert not await asyncio.to_thread(is_http_ok, f"{server.base_url}/readyz")
        commit_answers = await asyncio.gather(first_task, *later_commits)
        assert {status for status, _ in commit_answers} == {503}
        # A commit that waits behind a hanging commit is rejected, because the waits would add up.
        assert any("waited in the table's queue" in answer["error"]["message"] for _, answer in commit_answers), (
            commit_answers
        )
        misbehaviour.hang_all = False
        status, _ = await asyncio.to_thread(commit_append, first_key)
        assert status == 200
        assert await asyncio.to_thread(HttpClient(server.base_url).read_chain) == [1, 2]
