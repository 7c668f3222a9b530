"""Tests of HDFS with a real NameNode and DataNode."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hdfs_native
import pyarrow as pa
import pytest

import seamark
from seamark.connector.client.catalog import create_table, drop_table
from seamark.connector.client.indexes import IndexClient
from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError, ObjectExists, RetryLater, StorageError, StorageFull
from seamark.formats.storage.locations import normalize_location, parse_location
from seamark.metaserver.objects.hdfs import hdfs_objects
from seamark.metaserver.objects.hdfs import threads as client_threads
from seamark.metaserver.objects.hdfs.hdfs_objects import TEMPORARY_PREFIX, HdfsObjects
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from tests.connector.server_thread import ServerThread
from tests.objects.contract import ObjectStoreContract
from tests.seeds import first_seed
from tests.services.clouds.hdfs import HdfsCluster, run_hdfs
from tests.services.process import choose_free_port
from tests.waits import block_until, until

SCHEMA = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "id", "type": "long", "required": False},
        {"id": 2, "name": "part", "type": "string", "required": False},
    ],
}


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with run_hdfs(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


def build_settings(warehouse: str, **changes: Any) -> Settings:
    return dataclasses.replace(Settings(warehouse=warehouse, storage_timeout_s=60.0), **changes)


def make_client(location: str) -> tuple[hdfs_native.Client, str]:
    parsed = parse_location(location)
    return hdfs_native.Client(f"hdfs://{parsed.bucket}"), f"/{parsed.path}"


@pytest.mark.slow
class TestHdfsContract(ObjectStoreContract):
    @pytest.fixture
    def base(self, hdfs: HdfsCluster) -> str:
        return f"{hdfs.create_folder_name()}/warehouse/corner"

    @pytest.fixture
    async def store(self, base: str) -> AsyncIterator[ObjectStore]:
        async with open_objects(build_settings(base.removesuffix("/corner")), SystemClock()) as objects:
            yield objects


@pytest.mark.slow
async def test_random_operations_agree_with_a_dictionary(hdfs: HdfsCluster) -> None:
    warehouse, rng = f"{hdfs.create_folder_name()}/wh", random.Random(first_seed())
    contents: dict[str, bytes] = {}
    locations = [f"{warehouse}/{folder}/{name}" for folder in ("t", "t/data", "t1") for name in ("a", "b ü%41", "c")]
    async with open_objects(build_settings(warehouse), SystemClock()) as objects:
        for _ in range(200):
            location = rng.choice(locations)
            match rng.choice(("create", "create", "read", "range", "delete", "list")):
                case "create":
                    data = rng.randbytes(rng.choice((0, 1, 100, 70_000)))
                    if location in contents:
                        with pytest.raises(ObjectExists):
                            await objects.create(location, data)
                    else:
                        await objects.create(location, data, durable=rng.random() < 0.5)
                        contents[location] = data
                case "read" if location in contents:
                    assert await objects.read(location) == contents[location]
                case "range" if location in contents:
                    start, length = rng.randrange(80_000), rng.randrange(80_000)
                    part = await objects.read_range(location, start, length)
                    assert part == contents[location][start : start + length]
                case "delete":
                    await objects.delete(location)
                    contents.pop(location, None)
                case "list":
                    folder = rng.choice((warehouse, f"{warehouse}/t", f"{warehouse}/t/data"))
                    listed_sizes = {info.location: info.size_bytes async for info in objects.list(folder)}
                    expected_sizes = {
                        location: len(data) for location, data in contents.items() if location.startswith(f"{folder}/")
                    }
                    assert listed_sizes == expected_sizes
                case _:
                    assert await objects.exists(location) == (location in contents)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["before", "after"])
async def test_lost_reply_to_a_rename_is_not_reported_as_a_conflict(
    hdfs: HdfsCluster, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    warehouse = f"{hdfs.create_folder_name()}/wh"
    open_client = hdfs_objects.open_client

    def open_faulty_client(authority: str, settings: Settings) -> hdfs_native.Client:
        client = open_client(authority, settings)
        rename = client.rename

        def lose_reply(*arguments: Any, **options: Any) -> None:
            if fault == "after":
                rename(*arguments, **options)
            raise RuntimeError("the connection was reset")

        client.rename = lose_reply  # type: ignore[method-assign]
        return client

    monkeypatch.setattr(hdfs_objects, "open_client", open_faulty_client)
    async with open_objects(build_settings(warehouse), SystemClock()) as objects:
        if fault == "after":
            await objects.create(f"{warehouse}/a", b"1")
            assert await objects.read(f"{warehouse}/a") == b"1"
        else:
            with pytest.raises(RetryLater, match="connection was reset"):
                await objects.create(f"{warehouse}/a", b"1")
        client, path = make_client(warehouse)
        names = [status.path.rpartition("/")[2] for status in client.list_status(path)]
        assert names == (["a"] if fault == "after" else [])


class RefusingClient:
    """An HDFS client whose NameNode refuses each new file with `error`.

    The file `/wh/a` of another writer exists. `deleted` are the paths that the server has tried to delete.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.deleted: list[str] = []

    def create(self, path: str, options: object) -> None:
        raise self.error

    def get_file_info(self, path: str) -> SimpleNamespace:
        if path != "/wh/a":
            raise FileNotFoundError(path)
        return SimpleNamespace(isdir=False)

    def delete(self, path: str, recursive: bool) -> bool:
        self.deleted.append(path)
        return False


