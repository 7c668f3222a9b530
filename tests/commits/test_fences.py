"""Tests of a job whose server has lost the lease of the table services.

It commits nothing, and blocks no other change.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from seamark.metaserver.store.lease import SERVICES
from seamark.metaserver.store.operations import TakeLease
from tests.api.client import Api
from tests.commits.lake import CommitTable
from tests.server.rig import run_server


async def test_only_the_change_with_an_old_fencing_number_is_rejected_in_a_group(
    tmp_path: Path,
) -> None:
    async with run_server(tmp_path, services_workers=0) as server:
        lake = await CommitTable.create(Api(server))
        (fence,) = await server.components.store.transact([TakeLease(SERVICES, "a", now_ms=0, until_ms=10)])
        await lake.append([(0, 0, "a")], fence=fence)
        (new_fence,) = await server.components.store.transact([TakeLease(SERVICES, "b", now_ms=20, until_ms=30)])
        assert new_fence > fence
        bodies: list[dict[str, Any]] = [{"add": [lake.write_data_file([(row_id, 0, "a")])]} for row_id in range(1, 9)]
        for body in bodies[::2]:
            body["fence"] = fence
        async with server.components.engine_commits.publisher.lock(("db",), "t"):
            tasks = [asyncio.create_task(lake.send(body)) for body in bodies]
            await lake.wait_for_changes(8)
        answers = await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [409, 200] * 4
        await lake.append([(9, 0, "a")], fence=new_fence)
        assert int((await lake.read_metadata())["snapshots"][-1]["summary"]["total-records"]) == 6
