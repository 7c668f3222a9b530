"""Tests of rolled-back jobs: the replaced files are live again, and later changes of writers stay."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table

from seamark.connector.client.errors import Conflict, InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT, At
from seamark.connector.jobs.rollback import undo_job
from seamark.connector.jobs.server_jobs import expire, rewrite_manifests
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.iceberg.metadata.compaction import UNDONE_KEPT_MS
from tests.connector.jobs.test_manifests import NO_MERGE, count_entries
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, count_scanned_rows, create_test_table
from tests.seeds import examples, first_seed, mark_fast
from tests.server.rig import OffsetClock

AFTER_ALL_SNAPSHOTS_MS = 1 << 45
LINEAGE = ["id", "_row_id", "_last_updated_sequence_number"]


def list_paths(client: IndexClient, at: At = CURRENT) -> set[str]:
    return {task.path for task in plan(client, open_table(client, "db.t", at))}


def read_lineage(client: IndexClient) -> set[tuple[Any, ...]]:
    return {tuple(row.values()) for row in scan(client, "db.t", LINEAGE).to_arrow().to_pylist()}


@pytest.mark.parametrize("version", mark_fast([3, 2], 1))
def test_rows_stay_the_same_in_random_histories_with_a_job_and_its_rollback(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    """The rows equal those of the model after each rollback, whether it is refused or not. Each row keeps its id."""
    rng = random.Random(f"{first_seed()} {version}")
    outcomes = Counter[str]()
    with open_catalog(server.url) as catalog:
        for _ in range(examples(12, 9)):
            spec = rng.choice([PartitionSpec(), BY_PART])
            create_test_table(catalog, version, spec)
            model: dict[int, str] = {}

            def change(text: str, model: dict[int, str] = model, spec: PartitionSpec = spec) -> None:
                ids = rng.sample(range(40), rng.randint(1, 8))
                if rng.random() < 0.6:
                    uses_equality = spec is not BY_PART and rng.random() < 0.4
                    write_options: dict[str, Any] = (
                        {"strategy": "equality"} if uses_equality else {"mode": rng.choice([*MODES, None])}
                    )
                    upsert(client, "db.t", build_rows(ids, text), keys=["id"], **write_options)
                    model.update((id_, f"{text}{id_}") for id_ in ids)
                else:
                    delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice([*MODES, None]))
                    for id_ in ids:
                        model.pop(id_, None)

            for number in range(rng.randint(3, 7)):
                change(f"before {number}:")
            paths_before = list_paths(client)
            if compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2)).commits:
                compacted_paths = list_paths(client)
                snapshot_id = open_table(client, "db.t", CURRENT).snapshot_id
                for number in range(rng.randint(0, 2)):
                    if rng.random() < 0.5:
                        ids = list(range(100 + 10 * number, 105 + 10 * number))
                        append(client, "db.t", build_rows(ids, "new:"))
                        model.update((id_, f"new:{id_}") for id_ in ids)
                    else:
                        change(f"after {number}:")
                paths_before_undo = list_paths(client)
                lineage_before_undo = read_lineage(client) if version == 3 else set()
                contents_before_undo = read_contents(catalog.load_table("db.t"))
                try:
                    undo_job(client, "db.t", snapshot_id)
                except Conflict:
                    outcomes["refused"] += 1
                else:
                    outcomes["undone"] += 1
                    live_files, removed_files = read_entries_by_state(catalog.load_table("db.t"))
                    assert contents_before_undo.items() <= read_contents(catalog.load_table("db.t")).items()
                    assert not live_files & removed_files, (
                        "Iceberg's incremental clean-up would delete these files with their snapshots"
                    )
                    assert list_paths(client) == (paths_before - (compacted_paths - paths_before_undo)) | (
                        paths_before_undo - compacted_paths
                    )
                assert not lineage_before_undo or read_lineage(client) == lineage_before_undo
                assert count_scanned_rows(client) == Counter((id_, id_ % 3, text) for id_, text in model.items())
                change("then:")
                compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
                assert count_scanned_rows(client) == Counter((id_, id_ % 3, text) for id_, text in model.items())
            catalog.drop_table("db.t")
    assert min(outcomes["undone"], outcomes["refused"]) > 0, outcomes


def test_undo_reverts_the_newest_job_and_refuses_invalid_requests_with_a_reason(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
    append(client, "db.t", build_rows(range(3)))
    with pytest.raises(InvalidRequest, match="The branch has no snapshot"):
        undo_job(client, "db.t")
    with pytest.raises(InvalidRequest, match="only snapshots that replace files"):
        undo_job(client, "db.t", open_table(client, "db.t", CURRENT).snapshot_id)
    append(client, "db.t", build_rows(range(3, 6)))
    paths_before = list_paths(client)
    compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
    job_id = open_table(client, "db.t", CURRENT).snapshot_id
    report = undo_job(client, "db.t")
    assert (report.undone_id, report.files_restored, report.files_removed) == (job_id, 2, 1)
    assert list_paths(client) == paths_before
    with pytest.raises(InvalidRequest, match="The branch has no snapshot"):
        undo_job(client, "db.t")
    with pytest.raises(Conflict, match="replaced or deleted"):
        undo_job(client, "db.t", job_id)


def test_job_whose_old_files_may_be_deleted_is_not_undone(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
    for number in range(3):
        append(client, "db.t", build_rows([number]))
    compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
    expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=1)
    with pytest.raises(InvalidRequest, match="expired"):
        undo_job(client, "db.t")
    assert count_scanned_rows(client).total() == 3


def test_undone_snapshot_does_not_expire_within_an_hour(tmp_path: Path) -> None:
    """An engine that read the table before the undo would otherwise treat the restored files as removed."""
    clock = OffsetClock()
    server = ServerThread(tmp_path, warehouse=tmp_path.as_uri(), clock=clock)
    server.start()
    with closing(IndexClient(server.url)) as client, open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        for number in range(3):
            append(client, "db.t", build_rows([number]))
        compact(client, "db.t", policy=CompactionPolicy(target_bytes=1 << 20, min_files=2))
        append(client, "db.t", build_rows([3]))
        job_snapshot_id = undo_job(client, "db.t").undone_id
        table = catalog.load_table("db.t")
        other_snapshot_ids = {snapshot.snapshot_id for snapshot in table.metadata.snapshots} - {job_snapshot_id}
        table.maintenance.expire_snapshots().by_ids([job_snapshot_id]).commit()
        assert (
            expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=1).snapshots
            == len(other_snapshot_ids) - 1
        )
        live_snapshot_ids = {snapshot.snapshot_id for snapshot in catalog.load_table("db.t").metadata.snapshots}
        assert job_snapshot_id in live_snapshot_ids
        assert len(live_snapshot_ids) == 2
        clock.ahead_ms = UNDONE_KEPT_MS
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=1).snapshots == 1
        assert count_scanned_rows(client).total() == 4
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
def test_undo_of_a_manifest_rewrite_keeps_later_commits_or_is_refused(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    """All live entries of random histories stay the same.

    If no commit follows the rewrite, the undo restores the manifests from before the rewrite.
    """
    rng = random.Random(f"{first_seed()} {version}")
    outcomes = Counter[str]()
    with open_catalog(server.url) as catalog:
        for later_change in ("nothing", "append", "delete"):
            create_test_table(catalog, version, rng.choice([PartitionSpec(), BY_PART]), **NO_MERGE)
            for number in range(rng.randint(3, 6)):
                append(client, "db.t", build_rows(range(9 * number, 9 * number + 9)))
                if rng.random() < 0.3:
                    delete(client, "db.t", keys=pa.table({"id": [9 * number]}), mode=rng.choice(MODES))
            manifests_before = list_manifests(catalog.load_table("db.t"))
            rewrite_id = rewrite_manifests(client, "db.t", min_count=2)["snapshot-id"]
            assert rewrite_id is not None
            if later_change == "append":
                append(client, "db.t", build_rows(range(100, 103)))
            elif later_change == "delete":
                delete(client, "db.t", keys=pa.table({"id": list(range(0, 12))}), mode=MODES[0])
            latest_table = catalog.load_table("db.t")
            entries_before, rows_before = count_entries(latest_table), count_scanned_rows(client)
            lineage_before = read_lineage(client) if version == 3 else set()
            try:
                report = undo_job(client, "db.t")
            except Conflict:
                outcomes[f"refused after {later_change}"] += 1
            else:
                assert report.undone_id == rewrite_id
                outcomes[f"undone after {later_change}"] += 1
                manifests = list_manifests(catalog.load_table("db.t"))
                assert manifests_before <= manifests
                assert (manifests == manifests_before) == (later_change == "nothing")
                with pytest.raises(InvalidRequest, match="The branch has no snapshot"):
                    undo_job(client, "db.t")
                with pytest.raises(Conflict, match="replaced"):
                    undo_job(client, "db.t", rewrite_id)
            assert count_entries(catalog.load_table("db.t")) == entries_before
            assert count_scanned_rows(client) == rows_before
            assert not lineage_before or read_lineage(client) == lineage_before
            append(client, "db.t", build_rows(range(200, 203)))  # The table accepts commits after the undo.
            assert count_scanned_rows(client).total() == rows_before.total() + 3
            catalog.drop_table("db.t")
    assert outcomes["undone after nothing"], outcomes
    assert outcomes["undone after append"], outcomes
    assert outcomes["refused after delete"], outcomes


def read_entries_by_state(table: Table) -> tuple[set[Any], set[Any]]:
    """Return the files of the current snapshot, and the files that any snapshot removed.

    A file is a pair of path and offset.
    """
    head = table.current_snapshot()
    assert head is not None
    live_files: set[Any] = set()
    removed_files: set[Any] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                file = entry.data_file
                key = file.file_path, getattr(file, "content_offset", None)
                if entry.status == ManifestEntryStatus.DELETED:
                    removed_files.add(key)
                elif snapshot.snapshot_id == head.snapshot_id:
                    live_files.add(key)
    return live_files, removed_files


def read_contents(table: Table) -> dict[int, Any]:
    """Return for each snapshot its live files, with their sequence numbers and the snapshots that added them."""
    return {
        snapshot.snapshot_id: {
            (
                entry.data_file.file_path,
                getattr(entry.data_file, "content_offset", None),
                entry.sequence_number,
                entry.file_sequence_number,
                entry.snapshot_id,
                entry.data_file.record_count,
            )
            for manifest in snapshot.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io)
        }
        for snapshot in table.metadata.snapshots
    }


def list_manifests(table: Table) -> set[str]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return {
        manifest.manifest_path
        for manifest in snapshot.manifests(table.io)
        if manifest.has_added_files() or manifest.has_existing_files()
    }
