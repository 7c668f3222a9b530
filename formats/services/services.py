"""The table services by name, in the order of settings, policies and the documentation. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping

from seamark.formats.iceberg.metadata import (
    auto_advice,
    clustering,
    column_ttl,
    compaction,
    manifest_policy,
    retention,
    statistics,
)
from seamark.formats.services.service import (
    Requirement,
    ServiceProperty,
    TableService,
    require_parsed_by,
    require_whole_number,
)


def _require_layout(name: str) -> Requirement:
    """Return the requirement that the property `name` of a clustering is valid.

    The other properties of the clustering may be missing, so the column `c` replaces missing columns.
    """

    def require(properties: Mapping[str, str]) -> None:
        clustering.parse_joins(properties)
        clustering.ClusteringLayout.from_properties({clustering.COLUMNS: "c", name: properties[name]})

    return require


def _require_statistics(name: str) -> Requirement:
    """Return the requirement that the value of the statistics property `name` is valid.

    It is checked alone, because the other properties of the statistics may be missing.
    """

    def require(properties: Mapping[str, str]) -> None:
        statistics.StatisticsPolicy.from_properties({name: properties[name]})

    return require


def _require_column_name(properties: Mapping[str, str]) -> str | None:
    """Return what the time column must be, or None if it has a name. This is a `Requirement`."""
    return None if properties[column_ttl.TIME_COLUMN].strip() else "the name of a column"


INDEXING = TableService(
    name="indexing",
    command="index",
    summary="builds, merges and audits indexes",
    condition="the table has an enabled index",
    page="indexes.md",
    enabled_by_default=None,
    prefixes=("seamark.index.",),
    is_inherited=False,
    ignores_windows=True,  # A missing index slows queries immediately.
)

COMPACTION = TableService(
    name="compaction",
    command="compact",
    summary="merges small data files, applies delete files",
    priority=7,  # Indexing runs before this, because a missing index slows queries more.
    setting_help="Whether the server compacts tables without the property seamark.compaction.enabled: it merges small "
    "data files and applies deletes.",
    properties=(
        ServiceProperty(
            compaction.MIN_FILES, str(compaction.MIN_FILES_DEFAULT), require_whole_number(compaction.MIN_FILES)
        ),
    ),
    affected_by=("clustering",),
    rewrites_files=True,
    runs_on_spark=True,
)

CLUSTERING = TableService(
    name="clustering",
    command="cluster",
    summary="sorts new rows into files by the clustering columns",
    condition="the table has the property `seamark.clustering.columns`",
    priority=8,  # Indexing runs before this, because a missing index slows queries more than unclustered rows.
    enabled_by_default=True,
    setting_help="Whether the server clusters tables that have the property seamark.clustering.columns, but not "
    "seamark.clustering.enabled.",
    properties=(
        ServiceProperty(clustering.COLUMNS, "", _require_layout(clustering.COLUMNS), "none"),
        ServiceProperty(clustering.CURVE, clustering.HILBERT, _require_layout(clustering.CURVE)),
        ServiceProperty(clustering.JOINS, "", _require_layout(clustering.JOINS), "none"),
    ),
    affected_by=("compaction",),
    rewrites_files=True,
    runs_on_spark=True,
    reads_joined_tables=True,
)

COLUMN_TTL = TableService(
    name="column-ttl",
    command="column-ttl",
    summary="removes expired columns from old partitions",
    condition="the table has the property `seamark.column-ttl.columns`",
    page="merge-files-and-drop-columns.md#drop-columns-by-their-age",
    priority=6,  # Compaction runs after this, because it would also rewrite the expired columns.
    enabled_by_default=True,
    setting_help="Whether the server removes expired columns from old partitions of tables that have the property "
    "seamark.column-ttl.columns, but not seamark.column-ttl.enabled.",
    properties=(
        ServiceProperty(column_ttl.COLUMNS, "", require_parsed_by(column_ttl.TtlPolicy.from_properties), "none"),
        ServiceProperty(column_ttl.TIME_COLUMN, "", _require_column_name, "none"),
    ),
    rewrites_files=True,
)

EXPIRATION = TableService(
    name="expiration",
    command="expire",
    summary="removes old snapshots, and the files that no other snapshot needs",
    priority=9,  # Compaction runs before this, because it makes files unused.
    setting_help="Whether the server expires snapshots of tables without the property seamark.expiration.enabled. It "
    "follows their properties history.expire.*, and deletes the files that no other snapshot needs.",
    properties=(
        ServiceProperty(
            retention.MAX_SNAPSHOT_AGE,
            str(retention.MAX_SNAPSHOT_AGE_DEFAULT_MS),
            require_whole_number(retention.MAX_SNAPSHOT_AGE),
        ),
        ServiceProperty(retention.MIN_SNAPSHOTS, "1", require_whole_number(retention.MIN_SNAPSHOTS)),
        ServiceProperty(retention.MAX_REF_AGE, "", require_whole_number(retention.MAX_REF_AGE)),
    ),
    prefixes=("seamark.expiration.", "history.expire."),
)

ORPHAN_FILES = TableService(
    name="orphan-files",
    command="orphan-files",
    summary="removes files that no snapshot references, once a day after a change",
    priority=10,  # All services that may leave files run before this.
    setting_help="Whether the server removes orphan files, which no snapshot references, of tables without the "
    "property seamark.orphan-files.enabled.",
    properties=(
        ServiceProperty(
            retention.MIN_ORPHAN_AGE,
            str(retention.MIN_ORPHAN_AGE_DEFAULT_MS),
            require_whole_number(retention.MIN_ORPHAN_AGE),
        ),
    ),
)

STATISTICS = TableService(
    name="statistics",
    command="statistics",
    summary="computes distinct values of columns, and totals of partitions",
    # The services that replace files run before this, so that a replacement needs new statistics only once.
    priority=11,
    setting_help="Whether the server computes statistics of tables without the property seamark.statistics.enabled: "
    "distinct values of columns, and totals of partitions.",
    properties=(
        ServiceProperty(statistics.COLUMNS, "", _require_statistics(statistics.COLUMNS), "all"),
        ServiceProperty(
            statistics.CHANGED_PERCENT,
            str(statistics.CHANGED_PERCENT_DEFAULT),
            _require_statistics(statistics.CHANGED_PERCENT),
        ),
    ),
)

MANIFESTS = TableService(
    name="manifests",
    command="manifests",
    summary="lists the files in fewer manifests, sorted by partition",
    priority=8,  # Compaction runs before this, because it makes entries unnecessary.
    setting_help="Whether the server rewrites the manifests of tables without the property seamark.manifests.enabled, "
    "if they have many.",
    properties=(
        ServiceProperty(
            manifest_policy.MIN_COUNT,
            str(manifest_policy.MIN_COUNT_DEFAULT),
            require_whole_number(manifest_policy.MIN_COUNT),
        ),
    ),
)

BUCKET_SPLITTING = TableService(
    name="bucket-splitting",
    command="split-buckets",
    summary="splits files that were written when the table had fewer buckets",
    page="buckets.md",
    priority=6,  # Compaction runs after this, because it would merge the files first.
    setting_help="Whether the server splits files that were written with fewer buckets, of tables without the "
    "property seamark.bucket-splitting.enabled.",
    affected_by=("compaction",),
    rewrites_files=True,
)

AUTO_ADVICE = TableService(
    name="auto-advice",
    command="auto-advice",
    summary="applies proposals of the advisor, measures them, and undoes those without a benefit",
    page="advisor.md#apply-proposals-automatically",
    priority=12,  # This runs last, because it may begin a rewrite of the whole table.
    setting_help="Whether the server applies proposals of the advisor to tables without the property "
    "seamark.auto-advice.enabled, measures them, and undoes those without a benefit.",
    properties=tuple(
        ServiceProperty(name, str(default), require_whole_number(name))
        for name, default in (
            (auto_advice.BYTES_PER_DAY, auto_advice.BYTES_PER_DAY_DEFAULT),
            (auto_advice.SECONDS_PER_DAY, auto_advice.SECONDS_PER_DAY_DEFAULT),
            (auto_advice.MEASURE_HOURS, auto_advice.MEASURE_HOURS_DEFAULT),
        )
    ),
)

SERVICES: dict[str, TableService] = {
    service.name: service
    for service in (
        INDEXING,
        COMPACTION,
        CLUSTERING,
        COLUMN_TTL,
        EXPIRATION,
        ORPHAN_FILES,
        STATISTICS,
        MANIFESTS,
        BUCKET_SPLITTING,
        AUTO_ADVICE,
    )
}


def list_inherited_prefixes() -> tuple[str, ...]:
    """Return the prefixes of the properties that a namespace may have for its tables."""
    return tuple(
        prefix for service in SERVICES.values() if service.is_inherited for prefix in service.property_prefixes
    )


def list_affecting_prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of the properties that cause or affect the jobs of a service, or `()` for an unknown name.

    They are the service's own prefixes, and those of services whose properties it also reads.
    """
    if name not in SERVICES:
        return ()
    service = SERVICES[name]
    names = (service.name, *service.affected_by)
    return tuple(prefix for other in names for prefix in SERVICES[other].property_prefixes)
