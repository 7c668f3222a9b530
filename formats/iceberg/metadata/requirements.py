"""Requirements of the REST spec (`TableRequirement`, `ViewRequirement`): conditions for applying a commit.

The messages are Java's (`UpdateRequirement`), because clients and their tests match them. A failed requirement is a
`CommitConflict`: the client refreshes and decides. A malformed requirement is a `BadRequest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.reading import Int32, Int64, convert_json_value
from seamark.formats.runtime.errors import BadRequest, CommitConflict


def _make_conflict(message: str) -> CommitConflict:
    return CommitConflict(f"Requirement failed: {message}")


class Requirement(msgspec.Struct, frozen=True, rename="kebab"):
    """The base class of the requirements."""

    def check(self, metadata: TableMetadata) -> None:
        """Check the requirement.

        Raises:
            CommitConflict: The table does not satisfy the requirement.
        """
        raise NotImplementedError


class AssertCreate(Requirement, frozen=True):
    """The requirement that the table does not exist."""

    def check(self, metadata: TableMetadata) -> None:
        # The metadata belong to a table, so the table exists.
        raise _make_conflict("table already exists")


class AssertUuid(Requirement, frozen=True):
    uuid: str

    def check(self, metadata: TableMetadata) -> None:
        if metadata.table_uuid is None or metadata.table_uuid.lower() != self.uuid.lower():
            raise _make_conflict(f"UUID does not match: expected {metadata.table_uuid} != {self.uuid}")


class AssertRefSnapshotId(Requirement, frozen=True):
    """The requirement that a branch or tag refers to a snapshot, or does not exist."""

    ref: str
    snapshot_id: Int64 | None = None
    """The snapshot to which the reference must refer. None means that the reference must not exist."""

    def check(self, metadata: TableMetadata) -> None:
        ref = metadata.refs.get(self.ref)
        if ref is None:
            if self.snapshot_id is not None:
                raise _make_conflict(f"branch or tag {self.ref} is missing, expected {self.snapshot_id}")
            return
        kind = "branch" if ref.is_branch else "tag"
        if self.snapshot_id is None:
            raise _make_conflict(f"{kind} {self.ref} was created concurrently")
        if self.snapshot_id != ref.snapshot_id:
            raise _make_conflict(f"{kind} {self.ref} has changed: expected id {self.snapshot_id} != {ref.snapshot_id}")


def _make_id_requirement(field: str, attribute: str, subject: str) -> type[Requirement]:
    """Return a class of requirements: the integer in its field must equal an attribute of the table's metadata.

    The requirements of the spec for ids differ only in these names. The method `check` of the class raises
    CommitConflict if the numbers differ.

    Args:
        field: The name of the field.
        attribute: The name of the attribute.
        subject: The name of the attribute in messages.
    """

    def check(self: Requirement, metadata: TableMetadata) -> None:
        expected, current = getattr(self, field), getattr(metadata, attribute)
        if expected != current:
            raise _make_conflict(f"{subject} changed: expected id {expected} != {current}")

    struct: Any = msgspec.defstruct(
        f"Assert_{field}", [(field, Int32)], bases=(Requirement,), frozen=True, namespace={"check": check}
    )
    return cast(type[Requirement], struct)


class AssertProperties(Requirement, frozen=True):
    """The requirement that some properties have expected values. It belongs to Seamark, not to the specification.

    Attributes:
        properties: The expected value of each property. None means that the table must not have the property.
    """

    properties: dict[str, str | None]

    def check(self, metadata: TableMetadata) -> None:
        for name, expected in self.properties.items():
            current = metadata.properties.get(name)
            if current != expected:
                raise _make_conflict(f"property {name} changed: expected {expected!r} != {current!r}")


TABLE_REQUIREMENTS: dict[str, type[Requirement]] = {
    "assert-create": AssertCreate,
    "assert-table-uuid": AssertUuid,
    "assert-ref-snapshot-id": AssertRefSnapshotId,
    "assert-last-assigned-field-id": _make_id_requirement(
        "last_assigned_field_id", "last_column_id", "last assigned field id"
    ),
    "assert-current-schema-id": _make_id_requirement("current_schema_id", "current_schema_id", "current schema"),
    "assert-last-assigned-partition-id": _make_id_requirement(
        "last_assigned_partition_id", "last_partition_id", "last assigned partition id"
    ),
    "assert-default-spec-id": _make_id_requirement("default_spec_id", "default_spec_id", "default partition spec"),
    "assert-default-sort-order-id": _make_id_requirement(
        "default_sort_order_id", "default_sort_order_id", "default sort order"
    ),
    "seamark-assert-properties": AssertProperties,
}

VIEW_REQUIREMENTS: dict[str, type[Requirement]] = {"assert-view-uuid": AssertUuid}


class _RequirementType(msgspec.Struct, frozen=True):
    type: str


def _read_type(raw: object) -> str:
    return convert_json_value(raw, _RequirementType, "update requirement").type.lower()


def read_requirements(raw_requirements: Iterable[object]) -> tuple[Requirement, ...]:
    """Parse the JSON of the requirements on a table.

    Raises:
        BadRequest: A requirement is unknown, malformed, or for views; or `assert-create` is not the only requirement.
    """
    requirements: list[Requirement] = []
    for raw in raw_requirements:
        name = _read_type(raw)
        requirement_class = TABLE_REQUIREMENTS.get(name)
        if requirement_class is None:
            if name in VIEW_REQUIREMENTS:
                raise BadRequest(f"Cannot validate {name} against a table")
            raise BadRequest(f"Unknown update requirement: {name} (known: {', '.join(TABLE_REQUIREMENTS)})")
        requirements.append(convert_json_value(raw, requirement_class, f"{name} requirement"))
    create_count = sum(isinstance(requirement, AssertCreate) for requirement in requirements)
    if create_count and create_count < len(requirements):
        raise BadRequest("Invalid create requirements: assert-create cannot be combined with other requirements")
    return tuple(requirements)


def check_requirements(metadata: TableMetadata | None, requirements: Iterable[Requirement]) -> None:
    """Check that a table satisfies the requirements of a commit.

    Args:
        metadata: The table's metadata, or None if there is no table.
        requirements: The requirements, as `read_requirements` returns them.

    Raises:
        CommitConflict: A requirement fails. The message describes the first failure.
    """
    for requirement in requirements:
        if metadata is not None:
            requirement.check(metadata)
        elif not isinstance(requirement, AssertCreate):
            raise _make_conflict("table does not exist")


def check_view_requirements(view_uuid: str, requirements: Iterable[object]) -> None:
    """Check that the view with this UUID satisfies the requirements of a commit.

    Raises:
        CommitConflict: A requirement fails.
        BadRequest: A requirement is unknown, malformed, or for tables.
    """
    for raw in requirements:
        name = _read_type(raw)
        if name not in VIEW_REQUIREMENTS:
            if name in TABLE_REQUIREMENTS:
                raise BadRequest(f"Cannot validate {name} against a view")
            raise BadRequest(f"Unknown update requirement: {name} (known: {', '.join(VIEW_REQUIREMENTS)})")
        assertion = convert_json_value(raw, AssertUuid, f"{name} requirement")
        if assertion.uuid.lower() != view_uuid.lower():
            raise _make_conflict(f"view UUID does not match: expected {view_uuid} != {assertion.uuid}")
