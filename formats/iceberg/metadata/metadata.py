"""Table metadata, format versions 1 to 3, as one immutable value (Iceberg spec: "Table Metadata").

The older fields of version 1 (`schema`, `partition-spec`, missing ids) exist only in JSON: `table_json` converts them,
and all other code uses one form. Nothing is modified in place, including the dictionaries.
"""

from __future__ import annotations

import msgspec

from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.snapshot import (
    MAIN,
    EncryptedKey,
    MetadataLogEntry,
    PartitionStatisticsFile,
    Snapshot,
    SnapshotLogEntry,
    SnapshotRef,
    StatisticsFile,
)
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import computed_once
from seamark.formats.storage.locations import add_scheme

FORMAT_VERSION_DEFAULT = 2
FORMAT_VERSION_MAX = 3
ROW_LINEAGE_MIN_FORMAT_VERSION = 3
ENCRYPTION_MIN_FORMAT_VERSION = 3

CLOCK_SKEW_MS = 60_000
"""The maximum difference in milliseconds by which logged times can step back. Java rejects metadata with a larger one.
"""


class TableMetadata(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """The metadata of a table. Times are milliseconds since the epoch.

    If the JSON has a current snapshot of -1, `current_snapshot_id` is None.
    """

    format_version: int
    table_uuid: str | None
    """The UUID of the table. It is None only in version 1 metadata of old writers."""
    location: str
    last_updated_ms: int
    last_column_id: int
    schemas: tuple[Schema, ...]
    current_schema_id: int
    partition_specs: tuple[PartitionSpec, ...]
    default_spec_id: int
    last_partition_id: int
    sort_orders: tuple[SortOrder, ...]
    default_sort_order_id: int
    last_sequence_number: int = 0
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    current_snapshot_id: int | None = None
    snapshots: tuple[Snapshot, ...] = ()
    snapshot_log: tuple[SnapshotLogEntry, ...] = ()
    metadata_log: tuple[MetadataLogEntry, ...] = ()
    refs: dict[str, SnapshotRef] = msgspec.field(default_factory=dict)
    statistics: tuple[StatisticsFile, ...] = ()
    partition_statistics: tuple[PartitionStatisticsFile, ...] = ()
    next_row_id: int = 0
    encryption_keys: tuple[EncryptedKey, ...] = ()

    @computed_once
    def snapshots_by_id(self) -> dict[int, Snapshot]:
        return {snapshot.snapshot_id: snapshot for snapshot in self.snapshots}

    def snapshot(self, snapshot_id: int) -> Snapshot | None:
        return self.snapshots_by_id.get(snapshot_id)

    @property
    def current_snapshot(self) -> Snapshot | None:
        return None if self.current_snapshot_id is None else self.snapshots_by_id.get(self.current_snapshot_id)

    def schema(self, schema_id: int) -> Schema | None:
        for schema in self.schemas:
            if schema.id == schema_id:
                return schema
        return None

    def spec(self, spec_id: int) -> PartitionSpec | None:
        for spec in self.partition_specs:
            if spec.spec_id == spec_id:
                return spec
        return None

    def sort_order(self, order_id: int) -> SortOrder | None:
        return next((order for order in self.sort_orders if order.order_id == order_id), None)

    @computed_once
    def current_schema(self) -> Schema:
        schema = self.schema(self.current_schema_id)
        if schema is None:
            raise BadRequest(f"Cannot find schema with current-schema-id={self.current_schema_id} from schemas")
        return schema

    @property
    def default_spec(self) -> PartitionSpec:
        spec = self.spec(self.default_spec_id)
        if spec is None:
            raise BadRequest(f"Cannot find partition spec with default-spec-id={self.default_spec_id}")
        return spec


def add_schemes(metadata: TableMetadata) -> TableMetadata:
    """Add the scheme of local files to each location without a scheme, and return the metadata.

    Iceberg's Hadoop catalog writes such locations if its warehouse has no scheme.
    """
    # Properties such as `write.data.path` contain locations.
    paths = {
        name: value for name, value in metadata.properties.items() if name.endswith(".path") and value.startswith("/")
    }
    return msgspec.structs.replace(
        metadata,
        location=add_scheme(metadata.location),
        properties={**metadata.properties, **{name: add_scheme(value) for name, value in paths.items()}},
        snapshots=tuple(
            msgspec.structs.replace(
                snapshot,
                manifest_list=None if snapshot.manifest_list is None else add_scheme(snapshot.manifest_list),
                manifests=None if snapshot.manifests is None else tuple(map(add_scheme, snapshot.manifests)),
            )
            for snapshot in metadata.snapshots
        ),
        metadata_log=tuple(
            msgspec.structs.replace(entry, metadata_file=add_scheme(entry.metadata_file))
            for entry in metadata.metadata_log
        ),
        statistics=tuple(
            msgspec.structs.replace(file, statistics_path=add_scheme(file.statistics_path))
            for file in metadata.statistics
        ),
        partition_statistics=tuple(
            msgspec.structs.replace(file, statistics_path=add_scheme(file.statistics_path))
            for file in metadata.partition_statistics
        ),
    )


def check_invariants(metadata: TableMetadata) -> None:
    """Check that the parts of the metadata do not contradict each other.

    All writers and readers rely on this.

    Raises:
        BadRequest: Two parts contradict each other. The message describes the first contradiction.
    """
    if not 1 <= metadata.format_version <= FORMAT_VERSION_MAX:
        raise BadRequest(f"Unsupported format version: v{metadata.format_version} (supported: v{FORMAT_VERSION_MAX})")
    if metadata.table_uuid is None and metadata.format_version > 1:
        raise BadRequest(f"UUID is required in format v{metadata.format_version}")
    if metadata.format_version == 1 and metadata.last_sequence_number != 0:
        raise BadRequest(f"Sequence number must be 0 in v1: {metadata.last_sequence_number}")
    _ = metadata.current_schema, metadata.default_spec  # These properties raise BadRequest if the id is unknown.
    if metadata.sort_order(metadata.default_sort_order_id) is None and metadata.default_sort_order_id != 0:
        raise BadRequest(f"Cannot find sort order with default-sort-order-id={metadata.default_sort_order_id}")
    for name, ids in (
        ("schema", [schema.id for schema in metadata.schemas]),
        ("partition spec", [spec.spec_id for spec in metadata.partition_specs]),
        ("sort order", [order.order_id for order in metadata.sort_orders]),
    ):
        if len(set(ids)) != len(ids):
            raise BadRequest(f"Multiple entries with the same {name} id: {ids}")
    _check_snapshots(metadata)


def _check_snapshots(metadata: TableMetadata) -> None:
    snapshots = metadata.snapshots_by_id
    if len(snapshots) != len(metadata.snapshots):
        raise BadRequest("Multiple snapshots with the same id")
    highest_number = max((snapshot.sequence_number for snapshot in metadata.snapshots), default=0)
    if highest_number > metadata.last_sequence_number:
        raise BadRequest(
            f"Invalid snapshot with sequence number {highest_number} greater than last sequence number "
            f"{metadata.last_sequence_number}"
        )
    if metadata.current_snapshot_id is not None and metadata.current_snapshot_id not in snapshots:
        raise BadRequest(f"Cannot find current snapshot {metadata.current_snapshot_id}")
    for name, ref in metadata.refs.items():
        if ref.snapshot_id not in snapshots:
            raise BadRequest(f"Snapshot {ref.snapshot_id} for reference {name} does not exist")
    main_ref = metadata.refs.get(MAIN)
    if main_ref is not None and main_ref.snapshot_id != metadata.current_snapshot_id:
        raise BadRequest(
            f"Current snapshot ID does not match main branch ({metadata.current_snapshot_id} != {main_ref.snapshot_id})"
        )


def add_previous_file(
    metadata: TableMetadata, previous_location: str, previous_timestamp_ms: int, max_entries: int | None = None
) -> tuple[TableMetadata, list[str]]:
    """Add the previous metadata file to the metadata log.

    The caller decides whether to delete the files that are removed from the log
    (`write.metadata.delete-after-commit.enabled`).

    Args:
        metadata: The new metadata.
        previous_location: The location of the previous metadata file.
        previous_timestamp_ms: The `last_updated_ms` of the previous metadata.
        max_entries: The maximum length of the log, at least one. The default is the table property
            `write.metadata.previous-versions-max` (100).

    Returns:
        The metadata, and the files that were removed from the start of the log.

    Raises:
        BadRequest: The property is not an integer.
    """
    if max_entries is None:
        max_entries = props.parse_int(
            metadata.properties, props.PREVIOUS_VERSIONS_MAX, props.PREVIOUS_VERSIONS_MAX_DEFAULT
        )
    log = (*metadata.metadata_log, MetadataLogEntry(previous_timestamp_ms, previous_location))
    removed_count = max(0, len(log) - max(1, max_entries))
    return msgspec.structs.replace(metadata, metadata_log=log[removed_count:]), [
        entry.metadata_file for entry in log[:removed_count]
    ]
