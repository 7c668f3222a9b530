"""Tests of OpenLineage events with a real receiver.

The schemas in `openlineage/` are those of the specification 2-0-2 (github.com/OpenLineage/OpenLineage, folder spec,
August 2026).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from referencing import Registry, Resource

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import NotFound, RetryLater
from seamark.metaserver.store.model import InstantState
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline import delivery, lineage_target
from seamark.metaserver.timeline.delivery import NotDelivered
from seamark.metaserver.timeline.events import Event
from seamark.metaserver.timeline.lineage import CatalogName, name_location
from seamark.metaserver.timeline.lineage_target import LineageTarget
from tests.server.rig import RunningServer, build_instant, run_server
from tests.timeline.test_webhooks import Receiver, run_receiver

SCHEMAS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "openlineage").glob("*.json"))]
FIELDS: list[dict[str, Any]] = [
    {"id": 1, "name": "id", "type": "long", "required": True, "doc": "the key"},
    {"id": 2, "name": "tags", "required": False, "type": {
        "type": "list", "element-id": 3, "element-required": True, "element": {
            "type": "struct", "fields": [{"id": 4, "name": "x", "type": "string", "required": False}]}}},
    {"id": 5, "name": "m", "required": False, "type": {
        "type": "map", "key-id": 6, "key": "string", "value-id": 7, "value": "double", "value-required": False}},
]  # fmt: skip


def validate_event(event: dict[str, Any]) -> None:
    """Check an event and each of its facets against the specification's schemas."""
    registry: Registry[Any] = Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS
    )
    (core,) = (schema for schema in SCHEMAS if schema["$id"].endswith("/OpenLineage.json"))
    assert event["schemaURL"] == f"{core['$id']}#/$defs/RunEvent"
    validator = jsonschema.Draft202012Validator(
        {"$ref": event["schemaURL"]}, registry=registry, format_checker=jsonschema.FormatChecker()
    )
    validator.validate(event)
    facet_owners = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    facets = [facet for facet_owner in facet_owners for facet in facet_owner["facets"].items()]
    assert facets
    for name, facet in facets:
        schema_url = facet["_schemaURL"].partition("#")[0]
        (schema,) = (schema for schema in SCHEMAS if schema["$id"] == schema_url)
        assert name in schema["properties"], f"{name} is not the name of {schema_url}"
        jsonschema.Draft202012Validator({"$ref": facet["_schemaURL"]}, registry=registry).validate(facet)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with run_receiver() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the leases to 3 seconds, so that a server soon takes over the delivery from a stopped server."""
    monkeypatch.setattr(delivery, "LEASE_S", 3.0)


async def create_table(server: RunningServer, name: str) -> dict[str, Any]:
    body = {"name": name, "schema": {"type": "struct", "schema-id": 0, "fields": FIELDS}}
    async with server.http.post(f"{server.url}/v1/namespaces/db/tables", json=body) as answer:
        assert answer.status == 200, await answer.text()
        table: dict[str, Any] = await answer.json()
        return table


async def test_jobs_are_sent_as_valid_runs_with_datasets_and_facets(tmp_path: Path, receiver: Receiver) -> None:
    url = f"{receiver.url}/api/v1/lineage"
    settings = {"openlineage_url": url, "openlineage_api_key": "k", "openlineage_namespace": "lake"}
    receiver.answers = [503, 422]
    async with run_server(tmp_path, **settings) as server:
        table = await create_table(server, "t")
        uuid, location = table["metadata"]["table-uuid"], table["metadata"]["location"]
        await server.record("t", "commit", uuid=uuid)  # A commit is not a job, so it causes no event.
        await server.record("t", "maintenance", uuid=uuid, summary={"service": "refused"})
        finished_job = await server.record(
            "t", "maintenance", uuid=uuid, summary={"service": "clustering", "totals": {"files": 3}}
        )
        failed_job = await server.record(
            "t",
            "maintenance",
            uuid=uuid,
            state=InstantState.ROLLED_BACK,
            summary={"service": "expire", "error": "no space"},
        )
        running_job = await server.record(
            "t", "indexing", uuid=uuid, state=InstantState.INFLIGHT, completed_ms=None, summary={"index": "by_id"}
        )
        instant_of_dropped_table = await server.record("gone", "maintenance", summary={"service": "expire"})
        await receiver.wait_for_events_count(8)
    assert receiver.headers[0]["Authorization"] == "Bearer k"
    for event in receiver.events:
        validate_event(event)
    refused_event, *events = receiver.events
    assert refused_event["eventType"] == "COMPLETE"  # The receiver refused the START event, which is not sent again.
    runs = [(event["run"]["runId"], event["eventType"]) for event in events]
    assert runs == [
        (finished_job.id, "START"), (finished_job.id, "COMPLETE"), (failed_job.id, "START"), (failed_job.id, "FAIL"),
        (running_job.id, "START"),
        (instant_of_dropped_table.id, "START"), (instant_of_dropped_table.id, "COMPLETE"),
    ]  # fmt: skip
    complete_event, failed_event, index_event, lost_event = events[1], events[3], events[4], events[6]
    assert complete_event["job"]["namespace"] == "lake"
    assert [event["job"]["name"] for event in (complete_event, failed_event, index_event)] == [
        "db.t.clustering",
        "db.t.expire",
        "db.t.index by_id",
    ]
    (source,), (target,) = complete_event["inputs"], complete_event["outputs"]
    assert (target["namespace"], target["name"]) == ("file", location.removeprefix("file://"))
    warehouse = server.components.settings.make_warehouse_uri()
    (link,) = target["facets"]["symlinks"]["identifiers"]
    assert link == {"namespace": warehouse, "name": "db.t", "type": "TABLE"}
    assert target["facets"]["schema"]["fields"] == [
        {"name": "id", "type": "long", "description": "the key"},
        {"name": "tags", "type": "array", "fields": [
            {"name": "_element", "type": "struct", "fields": [{"name": "x", "type": "string"}]}]},
        {"name": "m", "type": "map", "fields": [
            {"name": "key", "type": "string"}, {"name": "value", "type": "double"}]},
    ]  # fmt: skip
    columns = target["facets"]["columnLineage"]["fields"]
    assert {name: [entry["field"] for entry in column["inputFields"]] for name, column in columns.items()} == {
        name: [name] for name in ("id", "tags", "m")
    }
    assert source["name"] == target["name"]
    assert failed_event["run"]["facets"]["errorMessage"]["message"] == "no space"
    assert (len(index_event["inputs"]), index_event["outputs"]) == (1, [])
    assert (lost_event["outputs"][0]["namespace"], lost_event["outputs"][0]["name"]) == (warehouse, "db.gone")


def build_table(columns_count: int) -> TableMetadata:
    """Return metadata of a table with `columns_count` columns."""
    return TableMetadata(
        format_version=2,
        table_uuid="u",
        location="file:///lake/t",
        last_updated_ms=0,
        last_column_id=columns_count,
        schemas=(
            Schema(
                tuple(Field(column_id, f"c{column_id}", False, "long") for column_id in range(1, columns_count + 1)), 0
            ),
        ),
        current_schema_id=0,
        partition_specs=(PartitionSpec(0, ()),),
        default_spec_id=0,
        last_partition_id=999,
        sort_orders=(),
        default_sort_order_id=0,
        properties={},
    )


async def send_job(receiver: Receiver, load: AsyncMock) -> None:
    """Send the events of a finished job to the receiver."""
    location = "file:///lake/t/metadata/1.json"
    instant = build_instant(
        SystemClock(), "t", "maintenance", metadata_location=location, summary={"service": "expire"}
    )
    async with aiohttp.ClientSession() as session:
        catalog = CatalogName("lake", "file:///lake")
        target = LineageTarget(receiver.url, "", catalog, AsyncMock(spec=PointerStore), load, session)
        await target.send([Event(instant, b"")])


async def test_event_is_sent_later_if_the_metadata_cannot_be_read_now(receiver: Receiver) -> None:
    with pytest.raises(NotDelivered, match="the storage is unavailable"):
        await send_job(receiver, AsyncMock(side_effect=RetryLater("the storage is unavailable")))
    assert receiver.events == []
    await send_job(receiver, AsyncMock(side_effect=NotFound("deleted")))
    assert [event["outputs"][0]["name"] for event in receiver.events] == ["db.t", "db.t"]


async def test_event_that_is_too_large_is_sent_without_columns_and_then_skipped(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AsyncMock(return_value=build_table(columns_count=100))
    receiver.answers = [413, 204, 413, 413]  # The START event is sent again. The COMPLETE event is refused twice.
    await send_job(receiver, load)
    (start,) = receiver.events
    validate_event(start)
    assert start["eventType"] == "START"
    for dataset in (*start["inputs"], *start["outputs"]):
        assert dataset["name"] == "/lake/t"
        assert sorted(dataset["facets"]) == ["catalog", "symlinks"]
    # If a body with columns exceeds the limit, it is sent only without columns.
    receiver.events.clear()
    monkeypatch.setattr(lineage_target, "BODY_BYTES_MAX", 20_000)  # An event with 100 columns is larger.
    await send_job(receiver, load)
    assert [sorted(event["outputs"][0]["facets"]) for event in receiver.events] == [["catalog", "symlinks"]] * 2
    receiver.events.clear()
    await send_job(receiver, AsyncMock(return_value=build_table(columns_count=3)))
    assert ["columnLineage" in event["outputs"][0]["facets"] for event in receiver.events] == [True, True]


async def test_imported_table_is_the_output_of_a_run(tmp_path: Path, receiver: Receiver) -> None:
    async with run_server(tmp_path, openlineage_url=receiver.url) as server:
        table = await create_table(server, "t")
        async with server.http.post(f"{server.url}/v1/namespaces/db/tables/t/unregister") as answer:
            assert answer.status < 300, await answer.text()
        body = {"metadata-location": table["metadata-location"]}
        async with server.http.put(f"{server.url}/api/v1/tables/db/u/import", json=body) as answer:
            assert answer.status == 200, await answer.text()
        await receiver.wait_for_events_count(2)
    for event in receiver.events:
        validate_event(event)
    assert [event["eventType"] for event in receiver.events] == ["START", "COMPLETE"]
    complete_event = receiver.events[1]
    assert (complete_event["job"]["name"], complete_event["inputs"]) == ("db.u.import", [])
    assert complete_event["outputs"][0]["facets"]["symlinks"]["identifiers"][0]["name"] == "db.u"


@pytest.mark.parametrize(
    ("location", "dataset"),
    [
        ("s3://lake/warehouse/shop/orders/", ("s3://lake", "warehouse/shop/orders")),
        ("gs://lake/t", ("gs://lake", "t")),
        ("abfss://lake@store.dfs.core.windows.net/a/t", ("abfss://lake@store.dfs.core.windows.net", "a/t")),
        ("file:///mnt/t", ("file", "/mnt/t")),
    ],
)
def test_datasets_have_the_names_of_the_specification(location: str, dataset: tuple[str, str]) -> None:
    assert name_location(location) == dataset


@given(
    st.lists(st.text("abc", min_size=1), min_size=1, max_size=4),
    st.lists(st.text("abc", min_size=1), min_size=1, max_size=4),
)
def test_different_locations_are_different_datasets(first_path: list[str], second_path: list[str]) -> None:
    names = {name_location(f"s3://lake/{'/'.join(path)}") for path in (first_path, second_path)}
    assert len(names) == (1 if first_path == second_path else 2)
