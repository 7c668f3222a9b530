"""The JSON body of a change, from which OpenAPI's schema is derived."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.reading import Int32, Int64
from seamark.formats.iceberg.types.values import LONG_MAX
from seamark.formats.protocol.wire import INDEX_FILES_MAX, INDEX_FOLDER

APPEND, OVERWRITE, DELETE, REPLACE = "append", "overwrite", "delete", "replace"
OPERATIONS = (APPEND, OVERWRITE, DELETE, REPLACE)
SERIALIZABLE, SNAPSHOT = "serializable", "snapshot"
ISOLATIONS = (SERIALIZABLE, SNAPSHOT)
WRITTEN = "written"
UNSET = msgspec.UNSET
_NonNegative = Annotated[int, msgspec.Meta(ge=0, le=LONG_MAX)]


def describe_field(description: str, **schema: Any) -> msgspec.Meta:
    """Return the metadata of a request field.

    Args:
        description: The documentation of the field.
        schema: Further entries of the field's JSON schema, which `read_request` enforces.
    """
    return msgspec.Meta(description=description, extra_json_schema=schema or None)


_File = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
_Filter = Annotated[msgspec.Raw, describe_field("An expression of the Iceberg REST specification.")]


class Producer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    sequence: _NonNegative


class Remove(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A live file to remove. A deletion vector is identified by the path of its Puffin file and its offset."""

    file_path: str
    content_offset: _NonNegative | None = None

    def __str__(self) -> str:
        return self.file_path if self.content_offset is None else f"{self.file_path} (at {self.content_offset})"


class GivenPartition(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    spec_id: Int32
    values: list[Any]


class ChangeScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows that a change has read: either a filter or partitions. An empty `filter` means that it is missing."""

    filter: _Filter = msgspec.field(default_factory=msgspec.Raw)
    partitions: list[GivenPartition] | None = None


class ChangeReplace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files that a change replaces: the files that match a filter, or the files in the written partitions."""

    filter: _Filter = msgspec.field(default_factory=msgspec.Raw)
    partitions: Annotated[
        str | None, describe_field("Replace all live files in the partitions of the added files.", enum=[WRITTEN])
    ] = None


class IndexFileGiven(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    location: str
    size_in_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ChangeFields(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    table_uuid: Annotated[
        str | None,
        describe_field("The UUID of the table. If the name refers to another table, the change is refused with 409."),
    ] = None
    branch: str = MAIN
    producer: Annotated[
        Producer | None,
        describe_field(
            "The writer, and the sequence number that it gave this change. A sequence number is committed only once."
        ),
    ] = None
    repeats_only: Annotated[
        bool,
        describe_field(
            "Only answer a repeat. If the producer has committed this change, the server returns the first answer; "
            "otherwise it answers 409 and changes nothing. A writer whose rows were changed since it read them uses "
            "this to determine whether its own change changed them."
        ),
    ] = False
    change_id: Annotated[
        str | None,
        describe_field(
            "An id that all attempts of one change share. After several collisions, the change has priority for some "
            "time, and other changes to the table wait."
        ),
    ] = None
    fence: Annotated[
        Int64 | None,
        describe_field(
            "The fencing number of a job of the table services. If another replica runs the table services now, the "
            "change is refused with 409, so that a job of the earlier replica commits nothing."
        ),
    ] = None
    operation: Annotated[
        str | None,
        describe_field(
            "The operation of the snapshot (Iceberg specification). By default, the server derives it from the change.",
            enum=[*OPERATIONS, None],
        ),
    ] = None
    isolation: Annotated[
        str, describe_field("The isolation level. The default is serializable.", enum=list(ISOLATIONS))
    ] = SERIALIZABLE
    schema_id: Annotated[
        Int32 | None,
        describe_field(
            "The schema that resolves names in filters. The default is the current schema. If the scope has a filter, "
            "and another schema is current now, the change is refused with 409, because names in the filter may mean "
            "different columns."
        ),
    ] = None
    format_version: Annotated[
        Int32 | None,
        describe_field(
            "The format version for which files were rewritten. If the table has a different version now, the change "
            "is refused with 409. From version 3 on, rewritten files contain the row ids of their rows."
        ),
    ] = None
    add: Annotated[
        list[_File],
        describe_field("Data and delete files to add. Each is a ContentFile of the Iceberg REST specification."),
    ] = []
    """The files to add.

    `read_change` decodes one file at a time. One call that decodes all files would block the interpreter for a second.
    """
    remove: Annotated[
        tuple[Remove, ...],
        describe_field(
            "Live files to remove. A deletion vector is identified by the path of its Puffin file and its offset."
        ),
    ] = ()
    index_files: Annotated[
        tuple[IndexFileGiven, ...],
        describe_field(
            f"Index files to register with the snapshot, stored in the folder {INDEX_FOLDER} of the table.",
            maxItems=INDEX_FILES_MAX,
        ),
    ] = ()
    undo_snapshot_id: Annotated[
        Int64 | None,
        describe_field(
            "A snapshot with the operation replace to undo: the change removes the files that this snapshot added, and "
            "restores the files that it removed. The change must not add or remove other files. If later commits "
            "changed the added files, the change is refused with 409."
        ),
    ] = None
    summary: dict[str, str] = {}


class ChangeBody(ChangeFields, frozen=True, kw_only=True):
    """The JSON body of the request for a change."""

    read_snapshot_id: Annotated[
        Int64 | msgspec.UnsetType | None,
        describe_field(
            "The snapshot from which the change was computed; null for an empty table. It is required if the change "
            "removes files, has a scope, or adds position deletes or deletion vectors."
        ),
    ] = UNSET
    scope: Annotated[
        ChangeScope | None,
        describe_field(
            "The rows that the change has read, as a filter or as partitions. The default is all rows if the change "
            "removes files or adds position deletes or deletion vectors, otherwise no rows."
        ),
    ] = None
    replace: Annotated[
        ChangeReplace | None,
        describe_field(
            "The live files that the change also removes: all files whose rows all match a filter, or all files in the "
            "partitions of the added files."
        ),
    ] = None
