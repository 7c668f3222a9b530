"""What is wrong with a table, what that costs its queries, and what is done about it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from seamark.metaserver.commit.expiration.policy import ExpirationPolicy, find_expired
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.clustering import ClusteringLayout, layer_of
from seamark.metaserver.iceberg.metadata.compaction import DELETED, ENABLED, MIN_FILES, MIN_FILES_DEFAULT, small_below
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT, as_bool
from seamark.metaserver.planner.lookup.lookup import lookup
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.services.clustering import clusters
from seamark.metaserver.services.expiration import ENABLED as EXPIRATION_ENABLED
from seamark.metaserver.services.service import count_of
from seamark.metaserver.settings import Settings

_MANY_SNAPSHOTS = 100
"""Snapshots from which on metadata files are noticeably large: about 1 KB each, read by each query of an engine."""
_FILES_A_MANIFEST = 100
"""Fewer data files a manifest mean that engines that plan by themselves open many manifests."""
_MANY_MANIFESTS = 20


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """`service`: the table service that corrects it. `enabled`: whether the server runs that for this table; None
    without a service."""

    problem: str
    detail: str
    cost: str
    service: str | None = None
    enabled: bool | None = None


class TableHealth(msgspec.Struct, frozen=True, rename="kebab"):
    """Of the current snapshot. Sizes in bytes. `deleted_records`: by the totals of the snapshot; a row that two delete
    files name counts twice."""

    snapshot_id: int | None
    format_version: int
    files: int
    records: int
    size_in_bytes: int
    target_file_size_in_bytes: int
    small_files: int
    files_if_compacted: int
    delete_files: int
    deleted_records: int
    manifests: int
    snapshots: int
    expired_snapshots: int
    problems: tuple[Problem, ...]


class _Sizes(NamedTuple):
    files: int
    records: int
    size_bytes: int
    small_files: int
    files_if_compacted: int


def health_of(metadata: TableMetadata, view: TableView, settings: Settings, now_ms: int) -> TableHealth:
    """`view`: that of the current snapshot; empty without one."""
    target_bytes = max(1, count_of(metadata.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
    sizes = _sizes(view, target_bytes, small_below(metadata) * target_bytes)
    snapshot = metadata.current_snapshot
    totals = {} if snapshot is None else snapshot.summary_map()
    problems: list[Problem] = []
    expired_snapshots = 0
    try:
        expired_snapshots = len(find_expired(metadata, ExpirationPolicy.of(metadata, now_ms), now_ms).snapshot_ids)
    except BadRequest as error:
        problems.append(Problem("invalid property", error.message, "no snapshot expires"))
    health = TableHealth(
        snapshot_id=metadata.current_snapshot_id,
        format_version=metadata.format_version,
        files=sizes.files,
        records=sizes.records,
        size_in_bytes=sizes.size_bytes,
        target_file_size_in_bytes=target_bytes,
        small_files=sizes.small_files,
        files_if_compacted=sizes.files_if_compacted,
        delete_files=view.delete_rows,
        deleted_records=count_of(totals, "total-position-deletes", 0) + count_of(totals, "total-equality-deletes", 0),
        manifests=len(view.manifests) + len(view.delete_manifests),
        snapshots=len(metadata.snapshots),
        expired_snapshots=expired_snapshots,
        problems=(),
    )
    found = (*problems, *_layout_problems(view, metadata, settings), *_problems(health, metadata, settings))
    return msgspec.structs.replace(health, problems=found)


def _sizes(view: TableView, target_bytes: int, small_bytes_max: float) -> _Sizes:
    files = lookup(view)
    records, bytes_of = files.longs("record_count").clip(0), files.longs("file_size_in_bytes").clip(0)
    grouped = group_by_partition(files)
    small = bytes_of < small_bytes_max
    small_bytes = np.zeros(len(grouped.partitions), dtype=np.int64)
    np.add.at(small_bytes, grouped.numbers[small], bytes_of[small])
    small_files = int(small.sum())
    merged = int((-(-small_bytes // target_bytes)).sum())
    return _Sizes(
        len(bytes_of),
        int(records.sum()),
        int(bytes_of.sum()),
        small_files,
        len(bytes_of) - small_files + merged,
    )


def _layout_problems(view: TableView, metadata: TableMetadata, settings: Settings) -> list[Problem]:
    try:
        layout = ClusteringLayout.of(metadata.properties)
    except BadRequest as error:
        return [Problem("invalid property", error.message, "no files are clustered")]
    if layout is None:
        return []
    layers = Counter(layer_of((path or b"").decode()) for path in lookup(view).texts("file_path").values())
    files, loose = layers.total(), layers.pop(None, 0)
    if loose < max(2, count_of(metadata.properties, MIN_FILES, MIN_FILES_DEFAULT)):
        return []
    return [
        Problem(
            "unclustered files",
            f"{loose:,} of {files:,} data files are not clustered by {layout.text}; the others form {len(layers):,} "
            "layers",
            "a query that filters on these columns opens all of them, and some files of each layer",
            "clustering",
            settings.services_workers > 0
            and metadata.format_version > 1
            and clusters(metadata.properties, settings.services_clustering),
        )
    ]


def _problems(health: TableHealth, metadata: TableMetadata, settings: Settings) -> list[Problem]:
    found: list[Problem] = []
    properties, runs = metadata.properties, settings.services_workers > 0
    by_clustering = clusters(properties, settings.services_clustering)
    rewrites = by_clustering or as_bool(properties, ENABLED, settings.services_compaction)
    service = "clustering" if by_clustering else "compaction"
    compacts = runs and metadata.format_version > 1 and rewrites
    least = max(2, count_of(properties, MIN_FILES, MIN_FILES_DEFAULT)) - 1
    # A clustering keeps small layers, until there is as much new data.
    if not by_clustering and health.files - health.files_if_compacted >= least:
        found.append(
            Problem(
                "small files",
                f"{health.small_files:,} of {health.files:,} data files are smaller than "
                f"{small_below(metadata):.0%} of {health.target_file_size_in_bytes:,} bytes",
                f"a scan of the whole table opens {health.files:,} files; {health.files_if_compacted:,} would do",
                service,
                compacts,
            )
        )
    if health.deleted_records >= DELETED * max(1, health.records):
        found.append(
            Problem(
                "deleted rows",
                f"{health.delete_files:,} delete files delete about {health.deleted_records:,} of {health.records:,} "
                "rows",
                "readers open the delete files, and read the deleted rows and drop them",
                service,
                compacts,
            )
        )
    if health.expired_snapshots:
        found.append(
            Problem(
                "expired snapshots",
                f"{health.expired_snapshots:,} of {health.snapshots:,} snapshots have expired",
                "they keep files that queries no longer need, and each query of an engine loads their list",
                "expiration",
                runs and as_bool(properties, EXPIRATION_ENABLED, settings.services_expiration),
            )
        )
    elif health.snapshots > _MANY_SNAPSHOTS:
        found.append(
            Problem(
                "many snapshots",
                f"{health.snapshots:,} snapshots are within the retention of the table",
                "each query of an engine loads their list; reduce history.expire.max-snapshot-age-ms",
            )
        )
    if health.manifests >= _MANY_MANIFESTS and health.files < _FILES_A_MANIFEST * health.manifests:
        found.append(
            Problem(
                "small manifests",
                f"{health.manifests:,} manifests list {health.files:,} files",
                "an engine that plans without the server opens each; run rewrite_manifests in Spark",
            )
        )
    return found
