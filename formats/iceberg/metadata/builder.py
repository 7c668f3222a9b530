"""The working copy of table metadata to which the updates of a commit are applied.

The copy is mutable, and private to this package. A commit that expires a thousand snapshots has a thousand updates. If
each update created an immutable value, the time would be quadratic in the length of the history. `build` validates the
result and returns an immutable `TableMetadata`, or the base if nothing changed.

The semantics are those of Java's `TableMetadata.Builder`, with three exceptions that are more lenient or safer. Adding
an existing item makes it the "last added" item. Missing ids of a partition spec are assigned. The UUID of an existing
table cannot change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import msgspec

from seamark.formats.iceberg.metadata import partition, sort_order
from seamark.formats.iceberg.metadata.compaction import find_recently_undone
from seamark.formats.iceberg.metadata.metadata import (
    CLOCK_SKEW_MS,
    ENCRYPTION_MIN_FORMAT_VERSION,
    FORMAT_VERSION_MAX,
    ROW_LINEAGE_MIN_FORMAT_VERSION,
    TableMetadata,
    check_invariants,
)
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.properties import drop_reserved
from seamark.formats.iceberg.metadata.snapshot import (
    MAIN,
    EncryptedKey,
    PartitionStatisticsFile,
    Snapshot,
    SnapshotLogEntry,
    SnapshotRef,
    StatisticsFile,
)
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types import schema as schemas
from seamark.formats.iceberg.types.reading import INT_MAX, LONG_MAX, check_number
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest, CommitConflict

LAST_ADDED = -1
COMPARISONS_MAX = 500_000
"""The maximum number of comparisons of a commit. A comparison with a small schema takes a microsecond."""
_FIELDS_PER_COMPARISON = 16
"""The number of fields that are compared in about the time of another comparison."""


class ComparisonBudget:
    """A limit for the comparisons between the updates of a commit.

    An update that adds a schema, a partition spec, a sort order or a version of a view is compared with all existing
    items, because an item must not be added twice. A body of 4 MiB can have 20,000 such updates. Their comparisons
    would take minutes, and block all other work.
    """

    __slots__ = ("_remaining",)

    def __init__(self) -> None:
        self._remaining = COMPARISONS_MAX

    def spend(self, other_items: int, fields: int = 0) -> None:
        """Count the comparisons of an item with other items, before they are made.

        Args:
            other_items: The number of the other items.
            fields: The number of fields of the item.

        Raises:
            BadRequest: The commit needs too many comparisons.
        """
        self._remaining -= other_items * (1 + fields // _FIELDS_PER_COMPARISON)
        if self._remaining < 0:
            raise BadRequest(
                "The updates add or change too many schemas, partition specs, sort orders, snapshots or versions at "
                "once: commit fewer of them together"
            )


class TableBuilder:
    """The working copy of a table's metadata.

    Args:
        base: The table's metadata. None starts an empty table.
        format_version: The format version of an empty table.
        now_ms: The time of the commit.
    """

    def __init__(self, base: TableMetadata | None, *, format_version: int, now_ms: int) -> None:
        self._base = base
        self.changed = base is None
        self.format_version = format_version if base is None else base.format_version
        self.uuid = None if base is None else base.table_uuid
        self.location = None if base is None else base.location
        # Even if the clock has stepped back, the metadata must not be older than the entries of its history.
        self.now_ms = now_ms if base is None else max(now_ms, base.last_updated_ms)
        logged_ms = base.snapshot_log[-1].timestamp_ms if base is not None and base.snapshot_log else 0
        self._clock_was_ahead = max(self.now_ms, logged_ms) - now_ms > CLOCK_SKEW_MS
        if self._clock_was_ahead:
            self.now_ms = max(self.now_ms, logged_ms)
        self.last_sequence_number = 0 if base is None else base.last_sequence_number
        self.last_column_id = 0 if base is None else base.last_column_id
        self.last_partition_id = 0 if base is None else base.last_partition_id
        self.next_row_id = 0 if base is None else base.next_row_id
        self.schemas = {} if base is None else {schema.id: schema for schema in base.schemas}
        self.specs = {} if base is None else {spec.spec_id: spec for spec in base.partition_specs}
        self.orders = {} if base is None else {order.order_id: order for order in base.sort_orders}
        self.current_schema_id = 0 if base is None else base.current_schema_id
        self.default_spec_id = 0 if base is None else base.default_spec_id
        self.default_order_id = 0 if base is None else base.default_sort_order_id
        self.properties = {} if base is None else dict(base.properties)
        self.snapshots = {} if base is None else dict(base.snapshots_by_id)
        self._recently_undone: frozenset[int] | None = None
        """The ids of the snapshots that were undone in the last hour, or None if they were not determined yet."""
        self.current_snapshot_id = None if base is None else base.current_snapshot_id
        self.refs = {} if base is None else dict(base.refs)
        self.snapshot_log = [] if base is None else list(base.snapshot_log)
        self.statistics: dict[int, tuple[StatisticsFile, ...]] = {}
        self.partition_statistics: dict[int, tuple[PartitionStatisticsFile, ...]] = {}
        self.keys = {} if base is None else {key.key_id: key for key in base.encryption_keys}
        if base is not None:
            for file in base.statistics:
                self.statistics[file.snapshot_id] = (*self.statistics.get(file.snapshot_id, ()), file)
            for part in base.partition_statistics:
                files = self.partition_statistics.get(part.snapshot_id, ())
                self.partition_statistics[part.snapshot_id] = (*files, part)
        # The ids to which -1 (`LAST_ADDED`) refers in an update: those of the items that this commit added last.
        self._last_schema_id: int | None = None
        self._last_spec_id: int | None = None
        self._last_order_id: int | None = None
        self._added_snapshots: set[int] = set()
        self._past_main_snapshots: set[int] = set()
        """The added snapshots that were the current snapshot during this commit."""
        self._removed_snapshots = False
        self._ref_names_by_snapshot: dict[int, set[str]] | None = None
        """The names of the references to each snapshot, cached because a commit can remove 10,000 snapshots one by one.
        """
        self._comparisons = ComparisonBudget()

    def assign_uuid(self, uuid: str) -> None:
        if self.uuid is not None and self.uuid.lower() == uuid.lower():
            return
        if self._base is not None and self.uuid is not None:
            raise BadRequest(f"Cannot reassign uuid: the table is {self.uuid}")
        self.uuid, self.changed = uuid, True

    def upgrade_format_version(self, version: int) -> None:
        if version > FORMAT_VERSION_MAX:
            raise BadRequest(
                f"Cannot upgrade table to unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})"
            )
        if version < self.format_version:
            raise BadRequest(f"Cannot downgrade v{self.format_version} table to v{version}")
        if version != self.format_version:
            self.format_version, self.changed = version, True

    def set_location(self, location: str) -> None:
        location = location if location.endswith("://") else location.rstrip("/")
        if not location:
            raise BadRequest("Invalid table location: empty")
        if location != self.location:
            self.location, self.changed = location, True

    def set_properties(self, updates: Mapping[str, str]) -> None:
        accepted_updates = drop_reserved(updates)
        if accepted_updates:
            self.properties.update(accepted_updates)
            self.changed = True

    def remove_properties(self, removals: Iterable[str]) -> None:
        for name in removals:
            self.changed = True
            self.properties.pop(name, None)

    def add_schema(self, new_schema: Schema) -> None:
        schema = schemas.normalize_schema(new_schema)
        schemas.check_format_version(schema, self.format_version)
        self.last_column_id = max(self.last_column_id, schema.highest_field_id)
        # Limit the total number of comparisons in one commit.
        self._comparisons.spend(len(self.schemas), len(schema.index.by_id))
        schema_id = next((other.id for other in self.schemas.values() if other.is_same_as(schema)), None)
        if schema_id is None:
            schema_id = max(self.schemas, default=self.current_schema_id - 1) + 1
            check_number(schema_id, INT_MAX, "id of the new schema")
            self.schemas[schema_id] = schemas.copy_with_id(schema, schema_id)
            self.changed = True
        self._last_schema_id = schema_id

    def set_current_schema(self, schema_id: int) -> None:
        if schema_id == LAST_ADDED:
            if self._last_schema_id is None:
                raise BadRequest("Cannot set last added schema: no schema has been added")
            schema_id = self._last_schema_id
        schema = self.schemas.get(schema_id)
        if schema is None:
            raise BadRequest(f"Cannot set current schema to unknown schema: {schema_id}")
        if schema_id == self.current_schema_id:
            return
        # Limit the total number of comparisons in one commit.
        self._comparisons.spend(len(self.specs) + self._count_spec_fields())
        # An engine that replaces a table first removes the branch.
        has_rows = any(ref.is_branch for ref in self.refs.values())
        old_schema = self.schemas.get(self.current_schema_id) if has_rows else None
        for spec in self.specs.values():
            partition.check_names(spec, schema)
            if old_schema is not None:
                partition.check_promotions(spec, old_schema, schema)
        self.current_schema_id, self.changed = schema_id, True

    def remove_schemas(self, schema_ids: Iterable[int]) -> None:
        for schema_id in schema_ids:
            if schema_id == self.current_schema_id:
                raise BadRequest("Cannot remove the current schema")
            self.changed |= self.schemas.pop(schema_id, None) is not None

    def _get_current_schema(self) -> Schema:
        schema = self.schemas.get(self.current_schema_id)
        if schema is None:
            raise BadRequest("No schema has been added and set as current")
        return schema

    def _count_spec_fields(self) -> int:
        """Return the number of fields of all partition specs."""
        return sum(len(spec.fields) for spec in self.specs.values())

    def add_spec(self, new_spec: PartitionSpec) -> None:
        self._comparisons.spend(len(self.specs) + self._count_spec_fields())
        existing_id = next((spec.spec_id for spec in self.specs.values() if spec.has_same_fields(new_spec)), None)
        if existing_id is None:
            schema = self._get_current_schema()
            partition.check_names(new_spec, schema)
            partition.check_compatible(new_spec, schema)
            existing_id = max(self.specs, default=-1) + 1
            check_number(existing_id, INT_MAX, "id of the new partition spec")
            self._put_spec(msgspec.structs.replace(new_spec, spec_id=existing_id))
        self._last_spec_id = existing_id

    def _put_spec(self, spec: PartitionSpec) -> None:
        """Add a partition spec under its id, with ids for fields that have none.

        In version 1, the ids of each spec are 1000, 1001, …. Later versions reuse the id of an equal field of another
        spec.

        Raises:
            BadRequest: A spec of version 1 has other ids, or an id is too large.
        """
        if any(field.field_id is None for field in spec.fields):
            last_used_id = max(self.last_partition_id, partition.FIELD_ID_START - 1)
            spec = (
                partition.number_fields(spec)
                if self.format_version == 1
                else partition.assign_field_ids(spec, self.specs.values(), last_used_id)
            )
        if self.format_version == 1 and not partition.has_sequential_ids(spec):
            raise BadRequest("Spec does not use sequential IDs that are required in v1")
        check_number(spec.last_field_id, INT_MAX, "id of the new partition field")
        self.last_partition_id = max(self.last_partition_id, spec.last_field_id)
        self.specs[spec.spec_id] = spec
        self.changed = True

    def set_default_spec(self, spec_id: int) -> None:
        if spec_id == LAST_ADDED:
            if self._last_spec_id is None:
                raise BadRequest("Cannot set last added spec: no spec has been added")
            spec_id = self._last_spec_id
        if spec_id not in self.specs:
            raise BadRequest(f"Cannot set default partition spec to unknown spec: {spec_id}")
        if spec_id != self.default_spec_id:
            self.default_spec_id, self.changed = spec_id, True

    def remove_specs(self, spec_ids: Iterable[int]) -> None:
        for spec_id in spec_ids:
            if spec_id == self.default_spec_id:
                raise BadRequest("Cannot remove the default partition spec")
            self.changed |= self.specs.pop(spec_id, None) is not None

    def add_sort_order(self, new_order: SortOrder) -> None:
        self._comparisons.spend(len(self.orders), len(new_order.fields))
        order_id = next((order.order_id for order in self.orders.values() if order.fields == new_order.fields), None)
        if order_id is None:
            sort_order.check_compatible(new_order, self._get_current_schema())
            order_id = max((*self.orders, 0)) + 1 if new_order.fields else sort_order.UNSORTED.order_id
            check_number(order_id, INT_MAX, "id of the new sort order")
            self.orders[order_id] = SortOrder(order_id, new_order.fields)
            self.changed = True
        self._last_order_id = order_id

    def set_default_sort_order(self, order_id: int) -> None:
        if order_id == LAST_ADDED:
            if self._last_order_id is None:
                raise BadRequest("Cannot set last added sort order: no sort order has been added")
            order_id = self._last_order_id
        if order_id not in self.orders:
            raise BadRequest(f"Cannot set default sort order to unknown sort order: {order_id}")
        if order_id != self.default_order_id:
            self.default_order_id, self.changed = order_id, True

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Add a snapshot.

        Raises:
            BadRequest: The table has no schema, partition spec or sort order yet, or already has a snapshot with this
                id.
            CommitConflict: The snapshot is based on older metadata: the client should refresh and retry.
        """
        for name, definitions in (
            ("schema", self.schemas),
            ("partition spec", self.specs),
            ("sort order", self.orders),
        ):
            if not definitions:
                raise BadRequest(f"Attempting to add a snapshot before a {name} is added")
        if snapshot.snapshot_id in self.snapshots:
            raise BadRequest(f"Snapshot already exists for id: {snapshot.snapshot_id}")
        sequence_number, last_sequence_number = snapshot.sequence_number, self.last_sequence_number
        # A replaced table starts from a snapshot without a parent; a concurrent commit may have used its number.
        is_behind = self.format_version > 1 and sequence_number <= last_sequence_number
        if is_behind and snapshot.parent_snapshot_id is not None:
            raise CommitConflict(
                "Validation failed, please retry: Cannot add snapshot with sequence number "
                f"{sequence_number} older than last sequence number {last_sequence_number}"
            )
        if self.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
            self._reserve_row_ids(snapshot)
        self.last_sequence_number = max(last_sequence_number, sequence_number)
        self.snapshots[snapshot.snapshot_id] = snapshot
        self._recently_undone = None
        self._added_snapshots.add(snapshot.snapshot_id)
        self.changed = True

    def _reserve_row_ids(self, snapshot: Snapshot) -> None:
        """Check the row ids that a snapshot assigns, and advance the table's next row id.

        Row ids that are below the next row id were assigned by a concurrent commit.

        Raises:
            BadRequest: The snapshot assigns no row ids, or the next row id would be too large.
            CommitConflict: A concurrent commit has assigned the row ids.
        """
        if snapshot.first_row_id is None or snapshot.added_rows is None:
            raise BadRequest("Cannot add a snapshot: first-row-id is null")
        if snapshot.first_row_id < self.next_row_id:
            raise CommitConflict(
                "Validation failed, please retry: Cannot add a snapshot, first-row-id is behind table next-row-id: "
                f"{snapshot.first_row_id} < {self.next_row_id}"
            )
        # Java adds the rows to the table's counter. Counting from the first row id of the snapshot also never assigns a
        # row id twice.
        next_row_id = snapshot.first_row_id + snapshot.added_rows
        check_number(next_row_id, LONG_MAX, "next-row-id after this snapshot")
        self.next_row_id = next_row_id

    def set_ref(self, name: str, ref: SnapshotRef) -> None:
        if self.refs.get(name) == ref:
            return
        snapshot = self.snapshots.get(ref.snapshot_id)
        if snapshot is None:
            raise BadRequest(f"Cannot set {name} to unknown snapshot: {ref.snapshot_id}")
        if name == MAIN:
            if not ref.is_branch:
                raise BadRequest(f"Cannot set {MAIN} to a tag, it must be a branch")
            self._move_main(snapshot)
        if self._ref_names_by_snapshot is not None:
            self._unlink_reference(name)
            self._ref_names_by_snapshot.setdefault(ref.snapshot_id, set()).add(name)
        self.refs[name] = ref
        self.changed = True

    def _unlink_reference(self, name: str) -> None:
        """Remove a reference from the list of its snapshot's references, before the reference is moved or removed."""
        if self._ref_names_by_snapshot is not None and name in self.refs:
            self._ref_names_by_snapshot.get(self.refs[name].snapshot_id, set()).discard(name)

    def _move_main(self, snapshot: Snapshot) -> None:
        """Make a snapshot the current snapshot of the branch main, and add an entry to the snapshot log."""
        self.current_snapshot_id = snapshot.snapshot_id
        is_new_snapshot = snapshot.snapshot_id in self._added_snapshots
        if is_new_snapshot:
            self._past_main_snapshots.add(snapshot.snapshot_id)
        # The log entry of a rollback to an existing snapshot has the current time, not the time of the snapshot.
        entry_time_ms = snapshot.timestamp_ms if is_new_snapshot else self.now_ms
        if self._clock_was_ahead:
            # Otherwise no client could commit until the clock has caught up. Readers require that the times in the log
            # ascend. The timestamp of the snapshot does not change.
            entry_time_ms = max(entry_time_ms, self.now_ms)
        self.snapshot_log.append(SnapshotLogEntry(entry_time_ms, snapshot.snapshot_id))

    def remove_ref(self, name: str) -> None:
        if name == MAIN and self.current_snapshot_id is not None:
            self.current_snapshot_id, self.changed = None, True
        self._unlink_reference(name)
        self.changed |= self.refs.pop(name, None) is not None

    def remove_snapshots(self, snapshot_ids: Iterable[int]) -> None:
        """Remove snapshots, and the statistics, branches and tags that refer to them.

        Snapshots that were undone in the last hour stay. An engine that read the table before the undo would otherwise
        delete files that are in use again (see `find_recently_undone`). Unknown ids are ignored, because two services
        can expire the same snapshot.
        """
        removed_ids: set[int] = set()
        # Find the undone snapshots only once per commit, because each of its updates may remove a snapshot.
        if self._recently_undone is None:
            self._comparisons.spend(len(self.snapshots))
            self._recently_undone = find_recently_undone(self.snapshots.values(), self.now_ms)
        for snapshot_id in snapshot_ids:
            if snapshot_id not in self._recently_undone and self.snapshots.pop(snapshot_id, None) is not None:
                removed_ids.add(snapshot_id)
                self.remove_statistics(snapshot_id)
                self.remove_partition_statistics(snapshot_id)
        if removed_ids:
            self._removed_snapshots = self.changed = True
            if self._ref_names_by_snapshot is None:
                self._ref_names_by_snapshot = {}
                for name, ref in self.refs.items():
                    self._ref_names_by_snapshot.setdefault(ref.snapshot_id, set()).add(name)
            for snapshot_id in removed_ids:
                for name in sorted(self._ref_names_by_snapshot.pop(snapshot_id, ())):
                    self.remove_ref(name)

    def set_statistics(self, file: StatisticsFile) -> None:
        self.statistics[file.snapshot_id] = (file,)
        self.changed = True

    def remove_statistics(self, snapshot_id: int) -> None:
        self.changed |= self.statistics.pop(snapshot_id, None) is not None

    def set_partition_statistics(self, file: PartitionStatisticsFile) -> None:
        self.partition_statistics[file.snapshot_id] = (file,)
        self.changed = True

    def remove_partition_statistics(self, snapshot_id: int) -> None:
        self.changed |= self.partition_statistics.pop(snapshot_id, None) is not None

    def add_encryption_key(self, key: EncryptedKey) -> None:
        if self.format_version < ENCRYPTION_MIN_FORMAT_VERSION:
            raise BadRequest(f"Encryption keys are not supported until v3: the table is v{self.format_version}")
        if key.key_id not in self.keys:
            self.keys[key.key_id] = key
            self.changed = True

    def remove_encryption_key(self, key_id: str) -> None:
        self.changed |= self.keys.pop(key_id, None) is not None

    def build(self) -> TableMetadata:
        """Return the validated result, or the base if no update changed anything.

        Raises:
            BadRequest: The result is not valid metadata.
        """
        if not self.changed and self._base is not None:
            return self._base
        if self.location is None:
            raise BadRequest("Table location is required: the updates set none")
        schema = self._get_current_schema()
        spec, order = self.specs.get(self.default_spec_id), self.orders.get(self.default_order_id)
        if spec is None:
            raise BadRequest("No partition spec has been added and set as default")
        if order is None and self.default_order_id != sort_order.UNSORTED.order_id:
            raise BadRequest("No sort order has been added and set as default")
        partition.check_compatible(spec, schema)
        sort_order.check_compatible(order or sort_order.UNSORTED, schema)
        result = TableMetadata(
            format_version=self.format_version,
            table_uuid=self.uuid,
            location=self.location,
            last_sequence_number=self.last_sequence_number,
            last_updated_ms=self.now_ms,
            last_column_id=self.last_column_id,
            schemas=tuple(self.schemas.values()),
            current_schema_id=self.current_schema_id,
            partition_specs=tuple(self.specs.values()),
            default_spec_id=self.default_spec_id,
            last_partition_id=self.last_partition_id,
            sort_orders=tuple(self.orders.values()) or (sort_order.UNSORTED,),
            default_sort_order_id=self.default_order_id,
            properties=self.properties,
            current_snapshot_id=self.current_snapshot_id,
            snapshots=tuple(self.snapshots.values()),
            snapshot_log=self._finish_log(),
            metadata_log=() if self._base is None else self._base.metadata_log,
            refs=self.refs,
            statistics=tuple(file for files in self.statistics.values() for file in files),
            partition_statistics=tuple(file for files in self.partition_statistics.values() for file in files),
            next_row_id=self.next_row_id,
            encryption_keys=tuple(self.keys.values()),
        )
        check_invariants(result)
        return result

    def _finish_log(self) -> tuple[SnapshotLogEntry, ...]:
        """Return the snapshot log without snapshots that were current only during this commit.

        A commit can make several snapshots current, of which clients only see the last. If another snapshot of the log
        was removed, the history before it is also omitted.
        """
        intermediate_ids = self._past_main_snapshots - {self.current_snapshot_id}
        log = self.snapshot_log
        if intermediate_ids or self._removed_snapshots:
            log = []
            for entry in self.snapshot_log:
                if entry.snapshot_id not in self.snapshots and self._removed_snapshots:
                    # The snapshot that was current before the gap is unknown, so time travel into it would be wrong.
                    log.clear()
                elif entry.snapshot_id not in intermediate_ids:
                    log.append(entry)
        self._check_times(log)
        return tuple(log)

    def _check_times(self, log: list[SnapshotLogEntry]) -> None:
        """Check that the times of this commit's log entries ascend, except for a small difference between clocks.

        Older entries are not checked, because an irregular history of an old table must not block its commits.

        Raises:
            BadRequest: A time is earlier than that of the previous entry, or later than the time of the commit, by more
                than clocks may differ.
        """
        new_entry_count = len(self.snapshot_log) - (0 if self._base is None else len(self._base.snapshot_log))
        # The last older entry is included, because the first new entry is compared with it.
        checked_entries = log[max(0, len(log) - new_entry_count - 1) :]
        for earlier_entry, later_entry in itertools.pairwise(checked_entries):
            if later_entry.timestamp_ms - earlier_entry.timestamp_ms < -CLOCK_SKEW_MS:
                raise BadRequest(
                    f"Invalid snapshot timestamp {later_entry.timestamp_ms}: before the previous snapshot log entry at "
                    f"{earlier_entry.timestamp_ms}, by more than the {CLOCK_SKEW_MS // 1000} s that clocks may differ; "
                    "correct the clock of the machine that made the snapshot, and commit again"
                )
        if new_entry_count and checked_entries and self.now_ms - checked_entries[-1].timestamp_ms < -CLOCK_SKEW_MS:
            raise BadRequest(
                f"Invalid update timestamp {self.now_ms}: before last snapshot log entry at "
                f"{checked_entries[-1].timestamp_ms}, by more than the {CLOCK_SKEW_MS // 1000} s that clocks may "
                "differ; the clock of the machine that made the snapshot is ahead: correct it, and commit again"
            )
