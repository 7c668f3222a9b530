"""Tests of `importTables`, which registers several tables in one transaction.

The oracle is `importTable`, with one request for each table in the same order.
"""

from __future__ import annotations

import gzip
import json
import random
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.catalog import (
    TableImport,
    create_namespace,
    create_table,
    drop_table,
    import_table,
    import_tables,
)
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.moving.rest_catalog import RestSource
from seamark.formats.runtime.errors import RetryLater, SeamarkError
from seamark.metaserver.catalog import imports
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import CreateEntry, Operation
from tests.api.client import SCHEMA, VIEW_VERSION
from tests.moving.random_names import list_catalog
from tests.moving.test_import import COLUMNS
from tests.seeds import first_seed, mark_fast
from tests.services.seamark import Seamark

TABLES_PER_REQUEST = 24


class MetadataFiles:
    """Metadata files of random tables.

    Some of the tables cannot be registered at all, and some cannot be registered together with an earlier table.
    """

    def __init__(self, rng: random.Random, metadata: dict[str, Any], lake: Path) -> None:
        self._rng = rng
        self._metadata = metadata
        self._lake = lake
        self._written: list[dict[str, Any]] = []

    def write(self) -> str:
        """Write a metadata file, and return its location."""
        metadata = json.loads(json.dumps(self._metadata))
        metadata |= {"table-uuid": str(uuid.UUID(int=self._rng.getrandbits(128), version=4)), "properties": {}}
        metadata["location"] = (self._lake / f"t{len(self._written)}").as_uri()
        # Seven of these 19 choices are faults, so most requests contain valid tables and tables with faults.
        fault = self._rng.choice(("none",) * 12 + ("uuid", "nested", "same", "outside", "property", "json", "missing"))
        earlier_metadata = self._rng.choice(self._written) if self._written else metadata
        if fault == "uuid":
            metadata["table-uuid"] = earlier_metadata["table-uuid"]
        elif fault in ("nested", "same"):
            metadata["location"] = earlier_metadata["location"] + ("/inner" if fault == "nested" else "")
        elif fault == "outside":
            metadata["location"] = "file:///etc/t"
        elif fault == "property":
            metadata["properties"] = {"s3.endpoint": "http://internal"}
        self._written.append(metadata)
        folder = self._lake / f"t{len(self._written)}" if fault == "outside" else _find_folder(metadata["location"])
        path = folder / "metadata" / f"{self._rng.randrange(10**9):09}-a.metadata.json"
        if fault != "missing":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{" if fault == "json" else json.dumps(metadata))
        return path.as_uri()


def _find_folder(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def import_one_by_one(client: IndexClient, namespace: str, locations: dict[str, str]) -> list[TableImport]:
    """Import each table by its own request, and return the result of each table."""
    results = []
    for name, location in locations.items():
        try:
            results.append(TableImport(is_new=import_table(client, (namespace, name), location), error=""))
        except Refused as error:
            # A message names the warehouse of the server. The comparison must not depend on the server.
            results.append(TableImport(is_new=False, error=error.message.replace("/single_target/", "/target/")))
    return results


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 30), 1))
def test_tables_of_one_request_get_the_results_of_single_requests(
    seed: int, origin: IndexClient, target: IndexClient, single_target: IndexClient, lake: Path
) -> None:
    check_batches(seed, origin, target, single_target, lake)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 10))
def test_tables_of_one_request_get_the_results_of_single_requests_in_postgres(
    seed: int, origin: IndexClient, postgres_target: IndexClient, single_target: IndexClient, lake: Path
) -> None:
    check_batches(seed, origin, postgres_target, single_target, lake)