@pytest.mark.parametrize(
    ("error_text", "expected"),
    [
        ("SafeModeException: Name node is in safe mode.", RetryLater),
        ("DSQuotaExceededException", StorageFull),
        ("AccessControlException: Permission denied", StorageError),
    ],
)
async def test_write_that_hdfs_refuses_is_not_a_lost_reply(
    monkeypatch: pytest.MonkeyPatch, error_text: str, expected: type[Exception]
) -> None:
    client = RefusingClient(RuntimeError(error_text))
    monkeypatch.setattr(hdfs_objects, "open_client", lambda authority, settings: client)
    with closing(HdfsObjects([], Settings(), SystemClock())) as objects, pytest.raises(expected):
        await objects.create("hdfs://lake/wh/a", b"second writer")
    assert [path.startswith(f"/wh/{TEMPORARY_PREFIX}") for path in client.deleted] == [True]


class WaitingHdfsClient:
    """An HDFS client whose calls wait until `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def get_file_info(self, path: str) -> SimpleNamespace:
        self.may_answer.wait()
        return SimpleNamespace(isdir=False)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WaitingHdfsClient]]:
    """Return the list of the clients that the server has opened.

    The first client does not answer before the end of the test. Later clients answer at once.
    """
    clients: list[WaitingHdfsClient] = []

    def open_event_client(authority: str, settings: Settings) -> WaitingHdfsClient:
        clients.append(WaitingHdfsClient())
        if len(clients) > 1:
            clients[-1].may_answer.set()
        return clients[-1]

    monkeypatch.setattr(hdfs_objects, "open_client", open_event_client)
    yield clients
    for client in clients:
        client.may_answer.set()


async def test_silent_name_node_delays_neither_other_calls_nor_the_exit(clients: list[WaitingHdfsClient]) -> None:
    with closing(HdfsObjects([], Settings(storage_timeout_s=60.0), SystemClock())) as objects:
        checks = [asyncio.create_task(objects.exists(f"hdfs://silent/{number}")) for number in range(10)]
        await until(lambda: clients)
        assert await objects.exists("hdfs://lake/a")
        names = [thread.name for thread in threading.enumerate() if not thread.daemon]
        assert [name for name in names if name.startswith("objects-hdfs")] == []
        for check in checks:
            check.cancel()
        await asyncio.wait(checks)


async def test_client_that_does_not_answer_is_replaced(clients: list[WaitingHdfsClient]) -> None:
    with closing(HdfsObjects([], Settings(storage_timeout_s=0.1), SystemClock())) as objects:
        with pytest.raises(RetryLater, match="HDFS did not answer"):
            await objects.exists("hdfs://lake/a")
        objects._settings = Settings(storage_timeout_s=60.0)
        assert await objects.exists("hdfs://lake/a")
        assert len(clients) == 2


async def test_number_of_hung_threads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_threads, "HUNG_THREADS_MAX", 2)
    # A thread hangs if its call does not end before the timeout. The next call then needs another thread.
    clock, may_answer, calls = SimulatedClock(1), threading.Event(), 0

    def call(get_client: Callable[[], str]) -> str:
        nonlocal calls
        calls += 1
        may_answer.wait()
        return get_client()

    threads = client_threads.ClientThreads("lake", lambda: "client", clock)
    try:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await threads.run(call, 0.05)
        assert calls == 3, "two calls hang, and one trial call is allowed. The other two calls are not executed"
        clock.advance(60_001)  # The next trial is possible a minute after the last trial.
        trial = asyncio.create_task(threads.run(call, 60.0))
        await until(lambda: calls == 4)
    finally:
        may_answer.set()
    assert await trial == "client"
    assert await threads.run(call, 60.0) == "client"


@pytest.mark.slow
async def test_incomplete_objects_are_neither_listed_nor_read(hdfs: HdfsCluster) -> None:
    warehouse = f"{hdfs.create_folder_name()}/wh"
    async with open_objects(build_settings(warehouse), SystemClock()) as objects:
        await objects.create(f"{warehouse}/t/a", b"1")
        client, path = make_client(warehouse)
        with client.create(f"{path}/t/{TEMPORARY_PREFIX}left") as writer:
            writer.write(b"half")
        assert [info.location async for info in objects.list(warehouse)] == [f"{warehouse}/t/a"]


@pytest.mark.slow
async def test_errors_from_hdfs_say_what_to_correct(hdfs: HdfsCluster) -> None:
    warehouse = f"{hdfs.create_folder_name()}/wh"
    client, path = make_client(warehouse)
    async with open_objects(build_settings(warehouse), SystemClock()) as objects:
        await objects.create(f"{warehouse}/file", b"1")
        with pytest.raises(StorageError, match="a part of it is a file"):
            await objects.create(f"{warehouse}/file/below", b"1")
        client.set_permission(path, 0o500)
        client.set_owner(path, "somebody")
        await objects.ping()
    unreachable = f"hdfs://127.0.0.1:{choose_free_port()}/wh"
    async with open_objects(build_settings(unreachable, storage_timeout_s=5.0), SystemClock()) as objects:
        with pytest.raises(RetryLater, match="HDFS did not"):
            await objects.read(f"{unreachable}/a")
    with pytest.raises(ConfigError, match="No configuration file names the NameNodes of 'lake'"):
        async with open_objects(build_settings("hdfs://lake/wh"), SystemClock()):
            pass


@pytest.mark.slow
async def test_nameservice_is_found_in_the_configuration_folder(hdfs: HdfsCluster, tmp_path: Path) -> None:
    address = hdfs.root.removeprefix("hdfs://")
    properties = {
        "dfs.nameservices": "LakeHA",
        "dfs.ha.namenodes.LakeHA": "one",
        "dfs.namenode.rpc-address.LakeHA.one": address,
    }
    entries = "".join(f"<property><name>{name}</name><value>{v}</value></property>" for name, v in properties.items())
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{entries}</configuration>")
    (tmp_path / "core-site.xml").write_text("<configuration/>")
    path = hdfs.create_folder_name().removeprefix(f"{hdfs.root}/")
    settings = build_settings(f"hdfs://LakeHA/{path}", hdfs_config_folder=str(tmp_path))
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(f"hdfs://LakeHA/{path}/a", b"1")
    async with open_objects(build_settings(f"{hdfs.root}/{path}"), SystemClock()) as objects:
        assert await objects.read(f"{hdfs.root}/{path}/a") == b"1"


@pytest.mark.slow
def test_table_in_hdfs_is_written_planned_and_purged(hdfs: HdfsCluster, tmp_path: Path) -> None:
    warehouse = f"{hdfs.create_folder_name()}/lake"
    server = ServerThread(tmp_path / "home", warehouse=warehouse, drop_retention_s=0, housekeeping_interval_s=0.1)
    server.start()
    try:
        with closing(IndexClient(server.url)) as client:
            create_table(client, "db.t", SCHEMA, properties={})
            for start in (0, 1000):
                ids = range(start, start + 1000)
                data = pa.table({"id": ids, "part": [f"p {number % 3}/ü" for number in ids]})
                seamark.append(client, "db.t", data)
            assert client.load_table("db.t").location.startswith(f"{warehouse}/db/t")
            assert sorted(seamark.scan(client, "db.t").to_arrow()["id"].to_pylist()) == list(range(2000))
            assert client.explain("db.t", "id > 1990").files == 1
            planned_rows = seamark.scan(client, "db.t", where="id > 1990").to_arrow()
            assert sorted(planned_rows["id"].to_pylist()) == list(range(1991, 2000))
            assert server.run(_list_objects(server.components.objects, warehouse))
            drop_table(client, "db.t", purge=True)
        block_until(lambda: not server.run(_list_objects(server.components.objects, warehouse)))
    finally:
        server.stop()


async def _list_objects(objects: ObjectStore, folder: str) -> list[str]:
    return [info.location async for info in objects.list(folder)]


def test_spellings_of_one_hdfs_location_are_equal() -> None:
    assert parse_location("HDFS://NameNode:8020/lake/t/") == parse_location("hdfs://namenode:8020/lake/t")
    assert normalize_location("hdfs://NN:8020/lake/t") == normalize_location("hdfs://nn/lake/t")
    assert parse_location("hdfs://nn/A") != parse_location("hdfs://nn/a")


@pytest.mark.parametrize(
    "location",
    [
        "hdfs:///lake",
        "hdfs:/lake",
        "hdfs://user@nn/lake",
        "hdfs://nn:port/lake",
        "hdfs://nn:8020:1/lake",
        "hdfs://-nn/lake",
        "hdfs://nn/lake/../other",
        "hdfs://nn/lake//t",
        "hdfs://nn/lake/%2e%2e/t",
        "hdfs://nn/lake/a:b",
        "hdfs://nn/.reserved/.inodes/16386",
        "hdfs://nn/lake/t/.snapshot/before/data",
        "hdfs://nn/lake/t/%2esnapshot/before",
        "hdfs://nn/lake?user=root",
    ],
)
def test_ambiguous_or_reserved_hdfs_location_is_refused(location: str) -> None:
    with pytest.raises(BadRequest):
        parse_location(location)
