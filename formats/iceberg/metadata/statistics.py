"""The statistics of a table: the snapshot that has them, later changes, and the policy that keeps them current.

The metadata names statistics files, which contain the numbers of distinct values. The numbers belong to one snapshot.
Later snapshots add and remove rows, which their summaries count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count, parse_int, parse_names
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.snapshot import BlobMetadata, Snapshot, StatisticsFile
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.runtime.errors import BadRequest

COLUMNS = "seamark.statistics.columns"
CHANGED_PERCENT, CHANGED_PERCENT_DEFAULT = "seamark.statistics.changed-percent", 10
THETA = "apache-datasketches-theta-v1"
NDV, REMOVED = "ndv", "seamark.removed-records"
"""Properties of a blob: the number of distinct values, which engines read, and the number of removed rows.

The second one counts the rows that were removed since the column was last read completely; the sketch still counts
their values.
"""
_UNCOUNTED_TYPES = frozenset({"unknown", "variant", "geometry", "geography"})
_ADDED_COUNTS = ("added-records",)
_REMOVED_COUNTS = ("deleted-records", "added-position-deletes", "added-equality-deletes")


@dataclass(frozen=True)
class StatisticsPolicy:
    """The columns that have statistics, and the changes after which the statistics are computed again.

    Attributes:
        columns: The names of the columns. If it is empty, all columns have statistics.
        changed_percent: The percentage of changed rows at which statistics are computed again.
    """

    columns: tuple[str, ...] = ()
    changed_percent: int = CHANGED_PERCENT_DEFAULT

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> StatisticsPolicy:
        """Return the policy in a table's properties.

        Raises:
            BadRequest: A property has an invalid value.
        """
        percent = parse_int(properties, CHANGED_PERCENT, CHANGED_PERCENT_DEFAULT)
        if not 1 <= percent <= 100:
            raise BadRequest(f"{CHANGED_PERCENT} is {percent}; it must be between 1 and 100")
        return StatisticsPolicy(parse_names(properties, COLUMNS, "different columns"), percent)

    def list_column_types(self, schema: Schema) -> dict[int, str]:
        """Return the types of the chosen columns by id.

        Structs, lists and maps, the columns inside them, and types whose values are not counted are omitted. Names that
        the schema does not have are ignored, because a column of the policy may have been dropped.
        """
        return {
            field.id: field.type
            for field in schema.fields
            if isinstance(field.type, str)
            and get_base_name(field.type) not in _UNCOUNTED_TYPES
            and (not self.columns or field.name in self.columns)
        }


@dataclass(frozen=True)
class KnownStatistics:
    """The statistics that apply to a snapshot.

    Attributes:
        snapshot: The snapshot.
        file: The newest statistics of the snapshot or an ancestor with a number of distinct values, or None if there
            are none.
        later_snapshots: The snapshots after the snapshot with the statistics, newest first. If there are no statistics,
            all known ancestors.
    """

    snapshot: Snapshot
    file: StatisticsFile | None
    later_snapshots: tuple[Snapshot, ...]

    @property
    def added(self) -> int:
        """The number of rows that snapshots have added since the statistics were computed."""
        return sum(_sum_counts(snapshot, _ADDED_COUNTS) for snapshot in self.later_snapshots)

    @property
    def removed(self) -> int:
        return sum(_sum_counts(snapshot, _REMOVED_COUNTS) for snapshot in self.later_snapshots)

    @property
    def rows(self) -> int:
        return parse_count(self.snapshot.build_summary_map(), "total-records", 0)

    def list_blobs(self, metadata: TableMetadata) -> dict[int, BlobMetadata]:
        """Return the statistics of each column by column id, as descriptions of blobs in the statistics file.

        A blob is a theta sketch, the hashes from which the number of distinct values is estimated. Columns whose type
        has changed since then are omitted, because a wider type changes the hashes.
        """
        if self.file is None:
            return {}
        blobs_by_column = {}
        for blob in self.file.blob_metadata:
            if blob.type != THETA or len(blob.fields) != 1:
                continue
            (column_id,) = blob.fields
            source_snapshot = metadata.snapshot(blob.snapshot_id)
            schema_id = None if source_snapshot is None else source_snapshot.schema_id
            schema = None if schema_id is None else metadata.schema(schema_id)
            source_column = None if schema is None else schema.column(column_id)
            current_column = metadata.current_schema.column(column_id)
            if source_column is not None and current_column is not None and source_column.type == current_column.type:
                blobs_by_column[column_id] = blob
        return blobs_by_column

    def is_stale(self, metadata: TableMetadata, policy: StatisticsPolicy) -> bool:
        """Return whether the statistics should be computed again.

        This is necessary if a column has no statistics, if many rows have changed, or if the newest commits have only
        rewritten files. In the last case, the numbers are still correct, but Spark reads only the statistics of the
        current snapshot. A table without rows needs no statistics.
        """
        if self.rows == 0:
            return False
        if not policy.list_column_types(metadata.current_schema).keys() <= self.list_blobs(metadata).keys():
            return True
        changed_rows = self.added + self.removed
        return bool(self.later_snapshots) and (
            changed_rows == 0 or changed_rows * 100 >= policy.changed_percent * self.rows
        )

    @property
    def uncounted(self) -> frozenset[int]:
        """The later snapshots whose files may have rows that the statistics do not count.

        A replacement has the same rows as its parent, in new files. The statistics count these rows, unless a snapshot
        between the statistics and the replacement has added rows.
        """
        snapshot_ids, has_added_rows = set(), False
        for snapshot in reversed(self.later_snapshots):
            summary = snapshot.build_summary_map()
            if is_replace(snapshot):
                if has_added_rows:
                    snapshot_ids.add(snapshot.snapshot_id)
                continue
            snapshot_ids.add(snapshot.snapshot_id)
            # Writers omit counts that are 0.
            has_added_rows |= "total-records" not in summary or _sum_counts(snapshot, _ADDED_COUNTS) > 0
        return frozenset(snapshot_ids)


def find_known_statistics(metadata: TableMetadata, snapshot: Snapshot) -> KnownStatistics:
    """Return the statistics of the snapshot, or of its nearest ancestor with statistics.

    The result also has the snapshots after this ancestor, newest first. If no ancestor has statistics, the result has
    no file, and all these snapshots.
    """
    files_by_snapshot = {
        file.snapshot_id: file
        for file in metadata.statistics
        if any(blob.type == THETA and NDV in (blob.properties or {}) for blob in file.blob_metadata)
    }
    later_snapshots: list[Snapshot] = []
    ancestor: Snapshot | None = snapshot
    while ancestor is not None:
        if (file := files_by_snapshot.get(ancestor.snapshot_id)) is not None:
            return KnownStatistics(snapshot, file, tuple(later_snapshots))
        later_snapshots.append(ancestor)
        ancestor = None if ancestor.parent_snapshot_id is None else metadata.snapshot(ancestor.parent_snapshot_id)
    return KnownStatistics(snapshot, None, tuple(later_snapshots))


def _sum_counts(snapshot: Snapshot, names: tuple[str, ...]) -> int:
    """Return the sum of some counts in a snapshot's summary, or 0 for a replacement, which does not change rows."""
    summary = snapshot.build_summary_map()
    return 0 if is_replace(snapshot) else sum(parse_count(summary, name, 0) for name in names)
