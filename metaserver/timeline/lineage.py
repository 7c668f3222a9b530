"""OpenLineage events of jobs: of table services, index builds, and imports of tables (OpenLineage 2-0-2).

The run id is the id of the instant, a UUIDv7 that does not change with the state of the job. A finished instant gives
the event START and the event that ends the run, because the timeline shows some jobs only when they have ended. A
dataset has the name of its location, as OpenLineage names tables of Iceberg, and a symlink to its name in the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, StructType, Type
from seamark.formats.storage.storages import LOCAL
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.timeline.instants import INDEXING, MAINTENANCE, is_finished

PRODUCER = "https://github.com/seamark/seamark"
SCHEMA_URL = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS_URL = "https://openlineage.io/spec/facets/"
_FACET_VERSIONS = {
    "CatalogDatasetFacet": "1-1-0",
    "ColumnLineageDatasetFacet": "1-2-0",
    "DatasetVersionDatasetFacet": "1-0-1",
    "ErrorMessageRunFacet": "1-0-1",
    "JobTypeJobFacet": "2-0-4",
    "SchemaDatasetFacet": "1-2-0",
    "SymlinksDatasetFacet": "1-0-1",
}
"""The versions of the schemas of facets. A test compares them with the schemas."""
IMPORT = "register"
"""The action of imported and registered tables."""
_JOB_TYPES = {MAINTENANCE: "MAINTENANCE", INDEXING: "INDEX", IMPORT: "IMPORT"}
_SIDES = ("inputs", "outputs")
_FIELD_CHARS = 48
"""The number of characters that a field of the facet `schema` has in addition to its name and its description."""
_COLUMN_FACETS = ("schema", "columnLineage")
_END_EVENT_TYPES = {InstantState.COMPLETED: "COMPLETE", InstantState.ROLLED_BACK: "FAIL"}


class CatalogName(msgspec.Struct, frozen=True):
    """The names that identify the catalog in events."""

    job_namespace: str
    warehouse: str
    """The URI of the warehouse."""


def list_run_events(instant: Instant, metadata: TableMetadata | None, catalog: CatalogName) -> list[dict[str, Any]]:
    """Return the OpenLineage events for a state of an instant. If the instant is not about a job, there are none.

    A finished instant gives START and the event of the end, so that each run has both.

    Args:
        instant: The instant.
        metadata: The metadata of the table, or None if it cannot be read.
        catalog: The names of the catalog.
    """
    if instant.action not in _JOB_TYPES or instant.kind is not EntryKind.TABLE:
        return []
    if instant.state is InstantState.REQUESTED:
        return []  # The job has not begun.
    start = _make_event("START", instant.requested_ms, instant, metadata, catalog)
    if not is_finished(instant.state):
        return [start]
    ended_ms = instant.requested_ms if instant.completed_ms is None else instant.completed_ms
    return [start, _make_event(_END_EVENT_TYPES[instant.state], ended_ms, instant, metadata, catalog)]


def _make_event(
    event_type: str, at_ms: int, instant: Instant, metadata: TableMetadata | None, catalog: CatalogName
) -> dict[str, Any]:
    """Return a run event of a job on a table.

    A rewrite reads and writes the same table, so its output also has the lineage of each column.
    """
    snapshot_id = instant.snapshot_id or (None if metadata is None else metadata.current_snapshot_id)
    dataset = make_dataset(instant.namespace, instant.name, snapshot_id, metadata, catalog)
    is_rewrite = instant.action == MAINTENANCE
    output: dict[str, Any] = dataset
    if is_rewrite and metadata is not None:
        lineage = _make_facet("ColumnLineageDatasetFacet", fields=_map_columns(dataset, metadata))
        output = {**dataset, "facets": {**dataset["facets"], "columnLineage": lineage}}
    error = str(instant.summary.get("error") or "the job was rolled back") if event_type == "FAIL" else ""
    job_name = ".".join((*instant.namespace, instant.name, _name_job(instant)))
    event = make_run_event(event_type, at_ms, instant.id, job_name, _JOB_TYPES[instant.action], error, catalog)
    return {
        **event,
        # An index build writes no rows, and an import finds its rows outside of the catalog.
        "inputs": [] if instant.action == IMPORT else [dataset],
        "outputs": [] if instant.action == INDEXING else [output],
    }


def make_run_event(
    event_type: str, at_ms: int, run_id: str, job_name: str, job_type: str, error: str, catalog: CatalogName
) -> dict[str, Any]:
    """Return a run event without datasets.

    Args:
        event_type: START, COMPLETE, FAIL or ABORT.
        at_ms: The time of the event in milliseconds since the epoch.
        run_id: A UUID.
        job_name: The name of the job in the namespace of the catalog.
        job_type: The kind of the job.
        error: The reason of a failure, or an empty text.
        catalog: The names of the catalog.
    """
    run_facets: dict[str, Any] = {}
    if error:
        run_facets["errorMessage"] = _make_facet("ErrorMessageRunFacet", message=error, programmingLanguage="PYTHON")
    job_facet = _make_facet("JobTypeJobFacet", processingType="BATCH", integration="SEAMARK", jobType=job_type)
    return {
        "eventType": event_type,
        "eventTime": datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "producer": PRODUCER,
        "schemaURL": SCHEMA_URL,
        "run": {"runId": run_id, "facets": run_facets},
        "job": {"namespace": catalog.job_namespace, "name": job_name, "facets": {"jobType": job_facet}},
        "inputs": [],
        "outputs": [],
    }


def _name_job(instant: Instant) -> str:
    """Return the part of the job's name that follows the name of the table: the service, the index or `import`."""
    if instant.action == MAINTENANCE:
        return str(instant.summary.get("service", MAINTENANCE))
    if instant.action == INDEXING:
        return f"index {instant.summary.get('index', '')}".strip()
    return "import"


