"""Tests that a writer of one namespace learns nothing about other tables by committing their manifests or files."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.commit.expiration import unused_files
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import SCHEMA, Answer, Api, build_property_commit
from tests.api.plans.planned import JAVA_HEADERS, KINDS, PYICEBERG, STYLE, build_data_file
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.server.rig import run_server

SECRET = "planted-secret"
GRANTS = {
    "root": [Grant("root", "admin")],
    "wendy": [Grant("wendy", "writer", ("mine",))],
    "rita": [Grant("rita", "reader")],
}


class TwoNamespaces:
    """Two namespaces, `theirs` and `mine`, each with a table `t`.

    The table in `theirs` has one file. wendy may write only in `mine`.
    """

    def __init__(self, api: Api, secrets: dict[str, str]) -> None:
        self._api = api
        self._secrets = secrets

    async def __call__(
        self, principal: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        request_headers = {"Authorization": f"Bearer {self._secrets[principal]}", **(headers or {})}
        return await self._api(method, path, body, headers=request_headers)

    @property
    def planner(self) -> Planner:
        return self._api.server.components.planner

    async def read_metadata(self, namespace: str) -> dict[str, Any]:
        answer = await self("root", "GET", f"/v1/namespaces/{namespace}/tables/t")
        metadata: dict[str, Any] = answer.json["metadata"]
        return metadata

    async def find_folder(self, namespace: str) -> Path:
        return Path((await self.read_metadata(namespace))["location"].removeprefix("file://"))

    async def forge_table_of_another_catalog(self) -> tuple[Path, dict[str, Any]]:
        """Create a table `forged` in `mine`, and register it again with a copy of its metadata file.

        The server did not write the copy, so its name has no digest, as for a table that another catalog wrote.

        Returns:
            The path of the copy, and its content.
        """
        body = {"name": "forged", "schema": SCHEMA}
        created_table = (await self("wendy", "POST", "/v1/namespaces/mine/tables", body)).json
        metadata_path = Path(created_table["metadata-location"].removeprefix("file://"))
        path = metadata_path.with_name("v1.metadata.json")
        path.write_bytes(metadata_path.read_bytes())
        body = {"name": "forged", "metadata-location": f"file://{path}", "overwrite": True}
        assert (await self("root", "POST", "/v1/namespaces/mine/register", body)).status == 200
        self._api.server.components.catalog.documents.cache.clear()
        return path, created_table["metadata"]

    def overwrite_metadata(self, path: Path, metadata: dict[str, Any]) -> None:
        """Replace a metadata file, and make the server read it again."""
        path.write_text(json.dumps(metadata))
        self._api.server.components.catalog.documents.cache.clear()

    async def plan(self, principal: str, namespace: str) -> Answer:
        return await self(principal, "POST", f"/v1/namespaces/{namespace}/tables/t/plan", {})

    async def commit(
        self, principal: str, namespace: str, snapshot_id: int, manifest_list: str, **options: Any
    ) -> Answer:
        """Commit a snapshot with this manifest list to the `main` branch of table `t`."""
        metadata = await self.read_metadata(namespace)
        snapshot = {
            "snapshot-id": snapshot_id,
            "sequence-number": metadata["last-sequence-number"] + 1,
            "timestamp-ms": metadata["last-updated-ms"] + 1,
            "manifest-list": manifest_list,
            "summary": {"operation": "append"},
            "schema-id": metadata["current-schema-id"],
            **options,
        }
        ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
        updates = [{"action": "add-snapshot", "snapshot": snapshot}, ref]
        return await self(
            principal, "POST", f"/v1/namespaces/{namespace}/tables/t", {"requirements": [], "updates": updates}
        )


def write_manifest(
    path: Path, files: list[DataFile], snapshot_id: int, *, status: int = ADDED, write: bool = True
) -> Manifest:
    """Return a manifest of the files, and store it at `path` unless `write` is False."""
    entries = [Entry(status, snapshot_id, 1, 1, file) for file in files]
    data = build_manifest_bytes(
        entries, version=2, content=0, style=STYLE, spec_id=0, fields=(), kinds=KINDS, schema={**SCHEMA, "schema-id": 0}
    )
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    # The counts are files and rows. `build_data_file` gives each file 100 rows.
    counts = {ADDED: (0, 0), EXISTING: (0, 0), DELETED: (0, 0), status: (len(files), 100 * len(files))}
    return Manifest(f"file://{path}", len(data), 0, 0, 1, 1, snapshot_id, entries, None, counts=counts)


def write_manifest_list(path: Path, manifests: list[Manifest]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    listing = [(manifest, None) for manifest in manifests]
    path.write_bytes(encode_manifest_list(listing, version=2, style=STYLE, header={"format-version": "2"}))
    return f"file://{path}"


@pytest.fixture
async def lake(tmp_path: Path) -> AsyncIterator[TwoNamespaces]:
    """Yield a server with the tables `mine.t` and `theirs.t`. Only `theirs.t` has a file, which contains the secret."""
    secrets, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, grants in GRANTS.items():
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
    async with run_server(tmp_path, auth="token", plan_prepare_bytes=0) as server:
        lake = TwoNamespaces(Api(server), secrets)
        for namespace in ("mine", "theirs"):
            assert (await lake("root", "POST", "/v1/namespaces", {"namespace": [namespace]})).status == 200
            body = {"name": "t", "schema": SCHEMA}
            assert (await lake("root", "POST", f"/v1/namespaces/{namespace}/tables", body)).status == 200
        foreign_folder = await lake.find_folder("theirs")
        secret_file = build_data_file(
            f"file://{foreign_folder}/data/{SECRET}.parquet", low=1, high=9, text=(SECRET, SECRET)
        )
        data_manifest = write_manifest(foreign_folder / "metadata" / "m.avro", [secret_file], snapshot_id=1)
        list_location = write_manifest_list(foreign_folder / "metadata" / "snap.avro", [data_manifest])
        assert (await lake.commit("root", "theirs", 1, list_location)).status == 200
        assert SECRET in (await lake.plan("rita", "theirs")).raw.decode()
        yield lake


async def test_confined_writer_cannot_commit_files_of_another_table(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    secret_file = build_data_file(f"file://{foreign_folder}/data/{SECRET}.parquet", 1, 9)
    foreign_manifest = write_manifest(foreign_folder / "metadata" / "m.avro", [secret_file], 1, write=False)
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro", [build_data_file(f"file://{own_folder}/data/a.parquet", 1, 9)], 7
    )
    attempts = {
        "manifest list of the other table": f"file://{foreign_folder}/metadata/snap.avro",
        "manifest of the other table": write_manifest_list(own_folder / "metadata" / "l1.avro", [foreign_manifest]),
        "manifests of both tables": write_manifest_list(
            own_folder / "metadata" / "l2.avro", [own_manifest, foreign_manifest]
        ),
    }
    for status in (ADDED, EXISTING):
        manifest = write_manifest(own_folder / "metadata" / f"n{status}.avro", [secret_file], 7, status=status)
        attempts[f"file of the other table with status {status}"] = write_manifest_list(
            own_folder / "metadata" / f"l3{status}.avro", [manifest]
        )
    path_with_dots = build_data_file(f"file://{own_folder}/../../theirs/data/{SECRET}.parquet", 1, 9)
    manifest = write_manifest(own_folder / "metadata" / "dots.avro", [path_with_dots], 7)
    attempts["file of the other table, by a path with dots"] = write_manifest_list(
        own_folder / "metadata" / "l4.avro", [manifest]
    )
    for number, (description, location) in enumerate(attempts.items()):
        answer = await lake.commit("wendy", "mine", 100 + number, location)
        assert answer.status in (400, 403), (description, answer.raw)
        assert SECRET not in (await lake.plan("wendy", "mine")).raw.decode(), description
    snapshot_without_list = {"manifest-list": None, "manifests": [f"file://{foreign_folder}/metadata/m.avro"]}
    assert (await lake.commit("wendy", "mine", 200, "", **snapshot_without_list)).status in (400, 403)
    statistics = {
        "snapshot-id": 1,
        "statistics-path": f"file://{foreign_folder}/metadata/stats.puffin",
        "file-size-in-bytes": 4,
        "file-footer-size-in-bytes": 1,
        "blob-metadata": [],
    }
    body = {"requirements": [], "updates": [{"action": "set-statistics", "snapshot-id": 1, "statistics": statistics}]}
    refusal = await lake("wendy", "POST", "/v1/namespaces/mine/tables/t", body)
    assert refusal.status == 400
    assert "outside" in refusal.error[2]


async def test_commit_that_names_a_file_behind_a_symbolic_link_is_rejected(lake: TwoNamespaces) -> None:
    """The server rejects it for a writer of the whole catalog and for a writer of one namespace.

    It also rejects a manifest that the writer has replaced by a link after it wrote the manifest list.
    """
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    (own_folder / "data").mkdir(exist_ok=True)
    (own_folder / "link").symlink_to(foreign_folder)
    (own_folder / "metadata" / "snap-link.avro").symlink_to(foreign_folder / "metadata" / "snap.avro")
    (own_folder / "data" / "link.parquet").symlink_to(foreign_folder / "data" / f"{SECRET}.parquet")
    link_location = f"file://{own_folder}/link"
    attempts = {
        "manifest list of the other table": f"{link_location}/metadata/snap.avro",
        "its manifest list, by a link in its place": f"file://{own_folder}/metadata/snap-link.avro",
    }
    for principal in ("wendy", "root"):
        for number, (description, location) in enumerate(attempts.items()):
            answer = await lake.commit(principal, "mine", 300 + number, location)
            assert (answer.status, "symbolic link" in answer.error[2]) == (400, True), (
                principal,
                description,
                answer.raw,
            )
        statistics = {
            "snapshot-id": 1,
            "statistics-path": f"{link_location}/metadata/stats.puffin",
            "file-size-in-bytes": 4,
            "file-footer-size-in-bytes": 1,
            "blob-metadata": [],
        }
        updates = [{"action": "set-statistics", "snapshot-id": 1, "statistics": statistics}]
        answer = await lake(principal, "POST", "/v1/namespaces/mine/tables/t", {"requirements": [], "updates": updates})
        assert (answer.status, "symbolic link" in answer.error[2]) == (400, True), (principal, answer.raw)
    for number, path in enumerate((f"{link_location}/data/{SECRET}.parquet", f"file://{own_folder}/data/link.parquet")):
        manifest = write_manifest(
            own_folder / "metadata" / f"behind{number}.avro", [build_data_file(path, low=1, high=9)], snapshot_id=7
        )
        list_location = write_manifest_list(own_folder / "metadata" / f"behind-list{number}.avro", [manifest])
        answer = await lake.commit("wendy", "mine", 310 + number, list_location)
        assert (answer.status, "symbolic link" in answer.error[2]) == (400, True), answer.raw
    hidden_manifest = write_manifest(
        own_folder / "metadata" / "hidden.avro",
        [build_data_file(f"file://{own_folder}/data/a.parquet", low=1, high=9)],
        snapshot_id=7,
    )
    list_location = write_manifest_list(own_folder / "metadata" / "hidden-list.avro", [hidden_manifest])
    (own_folder / "metadata" / "hidden.avro").rename(foreign_folder / "metadata" / "hidden.avro")
    (own_folder / "metadata" / "hidden.avro").symlink_to(foreign_folder / "metadata" / "hidden.avro")
    assert (await lake.commit("wendy", "mine", 320, list_location)).status == 400


async def test_confined_writer_can_commit_files_in_its_table(lake: TwoNamespaces) -> None:
    own_folder = await lake.find_folder("mine")
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro", [build_data_file(f"file://{own_folder}/data/a.parquet", 1, 9)], 7
    )
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [own_manifest])
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 200
    assert b"a.parquet" in (await lake.plan("wendy", "mine")).raw


async def test_files_overwritten_after_their_commit_are_checked_when_they_are_planned(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro", [build_data_file(f"file://{own_folder}/data/a.parquet", 1, 9)], 7
    )
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [own_manifest])
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 200
    secret_file = build_data_file(f"file://{foreign_folder}/data/{SECRET}.parquet", 1, 9)
    write_manifest_list(
        own_folder / "metadata" / "l.avro",
        [write_manifest(foreign_folder / "metadata" / "m.avro", [secret_file], 1, write=False)],
    )
    for principal in ("wendy", "root"):
        answer = await lake.plan(principal, "mine")
        assert answer.error[:2] == (403, "ForbiddenException")
        assert SECRET not in answer.raw.decode()
    for route in ("files", "partitions", "column-stats"):
        answer = await lake("wendy", "GET", f"/api/v1/tables/mine/t/{route}")
        assert SECRET not in answer.raw.decode(), route
    assert SECRET in (await lake.plan("rita", "theirs")).raw.decode(), "the table that owns the file is still planned"


async def test_plan_reads_neither_manifests_nor_manifest_lists_of_another_table(lake: TwoNamespaces) -> None:
    """The error of a damaged, a short or a missing file would show what the other table's folder contains.

    For clients that poll, such as Java's, the server reads the manifest list before it plans.
    """
    foreign_metadata_folder = (await lake.find_folder("theirs")) / "metadata"
    path, own_metadata = await lake.forge_table_of_another_catalog()
    secret_file = build_data_file(f"file://{foreign_metadata_folder.parent}/data/{SECRET}.parquet", low=1, high=9)
    secret_manifest = write_manifest(foreign_metadata_folder / "m.avro", [secret_file], snapshot_id=1, write=False)
    long_manifest = replace(secret_manifest, length=secret_manifest.length + 1000)
    missing_manifest = write_manifest(
        foreign_metadata_folder / "missing.avro", [secret_file], snapshot_id=1, write=False
    )
    damaged_manifest = write_manifest(foreign_metadata_folder / "damaged.avro", [secret_file], snapshot_id=1)
    (foreign_metadata_folder / "damaged.avro").write_bytes(b"x" * damaged_manifest.length)
    list_locations = [f"file://{foreign_metadata_folder}/{name}.avro" for name in ("snap", "damaged", "missing")]
    for number, listed_manifest in enumerate(
        (secret_manifest, long_manifest, damaged_manifest, missing_manifest, replace(missing_manifest, content=1))
    ):
        list_locations.append(write_manifest_list(path.with_name(f"l{number}.avro"), [listed_manifest]))
    answers = set()
    for location in list_locations:
        snapshot = {
            "snapshot-id": 7,
            "sequence-number": 1,
            "timestamp-ms": own_metadata["last-updated-ms"] + 1,
            "manifest-list": location,
            "summary": {"operation": "append"},
            "schema-id": 0,
        }
        refs = {"main": {"type": "branch", "snapshot-id": 7}}
        forged_table = {
            **own_metadata,
            "snapshots": [snapshot],
            "current-snapshot-id": 7,
            "last-sequence-number": 1,
            "refs": refs,
        }
        lake.overwrite_metadata(path, forged_table)
        for client in (PYICEBERG, JAVA_HEADERS):
            answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/forged/plan", {}, client)
            answers.add((answer.status, *answer.error[1:]))
    assert [(status, kind) for status, kind, _ in answers] == [(403, "ForbiddenException")], answers


async def test_manifest_that_names_a_file_of_another_table_is_not_planned(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    files = [
        build_data_file(f"file://{own_folder}/data/a.parquet", 1, 9),
        build_data_file(f"file://{foreign_folder}/data/{SECRET}.parquet", 1, 9),
    ]
    manifest = write_manifest(own_folder / "metadata" / "own.avro", files, 7)
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [manifest])
    assert (await lake.commit("root", "mine", 7, list_location)).status == 200, (
        "a writer of the whole catalog may commit it"
    )
    assert (await lake.plan("wendy", "mine")).error[0] == 403
    allowed_properties = {"seamark.allowed-locations": f"file://{foreign_folder}/data"}
    table = "/v1/namespaces/mine/tables/t"
    assert (await lake("wendy", "POST", table, build_property_commit(**allowed_properties))).error[0] == 403
    assert (await lake.plan("wendy", "mine")).error[0] == 403
    assert (await lake("root", "POST", table, build_property_commit(**allowed_properties))).status == 200
    assert SECRET in (await lake.plan("wendy", "mine")).raw.decode()


@pytest.mark.parametrize("is_mixed", [True, False], ids=["beside own files", "alone"])
async def test_file_of_another_table_whose_path_has_no_scheme_is_not_planned(
    lake: TwoNamespaces, is_mixed: bool
) -> None:
    """Readers open a path without a scheme as a local file, so it names the file of the other table."""
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    files = [build_data_file(f"{foreign_folder}/data/{SECRET}.parquet", low=1, high=9)]
    if is_mixed:
        files.append(build_data_file(f"file://{own_folder}/data/a.parquet", low=1, high=9))
    manifest = write_manifest(own_folder / "metadata" / "own.avro", files, snapshot_id=7)
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [manifest])
    assert (await lake.commit("root", "mine", 7, list_location)).status == 200
    answer = await lake.plan("wendy", "mine")
    assert answer.error[0] == 403
    assert SECRET not in answer.raw.decode().replace(str(foreign_folder), "")


async def test_only_an_unconfined_writer_may_add_files_outside_all_tables(lake: TwoNamespaces, tmp_path: Path) -> None:
    own_folder = await lake.find_folder("mine")
    legacy_path = f"file://{tmp_path}/warehouse/legacy/hive/p=1/a.parquet"
    manifest = write_manifest(
        own_folder / "metadata" / "own.avro", [build_data_file(legacy_path, low=1, high=9)], snapshot_id=7
    )
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [manifest])
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 400
    assert (await lake.commit("root", "mine", 7, list_location)).status == 200
    assert legacy_path in (await lake.plan("wendy", "mine")).raw.decode()
    # A merge of manifests copies the existing entries.
    files = [
        build_data_file(legacy_path, low=1, high=9),
        build_data_file(f"file://{own_folder}/data/b.parquet", low=1, high=9),
    ]
    merged_manifest = write_manifest(own_folder / "metadata" / "merged.avro", files, snapshot_id=7, status=EXISTING)
    list_location = write_manifest_list(own_folder / "metadata" / "l2.avro", [merged_manifest])
    assert (await lake.commit("wendy", "mine", 8, list_location, **{"parent-snapshot-id": 7})).status == 200


@pytest.mark.parametrize("kept_field", [None, "table-uuid", "location"])
async def test_overwritten_metadata_opens_no_file_of_another_table(lake: TwoNamespaces, kept_field: str | None) -> None:
    """The writer of a table overwrites its metadata file with the metadata of the other table.

    Args:
        kept_field: The field that still has the value of the writer's table, or None if there is none.
    """
    foreign_metadata = await lake.read_metadata("theirs")
    path, own_metadata = await lake.forge_table_of_another_catalog()
    path.write_text(
        json.dumps(
            foreign_metadata if kept_field is None else {**foreign_metadata, kept_field: own_metadata[kept_field]}
        )
    )
    answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/forged/plan", {})
    assert answer.error[0] == 403
    for route in ("files", "partitions"):
        answer = await lake("wendy", "GET", f"/api/v1/tables/mine/forged/{route}")
        assert answer.error[0] == 403, route


async def test_native_commit_uses_locations_of_the_database_and_not_of_the_metadata_file(lake: TwoNamespaces) -> None:
    """A user who may write the table's folder can put another location or path into its metadata file."""
    foreign_metadata = await lake.read_metadata("theirs")
    path, metadata = await lake.forge_table_of_another_catalog()
    own_location = metadata["location"]
    forged_properties = {**metadata["properties"], "write.data.path": f"{foreign_metadata['location']}/data"}
    path.write_text(json.dumps({**metadata, "properties": forged_properties}))

    async def commit_file(principal: str, file_path: str) -> int:
        added_file = {
            "spec-id": 0,
            "content": "data",
            "file-path": file_path,
            "file-format": "parquet",
            "partition": [],
        }
        added_file |= {"file-size-in-bytes": 100, "record-count": 1}
        return (await lake(principal, "POST", "/api/v1/tables/mine/forged/commit", {"add": [added_file]})).status

    assert await commit_file("wendy", f"{foreign_metadata['location']}/data/{SECRET}.parquet") == 403
    assert await commit_file("wendy", f"{own_location}/data/0.parquet") == 200


