"""Tests of statistics of tables in random histories, compared with exact counts of the rows that a scan reads."""

from __future__ import annotations

import os
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField

from seamark.connector.client.errors import Conflict
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs import statistics
from seamark.connector.jobs.jobs import run_statistics
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.runtime.errors import BadRequest
from tests.connector.jobs.test_orphan_files import age_all_files
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, create_test_table
from tests.connector.write.test_upserts import create_upsert_table as create_table
from tests.seeds import first_seed


def read_counts(catalog: RestCatalog, table_name: str = "db.t") -> dict[int, int]:
    """Return the numbers of distinct values in the statistics file of the current snapshot, by field id."""
    metadata = catalog.load_table(table_name).metadata
    (statistics_file,) = [file for file in metadata.statistics if file.snapshot_id == metadata.current_snapshot_id]
    return {blob.fields[0]: int((blob.properties or {})["ndv"]) for blob in statistics_file.blob_metadata}


def count_distinct_values(client: IndexClient, table_name: str = "db.t") -> list[int]:
    rows = scan(client, table_name).to_arrow()
    return [len(set(rows[name].to_pylist()) - {None}) for name in rows.column_names]


def list_statistics_files(catalog: RestCatalog) -> set[Path]:
    metadata = catalog.load_table("db.t").metadata
    statistics_paths = [file.statistics_path for file in (*metadata.statistics, *metadata.partition_statistics)]
    return {Path(path.removeprefix("file://")) for path in statistics_paths}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_statistics_in_random_histories_are_within_the_error_of_the_sketches(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    """Values of removed rows count until a tenth of the rows is removed, so the upper limit includes them."""
    rng, incremental_count = random.Random(first_seed()), 0
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, rng.choice((PartitionSpec(), BY_PART)))
        added_ids: set[int] = set()
        for step in range(14):
            random_number = rng.random()
            ids = [rng.randrange(60_000) for _ in range(rng.choice((5, 900, 9000)))]
            if random_number < 0.45 or step == 0:
                append(client, "db.t", build_rows(ids))
                added_ids |= set(ids)
            elif random_number < 0.65:
                upsert(client, "db.t", build_rows(sorted(set(ids[:900])), "n"), keys=["id"], mode=rng.choice(MODES))
                added_ids |= set(ids)
            elif random_number < 0.8:
                delete(client, "db.t", keys=pa.table({"id": sorted(set(ids))}), mode=rng.choice(MODES))
            else:
                compact(client, "db.t", policy=CompactionPolicy(target_bytes=1 << 20, min_files=2))
            if rng.random() < 0.6:
                continue
            report = compute_statistics(client, "db.t")
            incremental_count += report.columns_read == 0 and report.files < report.files_total
            actual_counts, live_counts = read_counts(catalog), count_distinct_values(client)
            for column, count in enumerate(live_counts, 1):
                # A sketch keeps up to 4,096 values, so it counts them exactly. The error of more values is at most 5 %.
                error = 0 if count <= 4096 else 0.05 * count
                # The limit for removed values is coarse: a quarter of all rows, and not a tenth.
                removed_max = 0 if report.columns_read else 0.25 * max(1, report.rows + len(added_ids))
                assert count - error <= actual_counts[column] <= count + error + removed_max, (
                    step,
                    column,
                    count,
                    actual_counts,
                )
        assert incremental_count, "no statistics were computed from previous statistics"


@pytest.mark.slow
def test_incremental_statistics_read_only_new_files_and_equal_a_full_run(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_PART)
        append(client, "db.t", build_rows(range(30_000)))
        assert compute_statistics(client, "db.t").files == 3  # Each append writes a file for each of three parts.
        append(client, "db.t", build_rows(range(30_000, 31_000)))
        append(client, "db.t", build_rows(range(31_000, 32_000)))
        dry_report = compute_statistics(client, "db.t", dry_run=True)
        report = compute_statistics(client, "db.t")
        assert (report.files, report.files_total, report.rows, report.columns_read) == (6, 9, 2000, 0)
        assert (dry_report.files, dry_report.rows) == (report.files, report.rows)
        counts_before = read_counts(catalog)
        assert compute_statistics(client, "db.t", full=True).files == 9
        assert read_counts(catalog) == counts_before
        # Files that replace counted files are read only if rows were added before the replacement.
        compact(client, "db.t", policy=CompactionPolicy(target_bytes=1 << 30, min_files=2))
        assert compute_statistics(client, "db.t").files == 0
        assert read_counts(catalog) == counts_before
        append(client, "db.t", build_rows(range(32_000, 33_000)))
        compact(client, "db.t", policy=CompactionPolicy(target_bytes=1 << 30, min_files=2))
        assert compute_statistics(client, "db.t").files == 3
        assert count_distinct_values(client)[0] == pytest.approx(read_counts(catalog)[1], rel=0.05)


