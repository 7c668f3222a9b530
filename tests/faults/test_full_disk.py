"""Tests of a full disk: commits are rejected at once with a clear error, the table is unchanged, and later work
succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from seamark.connector.client import client as client_module
from seamark.connector.client import commits as commits_module
from seamark.connector.client.errors import ServerStorageFull
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append
from tests.faults.rigs.disk import SmallDisk, mount_small_disk
from tests.faults.rigs.http import HttpClient, create_key
from tests.services.command import run_seamark
from tests.services.process import is_http_ok
from tests.services.seamark import SHARED_KEY, Seamark
from tests.waits import becomes_true

FULL_PARTS = ("home, warehouse and log", "the warehouse only", "the database only")
"""The parts of a server that are on the full disk."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mount_small_disk(tmp_path / "disk") as disk:
        yield disk


def _build_server(full_part: str, disk: SmallDisk, tmp_path: Path) -> Seamark:
    if full_part.startswith("home"):
        return Seamark(disk.root / "home")
    if full_part.startswith("the warehouse"):
        return Seamark(tmp_path / "home", warehouse=f"file://{disk.root / 'lake'}")
    return Seamark(tmp_path / "home", database=f"sqlite:///{disk.root / 'seamark.db'}")


def _list_metadata_files(server: Seamark) -> list[Path]:
    return sorted(Path(server.warehouse.removeprefix("file://")).rglob("*.metadata.json"))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("full_part", FULL_PARTS)
def test_commits_on_a_full_disk_are_rejected_and_earlier_commits_remain(
    tmp_path: Path, disk: SmallDisk, full_part: str
) -> None:
    with _build_server(full_part, disk, tmp_path) as server:
        client = HttpClient(server.base_url, timeout_s=60)
        assert client.create_table()[0] == 200
        commit_count = 3
        for snapshot_id in range(1, commit_count + 1):
            assert client.append(snapshot_id, snapshot_id - 1 or None, snapshot_id)[0] == 200
        for round_number in range(2):
            disk.fill()
            key = create_key()
            while True:
                # The database may still have free pages in its log for some commits (far fewer than 2000). A commit
                # that hangs ends at the client's time limit.
                status, body = client.append(commit_count + 1, commit_count, commit_count + 1, key=key)
                if status != 200:
                    break
                commit_count, key = commit_count + 1, create_key()
                assert commit_count < 2000, "the disk is not full"
            assert status == 503, body
            assert "full" in body["error"]["message"], body
            assert int(client.headers["Retry-After"]) >= 1
            assert is_http_ok(f"{server.base_url}/healthz")
            status, body = client.create_table("other")
            assert status == 503, body
            assert client.read_chain() == list(range(1, commit_count + 1)), "the table is unchanged"
            # Files of rejected commits are removed. The current metadata file and those of its log exist.
            expected = {Path(location.removeprefix("file://")) for location in client.list_metadata_files()}
            assert becomes_true(lambda wanted=expected: set(_list_metadata_files(server)) == wanted), full_part

            disk.free_space()
            status, body = client.append(commit_count + 1, commit_count, commit_count + 1, key=key)
            assert status == 200, f"round {round_number}: {body}"
            commit_count += 1
            assert client.read_chain() == list(range(1, commit_count + 1))
        for path in _list_metadata_files(server):
            json.loads(path.read_text())
        server.kill9()
        server.start()
        assert HttpClient(server.base_url).read_chain() == list(range(1, commit_count + 1)), (
            "the table is unchanged after a restart"
        )


def test_server_killed_on_a_full_disk_restarts_once_there_is_space(tmp_path: Path, disk: SmallDisk) -> None:
    with _build_server(FULL_PARTS[0], disk, tmp_path) as server:
        client = HttpClient(server.base_url)
        assert client.create_table()[0] == 200
        assert client.append(1, None, 1)[0] == 200
        disk.fill()
        status, _ = client.append(2, 1, 2)
        assert status == 503
        server.kill9()
        disk.free_space()
        server.start()
        client = HttpClient(server.base_url)
        assert client.read_chain() == [1]
        assert client.append(2, 1, 2)[0] == 200


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("full_part", [part for part in FULL_PARTS if "warehouse only" not in part])
def test_server_on_a_full_disk_ends_with_an_error_of_one_sentence(
    tmp_path: Path, disk: SmallDisk, full_part: str
) -> None:
    """The server first starts on a full disk without its files, and then with the files of an earlier server."""
    if full_part.startswith("home"):
        flags = ["--home", str(disk.root / "home")]
    else:
        flags = ["--home", str(tmp_path / "home"), "--database", f"sqlite:///{disk.root / 'seamark.db'}"]
    disk.fill()
    # The second start, with the files of an earlier server, is tested only if the disk has the whole home. A database
    # alone may have free pages in its write-ahead log, and the server then starts.
    for _ in range(2 if full_part.startswith("home") else 1):
        serve_result = run_seamark("serve", "--port", "0", *flags, env={"SEAMARK_ENCRYPTION_KEY": SHARED_KEY})
        assert serve_result.returncode == 2, serve_result.stderr
        assert "Traceback" not in serve_result.stderr
        line = serve_result.stderr.strip().splitlines()[-1]
        assert line.startswith("Error: "), line
        assert "full" in line, line
        assert "space" in line, line
        disk.free_space()
        with _build_server(full_part, disk, tmp_path) as server:
            assert HttpClient(server.base_url).create_table("t")[0] in (200, 409)
            server.kill9()
        disk.fill()


def test_writer_gets_an_error_at_once_when_the_database_disk_is_full(
    tmp_path: Path, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _build_server("the database only", disk, tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        assert HttpClient(server.base_url).create_table("t")[0] == 200
        rows = pa.table({"id": [1]})
        append(client, "db.t", rows, producer=("writer", 0))
        disk.fill()
        failing_time = SimpleNamespace(sleep=lambda seconds: pytest.fail(f"the write waits {seconds} s"))
        for module in (client_module, commits_module):
            monkeypatch.setattr(module, "time", failing_time)

        def fill_log() -> None:
            for number in range(1, 2000):  # The first appends may fit into free pages of the write-ahead log.
                append(client, "db.t", rows, producer=("writer", number))

        with pytest.raises(ServerStorageFull, match="disk of the database is full"):
            fill_log()
