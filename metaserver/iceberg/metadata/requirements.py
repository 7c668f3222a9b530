"""Requirements of the REST spec (`TableRequirement`, `ViewRequirement`): conditions for applying a commit.

The messages are Java's (`UpdateRequirement`), because clients and their tests match them. A failed requirement is a
`CommitConflict`: the client refreshes and decides. A malformed requirement is a `BadRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from seamark.metaserver.errors import BadRequest, CommitConflict
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.types.reading import Int32, Int64, read


class Requirement(msgspec.Struct, frozen=True, rename="kebab"):
    """Base of the requirement structs."""


class AssertCreate(Requirement, frozen=True):
    pass


class AssertUuid(Requirement, frozen=True):
    uuid: str


class AssertRefSnapshotId(Requirement, frozen=True):
    ref: str
    snapshot_id: Int64 | None = None
    """None: the reference must not exist."""


class AssertLastAssignedFieldId(Requirement, frozen=True):
    last_assigned_field_id: Int32


class AssertCurrentSchemaId(Requirement, frozen=True):
    current_schema_id: Int32


class AssertLastAssignedPartitionId(Requirement, frozen=True):
    last_assigned_partition_id: Int32


class AssertDefaultSpecId(Requirement, frozen=True):
    default_spec_id: Int32


class AssertDefaultSortOrderId(Requirement, frozen=True):
    default_sort_order_id: Int32


def _failed(message: str) -> CommitConflict:
    return CommitConflict(f"Requirement failed: {message}")


def _unchanged(what: str, expected: int, actual: int) -> None:
    if expected != actual:
        raise _failed(f"{what} changed: expected id {expected} != {actual}")


def _create(m: TableMetadata, r: AssertCreate) -> None:
    raise _failed("table already exists")


def _uuid(m: TableMetadata, r: AssertUuid) -> None:
    if m.table_uuid is None or m.table_uuid.lower() != r.uuid.lower():
        raise _failed(f"UUID does not match: expected {m.table_uuid} != {r.uuid}")


def _ref(m: TableMetadata, r: AssertRefSnapshotId) -> None:
    ref = m.refs.get(r.ref)
    if ref is None:
        if r.snapshot_id is not None:
            raise _failed(f"branch or tag {r.ref} is missing, expected {r.snapshot_id}")
        return
    kind = "branch" if ref.is_branch else "tag"
    if r.snapshot_id is None:
        raise _failed(f"{kind} {r.ref} was created concurrently")
    if r.snapshot_id != ref.snapshot_id:
        raise _failed(f"{kind} {r.ref} has changed: expected id {r.snapshot_id} != {ref.snapshot_id}")


def _field_id(m: TableMetadata, r: AssertLastAssignedFieldId) -> None:
    _unchanged("last assigned field id", r.last_assigned_field_id, m.last_column_id)


def _schema_id(m: TableMetadata, r: AssertCurrentSchemaId) -> None:
    _unchanged("current schema", r.current_schema_id, m.current_schema_id)


def _partition_id(m: TableMetadata, r: AssertLastAssignedPartitionId) -> None:
    _unchanged("last assigned partition id", r.last_assigned_partition_id, m.last_partition_id)


def _spec_id(m: TableMetadata, r: AssertDefaultSpecId) -> None:
    _unchanged("default partition spec", r.default_spec_id, m.default_spec_id)


def _sort_order_id(m: TableMetadata, r: AssertDefaultSortOrderId) -> None:
    _unchanged("default sort order", r.default_sort_order_id, m.default_sort_order_id)


class _Kind(NamedTuple):
    struct: type[Requirement]
    check: Callable[[TableMetadata, Any], None]


TABLE_REQUIREMENTS: dict[str, _Kind] = {
    "assert-create": _Kind(AssertCreate, _create),
    "assert-table-uuid": _Kind(AssertUuid, _uuid),
    "assert-ref-snapshot-id": _Kind(AssertRefSnapshotId, _ref),
    "assert-last-assigned-field-id": _Kind(AssertLastAssignedFieldId, _field_id),
    "assert-current-schema-id": _Kind(AssertCurrentSchemaId, _schema_id),
    "assert-last-assigned-partition-id": _Kind(AssertLastAssignedPartitionId, _partition_id),
    "assert-default-spec-id": _Kind(AssertDefaultSpecId, _spec_id),
    "assert-default-sort-order-id": _Kind(AssertDefaultSortOrderId, _sort_order_id),
}

VIEW_REQUIREMENTS: dict[str, type[Requirement]] = {"assert-view-uuid": AssertUuid}


class _Tagged(msgspec.Struct, frozen=True):
    type: str


def _name(raw: object) -> str:
    return read(raw, _Tagged, "update requirement").type.lower()


def check_requirements(m: TableMetadata | None, requirements: Sequence[object]) -> None:
    """CommitConflict for the first requirement that fails; `m` is None if there is no table.

    BadRequest for one that is unknown, malformed, for views, or beside `assert-create`, which must be alone.
    """
    parsed: list[tuple[_Kind, Requirement]] = []
    for raw in requirements:
        name = _name(raw)
        kind = TABLE_REQUIREMENTS.get(name)
        if kind is None:
            if name in VIEW_REQUIREMENTS:
                raise BadRequest(f"Cannot validate {name} against a table")
            raise BadRequest(f"Unknown update requirement: {name} (known: {', '.join(TABLE_REQUIREMENTS)})")
        parsed.append((kind, read(raw, kind.struct, f"{name} requirement")))
    others = [kind for kind, _ in parsed if kind.struct is not AssertCreate]
    if others and len(others) != len(parsed):
        raise BadRequest("Invalid create requirements: assert-create cannot be combined with other requirements")
    if m is None:
        if others:
            raise _failed("table does not exist")
        return
    for kind, requirement in parsed:
        kind.check(m, requirement)


def check_view_requirements(view_uuid: str, requirements: Sequence[object]) -> None:
    """CommitConflict unless each holds for the view with this UUID; BadRequest for a malformed one."""
    for raw in requirements:
        name = _name(raw)
        if name not in VIEW_REQUIREMENTS:
            if name in TABLE_REQUIREMENTS:
                raise BadRequest(f"Cannot validate {name} against a view")
            raise BadRequest(f"Unknown update requirement: {name} (known: {', '.join(VIEW_REQUIREMENTS)})")
        asserted = read(raw, AssertUuid, f"{name} requirement")
        if asserted.uuid.lower() != view_uuid.lower():
            raise _failed(f"view UUID does not match: expected {view_uuid} != {asserted.uuid}")
