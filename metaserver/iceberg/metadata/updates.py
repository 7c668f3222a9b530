"""Update actions of the REST spec (`TableUpdate`): for each name, a struct and a function on the working copy.

`apply_updates` is pure: metadata and updates in, metadata out, with time and UUID as arguments. Any JSON of a client
results in new metadata, in `BadRequest` with the action and the field, or in `CommitConflict` if it is based on older
metadata; updates are applied all or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata import partition, sort_order
from seamark.metaserver.iceberg.metadata.builder import TableBuilder
from seamark.metaserver.iceberg.metadata.metadata import FORMAT_VERSION_DEFAULT, FORMAT_VERSION_MAX, TableMetadata
from seamark.metaserver.iceberg.metadata.partition import PartitionSpecInput
from seamark.metaserver.iceberg.metadata.snapshot import (
    EncryptedKey,
    PartitionStatisticsFile,
    SnapshotInput,
    SnapshotRef,
    StatisticsFile,
    checked_key,
    checked_ref,
    checked_snapshot,
)
from seamark.metaserver.iceberg.metadata.sort_order import SortOrder
from seamark.metaserver.iceberg.types.reading import Int32, Int64, read
from seamark.metaserver.iceberg.types.schema import Schema

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Update(msgspec.Struct, frozen=True, rename="kebab"):
    """Base of the action structs; unknown fields are ignored, because the spec allows actions to grow."""


class AssignUuid(Update, frozen=True):
    uuid: str


class UpgradeFormatVersion(Update, frozen=True):
    format_version: Int32


class AddSchema(Update, frozen=True):
    schema: Schema
    last_column_id: Int32 | None = None
    """Deprecated by the spec and ignored: the schema determines it."""


class SetCurrentSchema(Update, frozen=True):
    schema_id: Int32


class AddSpec(Update, frozen=True):
    spec: PartitionSpecInput


class SetDefaultSpec(Update, frozen=True):
    spec_id: Int32


class AddSortOrder(Update, frozen=True):
    sort_order: SortOrder


class SetDefaultSortOrder(Update, frozen=True):
    sort_order_id: Int32


class AddSnapshot(Update, frozen=True):
    snapshot: SnapshotInput


class SetSnapshotRef(Update, frozen=True):
    ref_name: str
    type: str
    snapshot_id: Int64
    min_snapshots_to_keep: Int32 | None = None
    max_snapshot_age_ms: Int64 | None = None
    max_ref_age_ms: Int64 | None = None


class RemoveSnapshots(Update, frozen=True):
    snapshot_ids: tuple[Int64, ...]


class RemoveSnapshotRef(Update, frozen=True):
    ref_name: str


class SetLocation(Update, frozen=True):
    location: str


class SetProperties(Update, frozen=True):
    updates: dict[str, str] | None = None
    updated: dict[str, str] | None = None
    """The name `updates` in early clients."""


class RemoveProperties(Update, frozen=True):
    removals: tuple[str, ...] | None = None
    removed: tuple[str, ...] | None = None
    """The name `removals` in early clients."""


class SetStatistics(Update, frozen=True):
    statistics: StatisticsFile


class SnapshotStatistics(Update, frozen=True):
    snapshot_id: Int64


class SetPartitionStatistics(Update, frozen=True):
    partition_statistics: PartitionStatisticsFile


class RemovePartitionSpecs(Update, frozen=True):
    spec_ids: tuple[Int32, ...]


class RemoveSchemas(Update, frozen=True):
    schema_ids: tuple[Int32, ...]


class EnableRowLineage(Update, frozen=True):
    pass


class AddEncryptionKey(Update, frozen=True):
    encryption_key: EncryptedKey


class RemoveEncryptionKey(Update, frozen=True):
    key_id: str


def checked_uuid(uuid: str) -> str:
    """BadRequest unless the text is a UUID in its usual form, the only one that PyIceberg reads."""
    if _UUID.fullmatch(uuid) is None:
        raise BadRequest(f"Invalid uuid: {uuid!r}")
    return uuid


def given_updates(update: SetProperties) -> dict[str, str]:
    """The properties to set, from either name of the field. BadRequest if both are missing."""
    properties = update.updates if update.updates is not None else update.updated
    if properties is None:
        raise BadRequest("Invalid set-properties update: Object missing required field `updates`")
    return properties


def given_removals(update: RemoveProperties) -> tuple[str, ...]:
    """The properties to remove, from either name of the field. BadRequest if both are missing."""
    properties = update.removals if update.removals is not None else update.removed
    if properties is None:
        raise BadRequest("Invalid remove-properties update: Object missing required field `removals`")
    return properties


def _assign_uuid(b: TableBuilder, u: AssignUuid) -> None:
    b.assign_uuid(checked_uuid(u.uuid))


def _upgrade_format_version(b: TableBuilder, u: UpgradeFormatVersion) -> None:
    b.upgrade_format_version(u.format_version)


def _add_schema(b: TableBuilder, u: AddSchema) -> None:
    b.add_schema(u.schema)


def _set_current_schema(b: TableBuilder, u: SetCurrentSchema) -> None:
    b.set_current_schema(u.schema_id)


def _add_spec(b: TableBuilder, u: AddSpec) -> None:
    b.add_spec(partition.checked(u.spec))


def _set_default_spec(b: TableBuilder, u: SetDefaultSpec) -> None:
    b.set_default_spec(u.spec_id)


def _add_sort_order(b: TableBuilder, u: AddSortOrder) -> None:
    b.add_sort_order(sort_order.checked(u.sort_order))


def _set_default_sort_order(b: TableBuilder, u: SetDefaultSortOrder) -> None:
    b.set_default_sort_order(u.sort_order_id)


def _add_snapshot(b: TableBuilder, u: AddSnapshot) -> None:
    b.add_snapshot(checked_snapshot(u.snapshot, b.format_version))


def _set_snapshot_ref(b: TableBuilder, u: SetSnapshotRef) -> None:
    ref = SnapshotRef(u.snapshot_id, u.type, u.min_snapshots_to_keep, u.max_snapshot_age_ms, u.max_ref_age_ms)
    b.set_ref(u.ref_name, checked_ref(ref))


def _remove_snapshots(b: TableBuilder, u: RemoveSnapshots) -> None:
    b.remove_snapshots(u.snapshot_ids)


def _remove_snapshot_ref(b: TableBuilder, u: RemoveSnapshotRef) -> None:
    b.remove_ref(u.ref_name)


def _set_location(b: TableBuilder, u: SetLocation) -> None:
    b.set_location(u.location)


def _set_properties(b: TableBuilder, u: SetProperties) -> None:
    b.set_properties(given_updates(u))


def _remove_properties(b: TableBuilder, u: RemoveProperties) -> None:
    b.remove_properties(given_removals(u))


def _set_statistics(b: TableBuilder, u: SetStatistics) -> None:
    b.set_statistics(u.statistics)


def _remove_statistics(b: TableBuilder, u: SnapshotStatistics) -> None:
    b.remove_statistics(u.snapshot_id)


def _set_partition_statistics(b: TableBuilder, u: SetPartitionStatistics) -> None:
    b.set_partition_statistics(u.partition_statistics)


def _remove_partition_statistics(b: TableBuilder, u: SnapshotStatistics) -> None:
    b.remove_partition_statistics(u.snapshot_id)


def _remove_partition_specs(b: TableBuilder, u: RemovePartitionSpecs) -> None:
    b.remove_specs(u.spec_ids)


def _remove_schemas(b: TableBuilder, u: RemoveSchemas) -> None:
    b.remove_schemas(u.schema_ids)


def _enable_row_lineage(b: TableBuilder, u: EnableRowLineage) -> None:
    # every version 3 table tracks row lineage; the action predates this rule of the spec
    if b.format_version < 3:
        raise BadRequest(f"Cannot enable row lineage: it is not supported until v3, the table is v{b.format_version}")


def _add_encryption_key(b: TableBuilder, u: AddEncryptionKey) -> None:
    b.add_encryption_key(checked_key(u.encryption_key))


def _remove_encryption_key(b: TableBuilder, u: RemoveEncryptionKey) -> None:
    b.remove_encryption_key(u.key_id)


class Action(NamedTuple):
    struct: type[Update]
    apply: Callable[[Any, Any], None]


TABLE_ACTIONS: dict[str, Action] = {
    "assign-uuid": Action(AssignUuid, _assign_uuid),
    "upgrade-format-version": Action(UpgradeFormatVersion, _upgrade_format_version),
    "add-schema": Action(AddSchema, _add_schema),
    "set-current-schema": Action(SetCurrentSchema, _set_current_schema),
    "add-spec": Action(AddSpec, _add_spec),
    "set-default-spec": Action(SetDefaultSpec, _set_default_spec),
    "add-sort-order": Action(AddSortOrder, _add_sort_order),
    "set-default-sort-order": Action(SetDefaultSortOrder, _set_default_sort_order),
    "add-snapshot": Action(AddSnapshot, _add_snapshot),
    "set-snapshot-ref": Action(SetSnapshotRef, _set_snapshot_ref),
    "remove-snapshots": Action(RemoveSnapshots, _remove_snapshots),
    "remove-snapshot-ref": Action(RemoveSnapshotRef, _remove_snapshot_ref),
    "set-location": Action(SetLocation, _set_location),
    "set-properties": Action(SetProperties, _set_properties),
    "remove-properties": Action(RemoveProperties, _remove_properties),
    "set-statistics": Action(SetStatistics, _set_statistics),
    "remove-statistics": Action(SnapshotStatistics, _remove_statistics),
    "set-partition-statistics": Action(SetPartitionStatistics, _set_partition_statistics),
    "remove-partition-statistics": Action(SnapshotStatistics, _remove_partition_statistics),
    "remove-partition-specs": Action(RemovePartitionSpecs, _remove_partition_specs),
    "remove-schemas": Action(RemoveSchemas, _remove_schemas),
    "enable-row-lineage": Action(EnableRowLineage, _enable_row_lineage),
    "add-encryption-key": Action(AddEncryptionKey, _add_encryption_key),
    "remove-encryption-key": Action(RemoveEncryptionKey, _remove_encryption_key),
}

VIEW_ONLY_ACTIONS = ("add-view-version", "set-current-view-version")


class _Tagged(msgspec.Struct, frozen=True):
    action: str


def parse_update(raw: object, actions: dict[str, Action], foreign: Sequence[str], kind: str) -> tuple[Action, Update]:
    """The action and its typed fields. `foreign`: actions of the other `kind` (table or view). Raises BadRequest."""
    name = read(raw, _Tagged, "metadata update").action.lower()
    action = actions.get(name)
    if action is None:
        if name in foreign:
            raise BadRequest(f"Cannot apply update {name} to a {kind}")
        raise BadRequest(f"Unknown metadata update action: {name} (known: {', '.join(actions)})")
    return action, read(raw, action.struct, f"{name} update")


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
        requested = (update.format_version for _, update in parsed if isinstance(update, UpgradeFormatVersion))
        version = next(requested, FORMAT_VERSION_DEFAULT)
        if not 1 <= version <= FORMAT_VERSION_MAX:
            raise BadRequest(f"Unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})")
    builder = TableBuilder(base, format_version=version, now_ms=now_ms)
    for action, update in parsed:
        action.apply(builder, update)
    if base is None and builder.uuid is None:
        builder.uuid = new_uuid
    return builder.build()
