"""Routes of a table's indexes: list, define, pause and drop.

A definition is a table property, so defining an index is a commit to the table. The commit requires the table's UUID,
and the schema with which the route has resolved the names. Builds have their own routes (`builds.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.index.definitions import (
    BUCKET,
    BUCKET_PREFIX,
    ENABLED,
    PREFIX,
    STATES,
    Definitions,
    IndexDefinition,
    add_name_mapping,
    check_name,
    define_index,
    list_bucket_definitions,
    read_definitions,
)
from seamark.formats.index.keys.lookups import parse_lookup, remove_snapshots
from seamark.formats.index.keys.measures import Measure
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.kinds import KINDS, list_kinds_with_parameter, list_parameters
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, CommitConflict, NotFound
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.api.indexes.dimension_rights import check_dimension_rights, check_setter_rights
from seamark.metaserver.api.indexes.index_state import (
    NewFiles,
    SnapshotFiles,
    TableIndexes,
    find_covered_files,
    find_missing_files,
    find_named_snapshots,
    find_new_files_by_snapshot,
    load_requested_table,
    load_snapshot_files,
    read_audit_times_ms,
)
from seamark.metaserver.catalog.policies import parse_setters
from seamark.metaserver.store.model import IndexFileState, RegisteredIndexFile

_SHOWN_CHARS_MAX = 200
_LISTED_FILES_MAX = 1000
_COUNT = {"type": "integer"}
_REGISTERED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["location", "level", "state", "files", "rows", "size-in-bytes", "created-ms"],
    "properties": {
        "location": {"type": "string"},
        "level": {"type": "integer"},
        "state": {"enum": [state.value for state in IndexFileState]},
        "files": {"type": "integer", "description": "The number of data files that it describes, in any snapshot."},
        "rows": _COUNT,
        "size-in-bytes": _COUNT,
        "snapshot-id": {"type": ["integer", "null"]},
        "created-ms": _COUNT,
        "reason": {"type": ["string", "null"], "description": "The reason for the quarantine."},
    },
}
_COUNT_OR_NULL = {"type": ["integer", "null"]}
_INDEX_PROPERTIES: dict[str, Any] = {
    "name": {
        "type": "string",
        "description": f"The name. It is {BUCKET_PREFIX}… for an index from a bucket partition field.",
    },
    "kind": {"enum": [*KINDS, BUCKET, None]},
    "state": {"enum": [*STATES, None]},
    "health": {
        "enum": ["ok", "behind", "damaged", "paused", "broken"],
        "description": "`behind`: some files are not indexed. `damaged`: an index file is quarantined, and its data "
        "files are not indexed. `broken`: the table property is invalid; `problem` says why.",
    },
    "problem": {"type": ["string", "null"]},
    "definition": {
        "type": ["string", "null"],
        "description": "The definition in readable form.",
        "examples": ["bloom(user_id, fpp=0.01)"],
    },
    "definition-id": {"type": ["string", "null"], "description": "The id that its index files contain."},
    "columns": {"type": ["array", "null"], "items": {"type": "string"}},
    "field-ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "measures": {
        "type": ["array", "null"],
        "items": {"type": "string"},
        "description": "The aggregates of a cube. The list is empty for other kinds.",
    },
    **{
        name: {
            "type": "number",
            "description": f"For the kinds {', '.join(list_kinds_with_parameter(name))}: {parameter.meaning}.",
        }
        for name, parameter in list_parameters().items()
    },
    "files": {"type": ["integer", "null"], "description": "Data files of the current snapshot that the index covers."},
    "files-total": _COUNT_OR_NULL,
    "rows": _COUNT_OR_NULL,
    "rows-total": _COUNT_OR_NULL,
    "lag-files": {
        "type": ["integer", "null"],
        "description": "Files of the current snapshot that are not indexed yet.",
    },
    "lag-files-of-refs": {
        "type": ["integer", "null"],
        "description": "Files that are only in snapshots of other branches and of tags, and are not indexed yet.",
    },
    "size-in-bytes": {"type": ["integer", "null"], "description": "The total size of the live index files."},
    "levels": {
        "type": ["object", "null"],
        "additionalProperties": _COUNT,
        "description": "Live index files by level. A merge replaces many files by few files of a higher level.",
    },
    "misplaced": {
        "type": ["integer", "null"],
        "description": "Live index files in the folder of earlier versions of Seamark, where remove_orphan_files of "
        "other tools deletes them. The indexer moves them.",
    },
    "quarantined": {"type": ["integer", "null"], "description": "The number of quarantined index files."},
    "audited-ms": {
        "type": ["integer", "null"],
        "description": "The time in ms since the epoch at which all index files were last verified. It is null if this "
        "never happened, or was long ago.",
    },
    "used": {
        "type": ["object", "null"],
        "description": "The use of the index by plans of this worker since its start, or null if no plan has used it.",
        "properties": {"last-ms": _COUNT, "plans": _COUNT, "files-in": _COUNT, "files-removed": _COUNT},
    },
    "index-files": {"type": "array", "items": _REGISTERED_SCHEMA},
}
_INDEX_FIELDS = [name for name in _INDEX_PROPERTIES if name not in (*list_parameters(), "index-files")]
INDEX_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": _INDEX_FIELDS,
    "description": "For a broken index, all fields except name, health and problem are null.",
    "properties": _INDEX_PROPERTIES,
}
INDEXES_PATH = "/api/v1/tables/{namespace}/{table}/indexes"
_PATH = f"{INDEXES_PATH}/{{index}}"
NO_INDEX = ResponseSpec(404, "No such table, or no such index")
_ONE_INDEX = ResponseSpec(200, "The state of the index", {"$ref": "#/components/schemas/Index"})
_CONFLICT = ResponseSpec(409, "Concurrent commits conflicted in every attempt; repeat the request")
_CONFLICT_OR_NAME = ResponseSpec(
    409,
    "Concurrent commits conflicted in every attempt; or an index with an equal definition, or with another attribute "
    "and the same name, exists",
)


class PutIndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The definition of an index. `_make_body_type` adds the fields for the parameters."""

    kind: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": list(KINDS)})] = None
    columns: Annotated[
        list[str] | None,
        doc("The columns, or functions of one column: a.b, lower(c), bucket[16](c), truncate[4](c), day(c)."),
    ] = None
    measures: Annotated[
        list[str] | None,
        doc(
            "The aggregates of a cube: count, sum, min, max, avg of columns, or of +, - and * of columns, and "
            "approx_distinct of a column."
        ),
    ] = None
    state: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": list(STATES)})] = None
    replaces: Annotated[
        str | None,
        doc(
            "The `definition-id` of the index that is changed. If the index has another definition, the answer is 409."
        ),
    ] = None

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters of the index that the request sets."""
        # The fields of the subclass, which are the parameters, follow the fields of this class.
        parameter_names = self.__struct_fields__[len(PutIndexRequest.__struct_fields__) :]
        return {name: value for name in parameter_names if (value := getattr(self, name)) is not None}


@cache
def _make_body_type(names: tuple[str, ...]) -> type[PutIndexRequest]:
    """Make the type of the body, with a field for each of these parameters."""
    fields = [(name, float | None, None) for name in names]
    return cast(
        "type[PutIndexRequest]",
        msgspec.defstruct("PutIndexRequest", fields, bases=(PutIndexRequest,), forbid_unknown_fields=True),
    )


@Route(
    "GET",
    INDEXES_PATH,
    "listIndexes",
    "List the indexes of a table: definition, coverage of the current snapshot, size, health, use",
    tags=("indexes",),
    answers=(
        ResponseSpec(
            200,
            "All indexes, sorted by name. Bucket indexes of partition specs are last",
            {
                "type": "object",
                "required": ["snapshot-id", "indexes"],
                "properties": {
                    "snapshot-id": {"type": ["integer", "null"]},
                    "indexes": {"type": "array", "items": {"$ref": "#/components/schemas/Index"}},
                },
            },
        ),
        ResponseSpec(404, "No such table"),
    ),
)
async def list_indexes(call: Call) -> dict[str, Any]:
    """List the indexes of a table: definition, coverage of the current snapshot, size, health, use."""
    table = await load_requested_table(call)
    definitions = read_definitions(table.metadata)
    state = await _read_table_state(call, table)
    descriptions = [
        await _describe_index(call, table, state, definition) for definition in definitions.by_name.values()
    ]
    descriptions += [_make_broken_index_json(name, problem) for name, problem in definitions.problems.items()]
    descriptions.sort(key=lambda index: str(index["name"]))
    descriptions += [
        _describe_bucket_index(table.metadata, state.files, definition)
        for definition in list_bucket_definitions(table.metadata)
    ]
    return {"snapshot-id": table.metadata.current_snapshot_id, "indexes": descriptions}


@Route(
    "GET",
    _PATH,
    "loadIndex",
    "Return an index with its index files",
    tags=("indexes",),
    answers=(_ONE_INDEX, NO_INDEX),
)
async def load_index(call: Call) -> dict[str, Any]:
    """Return an index with its index files."""
    return await _show_index(call, await load_requested_table(call), call.names[1])


@Route(
    "PUT",
    _PATH,
    "putIndex",
    "Define or change an index. Fields that are missing in the body stay unchanged",
    tags=("indexes",),
    answers=(
        _ONE_INDEX,
        ResponseSpec(400, "The definition is invalid; the message states the reason"),
        ResponseSpec(403, "The caller may not read a dimension table whose attributes the cube has"),
        NO_INDEX,
        _CONFLICT_OR_NAME,
    ),
).takes_bytes(_make_body_type(tuple(list_parameters())))
async def put_index(call: Call, body_bytes: bytes) -> dict[str, Any]:
    """Define an index, or change the fields of an index that the body has."""
    name = check_name(call.names[1])
    # Make the type for each request, because kinds may be added while the server runs.
    body = await call.parse(body_bytes, _make_body_type(tuple(list_parameters())))

    dimension_tables: set[tuple[str, ...]] = set()

    # A setter is the recorded principal that last set the property with the definition. If only the snapshots of
    # dimension tables change, the property keeps its setter, which must still have the right to read these tables.
    setters: set[str] = set()
    kept_setters: set[str] = set()

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        definitions = read_definitions(metadata)
        present_definition = definitions.by_name.get(name)
        if body.replaces is not None and (present_definition is None or present_definition.id != body.replaces):
            raise CommitConflict(f"The index {name} has another definition: load it, and repeat the change")
        definition = _change_definition(name, body, definitions, metadata)
        dimension_tables.update(map(tuple, definition.dimension_tables))
        setters.update(setter for key, setter in parse_setters(metadata.properties).items() if key == PREFIX + name)
        kept_setters.clear()
        if body.replaces is not None and _differs_only_by_snapshots(present_definition, definition):
            kept_setters.add(PREFIX + name)
        limit = call.components.settings.indexes_limit
        if name not in definitions.by_name and len(definitions.by_name) >= limit:
            raise BadRequest(f"The table has {limit} indexes, which is the limit; drop an index first")
        if present_definition == definition:
            return []
        return [{"action": "set-properties", "updates": {PREFIX + name: definition.property_text}}]

    async def check_rights() -> None:
        await check_dimension_rights(call, dimension_tables)
        if kept_setters or call.caller.principal_name == SERVICE_PRINCIPAL:
            await check_setter_rights(call, setters, dimension_tables)

    await commit_updates(call, compute_updates, check_rights, kept_setters=kept_setters)
    return await _show_index(call, await load_requested_table(call), name)


@Route(
    "DELETE",
    _PATH,
    "dropIndex",
    "Drop an index. Until housekeeping deletes its index files, an equal new definition reuses them",
    tags=("indexes",),
    answers=(ResponseSpec(204, "Dropped"), NO_INDEX, _CONFLICT),
)
async def drop_index(call: Call) -> None:
    """Drop an index. Until housekeeping deletes its index files, an equal new definition reuses them."""
    name = call.names[1]
    if name.startswith(BUCKET_PREFIX):  # The check refuses the names of bucket indexes with a clear message.
        check_name(name)

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        if PREFIX + name not in metadata.properties:
            raise _make_missing_error(name, read_definitions(metadata).by_name)
        return [{"action": "remove-properties", "removals": [PREFIX + name]}]

    await commit_updates(call, compute_updates)


def _change_definition(
    name: str, body: PutIndexRequest, definitions: Definitions, metadata: TableMetadata
) -> IndexDefinition:
    """Return the definition of the index with the changes of the body, or a new definition.

    Raises:
        BadRequest: The definition is incomplete or invalid.
        AlreadyExists: Another index has the same definition, or filters already use the name for another attribute.
    """
    present_definition = definitions.by_name.get(name)
    kind = body.kind if body.kind is not None else present_definition.kind if present_definition else None
    if kind is None or (present_definition is None and body.columns is None):
        if name in definitions.problems:
            raise BadRequest(f"The index {name} is invalid ({definitions.problems[name]}); define it again completely")
        raise BadRequest(
            f"The table has no index {name[:_SHOWN_CHARS_MAX]!r}; to define it, set kind "
            f"({', '.join(KINDS)}) and columns"
        )
    columns: Sequence[str | Term] = (
        body.columns if body.columns is not None else present_definition.terms if present_definition else ()
    )
    parameters: dict[str, Any] = (
        dict(present_definition.parameters) if present_definition and present_definition.kind == kind else {}
    )
    parameters |= body.parameters
    state = body.state if body.state is not None else present_definition.state if present_definition else ENABLED
    measures: Sequence[str | Measure] = (
        body.measures if body.measures is not None else present_definition.measures if present_definition else ()
    )
    definition = define_index(
        name, kind, columns, metadata.current_schema, parameters=parameters, state=state, measures=measures
    )
    definition = add_name_mapping(definition, metadata)
    _check_filter_name(definition, definitions)
    equal_definition = next(
        (other for other in definitions.by_name.values() if other.id == definition.id and other.name != name), None
    )
    if equal_definition is not None:
        raise AlreadyExists(
            f"The index {equal_definition.name} has the same definition, {definition.text}; change that index, or drop "
            "it first"
        )
    return definition


def _differs_only_by_snapshots(present_definition: IndexDefinition | None, definition: IndexDefinition) -> bool:
    """Return whether two definitions differ, but only in the snapshots of their dimension tables."""
    return (
        present_definition is not None
        and present_definition.id != definition.id
        and remove_snapshots(present_definition.id) == remove_snapshots(definition.id)
    )


def _check_filter_name(definition: IndexDefinition, definitions: Definitions) -> None:
    """Check that the names of indexes on attributes keep their meaning in filters.

    An index may be replaced by an index on the same attribute at another snapshot of the dimension table.

    Raises:
        AlreadyExists: The name has another meaning, or differs only by case from the name of another attribute.
    """
    attribute = _identify_attribute(definition)
    present_definition = definitions.by_name.get(definition.name)
    if present_definition is not None and _identify_attribute(present_definition) == attribute:
        return
    for other in definitions.by_name.values():
        attributes = (attribute, _identify_attribute(other))
        if other is present_definition or (other.name.lower() == definition.name.lower() and None not in attributes):
            raise AlreadyExists(
                f"The index {other.name} is {other.text[:_SHOWN_CHARS_MAX]}. Filters can name an attribute by its "
                "index, so this name cannot get another meaning: choose another name (--name of seamark index create), "
                "or drop that index first"
            )


def _identify_attribute(definition: IndexDefinition) -> tuple[object, ...] | None:
    """Return the attribute of a dimension table that the index looks up. Filters can use the index's name for it.

    Returns:
        The ids of the attribute and its dimension table. They do not contain the snapshot of the dimension table, so
        they stay equal when the index moves to a later snapshot. None if the first term of the index looks up no
        attribute, or if the index is a cube, which filters cannot name.
    """
    lookup = parse_lookup(definition.terms[0].transform)
    if lookup is None or KINDS[definition.kind].aggregates:
        return None
    source = lookup.source
    return (definition.terms[0].column_id, source.table, source.key_id, lookup.attribute_id)


async def _show_index(call: Call, table: TableIndexes, name: str) -> dict[str, Any]:
    """Return an index with its index files in the form of an answer.

    Raises:
        NotFound: The table has no such index.
    """
    definitions = read_definitions(table.metadata)
    if name in definitions.problems:
        return _make_broken_index_json(name, definitions.problems[name])
    definition = definitions.by_name.get(name)
    bucket_definitions = (
        {definition.name: definition for definition in list_bucket_definitions(table.metadata)}
        if definition is None
        else {}
    )
    if definition is None and name not in bucket_definitions:
        raise _make_missing_error(name, (*definitions.by_name, *bucket_definitions))
    state = await _read_table_state(call, table)
    if definition is None:
        return _describe_bucket_index(table.metadata, state.files, bucket_definitions[name])
    files = [file for file in table.registered.files if file.definition == definition.id]
    index_files = [_make_index_file_json(file) for file in files[-_LISTED_FILES_MAX:]]
    return {**await _describe_index(call, table, state, definition), "index-files": index_files}


class _TableState(NamedTuple):
    """The files of a table that its indexes should cover, and the times of the last audits.

    Attributes:
        files: The files of the current snapshot.
        other_snapshots: The files that are only in other snapshots of branches and tags.
        audits: The time of the last audit of each index, in milliseconds since the epoch, by definition id.
    """

    files: SnapshotFiles
    other_snapshots: Sequence[NewFiles]
    audits: Mapping[str, int]


async def _read_table_state(call: Call, table: TableIndexes) -> _TableState:
    """Return the files of the current snapshot, of branches and of tags, and the times of audits.

    They describe the state of each index.
    """
    metadata = table.metadata
    new_files = await find_new_files_by_snapshot(call, metadata, find_named_snapshots(metadata))
    audits = await read_audit_times_ms(call, table)
    if metadata.current_snapshot_id is None:
        return _TableState(await load_snapshot_files(call, metadata, None), new_files, audits)
    # The current snapshot is first, before the snapshots of branches and tags.
    return _TableState(new_files[0].files, new_files[1:], audits)


async def _describe_index(
    call: Call, table: TableIndexes, state: _TableState, definition: IndexDefinition
) -> dict[str, Any]:
    """Return the state of an index in the form of an answer."""
    live_files, files = table.registered.list_live_files(definition.id), state.files
    is_covered = await find_covered_files(call, files, live_files)
    missing_of_refs_count = sum(
        [int((await find_missing_files(call, other, live_files)).sum()) for other in state.other_snapshots]
    )
    indexed_files, total_files = int(is_covered.sum()), files.ids.count
    missing_count = int((~is_covered & files.ids.has_identity).sum())
    quarantined_count = sum(
        file.state is IndexFileState.QUARANTINED for file in table.registered.files if file.definition == definition.id
    )
    index_usage = call.components.usage.find_usage(table.entry.uuid, definition.id)
    health = "ok" if missing_count == 0 else "damaged" if quarantined_count else "behind"
    problem = None
    if any(table.metadata.current_schema.column(column_id) is None for column_id in definition.column_ids):
        health, problem = "broken", "The column was dropped from the table"
    return {
        **_encode_definition(definition),
        "health": health if definition.enabled or health == "broken" else "paused",
        "problem": problem,
        "files": indexed_files,
        "files-total": total_files,
        "rows": files.count_rows(is_covered),
        "rows-total": files.count_rows(np.ones(total_files, dtype=np.bool_)),
        "lag-files": missing_count,
        "lag-files-of-refs": missing_of_refs_count,
        "size-in-bytes": sum(file.size_bytes for file in live_files),
        "levels": {str(level): count for level, count in sorted(Counter(file.level for file in live_files).items())},
        "misplaced": sum(f"/{FORMER_INDEX_FOLDER}/" in file.location for file in live_files),
        "quarantined": quarantined_count,
        "audited-ms": state.audits.get(definition.id),
        "used": None
        if index_usage is None
        else {
            "last-ms": index_usage.last_ms,
            "plans": index_usage.plans,
            "files-in": index_usage.files_in,
            "files-removed": index_usage.files_removed,
        },
    }


def _describe_bucket_index(
    metadata: TableMetadata, files: SnapshotFiles, definition: IndexDefinition
) -> dict[str, Any]:
    """Return a bucket index as JSON.

    A bucket index is a partition field with the transform bucket. It covers the files of every partition spec with this
    field. It has no index files, so the values that describe index files are 0.
    """
    term = definition.terms[0]
    spec_ids = [
        spec.spec_id
        for spec in metadata.partition_specs
        if any(field.sources == (term.column_id,) and field.transform == term.transform for field in spec.fields)
    ]
    rows_by_block = [block.rows for block in files.view.blocks]
    is_covered = np.repeat(np.isin(files.view.spec_ids, spec_ids), rows_by_block)
    return {
        **_encode_definition(definition),
        "health": "ok",
        "problem": None,
        "files": int(is_covered.sum()),
        "files-total": files.ids.count,
        "rows": files.count_rows(is_covered),
        "rows-total": files.count_rows(np.ones_like(is_covered)),
        "lag-files": 0,
        "lag-files-of-refs": 0,
        "size-in-bytes": 0,
        "levels": {},
        "misplaced": 0,
        "quarantined": 0,
        "audited-ms": None,
        "used": None,
    }


def _encode_definition(definition: IndexDefinition) -> dict[str, Any]:
    """Return the JSON object of a definition."""
    return {
        "name": definition.name,
        "kind": definition.kind,
        "state": definition.state,
        "definition": definition.text,
        "definition-id": definition.id,
        "columns": [term.text for term in definition.terms],
        "field-ids": [term.column_id for term in definition.terms],
        "measures": [measure.text for measure in definition.measures],
        **definition.parameters,
    }


def _make_broken_index_json(name: str, problem: str) -> dict[str, Any]:
    """Return an index with an invalid definition as JSON. All fields other than the name and the problem are null."""
    return {**dict.fromkeys(_INDEX_FIELDS), "name": name, "health": "broken", "problem": problem}


def _make_index_file_json(file: RegisteredIndexFile) -> dict[str, Any]:
    """Return the JSON object of an index file."""
    return {
        "location": file.location,
        "level": file.level,
        "state": file.state.value,
        "files": file.files,
        "rows": file.rows,
        "size-in-bytes": file.size_bytes,
        "snapshot-id": file.snapshot_id,
        "created-ms": file.created_ms,
        "reason": file.reason,
    }


def _make_missing_error(name: str, names: Iterable[str]) -> NotFound:
    """Return the error for an unknown index, with the most similar name."""
    # For example, price_bitmap is similar to price.
    similar_names = find_near_names(name[:_SHOWN_CHARS_MAX], names, maximum=1, cutoff=0.5)
    hint = f"did you mean {similar_names[0]}?" if similar_names else "list its indexes with seamark index list"
    return NotFound(f"The table has no index {name[:_SHOWN_CHARS_MAX]!r}; {hint}")


def find_defined_index(metadata: TableMetadata, name: str) -> IndexDefinition:
    """Return an index that can be built.

    Raises:
        NotFound: The index does not exist.
        BadRequest: The property with its definition is invalid, or the index is a bucket index.
    """
    definitions = read_definitions(metadata)
    if name in definitions.problems:
        raise BadRequest(
            f"The definition of the index {name} is invalid: {definitions.problems[name]}; define it again"
        )
    if name not in definitions.by_name:
        if name.startswith(BUCKET_PREFIX):  # The check refuses the names of bucket indexes with a clear message.
            check_name(name)
        raise _make_missing_error(name, definitions.by_name)
    return definitions.by_name[name]
