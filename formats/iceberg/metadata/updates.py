"""Update actions of the REST spec (`TableUpdate`): a struct for each name, which changes the working copy.

`apply_updates` is pure: metadata and updates in, metadata out, with time and UUID as arguments. Any JSON of a client
results in new metadata, in `BadRequest` with the action and the field, or in `CommitConflict` if it is based on older
metadata; updates are applied all or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from seamark.formats.iceberg.metadata import partition, sort_order
from seamark.formats.iceberg.metadata.builder import TableBuilder
from seamark.formats.iceberg.metadata.metadata import FORMAT_VERSION_DEFAULT, FORMAT_VERSION_MAX, TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpecInput
from seamark.formats.iceberg.metadata.snapshot import (
    EncryptedKey,
    PartitionStatisticsFile,
    SnapshotInput,
    SnapshotRef,
    StatisticsFile,
    checked_key,
    checked_ref,
    checked_snapshot,
)
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types.reading import Int32, Int64, read
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def checked_uuid(uuid: str) -> str:
    """BadRequest unless the text is a UUID in its usual form, the only one that PyIceberg reads."""
    if _UUID.fullmatch(uuid) is None:
        raise BadRequest(f"Invalid uuid: {uuid!r}")
    return uuid


class Update(msgspec.Struct, frozen=True, rename="kebab"):
    """Base of the action structs; unknown fields are ignored, because the spec allows actions to grow."""

    def apply(self, builder: Any) -> None:
        """Changes the working copy of a table; actions that views share also that of a view, with the same methods."""
        raise NotImplementedError


class AssignUuid(Update, frozen=True):
    uuid: str

    def apply(self, builder: Any) -> None:
        builder.assign_uuid(checked_uuid(self.uuid))


class UpgradeFormatVersion(Update, frozen=True):
    format_version: Int32

    def apply(self, builder: Any) -> None:
        builder.upgrade_format_version(self.format_version)


class AddSchema(Update, frozen=True):
    schema: Schema
    last_column_id: Int32 | None = None
    """Deprecated by the spec and ignored: the schema determines it."""

    def apply(self, builder: Any) -> None:
        builder.add_schema(self.schema)


class AddSpec(Update, frozen=True):
    spec: PartitionSpecInput

    def apply(self, builder: TableBuilder) -> None:
        builder.add_spec(partition.checked(self.spec))


class AddSortOrder(Update, frozen=True):
    sort_order: SortOrder

    def apply(self, builder: TableBuilder) -> None:
        builder.add_sort_order(sort_order.checked(self.sort_order))


class AddSnapshot(Update, frozen=True):
    snapshot: SnapshotInput

    def apply(self, builder: TableBuilder) -> None:
        builder.add_snapshot(checked_snapshot(self.snapshot, builder.format_version))


class SetSnapshotRef(Update, frozen=True):
    ref_name: str
    type: str
    snapshot_id: Int64
    min_snapshots_to_keep: Int32 | None = None
    max_snapshot_age_ms: Int64 | None = None
    max_ref_age_ms: Int64 | None = None

    def apply(self, builder: TableBuilder) -> None:
        limits = self.min_snapshots_to_keep, self.max_snapshot_age_ms, self.max_ref_age_ms
        builder.set_ref(self.ref_name, checked_ref(SnapshotRef(self.snapshot_id, self.type, *limits)))


class SetProperties(Update, frozen=True):
    updates: dict[str, str] | None = None
    updated: dict[str, str] | None = None
    """The name `updates` in early clients."""

    def apply(self, builder: Any) -> None:
        properties = self.updates if self.updates is not None else self.updated
        if properties is None:
            raise BadRequest("Invalid set-properties update: Object missing required field `updates`")
        builder.set_properties(properties)


class RemoveProperties(Update, frozen=True):
    removals: tuple[str, ...] | None = None
    removed: tuple[str, ...] | None = None
    """The name `removals` in early clients."""

    def apply(self, builder: Any) -> None:
        names = self.removals if self.removals is not None else self.removed
        if names is None:
            raise BadRequest("Invalid remove-properties update: Object missing required field `removals`")
        builder.remove_properties(names)


class EnableRowLineage(Update, frozen=True):
    def apply(self, builder: TableBuilder) -> None:
        # every version 3 table tracks row lineage; the action predates this rule of the spec
        version = builder.format_version
        if version < 3:
            raise BadRequest(f"Cannot enable row lineage: it is not supported until v3, the table is v{version}")


class AddEncryptionKey(Update, frozen=True):
    encryption_key: EncryptedKey

    def apply(self, builder: TableBuilder) -> None:
        builder.add_encryption_key(checked_key(self.encryption_key))


def simple_action(change: Callable[[Any, Any], None], field: str, kind: Any) -> type[Update]:
    """An action with one field, a `kind`, which is the argument of this method of the working copy."""

    def apply(self: Update, builder: Any) -> None:
        change(builder, getattr(self, field))

    namespace = {"apply": apply}
    made: Any = msgspec.defstruct(change.__name__, [(field, kind)], bases=(Update,), frozen=True, namespace=namespace)
    return cast(type[Update], made)


TABLE_ACTIONS: dict[str, type[Update]] = {
    "assign-uuid": AssignUuid,
    "upgrade-format-version": UpgradeFormatVersion,
    "add-schema": AddSchema,
    "set-current-schema": simple_action(TableBuilder.set_current_schema, "schema_id", Int32),
    "add-spec": AddSpec,
    "set-default-spec": simple_action(TableBuilder.set_default_spec, "spec_id", Int32),
    "add-sort-order": AddSortOrder,
    "set-default-sort-order": simple_action(TableBuilder.set_default_sort_order, "sort_order_id", Int32),
    "add-snapshot": AddSnapshot,
    "set-snapshot-ref": SetSnapshotRef,
    "remove-snapshots": simple_action(TableBuilder.remove_snapshots, "snapshot_ids", tuple[Int64, ...]),
    "remove-snapshot-ref": simple_action(TableBuilder.remove_ref, "ref_name", str),
    "set-location": simple_action(TableBuilder.set_location, "location", str),
    "set-properties": SetProperties,
    "remove-properties": RemoveProperties,
    "set-statistics": simple_action(TableBuilder.set_statistics, "statistics", StatisticsFile),
    "remove-statistics": simple_action(TableBuilder.remove_statistics, "snapshot_id", Int64),
    "set-partition-statistics": simple_action(
        TableBuilder.set_partition_statistics, "partition_statistics", PartitionStatisticsFile
    ),
    "remove-partition-statistics": simple_action(TableBuilder.remove_partition_statistics, "snapshot_id", Int64),
    "remove-partition-specs": simple_action(TableBuilder.remove_specs, "spec_ids", tuple[Int32, ...]),
    "remove-schemas": simple_action(TableBuilder.remove_schemas, "schema_ids", tuple[Int32, ...]),
    "enable-row-lineage": EnableRowLineage,
    "add-encryption-key": AddEncryptionKey,
    "remove-encryption-key": simple_action(TableBuilder.remove_encryption_key, "key_id", str),
}

VIEW_ONLY_ACTIONS = ("add-view-version", "set-current-view-version")


class _Tagged(msgspec.Struct, frozen=True):
    action: str


def parse_update(raw: object, actions: Mapping[str, type[Update]], foreign: Sequence[str], kind: str) -> Update:
    """The action with typed fields. `foreign`: actions of the other `kind` (table or view). Raises BadRequest."""
    name = read(raw, _Tagged, "metadata update").action.lower()
    action = actions.get(name)
    if action is None:
        if name in foreign:
            raise BadRequest(f"Cannot apply update {name} to a {kind}")
        raise BadRequest(f"Unknown metadata update action: {name} (known: {', '.join(actions)})")
    return read(raw, action, f"{name} update")


def apply_updates(
    base: TableMetadata | None, updates: Sequence[object], *, now_ms: int, new_uuid: str | None = None
) -> TableMetadata:
    """The metadata after all updates, in order; `base` if they change nothing (then there is nothing to commit).

    `base` None builds a new table, as the last step of a staged create; `new_uuid` is its UUID unless an update assigns
    one. The caller maintains the metadata log (`with_previous_file`). Raises BadRequest and CommitConflict.
    """
    parsed = [parse_update(raw, TABLE_ACTIONS, VIEW_ONLY_ACTIONS, "table") for raw in updates]
    version = FORMAT_VERSION_DEFAULT
    if base is None:
        # a new table starts at its version: nothing is upgraded, so version 1 is possible
        requested = (update.format_version for update in parsed if isinstance(update, UpgradeFormatVersion))
        version = next(requested, FORMAT_VERSION_DEFAULT)
        if not 1 <= version <= FORMAT_VERSION_MAX:
            raise BadRequest(f"Unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})")
    builder = TableBuilder(base, format_version=version, now_ms=now_ms)
    for update in parsed:
        update.apply(builder)
    if base is None and builder.uuid is None:
        builder.uuid = new_uuid
    return builder.build()
