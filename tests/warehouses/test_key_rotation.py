"""Tests that no request fails while the keys with which the server reaches a storage are replaced."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from yarl import URL

from seamark.metaserver.server import serve_gateway
from tests.gateway.rig import read_keys
from tests.objects.test_s3 import build_settings
from tests.services.process import choose_free_port
from tests.services.s3 import S3, find_versitygw, manage_users, run_s3
from tests.waits import PATIENCE_S
from tests.warehouses.world import WarehouseServer, run_server_with_warehouses

ROOT = "/v1/sales"


class Load:
    """Two clients that create, change and load tables of a warehouse until they are stopped."""

    def __init__(self, world: WarehouseServer) -> None:
        self._world = world
        self.answers = [0, 0]
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(len(self.answers))]

    async def _work(self, number: int) -> None:
        updates = [{"action": "set-properties", "updates": {"p": "1"}}]
        for table_number in itertools.count():
            path = f"{ROOT}/namespaces/n{number}/tables/t{table_number}"
            await self._world.create_table(ROOT, f"n{number}", f"t{table_number}")
            for method, body in (("POST", {"requirements": [], "updates": updates}), ("GET", None)):
                status, answer = await self._world.send(method, path, body)
                assert status == 200, answer
            self.answers[number] += 1

    async def wait(self, further_answers: int = 2) -> None:
        """Wait until each client has received `further_answers` more answers.

        If a client has failed, raise its error.
        """
        goals = [count + further_answers for count in self.answers]
        while any(count < goal for count, goal in zip(self.answers, goals, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


class GatewayLoad(Load):
    """Two clients that write and read objects of tables through the gateway until they are stopped."""

    async def _work(self, number: int) -> None:
        keys = read_keys(await self._world.create_table(ROOT, f"g{number}", "t"))
        for object_number in itertools.count():
            body = f"{number} {object_number}".encode() * 10_000
            for method, data, expected in (("PUT", body, b""), ("GET", None, body)):
                path, headers = keys.sign(method, f"data/{object_number}")
                url = URL(f"{keys.endpoint}{path}", encoded=True)
                async with self._world.server.http.request(method, url, data=data, headers=headers) as answer:
                    assert (answer.status, await answer.read()) == (200, expected)
            self.answers[number] += 1


def make_credentials(name: str) -> dict[str, str]:
    return {"s3_access_key_id": name, "s3_secret_access_key": f"secret of {name}"}


def create_key(s3: S3, name: str) -> None:
    manage_users(s3, "create-user", "--access", name, "--secret", f"secret of {name}", "--role", "admin")


@pytest.mark.parametrize("access", ["signing", pytest.param("gateway", marks=pytest.mark.slow)])
async def test_storage_keys_are_replaced_under_load_without_a_failed_request(tmp_path: Path, access: str) -> None:
    if find_versitygw() is None:
        pytest.skip("only versitygw has users whose keys are created and deleted while it runs")
    with run_s3(tmp_path / "s3", has_users=True) as s3:
        bucket = s3.create_bucket()
        await asyncio.to_thread(create_key, s3, "first")
        options: dict[str, Any] = {
            name: getattr(build_settings(s3, bucket), name) for name in ("s3_region", "storage_timeout_s")
        }
        roots = (f"s3://{bucket}/lake",)
        options |= {"s3_endpoint": s3.endpoint, "warehouse_roots": roots, "warehouse_endpoints": (s3.endpoint,)}
        if access == "gateway":
            options["gateway_port"] = choose_free_port()
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(run_server_with_warehouses(tmp_path, **options))
            if access == "gateway":
                await stack.enter_async_context(serve_gateway(world.server.components))
            settings = {"s3_endpoint": s3.endpoint, "s3_path_style": True, "s3_client_access": access}
            definition = {"location": f"s3://{bucket}/lake/sales", "settings": settings}
            await world.create_warehouse("sales", **definition, credentials=make_credentials("first"))
            clients = Load(world) if access == "signing" else GatewayLoad(world)
            async with asyncio.timeout(3 * PATIENCE_S):
                await clients.wait()
                await asyncio.to_thread(create_key, s3, "second")
                await clients.wait()
                body = {**definition, "credentials": make_credentials("second")}
                status, answer = await world.send("PUT", "/api/v1/warehouses/sales", body)
                assert status == 200, answer
                await clients.wait()
                # Each client has received further answers, so its requests that began with the first keys have ended.
                await asyncio.to_thread(manage_users, s3, "delete-user", "--access", "first")
                await clients.wait(further_answers=5)
                await clients.stop()
            keys = make_credentials("first")
            former_s3 = replace(s3, access_key=keys["s3_access_key_id"], secret_key=keys["s3_secret_access_key"])
            with pytest.raises(ClientError, match=r"InvalidAccessKeyId|SignatureDoesNotMatch"):
                former_s3.client().list_objects_v2(Bucket=bucket)
