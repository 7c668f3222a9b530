"""Tests of clients that disconnect at any point: their resources are released, and other clients continue."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver import server as server_module
from seamark.metaserver.api.http.slots import WorkerLimits
from tests.api.client import SCHEMA, Api
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.server.rig import RunningServer, run_server
from tests.server.test_bodies import build_head, encode_chunk, make_tokens
from tests.server.test_connections import RawConnection
from tests.waits import until

TABLES_PATH, TABLE_API = "/v1/namespaces/db/tables", "/api/v1/tables/db/t"
LONG_FILTER = {"filter": {"type": "in", "term": "id", "values": list(range(60_000))}}
PROPERTIES = {"action": "set-properties", "updates": {f"k{number}": "v" * 30 for number in range(4_000)}}
LONG_CONDITION = " OR ".join(["id = 1"] * 200)
REQUESTS: tuple[tuple[str, str, str, Any], ...] = (
    ("rita", "POST", f"{TABLES_PATH}/t/plan", {}),
    ("rita", "POST", f"{TABLES_PATH}/t/plan", LONG_FILTER),
    ("rita", "POST", f"{TABLE_API}/explain", {"where": LONG_CONDITION}),
    ("rita", "POST", f"{TABLE_API}/plan-tables", LONG_FILTER),
    ("rita", "GET", f"{TABLE_API}/timeline?since=latest&wait=1", None),
    ("rita", "GET", f"{TABLES_PATH}/t", None),
    ("wendy", "POST", f"{TABLES_PATH}/mine", {"requirements": [], "updates": [PROPERTIES]}),
    ("wendy", "POST", f"{TABLES_PATH}/mine", {"requirements": [], "updates": [{**PROPERTIES, "updates": {"k": "v"}}]}),
    ("wendy", "POST", "/v1/namespaces/db/properties", {"updates": PROPERTIES["updates"]}),
    ("nobody", "POST", f"{TABLES_PATH}/t/plan", LONG_FILTER),
)


def build_random_request(rng: random.Random, secrets: dict[str, str]) -> bytes:
    """Return a complete random request.

    Its body is plain or compressed, and has a length or chunks, as clients send bodies.
    """
    principal, method, path, body = rng.choice(REQUESTS)
    headers = [f"Authorization: Bearer {secrets[principal]}", "Content-Type: application/json", "User-Agent: Java/17"]
    if body is None:
        return build_head(method, path, *headers)
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        data = gzip.compress(data, 1)
        headers.append("Content-Encoding: gzip")
    if rng.random() < 0.3:
        pieces = [data[start : start + 50_000] for start in range(0, len(data), 50_000)]
        return build_head(method, path, *headers, "Transfer-Encoding: chunked") + b"".join(
            [*map(encode_chunk, pieces), b"0\r\n\r\n"]
        )
    return build_head(method, path, *headers, f"Content-Length: {len(data)}") + data


async def send_and_disconnect(server: RunningServer, secrets: dict[str, str], seed: int) -> None:
    """Send a random request, and disconnect at a random time.

    The client disconnects during the request, the server's work, the answer, or a second request.
    """
    rng = random.Random(seed)
    data = build_random_request(rng, secrets)
    async with await RawConnection.open(server) as raw_connection:
        try:
            async with asyncio.timeout(60):
                match rng.randrange(4):
                    case 0:  # The client disconnects during the request.
                        await raw_connection.send(data[: rng.randrange(len(data))])
                        await asyncio.sleep(rng.choice((0, 0.01, 0.05)))
                    case 1:  # The client disconnects while the server works.
                        await raw_connection.send(data)
                        await asyncio.sleep(rng.choice((0, 0.01, 0.1)))
                    case 2:  # The client disconnects during the answer.
                        await raw_connection.send(data)
                        await raw_connection.reader.readexactly(rng.randrange(1, 20))
                    case _:  # The client disconnects during its second request.
                        await raw_connection.send(data + data[: rng.randrange(len(data))])
                        await asyncio.sleep(rng.choice((0, 0.05)))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The server has closed the connection after an error.


async def run_concurrently(work: Callable[[int], Awaitable[None]], seeds: range, concurrency: int) -> None:
    """Await `work` for each seed, for `concurrency` seeds at a time."""
    seed_iterator = iter(seeds)

    async def run_next_seeds() -> None:
        for seed in seed_iterator:
            await work(seed)

    await asyncio.gather(*(run_next_seeds() for _ in range(concurrency)))


@pytest.mark.timeout(300)
async def test_resources_of_clients_that_disconnect_at_any_point_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created_limits: list[WorkerLimits] = []

    def record_limits(**options: int) -> WorkerLimits:
        created_limits.append(WorkerLimits(**options))
        return created_limits[-1]

    monkeypatch.setattr(server_module, "WorkerLimits", record_limits)
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", requests_limit=16) as server:
        api = Api(server)

        async def ask_as_root(method: str, path: str, body: Any = None) -> Any:
            return await api(method, path, body, headers={"Authorization": f"Bearer {secrets['root']}"})

        for name in ("t", "mine"):
            assert (await ask_as_root("POST", TABLES_PATH, {"name": name, "schema": SCHEMA})).status == 200
        await append_files(ask_as_root, "t", build_ten_id_files(300), snapshot_id=1, manifests=3)  # type: ignore[arg-type]
        await run_concurrently(lambda seed: send_and_disconnect(server, secrets, seed), range(32), 8)
        (worker_limits,) = created_limits
        await until(lambda: worker_limits.is_idle and server.components.metrics.requests.answering == 0)
        worker_limits.check_invariants()
        context = server.components.catalog.tables._context
        assert context.large.is_free
        assert not any(lock.locked() for lock in server.components.engine_commits.publisher._locks.values())
        planner = server.components.planner
        assert len(planner._loads) == len(planner._plan_runs) == 0
        planner.check_invariants()
        for principal, method, path, body in REQUESTS:
            answer = await api(method, path, body, headers={"Authorization": f"Bearer {secrets[principal]}"})
            assert answer.status == (403 if principal == "nobody" else 200), (path, answer.raw[:300])
        await until(lambda: worker_limits.is_idle)
