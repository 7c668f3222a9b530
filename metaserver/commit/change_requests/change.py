"""Reads the request of a change: files to add, files to remove, and the rows that the client has read.

The request is read in two steps, because the table may change between them. First, a `ChangeRequest` is checked without
the table. Then, a `Change` is bound to one state of the table's schemas, partition specs and format version. If one of
them changes, the request is bound again. Each error is a BadRequest that names the file and the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.manifests.content_file import (
    DATA,
    POSITION_DELETES,
    UNKNOWN,
    ContentFile,
    decode_content_file,
    list_partition_types,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.values import LONG_MAX, Value, compute_partition_key, decode_json
from seamark.formats.protocol.wire import FLUSH_KEYS, FRESH_FOLDER, INDEX_FILES_MAX, check_name
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.change_requests.change_body import (
    APPEND,
    DELETE,
    ISOLATIONS,
    OPERATIONS,
    OVERWRITE,
    REPLACE,
    UNSET,
    WRITTEN,
    ChangeBody,
    ChangeFields,
    ChangeReplace,
    ChangeScope,
    GivenPartition,
)
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.store.operations import FlushedRange

_OWN_PREFIX = "seamark."
"""The prefix of summary keys that only the server writes."""
_OWN_KEYS = frozenset({"operation", "changed-partition-count", *FLUSH_KEYS})
_OWN_BEGINNINGS = ("added-", "deleted-", "removed-", "total-", "partitions.", "manifests-")
_SUMMARY_KEYS_MAX = 100
_SUMMARY_BYTES_MAX = 16 << 10

Partition = tuple[Value | None, ...]


class ChangeRequest(ChangeFields, frozen=True, kw_only=True):
    """A checked request whose filters are not bound to the columns of the table yet."""

    reads: bool
    """Whether the request has a read snapshot. The id of the snapshot is None if an empty table was read."""
    read_snapshot_id: int | None
    scope_filter: Expression | None
    """The filter of the rows that the change has read, or None. The scope has a filter or partitions, not both."""
    scope_partitions: tuple[GivenPartition, ...] | None
    replace_filter: Expression | None
    """The filter of the rows whose files the change replaces, or None."""
    replace_written: bool
    """Whether the change replaces all files in the partitions of the added files."""
    flushed: tuple[FlushedRange, ...] = ()
    """The ranges of a stream's rows that the change adds. Clients cannot set this field."""

    @property
    def replaces(self) -> bool:
        return self.replace_filter is not None or self.replace_written


class ReadScope(msgspec.Struct, frozen=True):
    """The rows that a change has read.

    Attributes:
        bound: The filter that the rows match, with columns by id, or None if `partitions` describe the rows.
        partitions: The partitions of the rows, each as (spec id, partition values).
    """

    bound: Expression | None = None
    partitions: tuple[tuple[int, Partition], ...] = ()


