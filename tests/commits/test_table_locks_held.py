"""Tests of consecutive turns with a table's lock: other changes wait about as long as for one turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.api.client import Api
from tests.commits.lake import CommitTable
from tests.server.rig import run_server

CHANGES = 6


async def test_consecutive_turns_delay_other_changes_no_longer_than_one_turn(tmp_path: Path) -> None:
    """A change that has failed in conflicts gets a turn: for a limited time, other changes of the table wait for it."""
    async with run_server(tmp_path, commit_turn_after=1, commit_turn_s=1.0) as server:
        lake = await CommitTable.create(Api(server))
        removed_file = lake.write_data_file([(0, 0, "v")])
        first_commit = await lake.commit({"add": [removed_file]})
        remove = {"remove": [{"file-path": removed_file["file-path"]}], "read-snapshot-id": first_commit["snapshot-id"]}
        await lake.commit(remove)
        # All changes that arrive in this time form one group.
        async with server.components.engine_commits.publisher.lock(("db",), "t"):
            first_task = asyncio.create_task(lake.append([(1, 0, "a")]))
            await lake.wait_for_changes(1)
            tasks = [asyncio.create_task(lake.send({**remove, "change-id": f"c{number}"})) for number in range(CHANGES)]
            await lake.wait_for_changes(1 + CHANGES)
        await first_task
        assert {result.status for result in await asyncio.gather(*tasks)} == {409}

        completed_changes = 0

        async def send_changes() -> None:
            nonlocal completed_changes
            for number in range(CHANGES):
                await asyncio.sleep(0.7)
                producer = {"id": f"p{number}", "sequence": 1}
                assert (await lake.send({"change-id": f"c{number}", "producer": producer})).status == 200
                completed_changes += 1

        sender_task = asyncio.create_task(send_changes())
        await lake.append([(1, 0, "a")])
        completed_during_append = completed_changes
        await sender_task
        # A turn of 1 second takes as long as one or two of the changes, which follow each other every 0.7 seconds.
        assert completed_during_append < CHANGES - 1