async def test_rejected_plan_caches_no_view_for_the_table_that_owns_the_files(lake: TwoNamespaces) -> None:
    """A view is the server's decoded list of the files of a snapshot.

    The server caches it by the path of the manifest list. A view that is built with the metadata of another table
    would have the partition specs of that table.
    """
    folder = await lake.find_folder("theirs")
    file = build_data_file(f"file://{folder}/data/2.parquet", low=1, high=9)
    list_location = write_manifest_list(
        folder / "metadata" / "l2.avro", [write_manifest(folder / "metadata" / "m2.avro", [file], snapshot_id=2)]
    )
    assert (await lake.commit("root", "theirs", 2, list_location)).status == 200
    foreign_metadata = await lake.read_metadata("theirs")
    path, own_metadata = await lake.forge_table_of_another_catalog()
    path.write_text(
        json.dumps({**foreign_metadata, **{name: own_metadata[name] for name in ("table-uuid", "location")}})
    )
    views_before = lake.planner.read_stats().views
    answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/forged/plan", {})
    assert answer.error[0] == 403
    assert lake.planner.read_stats().views == views_before
    assert "/data/2.parquet" in (await lake.plan("rita", "theirs")).raw.decode()
    assert lake.planner.read_stats().views == views_before + 1


@pytest.mark.parametrize("file_count", [1, 100])
async def test_path_with_dots_after_the_tables_prefix_is_not_planned(lake: TwoNamespaces, file_count: int) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    list_location = write_manifest_list(
        own_folder / "metadata" / "l.avro",
        [
            write_manifest(
                own_folder / "metadata" / "own.avro", [build_data_file(f"file://{own_folder}/data/a.parquet", 1, 9)], 7
            )
        ],
    )
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 200
    files = [build_data_file(f"file://{own_folder}/data/{number}.parquet", 1, 9) for number in range(file_count)]
    file_with_dots = build_data_file(
        f"file://{own_folder}/../../theirs/{foreign_folder.name}/data/{SECRET}.parquet", 1, 9
    )
    overwritten_manifest = write_manifest(own_folder / "metadata" / "own.avro", [*files, file_with_dots], 7)
    write_manifest_list(own_folder / "metadata" / "l.avro", [overwritten_manifest])
    answer = await lake.plan("rita", "mine")
    assert answer.error[0] == 403
    assert SECRET not in answer.raw.decode()


