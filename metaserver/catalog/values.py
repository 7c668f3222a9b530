"""Values in the interface of the catalog."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import force_setattr

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.metaserver.store.model import Entry, NamespacePath

T = TypeVar("T")


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The Idempotency-Key header of a request; recorded in the same transaction as the request's effects."""

    key: str
    scope: str
    request_hash: str


class Caller(msgspec.Struct, frozen=True):
    """The principal of a request, for the timeline, and its idempotency key, if any."""

    who: str
    request_id: str
    idempotency: IdempotencyKey | None = None
    confined_to: tuple[NamespacePath, ...] | None = None
    """Namespaces whose locations the caller may place entries in; None: anywhere in the warehouse."""
    names_owners: bool = True
    """Whether the caller may name other users as owners of views (`owners.py`)."""
    request_bytes: int = 0
    """The length of the request's body, unpacked; 0 without one."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next_token: str | None
    """None on the last page."""


class LoadedTable(msgspec.Struct, frozen=True):
    """A table at one pointer. `entry` is None for a staged table, which is not stored yet."""

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
    """The body of POST …/tables; schema, spec and order are JSON objects of the specification."""

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
    """The part of a commit that concerns one table. The actions and types are in lower case, because clients may send
    them in any case."""

    namespace: NamespacePath
    name: str
    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]

    def __post_init__(self) -> None:
        force_setattr(self, "requirements", [_lowered(requirement, "type") for requirement in self.requirements])
        force_setattr(self, "updates", [_lowered(update, "action") for update in self.updates])


def _lowered(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return {**fields, name: value.lower()} if isinstance(value, str) else fields


class PropertyChanges(msgspec.Struct, frozen=True):
    updated: list[str]
    removed: list[str]
    missing: list[str]
