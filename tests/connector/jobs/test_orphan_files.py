"""Tests that a removal of orphan files deletes exactly the old files that no snapshot names.

The tests read the metadata with PyIceberg.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyiceberg.table import Table

from seamark.commands.main import cli
from seamark.connector.client.errors import InvalidRequest, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.jobs import run_indexing, run_orphan_files
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import upsert
from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.commit.expiration import expiration
from seamark.metaserver.commit.expiration import orphan_files as orphan_removal
from seamark.metaserver.store.port import InstantFilter
from tests.connector.jobs.test_expiration import (
    AFTER_ALL_SNAPSHOTS_MS,
    ROW_CHANGES,
    change_rows,
    create_history,
    list_needed_files,
    list_snapshot_ids,
    list_stored_files,
    read_snapshot,
    to_path,
)
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, create_test_table
from tests.seeds import examples, list_seeds_by_version

DAY_S = 24 * 3600
CONTENT = b"left" * 100
"""The content of each orphan file."""
ORPHAN_NAMES = (
    "data/00000-7-left.parquet",
    "data/day=1/left.parquet",
    "data/_x=1/left.orc",
    "data/deep/er/left.avro",
    "metadata/left-m0.avro",
    "metadata/snap-1-left.avro",
    "metadata/99999-left.metadata.json",
    "metadata/left.gz.metadata.json",
    "metadata/left.stats",
    "data/left.puffin",
)
KEPT_NAMES = (
    "data/_temporary/0/part.parquet",
    "data/.hidden.parquet",
    "_delta_log/1.parquet",
    "_seamark/index/unknown.puffin",
    "checkpoint/offsets/0",
    "README.md",
    "metadata/version-hint.text",
    "data/left.parquet.crc",
)


def put_file(table: Table, name: str, days: float = 30) -> Path:
    path = to_path(table.location()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(CONTENT)
    age_file(path, days)
    return path


def age_file(path: Path, days: float = 30) -> None:
    seconds = path.stat().st_mtime - days * DAY_S
    os.utime(path, (seconds, seconds))


def age_all_files(table: Table) -> None:
    for path in to_path(table.location()).rglob("*"):
        if path.is_file():
            age_file(path)


def list_all_files(table: Table) -> set[Path]:
    return {path for path in to_path(table.location()).rglob("*") if path.is_file()}


def list_metadata_files(table: Table) -> set[Path]:
    log = {to_path(entry.metadata_file) for entry in table.metadata.metadata_log}
    return {path for path in (*log, to_path(table.metadata_location)) if path.exists()}


def test_exactly_the_old_files_without_a_reference_are_removed(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        files_before = list_all_files(table)
        orphans, kept_files = (
            {put_file(table, name) for name in ORPHAN_NAMES},
            {put_file(table, name) for name in KEPT_NAMES},
        )
        young_file = put_file(table, "data/young.parquet", days=2)
        age_all_files(table)
        os.utime(young_file)
        dry_report = remove_orphan_files(client, "db.t", dry_run=True)
        assert {to_path(location) for location in dry_report.locations} == orphans
        assert (dry_report.files, dry_report.size_bytes) == (len(orphans), len(CONTENT) * len(orphans))
        assert dry_report.listed == len(list_all_files(table))
        assert list_all_files(table) == files_before | orphans | kept_files | {young_file}
        assert remove_orphan_files(client, "db.t") == dry_report
        assert list_all_files(table) == files_before | kept_files | {young_file}
        assert run_orphan_files(client, ("db", "t")) == {}
        (instant,) = server.run(server.components.store.list_instants(InstantFilter(action=orphan_removal.ACTION), 100))
        assert instant.summary["deleted-files"] == len(orphans)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("seed", "version"),
    [*list_seeds_by_version((0, 1)), *(pytest.param(2, version, marks=pytest.mark.slow) for version in (2, 3))],
)
def test_removals_in_random_histories_keep_every_file_that_a_snapshot_names(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, version: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {version}")
    monkeypatch.setattr(orphan_removal, "FILES_MAX", rng.choice([3, 1000]))
    monkeypatch.setattr(orphan_removal, "_DELETED_FILES_PER_BATCH", rng.choice([2, 100]))
    monkeypatch.setattr(orphan_removal, "_LISTED_OBJECTS_PER_BATCH", rng.choice([5, 1000]))
    removed_count, round_count = 0, examples(30, 9)
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version)
        append(client, "db.t", build_rows([0]))
        table = catalog.load_table("db.t")
        rows_by_snapshot: dict[int, Any] = {}
        put_file(table, "data/first.parquet")
        for number in range(round_count):
            ids, random_number = rng.sample(range(40), rng.randint(1, 6)), rng.random()
            table.refresh()
            if random_number < ROW_CHANGES:
                change_rows(client, table, rng, random_number, ids, number, version)
            elif random_number < 0.8:
                table.manage_snapshots().create_branch(rng.choice(list_snapshot_ids(table)), f"b{number}").commit()
            elif random_number < 0.9:
                orphan = put_file(table, f"data/{number}.parquet", rng.choice([0, 30]))
                if rng.random() < 0.3:  # A copy with the name of a live file must stay.
                    live_file = rng.choice(sorted(list_needed_files(table)))
                    if live_file.parent != orphan.parent:
                        orphan.rename(orphan.parent / live_file.name)
            else:
                ancestors = {entry.snapshot_id for entry in table.history()} & set(list_snapshot_ids(table))
                table.manage_snapshots().set_current_snapshot(rng.choice(sorted(ancestors))).commit()
            table.refresh()
            for snapshot_id in list_snapshot_ids(table):
                rows_by_snapshot.setdefault(snapshot_id, read_snapshot(client, snapshot_id))
            if rng.random() < 0.25 or number == round_count - 1:
                age_all_files(table)
                # A removal compares the ages of files with the newest file of the table.
                put_file(table, "_seamark/newest", 0)
                needed_files = list_needed_files(table) | list_metadata_files(table)
                needed_names = {path.name for path in needed_files}
                expected = {
                    path
                    for path in list_stored_files(table)
                    if path.name not in needed_names and "_seamark" not in path.parts
                }
                files_before = list_stored_files(table)
                removed_count += remove_orphan_files(client, "db.t").files
                assert files_before - list_stored_files(table) == expected
                assert needed_files <= list_all_files(table)
                for snapshot_id in list_snapshot_ids(table):
                    assert read_snapshot(client, snapshot_id) == rows_by_snapshot[snapshot_id]
    assert removed_count > 0


def test_removal_keeps_an_old_file_that_a_concurrent_commit_adds(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        late_file = to_path(table.location()) / "data" / "late.parquet"
        pq.write_table(build_rows([77]), late_file)
        orphan = put_file(table, "data/orphan.parquet")
        age_all_files(table)
        find = orphan_removal.OrphanRemoval._find_orphans

        async def find_and_add_late_file(self: orphan_removal.OrphanRemoval, *arguments: Any) -> Any:
            find_result = await find(self, *arguments)
            assert {to_path(info.location) for info in find_result[0]} == {late_file, orphan}
            await asyncio.to_thread(table.add_files, [f"file://{late_file}"])
            return find_result

        monkeypatch.setattr(orphan_removal.OrphanRemoval, "_find_orphans", find_and_add_late_file)
        assert remove_orphan_files(client, "db.t").files == 1
        assert late_file.exists()
        assert not orphan.exists()


def test_removal_keeps_files_of_an_interrupted_expiration_and_of_indexes(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        client.put_index("db.t", "ids", kind="bloom", columns=["id"])
        assert run_indexing(client, ("db", "t"))
        with table.transaction() as transaction:
            transaction.set_properties({"write.metadata.previous-versions-max": "1"})
        old_metadata_path = to_path(catalog.load_table("db.t").metadata_location)

        async def refuse_deletion(*arguments: Any) -> None:
            raise StorageError("the storage refuses the deletion")

        with monkeypatch.context() as context:
            context.setattr(type(server.components.objects), "delete", refuse_deletion)
            assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).files_failed > 0
        for number in range(3):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        table.refresh()
        assert old_metadata_path not in list_metadata_files(table)
        indexed_paths = {path for path in list_all_files(table) if "_seamark" in path.parts}
        assert indexed_paths
        age_all_files(table)
        age_file(old_metadata_path)  # The file becomes older than the minimum age, relative to the newest file.
        remove_orphan_files(client, "db.t")
        assert old_metadata_path.exists()
        assert indexed_paths <= list_all_files(table)
        # A negative age makes the interrupted expiration old enough to be continued.
        monkeypatch.setattr(expiration, "_RESUMED_AFTER_MS", -1)
        assert server.run(server.components.expiration.resume()) == 1
        remove_orphan_files(client, "db.t")
        assert not old_metadata_path.exists()
        table.refresh()
        assert list_stored_files(table) - indexed_paths == list_needed_files(table)


def test_removal_keeps_files_in_folders_of_other_tables_and_in_shared_folders(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        shared_folder = to_path(table.location()).parent / "shared"
        properties = {"write.data.path": f"file://{shared_folder}"}
        for name in ("one", "two"):
            catalog.create_table(f"db.{name}", table.schema(), properties=properties)
            append(client, f"db.{name}", build_rows([1, 2]))
        orphan = put_file(table, "../shared/left.parquet")
        own_file = put_file(catalog.load_table("db.one"), "data/left.parquet")
        for path in shared_folder.rglob("*.parquet"):
            age_file(path)
        actual = remove_orphan_files(client, "db.one")
        assert [to_path(location) for location in actual.locations] == [own_file]
        assert orphan.exists()
        assert read_snapshot(client, catalog.load_table("db.two").current_snapshot().snapshot_id, "db.two")


def test_removal_keeps_files_that_another_table_may_name(client: IndexClient, server: ServerThread) -> None:
    """An admin has allowed another table to name files in this table's folder."""
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        file = to_path(table.location()) / "data" / "of-two.parquet"
        pq.write_table(build_rows([77]), file)
        orphan = put_file(table, "metadata/left.avro")
        age_all_files(table)
        allowed_properties = {"seamark.allowed-locations": f"{table.location()}/data"}
        second_table = catalog.create_table("db.two", table.schema(), properties=allowed_properties)
        second_table.add_files([f"file://{file}"])
        actual = remove_orphan_files(client, "db.t")
        assert [to_path(location) for location in actual.locations] == [orphan]
        assert len(second_table.refresh().scan().to_arrow()) == 1


