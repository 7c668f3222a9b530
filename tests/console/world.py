"""Tables for the console: a clustered table with branches, an empty table, and others of any number and size.

The API writes them. Their data files exist only in manifests, with bounds, because the console reads nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seamark.formats.iceberg.types.values import encode_json, encode_single_value
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Entry, EntryKind, Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace
from tests.server.rig import RunningServer, build_settings

COLUMNS = (("id", "long"), ("customer_id", "long"), ("country", "string"), ("amount", "double"), ("day", "date"))
IDS = {name: number for number, (name, _) in enumerate(COLUMNS, start=1)}
SCHEMA = {
    "type": "struct",
    "fields": [{"id": IDS[name], "name": name, "type": kind, "required": name == "id"} for name, kind in COLUMNS],
}
BY_DAY = {"spec-id": 0, "fields": [{"source-id": IDS["day"], "field-id": 1000, "name": "day", "transform": "identity"}]}
COUNTRIES = ("AT", "BR", "CH", "DE", "ES", "FR", "GB", "IN", "JP", "US")
FIRST_DAY = 19_700
"""2023-12-09, in days since 1970."""
Bounds = dict[str, tuple[Any, Any]]
_FILES_PER_COMMIT = 1_000


def build_content_file(
    path: str, bounds: Bounds, rows: int = 1000, size: int = 1 << 20, **partition: Any
) -> dict[str, Any]:
    """Return a data file as clients send it.

    Args:
        path: The location of the file.
        bounds: The lowest and the highest value of each column, by name.
        rows: The number of rows.
        size: The size in bytes.
        partition: The day of the partition, or nothing if the table is not partitioned.
    """
    types = dict(COLUMNS)
    field_ids = [IDS[name] for name in bounds]

    def encode_bounds(values: dict[str, Any]) -> dict[str, Any]:
        encoded_values = [encode_single_value(types[name], value).hex().upper() for name, value in values.items()]
        return {"keys": field_ids, "values": encoded_values}

    return {
        "content": "data",
        "file-path": path,
        "file-format": "parquet",
        "spec-id": 0,
        "partition": [encode_json("date", day) for day in partition.values()],
        "file-size-in-bytes": size,
        "record-count": rows,
        "value-counts": {"keys": field_ids, "values": [rows] * len(field_ids)},
        "null-value-counts": {"keys": field_ids, "values": [0] * len(field_ids)},
        "lower-bounds": encode_bounds({name: low for name, (low, _) in bounds.items()}),
        "upper-bounds": encode_bounds({name: high for name, (_, high) in bounds.items()}),
    }


async def create_tokens(home: Path) -> dict[str, str]:
    """Create the namespace `db` and the logins of an admin and of Rita, a reader of `db`. Return their tokens.

    Call this before the server starts.
    """
    clock = SystemClock()
    async with open_store(build_settings(home).make_database_url(), clock=clock) as store:
        await store.transact([CreateNamespace(path=("db",), properties={})])
        return {
            "admin": await create_token(store, clock, "admin", ttl_s=None, grants=[Grant("admin", "admin")]),
            "rita": await create_token(store, clock, "rita", ttl_s=None, grants=[Grant("rita", "reader", ("db",))]),
        }


async def send_request(
    server: RunningServer, method: str, path: str, body: Any = None, token: str | None = None
) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with server.http.request(method, server.url + path, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status < 300, (method, path, answer.status, text[:500])
        return await answer.json() if text else None


async def create_table(server: RunningServer, name: str, *, partitioned: bool = False, **options: Any) -> str:
    """Create a table of `db`, and return its location."""
    # The target size equals the size of the files, so that an estimated layout has as many files as the table.
    properties = {"format-version": "2", "write.target-file-size-bytes": str(1 << 20), **options.pop("properties", {})}
    body = {
        "name": name,
        "schema": SCHEMA,
        "properties": properties,
        **({"partition-spec": BY_DAY} if partitioned else {}),
    }
    answer = await send_request(server, "POST", "/v1/namespaces/db/tables", body | options)
    return str(answer["metadata"]["location"])


async def commit_change(server: RunningServer, name: str, add: Sequence[dict[str, Any]], **options: Any) -> int:
    """Commit a change, and return the id of its snapshot."""
    answer = await send_request(server, "POST", f"/api/v1/tables/db/{name}/commit", {"add": list(add), **options})
    return int(answer["snapshot-id"])


def make_unclustered(location: str, count: int, rng: random.Random, days: int = 40) -> Iterator[dict[str, Any]]:
    """Yield files of one day each. The customers of a file are spread over most of the range."""
    for number in range(count):
        low, high = sorted(rng.randrange(1_000_000) for _ in range(2))
        low, high = low // 8, 1_000_000 - (1_000_000 - high) // 8  # Move both values to the ends of the range.
        day = FIRST_DAY + int(days * rng.random() ** 1.5)  # Earlier days have more files.
        first_id = number * 1000
        bounds = {
            "id": (first_id, first_id + 999),
            "customer_id": (low, high),
            "country": (COUNTRIES[rng.randrange(3)], COUNTRIES[rng.randrange(7, 10)]),
            "amount": (rng.random() * 5, 900 + rng.random() * 100),
            "day": (day, day),
        }
        size_bytes = int((1 << 18) * 2 ** (rng.random() * 5))  # Between 256 KiB and 8 MiB
        yield build_content_file(f"{location}/data/a-{number}.parquet", bounds, size=size_bytes, day=day)


def make_clustered(location: str, count: int, rng: random.Random, days: int = 40) -> Iterator[dict[str, Any]]:
    """Yield files of one day each. The files of a day are ordered by customer."""
    files_per_day = -(-count // days)
    for number in range(count):
        day, file_of_day = FIRST_DAY + number // files_per_day, number % files_per_day
        low = file_of_day * 1_000_000 // files_per_day
        bounds = {
            "id": (number, 1_000_000 - number),
            "customer_id": (low, low + 1_000_000 // files_per_day - 1),
            "country": ("AT", "US"),
            "amount": (0.5, 999.5),
            "day": (day, day),
        }
        size_bytes = (1 << 24) + rng.randrange(1 << 22)  # Between 16 and 20 MiB
        yield build_content_file(f"{location}/data/b-{number}.parquet", bounds, rows=1250, size=size_bytes, day=day)


async def make_orders(server: RunningServer, seed: int = 1) -> tuple[int, int]:
    """Create `db.orders` with appends, a branch, a tag, a clustering of all files, and the index `by_customer`.

    Return the snapshot ids before and after the clustering. It replaces 600 files of 1,000 rows by 480 of 1,250 rows.
    """
    rng = random.Random(seed)
    location = await create_table(
        server, "orders", partitioned=True, properties={"seamark.clustering.columns": "customer_id"}
    )
    files = list(make_unclustered(location, count=600, rng=rng))
    snapshot_before = 0
    for start in range(0, 600, 100):
        snapshot_before = await commit_change(server, "orders", files[start : start + 100])
        if start == 100:
            await set_ref(server, "orders", "audit", "branch", snapshot_before)
        if start == 300:
            await set_ref(server, "orders", "2024-q1", "tag", snapshot_before)
    audit_files = list(make_unclustered(f"{location}/audit", count=20, rng=rng))
    await commit_change(server, "orders", audit_files, branch="audit")
    snapshot_after = await commit_change(
        server,
        "orders",
        list(make_clustered(location, count=480, rng=rng)),
        remove=[{"file-path": file["file-path"]} for file in files],
        operation="replace",
        **{"read-snapshot-id": snapshot_before},
    )
    await send_request(
        server, "PUT", "/api/v1/tables/db/orders/indexes/by_customer", {"kind": "bloom", "columns": ["customer_id"]}
    )
    return snapshot_before, snapshot_after


async def set_ref(server: RunningServer, table: str, name: str, kind: str, snapshot_id: int) -> None:
    update = {"action": "set-snapshot-ref", "ref-name": name, "type": kind, "snapshot-id": snapshot_id}
    await send_request(server, "POST", f"/v1/namespaces/db/tables/{table}", {"requirements": [], "updates": [update]})


async def make_large(server: RunningServer, files: int, seed: int = 2) -> None:
    """Create the unpartitioned table `db.large` with this number of files."""
    rng = random.Random(seed)
    location = await create_table(server, "large")
    written_files = list(make_unclustered(location, files, rng))
    for file in written_files:
        file["partition"] = []
    for start in range(0, files, _FILES_PER_COMMIT):
        await commit_change(server, "large", written_files[start : start + _FILES_PER_COMMIT])


async def create_many_tables(server: RunningServer, table_count: int) -> None:
    """Create tables in the namespace `many`, all with the same metadata file."""
    await create_table(server, "template")
    store = server.components.store
    template = await store.load_entry(EntryKind.TABLE, ("db",), "template")
    assert template is not None
    await store.transact([CreateNamespace(path=("many",), properties={})])
    for start in range(0, table_count, 1000):
        entries = [
            Entry(
                EntryKind.TABLE,
                ("many",),
                f"events_{number:05}",
                f"{template.uuid}-{number}",
                template.metadata_location,
            )
            for number in range(start, min(table_count, start + 1000))
        ]
        await store.transact([CreateEntry(entry) for entry in entries])
