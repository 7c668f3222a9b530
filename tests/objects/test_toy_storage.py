"""Tests that a storage of three classes, registered in three registries, supports a table from creation to purge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import seamark
from seamark.connector.client.catalog import create_namespace, create_table, drop_table
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.builds import GroupLimits, InProcessWorkers
from seamark.connector.index.indexer import Indexer
from seamark.formats.iceberg.metadata.properties import configures_client
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.formats.storage.locations import list_spellings, make_location_key, normalize_location, parse_location
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.objects.storages import compute_access_stamp
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import resolve_settings
from tests.connector.server_thread import ServerThread
from tests.objects.contract import ObjectStoreContract
from tests.objects.toy_storage import SECRET, register_example_storage
from tests.waits import block_until

WAREHOUSE = "toy://shelf/lake"
SCHEMA = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "id", "type": "long", "required": False},
        {"id": 2, "name": "name", "type": "string", "required": False},
    ],
}
FILES, ROWS = 6, 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder in which the example storage of `tests/objects/toy_storage.py` keeps its objects."""
    objects_folder = tmp_path / "toys"
    objects_folder.mkdir()
    with register_example_storage(objects_folder):
        yield objects_folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(
        tmp_path / "home",
        warehouse=WAREHOUSE,
        drop_retention_s=0,
        index_retention_s=0,
        housekeeping_interval_s=0.1,
        index_wait_s=30,
    ) as server:
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    """Yield a client of a server whose table `db.t` has 6 files of 20 rows.

    The ids of each file are spread over all ids, so bounds of the column `id` prune no file.
    """
    with closing(IndexClient(server.url)) as client:
        create_table(client, "db.t", SCHEMA, properties={})
        for number in range(FILES):
            ids = [number + FILES * row for row in range(ROWS)]
            seamark.append(client, "db.t", pa.table({"id": ids, "name": [f"n{value}" for value in ids]}))
        yield client


class TestToyContract(ObjectStoreContract):
    """The contract of all stores, tested for the store that the server opens for locations of the example storage."""

    @pytest.fixture
    def base(self) -> str:
        return WAREHOUSE

    @pytest.fixture
    async def store(self, folder: Path, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        async with open_objects(Settings(home=tmp_path, warehouse=WAREHOUSE), SystemClock()) as objects:
            yield objects


def test_table_on_the_example_storage_is_written_read_indexed_and_purged(client: IndexClient, folder: Path) -> None:
    loaded_table = client.load_table("db.t")
    assert loaded_table.location.startswith(f"{WAREHOUSE}/db/t")
    rows = seamark.scan(client, "db.t").to_arrow().sort_by("id")
    assert rows["id"].to_pylist() == list(range(FILES * ROWS))
    assert client.explain("db.t", "id = 40").files == FILES

    client.put_index("db.t", "by_id", kind="bloom", columns=["id"])
    indexing_round = Indexer(
        client, lambda: closing(InProcessWorkers()), limits=GroupLimits(files=FILES)
    ).maintain_all_tables()
    assert (indexing_round.builds, indexing_round.failed) == (1, 0)
    assert client.explain("db.t", "id = 40").files < FILES
    assert seamark.scan(client, "db.t", where="id = 40").to_arrow()["name"].to_pylist() == ["n40"]
    assert list(folder.rglob("*.parquet"))

    drop_table(client, "db.t", purge=True)
    block_until(lambda: not [path for path in folder.rglob("*") if path.is_file()])


def test_storage_key_is_sent_to_clients_only_by_the_catalog(client: IndexClient) -> None:
    loaded_table = client.load_table("db.t")
    path = client.files("db.t")["file_path"][0].as_py()
    assert Storage(loaded_table.storage).read(path)
    with pytest.raises(PermissionError, match="needs a key"):
        Storage().read(path)


def test_paths_outside_the_warehouse_are_rejected(client: IndexClient) -> None:
    for location in (
        f"{WAREHOUSE}/../other",
        f"{WAREHOUSE}/%2e%2e/other",
        f"{WAREHOUSE}//t",
        f"{WAREHOUSE}/a\\b",
        WAREHOUSE,
        "toy://shelf/other",
        "toy:///lake/t",
        "toy://user@shelf/lake/t",
        "nosuch://shelf/lake/t",
    ):
        with pytest.raises(ClientError, match=r"location|Location"):
            create_table(client, "db.other", SCHEMA, location=location, properties={})
    create_namespace(client, "elsewhere", {})
    create_table(client, "elsewhere.t", SCHEMA, location="toys://shelf/lake/elsewhere/t", properties={})
    seamark.append(client, "elsewhere.t", pa.table({"id": [1], "name": ["n1"]}))
    assert seamark.scan(client, "elsewhere.t").to_arrow()["id"].to_pylist() == [1]
    with pytest.raises(ClientError, match="overlaps"):
        create_table(client, "elsewhere.u", SCHEMA, location="toy://shelf/lake/elsewhere/t", properties={})


def test_location_rules_of_the_toy_apply_to_comparisons_and_settings(folder: Path) -> None:
    assert parse_location("TOYS://shelf/a/") == parse_location("toy://shelf/a")
    assert make_location_key(parse_location("toy://shelf/a%41")) == make_location_key(parse_location("toys://shelf/aA"))
    assert normalize_location("toys://shelf/a") == normalize_location("toy://shelf/a")
    assert list_spellings("toy://shelf/a") == ["toy://shelf/a", "toy://shelf/a", "toys://shelf/a"]
    assert configures_client("toy.key")
    assert SECRET in compute_access_stamp(Settings(), None)
    assert resolve_settings({"warehouse": "toy://shelf/x"}, {}).warehouse == "toy://shelf/x"


def test_scheme_without_a_registered_storage_is_rejected() -> None:
    with pytest.raises(BadRequest, match="supports file:// and s3://"):
        parse_location("toy://unknown/a")
    with pytest.raises(ConfigError, match="file:// or s3://"):
        resolve_settings({"warehouse": "toy://unknown/a"}, {})
    with pytest.raises(ValueError, match="unsupported storage"):
        Storage().open("toy://unknown/a")
    assert not configures_client("toys.key")