EVERYTHING = ReadScope(bound=TRUE)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is bound to one state of the table."""

    request: ChangeRequest
    data: tuple[ContentFile, ...]
    deletes: tuple[ContentFile, ...]
    operation: str
    scope: ReadScope | None
    """The rows that the change has read, or None if it has read only the rows that it removes."""
    replaced: ReadScope | None
    """The scope in which the change also removes all live files, or None."""

    @property
    def removes(self) -> bool:
        return bool(self.request.remove) or self.request.replaces or self.request.undo_snapshot_id is not None

    @property
    def position_deletes(self) -> tuple[ContentFile, ...]:
        return tuple(file for file in self.deletes if file.content == POSITION_DELETES)


class TableShape(NamedTuple):
    """The parts of the table metadata to which a `Change` is bound. If they change, the change must be read again."""

    format_version: int
    specs: tuple[PartitionSpec, ...]
    schemas: object
    current_schema_id: int


def read_shape(metadata: TableMetadata) -> TableShape:
    return TableShape(metadata.format_version, metadata.partition_specs, metadata.schemas, metadata.current_schema_id)


def read_request(body: ChangeBody, *, files_max: int, flushed: Sequence[FlushedRange] = ()) -> ChangeRequest:
    """Check the request without the table, and return it.

    Args:
        body: The body of the request.
        files_max: The maximum number of files that the change may add and remove together.
        flushed: The ranges of a stream's rows that the change adds. A flush may have no files if its later rows delete
            all earlier rows.

    Raises:
        BadRequest: The request is invalid.
    """
    if len(body.add) + len(body.remove) > files_max:
        raise BadRequest(
            f"The change adds and removes {len(body.add) + len(body.remove):,} files; the limit is {files_max:,} files "
            "a change. Split the change"
        )
    if body.scope is not None and len(body.scope.partitions or ()) > files_max:
        raise BadRequest(
            f"The scope has {len(body.scope.partitions or ()):,} partitions; the limit is {files_max:,}. Use a filter"
        )
    if len(body.index_files) > INDEX_FILES_MAX:
        raise BadRequest(f"index-files has {len(body.index_files):,} files; the limit is {INDEX_FILES_MAX:,} a change")
    check_name(body.branch, "branch")
    if body.producer is not None:
        check_name(body.producer.id, "producer id")
    if body.repeats_only and body.producer is None:
        raise BadRequest("repeats-only needs a producer: only the change of a producer can be recognised as a repeat")
    if body.change_id is not None:
        check_name(body.change_id, "change-id")
    _check_choice("operation", body.operation, (None, *OPERATIONS))
    _check_choice("isolation", body.isolation, ISOLATIONS)
    if not flushed:
        _check_summary(body.summary)
    scope_filter, scope_partitions = _parse_scope(body.scope)
    replace_filter, replace_written = _read_replace(body.replace)
    repeated_names = [str(name) for name, count in Counter(body.remove).items() if count > 1]
    if repeated_names:
        raise BadRequest(
            f"remove names {repeated_names[0][:500]} twice; name each file once. If the table has the file twice, "
            "replace its partition or the whole table instead"
        )
    request = ChangeRequest(
        **{name: getattr(body, name) for name in ChangeFields.__struct_fields__},
        reads=body.read_snapshot_id is not UNSET,
        read_snapshot_id=None if body.read_snapshot_id is UNSET else body.read_snapshot_id,
        scope_filter=scope_filter,
        scope_partitions=scope_partitions,
        replace_filter=replace_filter,
        replace_written=replace_written,
        flushed=tuple(flushed),
    )
    _check_request(request)
    return request


def _check_request(request: ChangeRequest) -> None:
    """Check that the fields of a request fit each other.

    Raises:
        BadRequest: A field is missing, or two fields contradict each other.
    """
    if request.undo_snapshot_id is not None:
        if request.add or request.remove or request.replaces or request.index_files or request.operation is not None:
            raise BadRequest("A change with undo-snapshot-id adds, removes and replaces no files; omit them")
        return
    is_empty = not (request.add or request.remove or request.replaces)
    if is_empty and request.producer is None and not request.flushed:
        raise BadRequest(
            "The change is empty; add, remove or replace files. Only a change with a producer may be empty: it records "
            "the producer's sequence"
        )
    has_scope = request.scope_filter is not None or request.scope_partitions is not None
    if (request.remove or has_scope) and not request.reads:
        reason = "removes files" if request.remove else "has a scope"
        raise BadRequest(
            f"A change that {reason} needs read-snapshot-id: the snapshot that it was computed from, or null"
        )
    if request.replace_written and not request.add:
        raise BadRequest("replace.partitions is written, but add is empty; add the files of these partitions")
    if request.operation == APPEND and (request.remove or request.replaces):
        raise BadRequest("operation is append, but the change removes files; omit it, or set overwrite or replace")
    if request.operation == REPLACE and not request.remove:
        raise BadRequest("operation is replace, but remove is empty; name the files that are rewritten")


def _check_choice(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise BadRequest(f"{name} is {str(value)[:40]!r}; allowed values: {', '.join(filter(None, allowed))}")


def _check_summary(summary: dict[str, str]) -> None:
    if len(summary) > _SUMMARY_KEYS_MAX or sum(len(key) + len(summary[key]) for key in summary) > _SUMMARY_BYTES_MAX:
        raise BadRequest(f"summary is limited to {_SUMMARY_KEYS_MAX} keys and {_SUMMARY_BYTES_MAX:,} characters")
    for key in summary:
        if key in _OWN_KEYS or key.startswith((_OWN_PREFIX, *_OWN_BEGINNINGS)):
            raise BadRequest(f"summary: the server writes {key[:100]!r}; choose another key")


def _parse_scope(scope: ChangeScope | None) -> tuple[Expression | None, tuple[GivenPartition, ...] | None]:
    if scope is None:
        return None, None
    if bool(scope.filter) == (scope.partitions is not None):
        raise BadRequest("scope takes either a filter or partitions")
    if scope.partitions is not None:
        return None, tuple(scope.partitions)
    return _parse_expression(scope.filter, "scope"), None


def _read_replace(replace: ChangeReplace | None) -> tuple[Expression | None, bool]:
    if replace is None:
        return None, False
    if bool(replace.filter) == (replace.partitions is not None):
        raise BadRequest('replace takes either a filter or "partitions": "written"')
    if replace.partitions is not None:
        _check_choice("replace.partitions", replace.partitions, (WRITTEN,))
        return None, True
    return _parse_expression(replace.filter, "replace"), False


def _parse_expression(raw: msgspec.Raw, description: str) -> Expression:
    try:
        return parse_expression(msgspec.json.decode(raw))
    except BadRequest as error:
        raise BadRequest(f"{description}: {error.message}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{description}: the filter is invalid: {error}") from None


def read_change(request: ChangeRequest, metadata: TableMetadata, check_path: Callable[[str], object]) -> Change:
    """Bind the request to the table.

    Args:
        request: The checked request.
        metadata: The current metadata of the table.
        check_path: Raises an error if the table may have no files at a location.

    Raises:
        BadRequest: Files do not fit the table or contradict each other.
        Collision: Rows were read with a schema that is not the current schema.
    """
    if request.format_version not in (None, metadata.format_version):
        raise Collision(
            "schema",
            f"The table has format version {metadata.format_version}, but files were written for version "
            f"{request.format_version}; compute the change again",
        )
    files = [_parse_file(number, json, metadata) for number, json in enumerate(request.add)]
    for file in files:
        check_path(file.file_path)
        if f"/{FRESH_FOLDER}/" in file.file_path:
            raise BadRequest(
                f"{file.file_path} has rows of a stream that a flush adds to the table; it cannot be committed"
            )
        if file.first_row_id is not None:
            raise BadRequest(f"{file.file_path}: the commit assigns first-row-id; omit it")
    _check_distinct(files)
    data = tuple(file for file in files if file.content == DATA)
    deletes = tuple(file for file in files if file.content != DATA)
    _check_rows("data files", data)
    _check_rows("delete files", deletes)
    if metadata.format_version == 1 and (request.remove or request.replaces):
        raise BadRequest("The table has format version 1, which supports appends only; upgrade it to version 2")
    has_position_deletes = any(file.content == POSITION_DELETES for file in deletes)
    if has_position_deletes and not request.reads:
        raise BadRequest("A change that adds position deletes or deletion vectors needs read-snapshot-id")
    operation = _choose_operation(request, data, deletes)
    replaced = _read_replaced_scope(request, data, metadata)
    return Change(
        request=request,
        data=data,
        deletes=deletes,
        operation=operation,
        scope=_read_scope(request, metadata, has_position_deletes, operation, replaced),
        replaced=replaced,
    )


def _parse_file(index: int, json: msgspec.Raw, metadata: TableMetadata) -> ContentFile:
    try:
        return decode_content_file(msgspec.json.decode(json), metadata)
    except BadRequest as error:
        raise BadRequest(f"add[{index}]: {error.message}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"add[{index}] is malformed: {error}") from None


def _check_distinct(files: Iterable[ContentFile]) -> None:
    """Check that no file is added twice, and that each data file has at most one of the added deletion vectors.

    Raises:
        BadRequest: A file is added twice, or a data file has two deletion vectors.
    """
    paths: set[object] = set()
    files_with_vector: set[str | None] = set()
    for file in files:
        is_vector = file.is_deletion_vector
        key = (file.file_path, file.content_offset) if is_vector else file.file_path
        if key in paths:
            raise BadRequest(f"add names {file.file_path} twice")
        paths.add(key)
        if is_vector and file.referenced_data_file in files_with_vector:
            raise BadRequest(f"add has two deletion vectors for {file.referenced_data_file}; a data file has one")
        if is_vector:
            files_with_vector.add(file.referenced_data_file)


def _check_rows(description: str, files: Iterable[ContentFile]) -> None:
    """Check that the total row count fits into 64 bits, because manifests and manifest lists store 64-bit counts."""
    rows = sum(file.record_count for file in files)
    if rows > LONG_MAX:
        raise BadRequest(
            f"add: the {description} have {rows:,} rows together (record-count); the limit is {LONG_MAX:,}"
        )


def _choose_operation(request: ChangeRequest, data: Sequence[ContentFile], deletes: Sequence[ContentFile]) -> str:
    """Return the operation of the snapshot (Iceberg spec, "Snapshots").

    Without a requested operation, the files determine it. The reversal of a compaction is also a replacement.

    Raises:
        BadRequest: The request names an operation that does not fit the change.
    """
    removes = bool(request.remove) or request.replaces
    requested = REPLACE if request.undo_snapshot_id is not None else request.operation
    if requested is None:
        if not removes and not deletes:
            return APPEND
        return OVERWRITE if data else DELETE
    if requested == APPEND and deletes:
        raise BadRequest("operation is append, but the change adds delete files; omit it, or set overwrite")
    if requested == DELETE and data:
        raise BadRequest("operation is delete, but the change adds data files; omit it, or set overwrite")
    return requested


def _read_scope(
    request: ChangeRequest,
    metadata: TableMetadata,
    has_position_deletes: bool,
    operation: str,
    replaced: ReadScope | None,
) -> ReadScope | None:
    """Return the rows that the change has read, or None if it has read only the rows that it removes.

    The scope in the request comes first. Without a scope, a change that removes files or adds position deletes counts
    as having read all rows, and any other change as having read the rows that it replaces. A compaction and a change
    without a read snapshot depend only on the files that they remove.

    Args:
        request: The request.
        metadata: The metadata of the table.
        has_position_deletes: Whether the change adds position deletes or deletion vectors.
        operation: The operation of the snapshot.
        replaced: The scope that the change replaces, or None.

    Raises:
        Collision: The scope has a filter, and the rows were read with a schema other than the current schema.
    """
    if request.scope_filter is not None:
        if request.schema_id not in (None, metadata.current_schema_id):
            # In the schema with which the rows were read, the names in the filter may refer to different columns.
            raise Collision(
                "schema",
                f"Rows were read with schema {request.schema_id}; the current schema is {metadata.current_schema_id}. "
                "Compute the change again from the current snapshot",
            )
        return ReadScope(bound=_bind_filter(request.scope_filter, request, metadata, "scope"))
    if request.scope_partitions is not None:
        return ReadScope(
            partitions=tuple(_parse_partition(partition, metadata) for partition in request.scope_partitions)
        )
    if operation == REPLACE or not request.reads:
        return None
    if request.remove or has_position_deletes:
        return EVERYTHING
    return replaced


def _read_replaced_scope(
    request: ChangeRequest, data: Sequence[ContentFile], metadata: TableMetadata
) -> ReadScope | None:
    if request.replace_filter is not None:
        return ReadScope(bound=_bind_filter(request.replace_filter, request, metadata, "replace"))
    if not request.replace_written:
        return None
    return ReadScope(partitions=list_partitions(data))


def list_partitions(files: Iterable[ContentFile]) -> tuple[tuple[int, Partition], ...]:
    """Return the distinct partitions of the files, each as (spec id, partition values)."""
    partitions = {
        (file.spec_id, compute_partition_key(file.partition)): (file.spec_id, file.partition) for file in files
    }
    return tuple(partitions.values())


def _bind_filter(
    expression: Expression, request: ChangeRequest, metadata: TableMetadata, description: str
) -> Expression:
    schema = metadata.current_schema if request.schema_id is None else metadata.schema(request.schema_id)
    if schema is None:
        raise BadRequest(f"{description}: schema-id is {request.schema_id}; the table has no such schema")
    try:
        return bind(expression, schema, metadata.schemas, case_sensitive=True)
    except BadRequest as error:
        raise BadRequest(f"{description}: {error.message}") from None


def _parse_partition(partition: GivenPartition, metadata: TableMetadata) -> tuple[int, Partition]:
    spec = metadata.spec(partition.spec_id)
    if spec is None:
        raise BadRequest(f"scope: the table has no partition spec {partition.spec_id}")
    if len(partition.values) != len(spec.fields):
        raise BadRequest(
            f"scope: a partition of spec {partition.spec_id} has {len(spec.fields)} values, not {len(partition.values)}"
        )
    try:
        values = tuple(
            None if kind == UNKNOWN or value is None else decode_json(kind, value)
            for kind, value in zip(list_partition_types(metadata, spec), partition.values, strict=True)
        )
    except ValueError as error:
        raise BadRequest(f"scope: a partition of spec {partition.spec_id}: {str(error)[:300]}") from None
    return partition.spec_id, values