def check_batches(seed: int, origin: IndexClient, target: IndexClient, single_target: IndexClient, lake: Path) -> None:
    """Import random tables by requests for several tables, and by single requests, and compare the catalogs."""
    rng = random.Random(seed)
    create_namespace(origin, "shop", {})
    create_table(origin, "shop.model", COLUMNS, properties={})
    files = MetadataFiles(rng, json.loads(origin.load_table("shop.model", history=True).metadata), lake / "tables")
    view = {"name": "view", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    for client in (target, single_target):
        create_namespace(client, "shop", {})
        client._request_json("POST", "/v1/namespaces/shop/views", body=view)
    registered: dict[str, str] = {}
    for _ in range(3):
        names = [f"n{rng.randrange(10 * TABLES_PER_REQUEST)}" for _ in range(TABLES_PER_REQUEST)]
        locations = {name: files.write() for name in names}
        repeated_names = rng.sample(sorted(registered), min(2, len(registered)))
        locations |= {name: registered[name] for name in repeated_names}
        for name in repeated_names[
            :1
        ]:  # The table is imported again after a drop, under its name or under another one.
            for client in (target, single_target):
                drop_table(client, ("shop", name))
            location = registered.pop(name)
            locations |= {rng.choice((name, f"{name}-again")): location}
        locations |= {"view": files.write(), "a/b": files.write()} if rng.random() < 0.5 else {}
        shuffled_locations = rng.sample(sorted(locations.items()), len(locations))
        planned_results = import_tables(target, "shop", dict(shuffled_locations), dry_run=True)
        results = import_tables(target, "shop", dict(shuffled_locations))
        assert results == import_one_by_one(single_target, "shop", dict(shuffled_locations))
        assert [
            planned_result for planned_result, result in zip(planned_results, results, strict=True) if not result.error
        ] == [result for result in results if not result.error]
        registered |= {
            name: location
            for (name, location), result in zip(shuffled_locations, results, strict=True)
            if result.is_new
        }
    tables = {name: document for name, document in list_catalog(target).items() if name[0] == "table"}
    assert tables == {name: document for name, document in list_catalog(single_target).items() if name[0] == "table"}
    assert {name[-1] for name in tables} == registered.keys()
    registrations = [
        sorted(instant.name for instant in client.timeline() if instant.action == "register")
        for client in (target, single_target)
    ]
    assert registrations[0] == registrations[1]
    assert set(registrations[0]) >= registered.keys()


def test_tables_of_a_missing_namespace_are_refused_together(target: IndexClient) -> None:
    with pytest.raises(NoSuchResource):
        import_tables(target, "none", {"t": "file:///etc/passwd"})
    for locations in ({}, {f"t{number}": "file:///etc/passwd" for number in range(1001)}):
        with pytest.raises(InvalidRequest):
            import_tables(target, "none", locations)


def test_concurrent_requests_for_the_same_tables_register_each_table_once(
    origin: IndexClient, target: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions: list[list[str]] = []
    transact = CatalogContext.transact

    async def record_transaction(context: CatalogContext, operations: Sequence[Operation]) -> None:
        names = [operation.entry.name for operation in operations if isinstance(operation, CreateEntry)]
        transactions.append(names)
        assert not names or all(isinstance(operation, CreateEntry) for operation in operations[: len(names)])
        await transact(context, operations)

    create_namespace(origin, "shop", {})
    create_namespace(target, "shop", {})
    names = [f"t{number}" for number in range(8)]
    for name in names:
        create_table(origin, ("shop", name), COLUMNS, properties={})
    with closing(RestSource({"uri": origin.url}, connections=2)) as source:
        found_tables = source.find_tables(("shop",), names)
    locations = {name: str(location) for name, location in found_tables.items()}
    monkeypatch.setattr(imports, "_TABLES_PER_TRANSACTION_MAX", 3)
    monkeypatch.setattr(CatalogContext, "transact", record_transaction)

    def import_shuffled(seed: int) -> dict[str, TableImport]:
        shuffled = dict(random.Random(seed).sample(sorted(locations.items()), len(locations)))
        return dict(zip(shuffled, import_tables(target, "shop", shuffled), strict=True))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(import_shuffled, range(6)))
    assert not [result.error for results in answers for result in results.values() if result.error]
    for name in names:
        assert [results[name].is_new for results in answers].count(True) == 1
    assert all(names_of_transaction == sorted(names_of_transaction) for names_of_transaction in transactions)
    assert max(map(len, transactions)) in (2, 3)  # At most `_TABLES_PER_TRANSACTION_MAX`.


def test_import_whose_tables_cannot_be_checked_afterwards_is_repeated(
    origin: IndexClient, target: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_namespace(origin, "shop", {})
    create_namespace(target, "shop", {})
    for name in ("a", "b"):
        create_table(origin, ("shop", name), COLUMNS, properties={})
    with closing(RestSource({"uri": origin.url}, connections=2)) as source:
        locations = {name: str(location) for name, location in source.find_tables(("shop",), ["a", "b"]).items()}
    original_check, failures = Tables.check_all_registered, [RetryLater("The storage does not answer", 0)]

    async def fail_once(tables: Tables, caller: Caller, entries: Sequence[Entry]) -> list[SeamarkError | None]:
        if failures:
            raise failures.pop()
        return await original_check(tables, caller, entries)

    monkeypatch.setattr(Tables, "check_all_registered", fail_once)
    # The client repeats a request after a 503, and finds the tables of the first request.
    results = import_tables(target, "shop", locations)
    assert not failures
    assert results == [TableImport(is_new=False, error=""), TableImport(is_new=False, error="")]


def write_table(origin: IndexClient, folder: Path, padding_bytes: int = 0) -> tuple[str, Path]:
    """Write a metadata file of a new table, and return its location and its path.

    The file contains `padding_bytes` bytes of properties, rounded down to thousands.
    """
    metadata: dict[str, Any] = json.loads(origin.load_table("shop.model", history=True).metadata)
    metadata |= {"table-uuid": str(uuid.uuid4()), "location": folder.as_uri(), "metadata-log": []}
    # Each value has 1,000 characters. It contains random digits, because the server refuses a file that gzip shrinks
    # more than 64 times.
    padding = {
        f"padding-{number}": random.Random(number).randbytes(20).hex() * 25 for number in range(padding_bytes // 1000)
    }
    metadata["properties"] = padding
    path = folder / "metadata" / "00001-a.metadata.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(metadata))
    return path.as_uri(), path


def test_file_with_many_names_is_read_once(
    origin: IndexClient, target: IndexClient, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_namespace(origin, "shop", {})
    create_namespace(target, "shop", {})
    create_table(origin, "shop.model", COLUMNS, properties={})
    location, _ = write_table(origin, lake / "t")
    read_locations: list[str] = []
    original_read = LocalObjects.read

    async def record_read(objects: LocalObjects, location: str, *, limit_bytes: int | None = None) -> bytes:
        read_locations.append(location)
        return await original_read(objects, location, limit_bytes=limit_bytes)

    monkeypatch.setattr(LocalObjects, "read", record_read)
    names = [f"t{number}" for number in range(200)]
    results = import_tables(target, "shop", dict.fromkeys(names, location))
    assert read_locations.count(location) == 1
    assert results[0] == TableImport(is_new=True, error="")
    assert {result.is_new for result in results[1:]} == {False}
    assert all("under another name" in result.error for result in results[1:])
    # A repeated request reads the file for the other names, and refuses them again.
    assert import_tables(target, "shop", dict.fromkeys(names, location)) == [
        TableImport(is_new=False, error=""),
        *results[1:],
    ]


@pytest.mark.slow
def test_request_with_large_files_needs_the_memory_of_one(origin: IndexClient, lake: Path, tmp_path: Path) -> None:
    create_namespace(origin, "shop", {})
    create_table(origin, "shop.model", COLUMNS, properties={})
    settings = {"SEAMARK_ALLOWED_LOCATIONS": lake.as_uri()}
    large_bytes = 12 << 20
    added_peak_bytes: dict[int, int] = {}
    for table_count in (1, 16):
        home = tmp_path / f"server-{table_count}"
        locations: dict[str, str] = {}
        for number in range(table_count):
            location, path = write_table(origin, lake / f"{table_count}-{number}", large_bytes)
            if number % 2:  # Half of the files are small, but not when they are decompressed.
                zipped_path = path.with_name("00001-a.gz.metadata.json")
                zipped_path.write_bytes(gzip.compress(path.read_bytes(), 1))
                path.unlink()
                location = zipped_path.as_uri()
            locations[f"t{number}"] = location
        with Seamark(home, env=settings) as server, closing(IndexClient(server.base_url)) as client:
            create_namespace(client, "shop", {})
            peak_before = read_peak_bytes(server.pid)
            results = import_tables(client, "shop", locations)
            assert results == [TableImport(is_new=True, error="")] * table_count
            added_peak_bytes[table_count] = read_peak_bytes(server.pid) - peak_before
    # The 16 files have 16 times `large_bytes` together, so a request that held them all would exceed this limit.
    assert added_peak_bytes[16] < added_peak_bytes[1] + 10 * large_bytes, added_peak_bytes


def read_peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