@pytest.mark.parametrize("attack", ["foreign path", "foreign path with dots", "foreign manifest"])
async def test_expiration_neither_deletes_nor_reads_files_of_another_table(lake: TwoNamespaces, attack: str) -> None:
    """Expiration deletes the files of an expired snapshot only in the table's own locations.

    The writer commits the snapshots 7 and 8. Then it overwrites its own files so that snapshot 7 names the other
    table's data file, or so that its manifest list names a manifest of the other table.
    """
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    metadata_folder = own_folder / "metadata"
    for number in (7, 8):
        own_manifest = write_manifest(
            metadata_folder / f"m{number}.avro",
            [build_data_file(f"file://{own_folder}/data/{number}.parquet", 1, 9)],
            number,
        )
        list_location = write_manifest_list(metadata_folder / f"l{number}.avro", [own_manifest])
        assert (await lake.commit("wendy", "mine", number, list_location)).status == 200
    secret_file = foreign_folder / "data" / f"{SECRET}.parquet"
    for path in (secret_file, own_folder / "data" / "7.parquet", own_folder / "data" / "8.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"rows")
    location = (
        f"file://{secret_file}"
        if attack == "foreign path"
        else f"file://{own_folder}/../{foreign_folder.name}/data/{secret_file.name}"
    )
    if attack == "foreign manifest":
        foreign_manifest = write_manifest(
            foreign_folder / "metadata" / "m.avro", [build_data_file(f"file://{secret_file}", 1, 9)], 1, write=False
        )
        write_manifest_list(metadata_folder / "l7.avro", [foreign_manifest])
    else:
        own_file = build_data_file(f"file://{own_folder}/data/7.parquet", 1, 9)
        listing = [write_manifest(metadata_folder / "m7.avro", [own_file, build_data_file(location, 1, 9)], 7)]
        write_manifest_list(metadata_folder / "l7.avro", listing)
    paths_before = {path for path in foreign_folder.rglob("*") if path.is_file()}
    route = "/api/v1/tables/mine/t/expire-snapshots"
    body = {"older-than-ms": 1 << 60, "retain-last": 1}
    assert (await lake("rita", "POST", route, body)).status == 403
    assert (await lake("wendy", "POST", "/api/v1/tables/theirs/t/expire-snapshots", body)).status == 403
    answer = await lake("wendy", "POST", route, body)
    assert SECRET not in answer.raw.decode()
    assert {path for path in foreign_folder.rglob("*") if path.is_file()} == paths_before
    if attack == "foreign manifest":
        assert answer.status == 403
        assert (own_folder / "data" / "7.parquet").exists()
    else:
        assert (answer.status, answer.json["snapshots"], answer.json["content-files"]) == (200, 1, 1)
        assert [path.name for path in (own_folder / "data").iterdir()] == ["8.parquet"]
        assert not (metadata_folder / "m7.avro").exists()


@pytest.mark.parametrize("are_many", [False, True], ids=["few files", "many files"])
async def test_expiration_keeps_a_live_file_whose_path_is_spelled_differently(
    lake: TwoNamespaces, monkeypatch: pytest.MonkeyPatch, are_many: bool
) -> None:
    if are_many:
        monkeypatch.setattr(unused_files, "_COMPARED_FILES_MAX", 0)
    own_folder = await lake.find_folder("mine")
    for number, prefix in ((7, "file://"), (8, "file:")):
        file = build_data_file(f"{prefix}{own_folder}/data/7.parquet", 1, 9)
        own_manifest = write_manifest(own_folder / "metadata" / f"m{number}.avro", [file], number)
        list_location = write_manifest_list(own_folder / "metadata" / f"l{number}.avro", [own_manifest])
        assert (await lake.commit("root", "mine", number, list_location)).status == 200
    (own_folder / "data").mkdir(exist_ok=True)
    (own_folder / "data" / "7.parquet").write_bytes(b"rows")
    body = {"older-than-ms": 1 << 60, "retain-last": 1}
    answer = await lake("wendy", "POST", "/api/v1/tables/mine/t/expire-snapshots", body)
    assert (answer.json["snapshots"], answer.json["content-files"]) == (1, 0)
    assert (own_folder / "data" / "7.parquet").exists()


async def test_expiration_deletes_nothing_in_a_folder_named_only_by_overwritten_metadata(
    lake: TwoNamespaces, tmp_path: Path
) -> None:
    path, metadata = await lake.forge_table_of_another_catalog()
    legacy_folder = tmp_path / "warehouse" / "legacy"
    legacy_folder.mkdir(parents=True)
    (legacy_folder / "1.parquet").write_bytes(b"rows of nobody")
    folder = Path(metadata["location"].removeprefix("file://")) / "metadata"
    snapshots = []
    for snapshot_id, sequence_number in ((7, 1), (8, 2)):
        files = [build_data_file(f"file://{legacy_folder}/{sequence_number}.parquet", 1, 9)]
        list_location = write_manifest_list(
            folder / f"l{snapshot_id}.avro", [write_manifest(folder / f"m{snapshot_id}.avro", files, snapshot_id)]
        )
        snapshots.append(
            {
                "snapshot-id": snapshot_id,
                "sequence-number": sequence_number,
                "timestamp-ms": metadata["last-updated-ms"] + sequence_number,
                "manifest-list": list_location,
                "summary": {"operation": "append"},
                "schema-id": 0,
            }
        )
    forged_table = {
        **metadata,
        "properties": {"write.data.path": f"file://{legacy_folder}"},
        "snapshots": snapshots,
        "current-snapshot-id": 8,
        "last-sequence-number": 2,
        "last-updated-ms": metadata["last-updated-ms"] + 9,
        "refs": {"main": {"type": "branch", "snapshot-id": 8}},
    }
    path.write_text(json.dumps(forged_table))
    body = {"older-than-ms": 1 << 60, "retain-last": 1}
    answer = await lake("wendy", "POST", "/api/v1/tables/mine/forged/expire-snapshots", body)
    assert answer.status in (200, 403), answer.raw
    assert (legacy_folder / "1.parquet").exists()


async def test_manifest_rewrite_reads_no_file_of_another_table(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    for number in (7, 8):
        own_manifest = write_manifest(
            own_folder / "metadata" / f"m{number}.avro",
            [build_data_file(f"file://{own_folder}/data/7.parquet", 1, 9)],
            number,
        )
        list_location = write_manifest_list(own_folder / "metadata" / f"l{number}.avro", [own_manifest])
        assert (await lake.commit("wendy", "mine", number, list_location)).status == 200
    secret_file = build_data_file(f"file://{foreign_folder}/data/{SECRET}.parquet", 1, 9)
    foreign_manifests = [
        write_manifest(foreign_folder / "metadata" / f"m{number}.avro", [secret_file], number) for number in (1, 2, 3)
    ]
    write_manifest_list(own_folder / "metadata" / "l8.avro", foreign_manifests)
    paths_before = {path for path in (*foreign_folder.rglob("*"), *own_folder.rglob("*")) if path.is_file()}
    route, body = "/api/v1/tables/mine/t/rewrite-manifests", {"min-count": 2}
    assert (await lake("rita", "POST", route, body)).status == 403
    assert (await lake("wendy", "POST", "/api/v1/tables/theirs/t/rewrite-manifests", body)).status == 403
    answer = await lake("wendy", "POST", route, body)
    assert answer.status == 403, answer.raw
    assert SECRET not in answer.raw.decode()
    assert {path for path in (*foreign_folder.rglob("*"), *own_folder.rglob("*")) if path.is_file()} == paths_before


@pytest.mark.parametrize("foreign_folder", ["of nobody", "of another table"])
async def test_orphan_removal_deletes_nothing_in_a_folder_named_only_by_overwritten_metadata(
    lake: TwoNamespaces, tmp_path: Path, foreign_folder: str
) -> None:
    path, metadata = await lake.forge_table_of_another_catalog()
    other_folder = (
        await lake.find_folder("theirs") if foreign_folder == "of another table" else tmp_path / "warehouse" / "legacy"
    )
    own_location = Path(metadata["location"].removeprefix("file://"))
    own_orphan, foreign_file = own_location / "data" / "left.parquet", other_folder / "data" / f"{SECRET}.parquet"
    for file in (own_orphan, foreign_file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"rows")
        os.utime(file, (1, 1))
    path.write_text(json.dumps({**metadata, "properties": {"write.data.path": f"file://{other_folder}"}}))
    route = "/api/v1/tables/mine/forged/remove-orphan-files"
    assert (await lake("rita", "POST", route)).status == 403
    answer = await lake("wendy", "POST", route)
    assert answer.status in (200, 403), answer.raw
    assert SECRET not in answer.raw.decode()
    assert foreign_file.exists()
    assert own_orphan.exists() == (answer.status == 403)