@pytest.mark.parametrize(
    ("spelling", "stored_spelling"),
    [
        ("file:///t/dir%2Ff.parquet", "file:///t/dir/f.parquet"),
        ("s3a://b/t/f%20g.parquet", "s3://b/t/f g.parquet"),
        ("/t/F.parquet", "file:///u/f.parquet"),
        ("file:///t/u\u0308.parquet", "file:///t/\u00fc.parquet"),
        ("file:///t/a%2525b.parquet", "file:///t/a%25b.parquet"),
    ],
)
def test_spellings_of_a_name_have_the_same_hash(spelling: str, stored_spelling: str) -> None:
    assert orphan_removal._hash_name(spelling) == orphan_removal._hash_name(stored_spelling)
    assert orphan_removal._hash_name(spelling) != orphan_removal._hash_name(stored_spelling + ".parquet")


@pytest.mark.slow
def test_failed_deletions_are_reported_and_a_repeated_job_continues(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        orphan = put_file(table, "data/orphan.parquet")

        async def refuse_deletion(*arguments: Any) -> None:
            raise StorageError("the storage refuses the deletion")

        with monkeypatch.context() as context:
            context.setattr(type(server.components.objects), "delete", refuse_deletion)
            totals = remove_orphan_files(client, "db.t")
            assert (totals.files, totals.files_failed) == (0, 1)
            with pytest.raises(RuntimeError, match="did not delete 1 files"):
                run_orphan_files(client, ("db", "t"))
        assert orphan.exists()
        assert remove_orphan_files(client, "db.t").files == 1


def test_unreadable_manifest_stops_the_removal(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        orphan = put_file(table, "data/orphan.parquet")
        (manifest, *_) = table.metadata.snapshots[0].manifests(table.io)
        to_path(manifest.manifest_path).unlink()
        with pytest.raises(Exception, match="missing in storage"):
            remove_orphan_files(client, "db.t")
        assert orphan.exists()


@pytest.mark.slow
def test_refused_removal_names_the_reason(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 2)
        orphan = put_file(table, "data/orphan.parquet")
        for properties, message in (
            ({"seamark.orphan-files.min-age-ms": "soon"}, "min-age-ms .* 'soon'"),
            ({"seamark.orphan-files.min-age-ms": "1000"}, "is 1000; it must be at least 86400000"),
            ({"gc.enabled": "false"}, "gc.enabled of the table is false"),
        ):
            with table.transaction() as transaction:
                transaction.set_properties(properties)
            with pytest.raises(InvalidRequest, match=message):
                remove_orphan_files(client, "db.t")
            with table.transaction() as transaction:
                transaction.remove_properties(*properties)
        with pytest.raises(InvalidRequest, match="less than one day before now"):
            remove_orphan_files(client, "db.t", older_than_ms=1 << 60)
        with pytest.raises(NoSuchResource):
            remove_orphan_files(client, "db.none")
        catalog.register_table("db.again", catalog.load_table("db.t").metadata_location)
        with pytest.raises(InvalidRequest, match="several names"):
            remove_orphan_files(client, "db.t")
        assert orphan.exists()


def test_orphan_files_command_lists_and_removes_files(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        orphan = put_file(create_history(client, catalog), "data/orphan.parquet")

        def run_command(*arguments: str) -> str:
            result = CliRunner().invoke(cli, ["run", "orphan-files", "db.t", "--url", server.url, *arguments])
            assert result.exit_code == 0, result.output
            return result.output

        assert f"file://{orphan}" in run_command("--dry-run").splitlines()
        assert "0 orphan files" in run_command("--older-than", "60d")
        assert "1 orphan file (400 B) of db.t was removed" in run_command("--older-than", "36h")
        refusal = CliRunner().invoke(cli, ["run", "orphan-files", "db.t", "--url", server.url, "--older-than", "1h"])
        assert (refusal.exit_code, "less than one day" in refusal.output) == (2, True)