def make_dataset(
    namespace: Sequence[str],
    table: str,
    snapshot_id: int | None,
    metadata: TableMetadata | None,
    catalog: CatalogName,
    *,
    has_schema: bool = True,
) -> dict[str, Any]:
    """Return the OpenLineage dataset of a table, with its schema if the metadata can be read and `has_schema` is true.

    Its name is the location, as other tools name it. Without metadata, it is the name of the table in the catalog.
    """
    name = ".".join((*namespace, table))
    facets: dict[str, Any] = {
        "catalog": _make_facet(
            "CatalogDatasetFacet", framework="iceberg", type="rest", name="seamark", warehouseUri=catalog.warehouse
        )
    }
    if metadata is None:
        return {"namespace": catalog.warehouse, "name": name, "facets": facets}
    symlink = {"namespace": catalog.warehouse, "name": name, "type": "TABLE"}
    facets["symlinks"] = _make_facet("SymlinksDatasetFacet", identifiers=[symlink])
    if has_schema:
        facets["schema"] = _make_facet("SchemaDatasetFacet", fields=_list_fields(metadata.current_schema.fields))
    if snapshot_id is not None:
        facets["version"] = _make_facet("DatasetVersionDatasetFacet", datasetVersion=str(snapshot_id))
    dataset_namespace, path = name_location(metadata.location)
    return {"namespace": dataset_namespace, "name": path, "facets": facets}


def remove_columns(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without the facets that have an entry for each column of the table."""
    return {**event, **{side: [_remove_column_facets(dataset) for dataset in event[side]] for side in _SIDES}}


def _remove_column_facets(dataset: dict[str, Any]) -> dict[str, Any]:
    facets = {name: facet for name, facet in dataset["facets"].items() if name not in _COLUMN_FACETS}
    return {**dataset, "facets": facets}


def name_location(location: str) -> tuple[str, str]:
    """Return the namespace and the name of the dataset at a location, according to OpenLineage's naming rules."""
    parts = urlsplit(location)
    if parts.scheme in ("", LOCAL):
        return "file", parts.path.rstrip("/") or "/"
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/") or "/"


def measure_schema(fields: Sequence[Field], chars_max: int) -> int:
    """Return the approximate number of characters of OpenLineage's facet `schema`, which lists all fields of a table.

    The count ends when it exceeds `chars_max`, so that a very large schema takes little time.
    """
    chars = 0
    pending_types: list[Type] = [StructType(tuple(fields))]
    while pending_types and chars <= chars_max:
        match pending_types.pop():
            case StructType(fields=inner_fields):
                chars += sum(_FIELD_CHARS + len(field.name) + len(field.doc or "") for field in inner_fields)
                pending_types += [field.type for field in inner_fields if not isinstance(field.type, str)]
            case ListType(element=element):
                chars += _FIELD_CHARS
                pending_types.append(element)
            case MapType(key=key, value=value):
                chars += 2 * _FIELD_CHARS
                pending_types += [key, value]
    return chars


def _list_fields(fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Return the fields of the facet `schema` of an OpenLineage dataset.

    List elements, map keys and map values have the names that Iceberg gives them.
    """
    return [_describe_field(field.name, field.type, field.doc) for field in fields]


def _describe_field(name: str, field_type: Type, doc: str | None = None) -> dict[str, Any]:
    """Return a field of the facet `schema` of an OpenLineage dataset, including the fields inside it.

    The elements of lists have the name `_element`, and the entries of maps the names `key` and `value`.
    """
    description: dict[str, Any] = {"name": name, "type": field_type if isinstance(field_type, str) else ""}
    if doc:
        description["description"] = doc
    match field_type:
        case StructType():
            description |= {"type": "struct", "fields": _list_fields(field_type.fields)}
        case ListType():
            description |= {"type": "array", "fields": [_describe_field("_element", field_type.element)]}
        case MapType():
            entries = [_describe_field("key", field_type.key), _describe_field("value", field_type.value)]
            description |= {"type": "map", "fields": entries}
    return description


def _map_columns(dataset: dict[str, Any], metadata: TableMetadata) -> dict[str, Any]:
    """Return the column lineage of a rewrite, which copies each column."""
    transformations = [{"type": "DIRECT", "subtype": "IDENTITY", "description": "", "masking": False}]
    source = {"namespace": dataset["namespace"], "name": dataset["name"], "transformations": transformations}
    return {field.name: {"inputFields": [{**source, "field": field.name}]} for field in metadata.current_schema.fields}


def _make_facet(kind: str, **values: Any) -> dict[str, Any]:
    """Return a facet of OpenLineage with the URL of its schema."""
    url = f"{_FACETS_URL}{_FACET_VERSIONS[kind]}/{kind}.json#/$defs/{kind}"
    return {"_producer": PRODUCER, "_schemaURL": url, **values}
