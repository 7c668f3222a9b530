"""Plain values that cross the catalog's border."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.views.view import ViewMetadata
from metaserver.store.port import Entry, NamespacePath

T = TypeVar("T")


class IdempotencyKey(msgspec.Struct, frozen=True):
    """What a request with an Idempotency-Key header brings; recorded in the transaction that does its work."""

    key: str
    scope: str
    request_hash: str


class Caller(msgspec.Struct, frozen=True):
    """Who asks, for the timeline; and under which key, if any."""

    who: str
    request_id: str
    idempotency: IdempotencyKey | None = None
    confined_to: tuple[NamespacePath, ...] | None = None
    """Namespaces within whose locations the caller may place things; None: anywhere in the warehouse."""
    names_owners: bool = True
    """Whether the caller may name others as owners of views (`owners`)."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next_token: str | None
    """None on the last page."""


class LoadedTable(msgspec.Struct, frozen=True):
    """A table as it stands at one pointer. `entry` is None for a staged table, which is stored nowhere yet."""

    entry: Entry | None
    metadata: TableMetadata


class LoadedView(msgspec.Struct, frozen=True):
    entry: Entry
    metadata: ViewMetadata


class LoadedFunction(msgspec.Struct, frozen=True):
    entry: Entry
    document: bytes
    """The function's metadata, as JSON."""


class TableIdentifier(msgspec.Struct, frozen=True):
    namespace: NamespacePath
    name: str


class CreateTable(msgspec.Struct, frozen=True):
    """What POST …/tables brings; schema, spec and order as JSON objects of the spec."""

    name: str
    schema: dict[str, Any]
    location: str | None = None
    partition_spec: dict[str, Any] | None = None
    write_order: dict[str, Any] | None = None
    properties: dict[str, str] = {}


class CreateView(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any]
    view_version: dict[str, Any]
    location: str | None = None
    properties: dict[str, str] = {}


class TableChange(msgspec.Struct, frozen=True):
    """One table's part of a commit."""

    namespace: NamespacePath
    name: str
    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


class PropertyChanges(msgspec.Struct, frozen=True):
    updated: list[str]
    removed: list[str]
    missing: list[str]
