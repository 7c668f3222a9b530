"""Tests of producers.

Each sequence is in the table once, even if requests are lost or repeated, servers are killed, or records expire.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import ServerFailed, Unreachable
from seamark.metaserver.store.operations import AdvanceProducer
from tests.api.client import Api
from tests.commits.lake import SCHEMA, CommitTable
from tests.commits.reader import check_snapshots, find_snapshot, read_snapshot_ids, read_snapshot_rows
from tests.faults.rigs.http import HttpClient
from tests.faults.rigs.lossy_proxy import FAULTS, make_fault_chooser, run_lossy_proxy
from tests.faults.rigs.mortal import KillableServer
from tests.seeds import first_seed
from tests.server.rig import run_server

SEED = first_seed("FAULT_SEED")


@pytest.fixture(params=["sqlite", "postgres"])
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    server_options = {"database": request.getfixturevalue("postgres_url")} if request.param == "postgres" else {}
    async with run_server(tmp_path, **server_options) as server:
        yield Api(server)


def make_numbered_change(lake: CommitTable, sequence: int, producer: str = "p") -> dict[str, Any]:
    return {
        "producer": {"id": producer, "sequence": sequence},
        "add": [lake.write_data_file([(sequence, 0, producer)])],
    }


async def read_rows(lake: CommitTable) -> list[Any]:
    metadata = await lake.read_metadata()
    check_snapshots(metadata)
    return read_snapshot_rows(find_snapshot(metadata))


async def test_sequence_is_committed_once_and_repeats_get_the_first_answer(api: Api) -> None:
    lake = await CommitTable.create(api)
    bodies = [make_numbered_change(lake, sequence) for sequence in (3, 4, 9)]
    answers = [await lake.commit(body) for body in bodies]
    assert [answer["summary"]["seamark.producer-sequence"] for answer in answers] == ["3", "4", "9"]
    for body, answer in zip(bodies, answers, strict=True):
        repeated_answer = await lake.commit(body)
        assert repeated_answer == {**answer, "duplicate": True, "metadata-location": answers[-1]["metadata-location"]}
    skipped_answer = await lake.commit(make_numbered_change(lake, 7))
    assert (skipped_answer["duplicate"], skipped_answer["snapshot-id"]) == (True, None)
    other_answer = await lake.commit(make_numbered_change(lake, 1, "q"))
    assert not other_answer["duplicate"]
    assert len(await read_rows(lake)) == 4


async def test_only_one_of_concurrent_repeats_is_committed(api: Api) -> None:
    lake = await CommitTable.create(api)
    body = make_numbered_change(lake, 1)
    answers = await asyncio.gather(*(lake.commit(body) for _ in range(6)))
    assert sorted(answer["duplicate"] for answer in answers) == [False, True, True, True, True, True]
    assert len({answer["snapshot-id"] for answer in answers}) == 1
    assert await read_rows(lake) == [(1, 0, "p")]


async def test_sequence_forgotten_by_the_database_is_found_in_the_snapshots(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        bodies = [make_numbered_change(lake, sequence) for sequence in (1, 2)]
        answers = [await lake.commit(body) for body in bodies]
    with sqlite3.connect(tmp_path / "seamark.db") as database:
        assert database.execute("DELETE FROM producers").rowcount == 1
    database.close()
    async with run_server(tmp_path) as server:
        lake.api = Api(server)
        for body, answer in zip(bodies, answers, strict=True):
            repeated_answer = await lake.commit(body)
            assert (repeated_answer["duplicate"], repeated_answer["snapshot-id"]) == (True, answer["snapshot-id"])
        assert not (await lake.commit(make_numbered_change(lake, 3)))["duplicate"]
        assert len(await read_rows(lake)) == 3


async def _change_table_of_name(api: Api, change_kind: str) -> None:
    """Drop the table `db.t`, rename it, or replace it by a new table of this name, as `change_kind` states."""
    if change_kind == "dropped":
        assert (await api("DELETE", "/v1/namespaces/db/tables/t")).status == 204
        return
    names = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "u"}}
    assert (await api("POST", "/v1/tables/rename", names)).status == 204
    if change_kind == "replaced":
        await api.create_table("t")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("change_kind", ["renamed", "replaced", "dropped"])
async def test_repeat_is_not_rejected_after_its_table_has_lost_the_name(api: Api, change_kind: str) -> None:
    """A change with a sequence number is committed, and its table then loses the name. The client repeats the change.

    After a rejection, the client would delete the files of the change, which are live.
    """
    lake = await CommitTable.create(api)
    body = make_numbered_change(lake, 4)
    uuid = (await lake.commit(body))["table-uuid"]
    await _change_table_of_name(api, change_kind)
    rejection = (409, "CommitFailedException") if change_kind == "replaced" else (404, "NoSuchTableException")
    for sequence, expected_error in ((4, (500, "CommitStateUnknownException")), (5, rejection)):
        repeated_body = {**body, "table-uuid": uuid, "producer": {"id": "p", "sequence": sequence}}
        assert (await lake.send(repeated_body)).error[:2] == expected_error
    assert (await lake.send({**body, "table-uuid": uuid, "producer": None})).error[:2] == rejection


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("change_kind", ["renamed", "replaced"])
async def test_change_that_another_server_has_committed_has_an_unknown_outcome(api: Api, change_kind: str) -> None:
    """Two changes wait while another server commits the first one, and the table then loses its name.

    The outcome of the first change must not be reported as a rejection. The second change is rejected.
    """
    lake = await CommitTable.create(api)
    uuid = (await lake.read_metadata())["table-uuid"]
    async with api.server.components.engine_commits.publisher.lock(("db",), "t"):
        tasks = [asyncio.create_task(lake.send(make_numbered_change(lake, sequence))) for sequence in (1, 2)]
        await lake.wait_for_changes(2)
        # Another server records sequence 1 of the producer, with the snapshot 77.
        await api.server.components.store.transact([AdvanceProducer(uuid, "p", 1, 77, 0)])
        await _change_table_of_name(api, change_kind)
    answers = await asyncio.gather(*tasks)
    rejection = (409, "CommitFailedException") if change_kind == "replaced" else (404, "NoSuchTableException")
    assert [answer.error[:2] for answer in answers] == [(500, "CommitStateUnknownException"), rejection]


def _create_table_on_server(base_url: str, name: str) -> CommitTable:
    """Create a table on a server in another process, and return it."""
    client = HttpClient(base_url)
    client.call("POST", "/v1/namespaces", {"namespace": ["db"]})
    status, created_table = client.call("POST", "/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA})
    assert status == 200
    folder = Path(created_table["metadata"]["location"].removeprefix("file://"))
    (folder / "data").mkdir(parents=True)
    # Other clients send the requests of these tests, so the table needs no Api.
    return CommitTable(api=None, folder=folder, name=name, version=2, spec=())  # type: ignore[arg-type]


def _read_ids(base_url: str, name: str) -> list[int]:
    _, loaded_table = HttpClient(base_url).call("GET", f"/v1/namespaces/db/tables/{name}")
    check_snapshots(loaded_table["metadata"])
    return read_snapshot_ids(find_snapshot(loaded_table["metadata"]))


def test_lost_requests_and_replies_neither_lose_nor_duplicate_rows(tmp_path: Path) -> None:
    with KillableServer(tmp_path / "home") as server:
        server.start()
        lake = _create_table_on_server(server.base_url, "t")
        with run_lossy_proxy(server.base_url) as proxy:
            proxy.choose_fault = make_fault_chooser(SEED, 0.5, applies=lambda method, path: path.endswith("/commit"))
            client = CommitClient(SeamarkClient(proxy.base_url, retries=20))
            sequence = 0
            # At least 15 changes, and as many as needed for each kind of fault to occur.
            while sequence < 15 or not {fault for fault, *_ in proxy.requests} >= {*FAULTS}:
                body = make_numbered_change(lake, sequence)
                while True:
                    with suppress(Unreachable, ServerFailed):  # If all attempts fail, the loop repeats them.
                        client.commit("db.t", body)
                        break
                sequence += 1
            request_count = len(proxy.requests)
            proxy.choose_fault = lambda method, path: "lost reply"
            with pytest.raises(Unreachable):
                client.commit("db.t", {"add": [lake.write_data_file([(99, 0, "x")])]})
            assert len(proxy.requests) == request_count + 1, "a change without a producer is sent only once"
        assert _read_ids(server.base_url, "t") == sorted([*range(sequence), 99]), f"FAULT_SEED={SEED}"


@pytest.mark.slow
def test_server_killed_at_any_step_leaves_each_sequence_once(tmp_path: Path) -> None:
    """The test kills the server during each commit, and then repeats the commit.

    About half of the changes remove a file, so the server also rewrites manifests.
    """
    print(f"kills: FAULT_SEED={SEED}")
    rng = random.Random(SEED)
    steps = ("before-metadata-write", "after-metadata-write", "before-swap", "after-swap")
    with KillableServer(tmp_path / "home") as server:
        client = server.start()
        lake = _create_table_on_server(server.base_url, "t")
        path_by_sequence: dict[int, str] = {}
        head: int | None = None
        for sequence in range(int(os.environ.get("FAULT_ROUNDS", "8"))):
            body = make_numbered_change(lake, sequence)
            if path_by_sequence and rng.random() < 0.5:
                removed_sequence = rng.choice(sorted(path_by_sequence))
                body |= {"remove": [{"file-path": path_by_sequence.pop(removed_sequence)}], "read-snapshot-id": head}
            path_by_sequence[sequence] = body["add"][0]["file-path"]
            step = rng.choice(steps)
            # A commit writes manifests, the manifest list and the metadata, and swaps the pointer once.
            nth = 1 if step.endswith("swap") else rng.randint(1, 3)
            server.run_until_death(step, nth, lambda client=client, body=body: client.call("POST", lake.path, body))
            client = server.start()
            status, answer = client.call("POST", lake.path, body)
            assert status == 200, (SEED, step, nth, answer)
            assert answer["duplicate"] == (step == "after-swap"), (SEED, step, nth)
            head = answer["snapshot-id"]
            assert _read_ids(server.base_url, "t") == sorted(path_by_sequence), (SEED, step, nth)
