"""Tests of a hostile local writer that replaces folders and files of its table by links to those of another tenant.

Meanwhile the server plans, reads, expires, removes orphans, commits and purges, and workers run statements and jobs. No
value of the other tenant appears in an answer, and none of its files is read into a new file, changed or deleted. The
other tenant's files have the names in the writer's metadata, so that each link leads to a suitable file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import threading
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from seamark.commands.job_worker import run as run_job
from seamark.connector.client import storage
from seamark.connector.client.client import SeamarkClient
from seamark.connector.write.appends import append
from seamark.metaserver.services.launching.launchers import JobRequest
from tests.api.client import Api
from tests.connector.lake import open_catalog
from tests.server.rig import RunningServer, run_server

SECRET = "the-other-tenants-value"
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
ROUNDS = 4
PAUSE_S_MAX = 0.004
"""The longest time between two changes of a path."""
_DAY_MS = 86_400_000
SEEDS = [pytest.param(seed, marks=[] if seed == 1 else pytest.mark.slow) for seed in range(1, 9)]


def create_filled_table(url: str, namespace: str, text: str, appends: int = 3) -> None:
    with open_catalog(url) as catalog:
        catalog.create_table(f"{namespace}.t", schema=SCHEMA)
    with closing(SeamarkClient(url)) as client:
        for number in range(appends):
            append(client, (namespace, "t"), pa.table({"id": [number], "text": [text]}, schema=SCHEMA))


class Swapper:
    """A thread that replaces a file or folder by a link for a moment, again and again.

    The path is below `own_table`. The link leads to the path of the same name below `other_folder`.
    """

    def __init__(self, own_table: Path, other_folder: Path, seed: int) -> None:
        self._own_table, self._other_folder = own_table, other_folder
        self._rng = random.Random(seed)
        self._end_event = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.swaps = 0

    def __enter__(self) -> Swapper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end_event.is_set():
            with suppress(OSError):
                self._replace_for_a_moment(self._choose_path())
                self.swaps += 1

    def _choose_path(self) -> Path:
        choices = [self._own_table, self._own_table / "data", self._own_table / "metadata"]
        choices += [path for folder in choices[1:] for path in folder.iterdir()]
        return self._rng.choice(choices)

    def _replace_for_a_moment(self, path: Path) -> None:
        away_path = path.with_name(f"{path.name}-away")
        counterpart = self._other_folder / path.relative_to(self._own_table)
        link = path.with_name(f"{path.name}-link")
        link.symlink_to(os.path.relpath(counterpart, path.parent) if self._rng.random() < 0.5 else counterpart)
        path.rename(away_path)
        link.rename(path)
        self._end_event.wait(self._rng.random() * PAUSE_S_MAX)
        path.unlink()
        away_path.rename(path)
        self._end_event.wait(self._rng.random() * PAUSE_S_MAX)


def list_plain_files(folder: Path) -> list[Path]:
    """Return all files below the folder without following links."""
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return sorted(path for path in paths if not path.is_symlink())


def compute_digests(folder: Path) -> dict[str, str]:
    files = list_plain_files(folder)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copy_files_under_the_same_names(own_table: Path, other_path: Path, matching_path: Path) -> None:
    """Give the other tenant a file for each file name of the writer.

    Both tenants also get an old file that no table names, for orphan removal.

    Args:
        own_table: The folder of the writer's table.
        other_path: The folder of the other tenant's table.
        matching_path: The data file to copy for each data file. It has as many rows as the writer's files.
    """
    for folder in ("data", "metadata"):
        (own_table / folder / "orphan.parquet").write_bytes(b"orphan")
    for path in list_plain_files(own_table):
        target = other_path / path.relative_to(own_table)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(matching_path if path.suffix == ".parquet" else path, target)
        for old_path in (path, target):
            os.utime(old_path, (1, 1))  # In 1970, so each file is old enough for orphan removal.


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_file_of_another_tenant_is_read_changed_or_deleted(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_confined_to", None)
    rng = random.Random(seed)
    async with run_server(tmp_path, drop_retention_s=0, plan_prepare_bytes=0, sql="on") as server:
        warehouse = tmp_path / "warehouse"
        for namespace in ("mine", "theirs"):
            assert (await Api(server)("POST", "/v1/namespaces", {"namespace": [namespace]})).status == 200
        await asyncio.to_thread(create_filled_table, server.url, "theirs", SECRET)
        (other_folder,) = (warehouse / "theirs").iterdir()
        # Its rows are as many as those of the writer's files, so a reader that follows a link would not fail.
        matching_path = next((other_folder / "data").rglob("*.parquet"))
        swaps = 0
        for round_number in range(ROUNDS):
            await asyncio.to_thread(create_filled_table, server.url, "mine", "own")
            own_table = max((warehouse / "mine").iterdir(), key=lambda path: path.stat().st_mtime_ns)
            # A link at each file of the writer then leads to a file of the other tenant.
            copy_files_under_the_same_names(own_table, other_folder, matching_path)
            digests_before = compute_digests(warehouse / "theirs")
            with Swapper(own_table, other_folder, seed * 100 + round_number) as swapper:
                answers = [await carry_out_action(server, warehouse, action) for action in rng.sample(ACTIONS * 2, 8)]
                answers += [
                    await carry_out_action(server, warehouse, "purge"),
                    await carry_out_action(server, warehouse, "housekeep"),
                ]
            swaps += swapper.swaps
            assert compute_digests(warehouse / "theirs") == digests_before
            assert not any(SECRET in answer for answer in answers)
            for path in list_plain_files(own_table):
                assert SECRET.encode() not in path.read_bytes(), path
            next_answer = await Api(server)("DELETE", "/v1/namespaces/mine/tables/t?purgeRequested=false")
            assert next_answer.status in (204, 404), next_answer.raw
    assert swaps > ROUNDS * 4  # With fewer than four links in a round, the test would have tested little.


ACTIONS = ["load", "plan", "sql", "join", "expire", "orphans", "commit", "append", "compaction", "statistics"]


async def carry_out_action(server: RunningServer, warehouse: Path, action: str) -> str:
    """Carry out an action on the table `mine.t`, and return the server's answer as text.

    The action is a request, a round of housekeeping, or a job of a table service. The answer may be an error, because
    the writer replaces its own files.
    """
    api, table = Api(server), "/v1/namespaces/mine/tables/t"
    maintenance = "/api/v1/tables/mine/t"
    match action:
        case "load":
            answer = await api("GET", table)
        case "plan":
            condition = {"type": "gt-eq", "term": "id", "value": 0}
            answer = await api("POST", f"{table}/plan", {"filter": condition, "stats-fields": ["text"]})
        case "sql":
            answer = await api("POST", "/api/v1/sql", {"statement": "SELECT * FROM mine.t"})
        case "join":
            text = "SELECT b.id FROM theirs.t AS b JOIN mine.t AS a ON a.id = b.id WHERE a.text <> 'x'"
            answer = await api("POST", "/api/v1/sql", {"statement": text})
        case "expire":
            answer = await api("POST", f"{maintenance}/expire-snapshots", {"retain-last": 1, "older-than-ms": 2**52})
        case "orphans":
            answer = await api("POST", f"{maintenance}/remove-orphan-files", {"older-than-ms": 2 * _DAY_MS})
        case "commit":
            body = {"requirements": [], "updates": [{"action": "set-properties", "updates": {"k": "v"}}]}
            answer = await api("POST", table, body)
        case "purge":
            answer = await api("DELETE", f"{table}?purgeRequested=true")
        case "housekeep":
            return str(await server.components.housekeeping.run_round())
        case "append":
            return await asyncio.to_thread(try_append, server.url)
        case _:
            request = JobRequest(action, ("mine",), "t", server.url, None, (str(warehouse),), 0o022)
            try:
                return str(await asyncio.to_thread(run_job, request, lambda progress: None))
            finally:
                # A job confines its process to the warehouse. It runs in the process of the test here.
                storage._confined_to = None

    return str(answer.raw)


def try_append(url: str) -> str:
    try:
        with closing(SeamarkClient(url)) as client:
            append(client, ("mine", "t"), pa.table({"id": [9], "text": ["own"]}, schema=SCHEMA))
    except Exception as error:  # noqa: BLE001  The append fails while the folder is a link.
        return str(error)
    return ""
