"""Tests that files of earlier bucket counts become files of the current buckets, also while writers commit."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType

from seamark.connector.client.errors import Conflict, InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs import bucket_splitting
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.jobs import run_bucket_splitting
from seamark.connector.jobs.rollback import undo_job
from seamark.connector.read.scans import scan
from seamark.connector.write import replacements
from seamark.connector.write.appends import append, commit
from seamark.connector.write.buckets import compute_bucket_sizes, resize
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.connector.jobs.test_manifests import count_lineage
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, count_scanned_rows, create_test_table
from tests.seeds import first_seed, mark_fast

BY_BUCKET = PartitionSpec(PartitionField(1, 1000, BucketTransform(2), "id_bucket"))
WITH_PART = PartitionSpec(*BY_BUCKET.fields, PartitionField(2, 1001, IdentityTransform(), "part"))


def read_ids_by_file(client: IndexClient) -> dict[str, list[int]]:
    rows_by_file = scan(client, "db.t", ["_file", "id"]).to_arrow().to_pylist()
    ids_by_file: dict[str, list[int]] = {}
    for row in rows_by_file:
        ids_by_file.setdefault(row["_file"], []).append(row["id"])
    return ids_by_file


@pytest.mark.parametrize("spec", mark_fast([WITH_PART, BY_BUCKET], 1), ids=["bucket and part", "bucket"])
@pytest.mark.parametrize("version", mark_fast([3, 2], 1))
def test_each_split_file_has_the_rows_of_one_new_bucket(
    client: IndexClient, server: ServerThread, version: int, spec: PartitionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(first_seed())
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, spec)
        for number in range(4):
            append(client, "db.t", build_rows(range(100 * number, 100 * number + 100)))
            upsert(
                client, "db.t", build_rows(rng.sample(range(400), 9), f"{number}"), keys=["id"], mode=rng.choice(MODES)
            )
            delete(client, "db.t", keys=pa.table({"id": rng.sample(range(400), 5)}), mode=rng.choice(MODES))
            if number == 1:
                resize(client, "db.t", buckets=4)
        resize(client, "db.t", buckets=16)
        (problem,) = [problem for problem in client.health("db.t")["problems"] if problem["problem"] == "shared files"]
        assert problem["service"] == "bucket-splitting"
        rows_before, lineage_before = count_scanned_rows(client), count_lineage(client) if version == 3 else None
        dry_report = split_buckets(client, "db.t", dry_run=True)
        monkeypatch.setattr(bucket_splitting, "BATCH_FILES", 5)
        report = split_buckets(client, "db.t")
        assert (dry_report.files_before, dry_report.bytes_before) == (report.files_before, report.bytes_before)
        assert report.commits > 1
        assert count_scanned_rows(client) == rows_before
        assert lineage_before is None or count_lineage(client) == lineage_before
        (sizes,) = compute_bucket_sizes(client, "db.t")
        assert (sizes.buckets, sizes.shared_files) == (16, 0)
        compute_bucket = BucketTransform(16).transform(LongType())
        assert all(len({compute_bucket(key) for key in keys}) == 1 for keys in read_ids_by_file(client).values())
        assert "shared files" not in [problem["problem"] for problem in client.health("db.t")["problems"]]
        assert run_bucket_splitting(client, ("db", "t")) == {}


def test_split_includes_the_change_of_a_concurrent_writer(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_BUCKET)
        append(client, "db.t", build_rows(range(300)))
        resize(client, "db.t", buckets=4)
        keys = pa.table({"id": [1, 2, 3]})
        remaining_changes = [lambda: delete(client, "db.t", keys=keys, mode="merge-on-read")]

        def change_and_commit(*arguments: Any, **options: Any) -> Any:
            if remaining_changes:
                remaining_changes.pop()()
            return commit(*arguments, **options)

        monkeypatch.setattr(replacements, "commit", change_and_commit)
        report = split_buckets(client, "db.t")
        assert (report.commits, report.conflicts) == (1, 0)
        assert {row[0] for row in count_scanned_rows(client)} == {0, *range(4, 300)}
        assert compute_bucket_sizes(client, "db.t")[0].shared_files == 0


@pytest.mark.slow
def test_split_keeps_files_without_a_bucket_field(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows(range(10)))
        with catalog.load_table("db.t").update_spec() as update:
            update.add_field("id", BucketTransform(4), "id_bucket")
        append(client, "db.t", build_rows(range(10, 20)))
        assert split_buckets(client, "db.t").files_before == 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_split_can_be_undone_after_later_commits_and_repeated(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    """The undo keeps the rows of later writers, and rows keep their ids."""
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, BY_BUCKET)
        append(client, "db.t", build_rows(range(200)))
        resize(client, "db.t", buckets=8)
        files_before = set(read_ids_by_file(client))
        split_buckets(client, "db.t")
        assert not files_before & set(read_ids_by_file(client))
        append(client, "db.t", build_rows(range(200, 230)))
        rows_before, lineage_before = count_scanned_rows(client), count_lineage(client) if version == 3 else None
        report = undo_job(client, "db.t")
        assert report.files_restored == len(files_before)
        assert files_before < set(read_ids_by_file(client))
        assert count_scanned_rows(client) == rows_before
        assert lineage_before is None or count_lineage(client) == lineage_before
        with pytest.raises(InvalidRequest, match="not undone"):
            undo_job(client, "db.t")
        assert compute_bucket_sizes(client, "db.t")[0].shared_files == len(files_before)
        assert split_buckets(client, "db.t").files_before == len(files_before)
        assert count_scanned_rows(client) == rows_before
        assert compute_bucket_sizes(client, "db.t")[0].shared_files == 0


@pytest.mark.slow
def test_split_whose_files_have_changed_is_not_undone(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_BUCKET)
        append(client, "db.t", build_rows(range(50)))
        resize(client, "db.t", buckets=4)
        split_buckets(client, "db.t")
        delete(client, "db.t", keys=pa.table({"id": [1]}), mode="copy-on-write")
        rows_before = count_scanned_rows(client)
        with pytest.raises(Conflict, match="replaced or deleted"):
            undo_job(client, "db.t")
        assert count_scanned_rows(client) == rows_before
