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


def doc(description: str, **schema: Any) -> msgspec.Meta:
    """Return the metadata of a request field.

    Args:
        description: The documentation of the field.
        schema: Further entries of the field's JSON schema, which `read_request` enforces.
    """
    return msgspec.Meta(description=description, extra_json_schema=schema or None)


_File = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
_Filter = Annotated[msgspec.Raw, doc("An expression of the Iceberg REST specification.")]


class Producer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    sequence: _NonNegative


class Remove(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A live file to remove. A deletion vector is named by its path and its offset."""

    file_path: str
    content_offset: _NonNegative | None = None

    def __str__(self) -> str:
        return self.file_path if self.content_offset is None else f"{self.file_path} (at {self.content_offset})"


class GivenPartition(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    spec_id: Int32
    values: list[Any]


class ChangeScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows that a change has read: either a filter or partitions."""

    filter: _Filter = msgspec.field(default_factory=msgspec.Raw)
    partitions: list[GivenPartition] | None = None


class ChangeReplace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files that a change replaces: either a filter, or `partitions`."""

    filter: _Filter = msgspec.field(default_factory=msgspec.Raw)
    partitions: Annotated[str | None, doc("Those of the added files.", enum=[WRITTEN])] = None


class IndexFileGiven(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    location: str
    size_in_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ChangeFields(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    table_uuid: Annotated[str | None, doc("409 if the name refers to another table.")] = None
    branch: str = MAIN
    producer: Annotated[
        Producer | None, doc("The writer and the sequence number of this change: each sequence is committed once.")
    ] = None
    repeats_only: Annotated[
        bool,
        doc(
            "Answer a repeat of the producer's change as the first time, and refuse all else by 409, so that a writer "
            "who finds rows changed since it read them learns whether its own change did that."
        ),
    ] = False
    change_id: Annotated[
        str | None,
        doc(
            "Shared by all attempts of one change. After several collisions, the change gets a table lock for some "
            "time, and other changes to the table wait."
        ),
    ] = None
    fence: Annotated[
        Int64 | None,
        doc(
            "The fencing number of a job of the table services; 409 if another replica runs them now, so that a job "
            "which its server has lost commits nothing."
        ),
    ] = None
    operation: Annotated[
        str | None,
        doc(
            "The operation of the snapshot (Iceberg specification); by default derived from the change.",
            enum=[*OPERATIONS, None],
        ),
    ] = None
    isolation: Annotated[str, doc("By default serializable.", enum=list(ISOLATIONS))] = SERIALIZABLE
    schema_id: Annotated[
        Int32 | None,
        doc(
            "The schema that resolves names in filters; by default the current schema. 409 when another schema is "
            "current now and the scope has a filter, because its names may mean other columns."
        ),
    ] = None
    format_version: Annotated[
        Int32 | None,
        doc(
            "The format version for which files were rewritten; 409 if the table has another one now. Rows of "
            "rewritten files have their row ids from version 3 on."
        ),
    ] = None
    add: Annotated[
        list[_File], doc("Data and delete files, each a ContentFile of the Iceberg REST specification.")
    ] = []
    """The files to add.

    `read_change` decodes them file by file. Decoding all of them at once would block the interpreter for a second.
    """
    remove: Annotated[
        tuple[Remove, ...], doc("Live files. A deletion vector is named by its path and its offset.")
    ] = ()
    index_files: Annotated[
        tuple[IndexFileGiven, ...],
        doc(
            f"Index files that are registered with the snapshot; stored below {INDEX_FOLDER} of the table.",
            maxItems=INDEX_FILES_MAX,
        ),
    ] = ()
    undo_snapshot_id: Annotated[
        Int64 | None,
        doc(
            "Undoes this snapshot, whose operation is replace: removes the files that it added, and restores those "
            "that it removed. 409 if later commits changed the added files. Without files of its own."
        ),
    ] = None
    summary: dict[str, str] = {}


class ChangeBody(ChangeFields, frozen=True, kw_only=True):
    """The JSON body of the request."""

    read_snapshot_id: Annotated[
        Int64 | msgspec.UnsetType | None,
        doc(
            "The snapshot that the change was computed from; null for an empty table. Required with removed files, "
            "position deletes, deletion vectors or a scope."
        ),
    ] = UNSET
    scope: Annotated[
        ChangeScope | None,
        doc(
            "The rows that the change has read, as a filter or as partitions. Default: all rows when the change "
            "removes files or adds position deletes or deletion vectors, otherwise none."
        ),
    ] = None
    replace: Annotated[
        ChangeReplace | None,
        doc(
            "Removes every live file whose rows all match the filter, or every live file in the partitions of the "
            "added files."
        ),
    ] = None
