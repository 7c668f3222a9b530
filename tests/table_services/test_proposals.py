"""Tests of the jobs that services propose for a table from only its metadata."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table, encode_table
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.metaserver.services.proposer import JobProposer
from seamark.metaserver.services.proposers import (
    AutoAdvice,
    BucketSplitting,
    Compaction,
    Indexing,
    ManifestRewriting,
    OrphanFileRemoval,
    SnapshotExpiration,
    TableClustering,
    TableStatistics,
)
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind
from tests.catalog.rig import SCHEMA
from tests.server.rig import OffsetClock

ENTRY = Entry(EntryKind.TABLE, ("db",), "t", "11111111-1111-1111-1111-111111111111", "file:///t/metadata/1.json")
COMPACTION_PROPERTIES = {"seamark.compaction.enabled": "true"}


def build_proposer(kind: type[JobProposer], clock: Clock | None = None, **by_default: bool) -> JobProposer:
    """Return the proposer of a service.

    Args:
        by_default: Whether each of these services runs on tables without the property that enables or disables it.
    """
    settings = Settings(**{f"services_{name}": is_enabled for name, is_enabled in by_default.items()})
    return kind(settings, clock or SystemClock())


def build_table(properties: dict[str, str], version: int = 2, **totals: int) -> TableMetadata:
    summary = {"operation": "append", **{name.replace("_", "-"): str(count) for name, count in totals.items()}}
    snapshot = {
        "snapshot-id": 1, "sequence-number": version - 1, "timestamp-ms": 1, "manifest-list": "file:///t/l.avro",
        "schema-id": 0, "summary": summary,
    }  # fmt: skip
    document: dict[str, Any] = {
        "format-version": version, "table-uuid": ENTRY.uuid, "location": "file:///t",
        "last-sequence-number": version - 1, "last-updated-ms": 1,
        "last-column-id": 2, "current-schema-id": 0, "schemas": [{**SCHEMA, "schema-id": 0}],
        "default-spec-id": 0, "partition-specs": [{"spec-id": 0, "fields": []}], "last-partition-id": 999,
        "default-sort-order-id": 0, "sort-orders": [{"order-id": 0, "fields": []}], "properties": properties,
        "current-snapshot-id": 1 if totals else -1, "snapshots": [snapshot] if totals else [],
    }  # fmt: skip
    return decode_table(msgspec.json.encode(document), "t")


@pytest.mark.parametrize(
    ("table", "proposed"),
    [
        (build_table(COMPACTION_PROPERTIES, total_data_files=5, total_files_size=500), True),
        (build_table(COMPACTION_PROPERTIES, total_data_files=4, total_files_size=400), False),
        (build_table(COMPACTION_PROPERTIES, total_data_files=1, total_files_size=400, total_delete_files=1), True),
        (build_table(COMPACTION_PROPERTIES, total_data_files=10, total_files_size=10 << 29), False),
        (
            build_table(
                {**COMPACTION_PROPERTIES, "write.target-file-size-bytes": "1000"},
                total_data_files=10,
                total_files_size=8000,
            ),
            False,
        ),
        (
            build_table(
                {**COMPACTION_PROPERTIES, "write.target-file-size-bytes": "1000"},
                total_data_files=10,
                total_files_size=7000,
            ),
            True,
        ),
        (
            build_table(
                {**COMPACTION_PROPERTIES, "seamark.compaction.min-files": "3"}, total_data_files=3, total_files_size=300
            ),
            True,
        ),
        (
            build_table(
                {**COMPACTION_PROPERTIES, "seamark.compaction.min-files": "no"},
                total_data_files=5,
                total_files_size=300,
            ),
            True,
        ),
        (build_table(COMPACTION_PROPERTIES), False),
        (build_table(COMPACTION_PROPERTIES, version=1, total_data_files=9, total_files_size=9), False),
        (build_table({}, total_data_files=9, total_files_size=9), False),
    ],
)
def test_compaction_is_proposed_when_it_may_find_work(table: TableMetadata, proposed: bool) -> None:
    assert (build_proposer(Compaction, compaction=False, clustering=True).propose(ENTRY, table) is not None) == proposed


def test_table_property_takes_precedence_over_the_setting() -> None:
    totals = {"total_data_files": 9, "total_files_size": 9}
    service = build_proposer(Compaction, compaction=True, clustering=True)
    assert service.propose(ENTRY, build_table({}, **totals)) is not None
    assert service.propose(ENTRY, build_table({"seamark.compaction.enabled": "false"}, **totals)) is None


def test_table_with_clustering_columns_is_clustered_and_not_compacted() -> None:
    properties = {**COMPACTION_PROPERTIES, "seamark.clustering.columns": "id"}
    totals = {"total_data_files": 9, "total_files_size": 9}
    compaction, clustering = (
        build_proposer(Compaction, compaction=True, clustering=True),
        build_proposer(TableClustering, clustering=True),
    )
    assert compaction.propose(ENTRY, build_table(properties, **totals)) is None
    assert clustering.propose(ENTRY, build_table(properties, **totals)) is not None
    disabled_properties = {**properties, "seamark.clustering.enabled": "false"}
    assert compaction.propose(ENTRY, build_table(disabled_properties, **totals)) is not None
    assert clustering.propose(ENTRY, build_table(disabled_properties, **totals)) is None
    assert build_proposer(TableClustering, clustering=False).propose(ENTRY, build_table(properties, **totals)) is None
    assert clustering.propose(ENTRY, build_table(COMPACTION_PROPERTIES, **totals)) is None
    assert clustering.propose(ENTRY, build_table(properties, version=1, **totals)) is None


def test_large_tables_are_examined_less_often() -> None:
    service = build_proposer(Compaction, compaction=True, clustering=True)
    job = service.propose(ENTRY, build_table({}, total_data_files=1_000_000, total_files_size=9))
    assert job is not None
    assert job.pause_s == 1000


def test_indexing_is_proposed_only_for_enabled_indexes() -> None:
    assert build_proposer(Indexing).propose(ENTRY, build_table({"seamark.index.i": "bloom(id)"})) is not None
    paused_definition = '{"kind": "bloom", "columns": ["id"], "state": "paused"}'
    assert build_proposer(Indexing).propose(ENTRY, build_table({"seamark.index.i": paused_definition})) is None
    assert build_proposer(Indexing).propose(ENTRY, build_table({"seamark.index.i": "nonsense"})) is None
    assert build_proposer(Indexing).propose(ENTRY, build_table({})) is None


def build_table_with_snapshots(properties: dict[str, str], *times_ms: int, **ref: int) -> TableMetadata:
    """Return a table of version 2 whose snapshots were committed at these times.

    Args:
        ref: The retention properties of the branch `main`.
    """
    document = msgspec.json.decode(encode_table(build_table(properties, total_data_files=1)))
    (snapshot,) = document["snapshots"]
    document["snapshots"] = [
        {**snapshot, "snapshot-id": number, "sequence-number": number, "timestamp-ms": time_ms}
        for number, time_ms in enumerate(times_ms, 1)
    ]
    snapshot_count = len(times_ms)
    ref_options = {name.replace("_", "-"): value for name, value in ref.items()}
    document |= {
        "current-snapshot-id": snapshot_count,
        "last-sequence-number": snapshot_count,
        "last-updated-ms": times_ms[-1],
    }
    document["refs"] = {"main": {"type": "branch", "snapshot-id": snapshot_count, **ref_options}}
    return decode_table(msgspec.json.encode(document), "t")


DAY_MS = 86_400_000
EXPIRES = {"seamark.expiration.enabled": "true"}


@pytest.mark.parametrize(
    ("table", "proposed"),
    [
        # It is day 20. By default, a snapshot is old after 5 days. The oldest snapshot can expire only if the second
        # snapshot, which replaced it as the current one, is old too. The last row has a maximum age for a branch, so
        # the proposal does not examine the times.
        (build_table_with_snapshots(EXPIRES, 1, 2, 20 * DAY_MS), True),
        (build_table_with_snapshots(EXPIRES, 1, 16 * DAY_MS, 20 * DAY_MS), False),
        (build_table_with_snapshots(EXPIRES, 1), False),
        (build_table_with_snapshots({**EXPIRES, "gc.enabled": "false"}, 1, 2, 20 * DAY_MS), False),
        (build_table_with_snapshots({}, 1, 2, 20 * DAY_MS), False),
        (
            build_table_with_snapshots(
                {**EXPIRES, "history.expire.max-snapshot-age-ms": "1000"}, 1, 19 * DAY_MS, 20 * DAY_MS
            ),
            True,
        ),
        (
            build_table_with_snapshots({**EXPIRES, "history.expire.min-snapshots-to-keep": "3"}, 1, 2, 20 * DAY_MS),
            False,
        ),
        (
            build_table_with_snapshots({**EXPIRES, "history.expire.min-snapshots-to-keep": "many"}, 1, 2, 20 * DAY_MS),
            False,
        ),
        (build_table_with_snapshots(EXPIRES, 1, 16 * DAY_MS, 20 * DAY_MS, max_snapshot_age_ms=1000), True),
    ],
)
def test_expiration_is_proposed_when_it_may_find_old_snapshots(table: TableMetadata, proposed: bool) -> None:
    clock = OffsetClock()
    clock.ahead_ms = 20 * DAY_MS - SystemClock().now_ms()
    assert (build_proposer(SnapshotExpiration, clock, expiration=False).propose(ENTRY, table) is not None) == proposed


@pytest.mark.parametrize(
    ("properties", "default", "proposed"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"seamark.orphan-files.enabled": "false"}, True, False),
        ({"seamark.orphan-files.enabled": "true"}, False, True),
        ({"gc.enabled": "false"}, True, False),
        ({"seamark.orphan-files.min-age-ms": "1"}, True, False),
        ({"seamark.orphan-files.min-age-ms": "86400000"}, True, True),
    ],
)
def test_orphan_removal_is_proposed_when_it_is_enabled_and_possible(
    properties: dict[str, str], default: bool, proposed: bool
) -> None:
    job = build_proposer(OrphanFileRemoval, orphan_files=default).propose(ENTRY, build_table(properties))
    assert (job is not None) == proposed
    assert job is None or job.pause_s == 24 * 3600


@pytest.mark.parametrize(
    ("properties", "totals", "default", "proposed"),
    [
        ({}, {"total_data_files": 9}, False, False),
        ({}, {"total_data_files": 9}, True, True),
        ({"seamark.manifests.enabled": "true"}, {"total_data_files": 4}, False, True),
        ({"seamark.manifests.enabled": "true"}, {"total_data_files": 3}, False, False),
        ({"seamark.manifests.min-count": "2"}, {"total_data_files": 1, "total_delete_files": 1}, True, True),
        ({}, {"total_data_files": 9, "manifests_rewritten_by": "seamark"}, True, False),
        ({}, {}, True, False),
    ],
)
def test_manifest_rewrite_is_proposed_after_a_change(
    properties: dict[str, str], totals: dict[str, Any], default: bool, proposed: bool
) -> None:
    job = build_proposer(ManifestRewriting, manifests=default).propose(ENTRY, build_table(properties, **totals))
    assert (job is not None) == proposed
    assert job is None or (job.pause_s, job.idle_pause_s) == (600, 60)


def build_history(
    *totals: dict[str, Any], statistics_of: int | None, columns: tuple[int, ...] = (1, 2)
) -> TableMetadata:
    """Return a table with a snapshot for each summary in `totals`.

    The snapshot with the id `statistics_of` has a statistics file, which counts five distinct values for each column of
    `columns`. The ids of the snapshots begin with 1.
    """
    document = msgspec.json.decode(encode_table(build_table({}, total_records=1)))
    snapshot = document["snapshots"][0]
    document["snapshots"] = [
        {
            **snapshot, "snapshot-id": number, "sequence-number": number,
            **({"parent-snapshot-id": number - 1} if number > 1 else {}),
            "summary": {name.replace("_", "-"): str(value) for name, value in total.items()},
        }
        for number, total in enumerate(totals, 1)
    ]  # fmt: skip
    document |= {"current-snapshot-id": len(totals), "last-sequence-number": len(totals)}
    document["refs"] = {"main": {"type": "branch", "snapshot-id": len(totals)}}
    if statistics_of is not None:
        blobs = [
            {"type": "apache-datasketches-theta-v1", "snapshot-id": statistics_of, "sequence-number": statistics_of,
             "fields": [column], "properties": {"ndv": "5"}}
            for column in columns
        ]  # fmt: skip
        document["statistics"] = [
            {"snapshot-id": statistics_of, "statistics-path": "file:///t/s.stats", "file-size-in-bytes": 9,
             "file-footer-size-in-bytes": 9, "blob-metadata": blobs}
        ]  # fmt: skip
    return decode_table(msgspec.json.encode(document), "t")


FIRST_APPEND = {"operation": "append", "added_records": 100, "total_records": 100}
SMALL_APPEND = {"operation": "append", "added_records": 5, "total_records": 105}
LARGE_APPEND = {"operation": "append", "added_records": 20, "total_records": 120}
DELETION = {"operation": "overwrite", "deleted_records": 30, "total_records": 70}
REWRITE_OF_SAME_ROWS = {"operation": "replace", "added_records": 100, "deleted_records": 100, "total_records": 100}


@pytest.mark.parametrize(
    ("table", "proposed"),
    [
        (build_history(FIRST_APPEND, statistics_of=None), True),
        (build_history(FIRST_APPEND, statistics_of=1), False),
        (build_history(FIRST_APPEND, statistics_of=1, columns=(1,)), True),
        (build_history(FIRST_APPEND, SMALL_APPEND, statistics_of=1), False),
        (build_history(FIRST_APPEND, SMALL_APPEND, statistics_of=2), False),
        (build_history(FIRST_APPEND, LARGE_APPEND, statistics_of=1), True),
        (build_history(FIRST_APPEND, SMALL_APPEND, SMALL_APPEND, SMALL_APPEND, statistics_of=1), True),
        (build_history(FIRST_APPEND, DELETION, statistics_of=1), True),
        (build_history(FIRST_APPEND, REWRITE_OF_SAME_ROWS, statistics_of=1), True),
        (build_history(FIRST_APPEND, SMALL_APPEND, REWRITE_OF_SAME_ROWS, statistics_of=1), False),
        (build_history({"operation": "delete", "total_records": 0}, statistics_of=None), False),
        (build_table({"seamark.statistics.changed-percent": "no"}, total_records=9), False),
    ],
)
def test_statistics_are_proposed_when_they_are_missing_or_outdated(table: TableMetadata, proposed: bool) -> None:
    assert (build_proposer(TableStatistics, statistics=True).propose(ENTRY, table) is not None) == proposed
    assert build_proposer(TableStatistics, statistics=False).propose(ENTRY, table) is None


@pytest.mark.parametrize(
    ("bucket_counts", "proposed"), [((2,), False), ((2, 4), True), ((4, 2), False), ((3, 4), False), ((4, 8, 16), True)]
)
def test_split_is_proposed_when_a_spec_has_fewer_buckets(bucket_counts: tuple[int, ...], proposed: bool) -> None:
    document = msgspec.json.decode(encode_table(build_table({}, total_data_files=1)))
    document["partition-specs"] = [
        {
            "spec-id": number,
            "fields": [
                {
                    "source-id": 1,
                    "field-id": 1000 + number,
                    "name": f"b{number}",
                    "transform": f"bucket[{bucket_count}]",
                }
            ],
        }
        for number, bucket_count in enumerate(bucket_counts)
    ]
    document |= {"default-spec-id": len(bucket_counts) - 1, "last-partition-id": 1000 + len(bucket_counts)}
    table = decode_table(msgspec.json.encode(document), "t")
    assert (build_proposer(BucketSplitting, bucket_splitting=True).propose(ENTRY, table) is not None) == proposed
    assert build_proposer(BucketSplitting, bucket_splitting=False).propose(ENTRY, table) is None


def test_automatic_advice_is_proposed_for_tables_with_rows() -> None:
    enabled_properties = {"seamark.auto-advice.enabled": "true"}
    advice = build_proposer(AutoAdvice, auto_advice=False)
    assert advice.propose(ENTRY, build_table(enabled_properties, total_data_files=1)) is not None
    assert advice.recheck_after_s(build_table(enabled_properties)) < math.inf
    assert advice.propose(ENTRY, build_table(enabled_properties)) is None
    assert advice.propose(ENTRY, build_table({}, total_data_files=1)) is None
    assert build_proposer(AutoAdvice, auto_advice=True).propose(ENTRY, build_table({}, total_data_files=1)) is not None
