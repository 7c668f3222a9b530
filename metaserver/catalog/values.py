"""Data types in the interface of the catalog."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import AssertCreate, Requirement, read_requirements
from seamark.formats.iceberg.metadata.snapshot import SnapshotInput
from seamark.formats.iceberg.metadata.updates import (
    AddSnapshot,
    RemoveSnapshots,
    SetPartitionStatistics,
    SetStatistics,
    Update,
    read_updates,
)
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import FLUSH_KEYS
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.privileges import OWNER
from seamark.metaserver.store.model import NAMESPACE, Entry, Grant, NamespacePath
from seamark.metaserver.store.operations import Operation, SaveGrant

T = TypeVar("T")


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The Idempotency-Key header of a request.

    It is recorded in the transaction that contains the request's effects.

    Attributes:
        scope: The name of the principal, and the method and the path of the request.
        request_hash: The digest of the request's body and query.
    """

    key: str
    scope: str
    request_hash: str


class Caller(msgspec.Struct, frozen=True):
    """The principal of a request with its rights in the catalog, and the request's idempotency key if it has one."""

    principal_name: str
    request_id: str
    idempotency: IdempotencyKey | None = None
    confined_to: tuple[NamespacePath, ...] | None = None
    """The namespaces in whose locations the caller may place entries. None means the whole warehouse."""
    names_owners: bool = True
    """Whether the caller may name other users as owners of views (`owners.py`)."""
    owns_created_in: tuple[NamespacePath, ...] = ()
    """The caller becomes the owner of the entries that it creates in these namespaces and below them."""
    reuses_locations_in: tuple[NamespacePath, ...] = ((),)
    """In these namespaces and below them, the caller may create entries at the locations of dropped entries."""
    request_bytes: int = 0
    """The length of the request's decompressed body, or 0 without a body."""
    keeps_setters_of: tuple[str, ...] = ()
    """The properties that keep their recorded setter, the principal that last set them, if the caller changes them."""


def make_owner(caller: Caller, namespace: NamespacePath, kind: str = NAMESPACE, name: str = "") -> list[Operation]:
    """Return the operations that make the caller the owner of a new entry, if its rights include this."""
    if not any(namespace[: len(path)] == path for path in caller.owns_created_in):
        return []
    return [SaveGrant(Grant(caller.principal_name, OWNER, namespace, kind, name))]


def may_reuse_locations(caller: Caller, namespace: NamespacePath) -> bool:
    """Return whether the caller may create an entry in the namespace at the location of a dropped entry.

    The new entry can read and overwrite the files of the dropped entry.
    """
    return any(namespace[: len(path)] == path for path in caller.reuses_locations_in)


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next_token: str | None
    """The token for the next page, or None on the last page."""


class LoadedTable(msgspec.Struct, frozen=True):
    """A table with the metadata of its pointer. `entry` is None for a staged table, which is not stored yet."""

    entry: Entry | None
    metadata: TableMetadata


class LoadedView(msgspec.Struct, frozen=True):
    entry: Entry
    metadata: ViewMetadata


class LoadedFunction(msgspec.Struct, frozen=True):
    entry: Entry
    document: bytes
    """The function's metadata as JSON."""


class TableIdentifier(msgspec.Struct, frozen=True):
    namespace: NamespacePath
    name: str


class CreateTable(msgspec.Struct, frozen=True, rename="kebab"):
    """The body of POST …/tables. Schema, partition spec and write order are JSON objects of the REST specification."""

    name: str
    schema: dict[str, Any]
    location: str | None = None
    partition_spec: dict[str, Any] | None = None
    write_order: dict[str, Any] | None = None
    properties: dict[str, str] | None = None


class CreateView(msgspec.Struct, frozen=True, rename="kebab"):
    """The body of POST …/views."""

    name: str
    schema: dict[str, Any]
    view_version: dict[str, Any]
    location: str | None = None
    properties: dict[str, str] | None = None


class TableChange(msgspec.Struct, frozen=True):
    """The changes of one table in an engine's commit, as JSON of the REST specification."""

    namespace: NamespacePath
    name: str
    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


class ExaminedTable(msgspec.Struct, frozen=True):
    """A table as it was when the effect of a commit on its stream was examined.

    Attributes:
        uuid: The UUID, or None if the table did not exist.
        refused_location: The location of the metadata for which the commit was refused. None if the commit was not
            refused.
    """

    uuid: str | None
    refused_location: str | None = None


class TableCommit(msgspec.Struct, frozen=True):
    """The changes of one table in an engine's commit."""

    namespace: NamespacePath
    name: str
    requirements: tuple[Requirement, ...]
    updates: tuple[Update, ...]
    added_snapshots: tuple[SnapshotInput, ...]
    removed_snapshot_ids: tuple[int, ...]
    statistics_paths: tuple[str, ...]
    """The files of statistics that the updates name."""
    is_append: bool
    """Whether the commit adds snapshots, and each of them only appends files."""

    @property
    def is_create(self) -> bool:
        return any(isinstance(requirement, AssertCreate) for requirement in self.requirements)


def _check_summary(snapshot: SnapshotInput) -> None:
    """Check that a client's snapshot is not marked as a flush, because continuous readers would skip its rows.

    Raises:
        BadRequest: The summary has a key of a flush.
    """
    for key in FLUSH_KEYS:
        if key in (snapshot.summary or {}):
            raise BadRequest(
                f"The summary of snapshot {snapshot.snapshot_id} has the key {key!r}, which only the server writes; "
                "commit the snapshot without it"
            )


def read_table_commit(change: TableChange) -> TableCommit:
    """Parse the requirements and updates of an engine's commit.

    Raises:
        BadRequest: A requirement or an update is unknown or malformed, or a snapshot is marked as a flush.
    """
    updates = read_updates(change.updates)
    added_snapshots: list[SnapshotInput] = []
    removed_ids: list[int] = []
    statistics_paths: list[str] = []
    for update in updates:
        if isinstance(update, AddSnapshot):
            _check_summary(update.snapshot)
            added_snapshots.append(update.snapshot)
        elif isinstance(update, RemoveSnapshots):
            removed_ids += update.snapshot_ids
        elif isinstance(update, SetStatistics):
            statistics_paths.append(update.statistics.statistics_path)
        elif isinstance(update, SetPartitionStatistics):
            statistics_paths.append(update.partition_statistics.statistics_path)
    return TableCommit(
        change.namespace,
        change.name,
        read_requirements(change.requirements),
        updates,
        tuple(added_snapshots),
        tuple(removed_ids),
        tuple(statistics_paths),
        bool(added_snapshots)
        and all((snapshot.summary or {}).get("operation") == "append" for snapshot in added_snapshots),
    )


class PropertyChanges(msgspec.Struct, frozen=True):
    updated: list[str]
    removed: list[str]
    missing: list[str]