@pytest.mark.slow
def test_columns_with_removed_values_or_a_changed_type_are_read_completely(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        schema = Schema(
            NestedField(1, "id", LongType(), required=False), NestedField(2, "n", IntegerType(), required=False)
        )
        table = catalog.create_table("db.t", schema, properties={"format-version": "2"})

        def make_rows(ids: range) -> pa.Table:
            return pa.table({"id": pa.array(ids, pa.int64()), "n": pa.array([i % 500 for i in ids], pa.int32())})

        append(client, "db.t", make_rows(range(3000)))
        assert compute_statistics(client, "db.t").columns_read == 2
        with table.update_schema() as update:
            update.update_column("n", LongType())
        with catalog.load_table("db.t").update_schema() as update:
            update.add_column("more", LongType())
        append(client, "db.t", pa.table({"id": [3000], "n": pa.array([9000], pa.int64()), "more": [1]}))
        assert client.health("db.t")["problems"][-1]["problem"] == "stale statistics"
        assert compute_statistics(client, "db.t").columns_read == 2
        assert read_counts(catalog) == {1: 3001, 2: 501, 3: 1}
        delete(client, "db.t", keys=pa.table({"id": list(range(2000))}))
        assert compute_statistics(client, "db.t").columns_read == 3
        assert read_counts(catalog) == {1: 1001, 2: 501, 3: 1}


@pytest.mark.slow
def test_policy_decides_when_and_for_which_columns_statistics_are_computed(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(
            catalog, 2, **{"seamark_statistics_columns": "id, gone", "seamark_statistics_changed-percent": "20"}
        )
        assert compute_statistics(client, "db.t").snapshot_id is None
        append(client, "db.t", build_rows(range(100)))
        assert run_statistics(client, ("db", "t"))["rows"] == 100
        assert read_counts(catalog) == {1: 100}
        append(client, "db.t", build_rows(range(100, 119)))
        assert run_statistics(client, ("db", "t")) == {}
        append(client, "db.t", build_rows(range(119, 130)))
        assert run_statistics(client, ("db", "t"))["rows"] == 30
        assert read_counts(catalog) == {1: 130}
        assert run_statistics(client, ("db", "t")) == {}
        with catalog.load_table("db.t").transaction() as transaction:
            transaction.set_properties({"seamark.statistics.changed-percent": "0"})
        with pytest.raises(BadRequest, match="changed-percent"):
            compute_statistics(client, "db.t")


def test_damaged_or_missing_statistics_are_computed_again(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows(range(100)))
        compute_statistics(client, "db.t")
        (path,) = list_statistics_files(catalog)
        whole_file = path.read_bytes()
        for content in (b"", whole_file[:40], whole_file[:100] + b"\xff" * 8 + whole_file[108:], None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            append(client, "db.t", build_rows(range(100, 101)))
            report = compute_statistics(client, "db.t")
            assert report.files in (report.files_total, 1)
            assert read_counts(catalog)[1] == 101
            with catalog.load_table("db.t").update_statistics() as update:
                update.remove_statistics(catalog.load_table("db.t").metadata.current_snapshot_id)


def test_expiration_and_orphan_removal_keep_statistics_of_live_snapshots(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_PART)
        for number in range(3):
            append(client, "db.t", build_rows(range(number * 10, number * 10 + 10)))
            compute_statistics(client, "db.t")
        files = list_statistics_files(catalog)
        assert len(files) == 6  # Each run writes a file for the columns and a file for the partitions.
        folder = Path(catalog.load_table("db.t").location().removeprefix("file://"))
        orphan = folder / "metadata" / "left.stats"
        orphan.write_bytes(b"left over")
        age_all_files(catalog.load_table("db.t"))
        # A recent metadata file shows that the table is in use.
        os.utime(catalog.load_table("db.t").metadata_location.removeprefix("file://"))
        assert remove_orphan_files(client, "db.t").files == 1
        assert not orphan.exists()
        assert all(path.exists() for path in files)
        expire(client, "db.t", older_than_ms=1 << 60)
        referenced_files = list_statistics_files(catalog)
        assert len(referenced_files) == 2
        assert {path for path in files if path.exists()} == referenced_files


def test_refused_statistics_commit_leaves_no_file(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Conflict("refused")

    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_PART)
        append(client, "db.t", build_rows(range(10)))
        folder = Path(catalog.load_table("db.t").location().removeprefix("file://"))
        files_before = set(folder.rglob("*"))
        monkeypatch.setattr(statistics, "update_table", refuse)
        with pytest.raises(Conflict):
            compute_statistics(client, "db.t")
        assert set(folder.rglob("*")) == files_before


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_partition_statistics_contain_the_totals_of_each_partition(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, BY_PART)
        append(client, "db.t", build_rows(range(300)))
        delete(client, "db.t", keys=pa.table({"id": [0, 1, 3]}), mode="merge-on-read")
        assert compute_statistics(client, "db.t").partitions == 3
        (path,) = [path for path in list_statistics_files(catalog) if path.suffix == ".parquet"]
        values = pq.read_table(path).to_pylist()
        assert [row["partition"]["part"] for row in values] == [0, 1, 2]
        assert [row["data_record_count"] for row in values] == [100, 100, 100]
        assert sum(row["position_delete_record_count"] for row in values) == 3
        vectors = [row["dv_count"] for row in values] if version == 3 else []
        deletes = [row["position_delete_file_count"] for row in values]
        assert (vectors or deletes) == [1, 1, 0]
        assert not vectors or deletes == [0, 0, 0]
        snapshot = catalog.load_table("db.t").current_snapshot()
        assert snapshot is not None
        assert [row["last_updated_snapshot_id"] == snapshot.snapshot_id for row in values] == [True, True, False]


@pytest.mark.slow
def test_partition_statistics_accept_decimals_that_truncation_makes_longer(
    client: IndexClient, server: ServerThread
) -> None:
    fields = [{"id": 1, "name": "price", "required": False, "type": "decimal(9, 2)"}]
    with open_catalog(server.url) as catalog:
        create_table(client, spec=[("truncate[10]", 1)], fields=fields)
        prices = [Decimal("-9999999.99"), Decimal("1.25"), None]
        append(client, "db.t", pa.table({"price": pa.array(prices, pa.decimal128(9, 2))}))
        assert compute_statistics(client, "db.t").partitions == 3
        (path,) = [path for path in list_statistics_files(catalog) if path.suffix == ".parquet"]
    actual = [row["p0"] for row in pq.read_table(path).column("partition").to_pylist()]
    assert actual == [None, Decimal("-10000000.00"), Decimal("1.20")]
