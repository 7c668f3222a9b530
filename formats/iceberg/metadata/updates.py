"""Updates of the REST spec (`TableUpdate`): a struct for each action, which changes the working copy.

`read_updates` converts the JSON of a client to structs, or raises `BadRequest` with the action and the field.
`apply_updates` has no side effects: it takes metadata, updates, the time and a UUID, and returns metadata. It applies
all updates or none. If updates are based on older metadata, it raises `CommitConflict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec

from seamark.formats.iceberg.metadata import partition, sort_order
from seamark.formats.iceberg.metadata.builder import TableBuilder
from seamark.formats.iceberg.metadata.metadata import (
    FORMAT_VERSION_DEFAULT,
    FORMAT_VERSION_MAX,
    ROW_LINEAGE_MIN_FORMAT_VERSION,
    TableMetadata,
)
from seamark.formats.iceberg.metadata.partition import PartitionSpecInput
from seamark.formats.iceberg.metadata.snapshot import (
    EncryptedKey,
    PartitionStatisticsFile,
    SnapshotInput,
    SnapshotRef,
    StatisticsFile,
    normalize_ref,
    to_snapshot,
    validate_key,
)
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types.reading import Int32, Int64, convert_json_value
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def validate_uuid(uuid: str) -> str:
    """Check that a text is a UUID in the usual form, and return it.

    Raises:
        BadRequest: The text does not have the usual form, the only one that PyIceberg reads.
    """
    if _UUID.fullmatch(uuid) is None:
        raise BadRequest(f"Invalid uuid: {uuid!r}")
    return uuid


class Update(msgspec.Struct, frozen=True, rename="kebab"):
    """The base class of the updates.

    Fields that the spec does not have are ignored, because later versions of the spec may add fields to an action.
    """

    action: ClassVar[str]
    """The name of the action in the REST spec."""

    def apply(self, builder: Any) -> None:
        """Change the working copy of a table, or of a view for updates that tables and views share."""
        raise NotImplementedError


class AssignUuid(Update, frozen=True):
    action = "assign-uuid"
    uuid: str

    def apply(self, builder: Any) -> None:
        builder.assign_uuid(validate_uuid(self.uuid))


class UpgradeFormatVersion(Update, frozen=True):
    action = "upgrade-format-version"
    format_version: Int32

    def apply(self, builder: Any) -> None:
        builder.upgrade_format_version(self.format_version)


class AddSchema(Update, frozen=True):
    action = "add-schema"
    schema: Schema
    last_column_id: Int32 | None = None
    """The last column id. It is ignored, because the schema determines it; the spec deprecates it."""

    def apply(self, builder: Any) -> None:
        builder.add_schema(self.schema)


class AddSpec(Update, frozen=True):
    action = "add-spec"
    spec: PartitionSpecInput

    def apply(self, builder: TableBuilder) -> None:
        builder.add_spec(partition.normalize_spec(self.spec))


class AddSortOrder(Update, frozen=True):
    action = "add-sort-order"
    sort_order: SortOrder

    def apply(self, builder: TableBuilder) -> None:
        builder.add_sort_order(sort_order.normalize_order(self.sort_order))


class AddSnapshot(Update, frozen=True):
    action = "add-snapshot"
    snapshot: SnapshotInput

    def apply(self, builder: TableBuilder) -> None:
        builder.add_snapshot(to_snapshot(self.snapshot, builder.format_version))


class SetSnapshotRef(Update, frozen=True):
    action = "set-snapshot-ref"
    ref_name: str
    type: str
    snapshot_id: Int64
    min_snapshots_to_keep: Int32 | None = None
    max_snapshot_age_ms: Int64 | None = None
    max_ref_age_ms: Int64 | None = None

    @staticmethod
    def build_for_ref(name: str, ref: SnapshotRef) -> SetSnapshotRef:
        """Return the update that sets the reference `name` to `ref`."""
        limits = ref.min_snapshots_to_keep, ref.max_snapshot_age_ms, ref.max_ref_age_ms
        return SetSnapshotRef(name, ref.type, ref.snapshot_id, *limits)

    def apply(self, builder: TableBuilder) -> None:
        limits = self.min_snapshots_to_keep, self.max_snapshot_age_ms, self.max_ref_age_ms
        builder.set_ref(self.ref_name, normalize_ref(SnapshotRef(self.snapshot_id, self.type, *limits)))


class SetProperties(Update, frozen=True):
    action = "set-properties"
    updates: dict[str, str] | None = None
    updated: dict[str, str] | None = None
    """The name of the field `updates` in early clients."""

    def apply(self, builder: Any) -> None:
        properties = self.updates if self.updates is not None else self.updated
        if properties is None:
            raise BadRequest("Invalid set-properties update: Object missing required field `updates`")
        builder.set_properties(properties)


class RemoveProperties(Update, frozen=True):
    action = "remove-properties"
    removals: tuple[str, ...] | None = None
    removed: tuple[str, ...] | None = None
    """The name of the field `removals` in early clients."""

    def apply(self, builder: Any) -> None:
        names = self.removals if self.removals is not None else self.removed
        if names is None:
            raise BadRequest("Invalid remove-properties update: Object missing required field `removals`")
        builder.remove_properties(names)


class EnableRowLineage(Update, frozen=True):
    action = "enable-row-lineage"

    def apply(self, builder: TableBuilder) -> None:
        """Check that the version of the table supports row lineage. Nothing changes, because it is then always enabled.

        Raises:
            BadRequest: The table has a version before 3.
        """
        version = builder.format_version
        if version < ROW_LINEAGE_MIN_FORMAT_VERSION:
            raise BadRequest(f"Cannot enable row lineage: it is not supported until v3, the table is v{version}")


class AddEncryptionKey(Update, frozen=True):
    action = "add-encryption-key"
    encryption_key: EncryptedKey

    def apply(self, builder: TableBuilder) -> None:
        builder.add_encryption_key(validate_key(self.encryption_key))


class RemoveSnapshots(Update, frozen=True):
    action = "remove-snapshots"
    snapshot_ids: tuple[Int64, ...]

    def apply(self, builder: TableBuilder) -> None:
        builder.remove_snapshots(self.snapshot_ids)


class RemoveSnapshotRef(Update, frozen=True):
    action = "remove-snapshot-ref"
    ref_name: str

    def apply(self, builder: TableBuilder) -> None:
        builder.remove_ref(self.ref_name)


class SetStatistics(Update, frozen=True):
    action = "set-statistics"
    statistics: StatisticsFile

    def apply(self, builder: TableBuilder) -> None:
        builder.set_statistics(self.statistics)


class SetPartitionStatistics(Update, frozen=True):
    action = "set-partition-statistics"
    partition_statistics: PartitionStatisticsFile

    def apply(self, builder: TableBuilder) -> None:
        builder.set_partition_statistics(self.partition_statistics)


def make_simple_update(action: str, change: Callable[[Any, Any], None], field: str, kind: Any) -> type[Update]:
    """Return the class of an update with one field.

    The update calls a method of the working copy, which is the mutable metadata of the commit, with this field.

    Args:
        action: The name of the action in the REST spec.
        change: The method of the working copy.
        field: The name of the field in the update.
        kind: The type of the field.
    """

    def apply(self: Update, builder: Any) -> None:
        change(builder, getattr(self, field))

    namespace = {"apply": apply, "action": action}
    struct: Any = msgspec.defstruct(change.__name__, [(field, kind)], bases=(Update,), frozen=True, namespace=namespace)
    return cast(type[Update], struct)


def updates_by_action(*kinds: type[Update]) -> dict[str, type[Update]]:
    return {kind.action: kind for kind in kinds}


TABLE_ACTIONS = updates_by_action(
    AssignUuid,
    UpgradeFormatVersion,
    AddSchema,
    make_simple_update("set-current-schema", TableBuilder.set_current_schema, "schema_id", Int32),
    AddSpec,
    make_simple_update("set-default-spec", TableBuilder.set_default_spec, "spec_id", Int32),
    AddSortOrder,
    make_simple_update("set-default-sort-order", TableBuilder.set_default_sort_order, "sort_order_id", Int32),
    AddSnapshot,
    SetSnapshotRef,
    RemoveSnapshots,
    RemoveSnapshotRef,
    make_simple_update("set-location", TableBuilder.set_location, "location", str),
    SetProperties,
    RemoveProperties,
    SetStatistics,
    make_simple_update("remove-statistics", TableBuilder.remove_statistics, "snapshot_id", Int64),
    SetPartitionStatistics,
    make_simple_update("remove-partition-statistics", TableBuilder.remove_partition_statistics, "snapshot_id", Int64),
    make_simple_update("remove-partition-specs", TableBuilder.remove_specs, "spec_ids", tuple[Int32, ...]),
    make_simple_update("remove-schemas", TableBuilder.remove_schemas, "schema_ids", tuple[Int32, ...]),
    EnableRowLineage,
    AddEncryptionKey,
    make_simple_update("remove-encryption-key", TableBuilder.remove_encryption_key, "key_id", str),
)

VIEW_ONLY_ACTIONS = ("add-view-version", "set-current-view-version")


class _UpdateAction(msgspec.Struct, frozen=True):
    action: str


def read_update(raw: object, actions: Mapping[str, type[Update]], foreign_actions: Sequence[str], kind: str) -> Update:
    """Parse the JSON of an update.

    Args:
        raw: The JSON of the update. The action can be in upper or lower case.
        actions: The updates of this kind of entry, by action.
        foreign_actions: The actions of the other kind of entry.
        kind: "table" or "view".

    Raises:
        BadRequest: The action is unknown or belongs to the other kind, or a field is missing or has the wrong type.
    """
    name = convert_json_value(raw, _UpdateAction, "metadata update").action.lower()
    update_class = actions.get(name)
    if update_class is None:
        if name in foreign_actions:
            raise BadRequest(f"Cannot apply update {name} to a {kind}")
        raise BadRequest(f"Unknown metadata update action: {name} (known: {', '.join(actions)})")
    return convert_json_value(raw, update_class, f"{name} update")


def read_updates(raw_updates: Iterable[object]) -> tuple[Update, ...]:
    """Parse the JSON of the updates of a table.

    Raises:
        BadRequest: An update is unknown, for views, or malformed.
    """
    return tuple(read_update(raw, TABLE_ACTIONS, VIEW_ONLY_ACTIONS, "table") for raw in raw_updates)


def apply_updates(
    base: TableMetadata | None, updates: Sequence[Update], *, now_ms: int, new_uuid: str | None = None
) -> TableMetadata:
    """Apply updates to metadata in order. If they change nothing, return `base` itself.

    The caller maintains the metadata log (`add_previous_file`).

    Args:
        base: The table's metadata. None builds a new table, as the last step of a staged create.
        updates: The updates of a commit.
        now_ms: The time of the commit.
        new_uuid: The UUID of a new table, unless an update assigns one.

    Raises:
        BadRequest: An update does not fit the table.
        CommitConflict: An update is based on older metadata.
    """
    version = FORMAT_VERSION_DEFAULT  # It is used only for a new table.
    if base is None:
        # A new table starts with its version instead of being upgraded to it, so version 1 is possible.
        requested_versions = (update.format_version for update in updates if isinstance(update, UpgradeFormatVersion))
        version = next(requested_versions, FORMAT_VERSION_DEFAULT)
        if not 1 <= version <= FORMAT_VERSION_MAX:
            raise BadRequest(f"Unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})")
    builder = TableBuilder(base, format_version=version, now_ms=now_ms)
    for update in updates:
        update.apply(builder)
    if base is None and builder.uuid is None:
        builder.uuid = new_uuid
    return builder.build()
