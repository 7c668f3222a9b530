"""Tests of the events endpoint of the draft apache/iceberg#12584: its schemas, rights, filters and pages.

If PyIceberg applies the updates of the events, it gets the table's metadata.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import jsonschema
import pyarrow as pa
import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import TypeAdapter
from pyiceberg.catalog import load_catalog
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.update import TableUpdate, update_table_metadata
from pyiceberg.types import StringType

from seamark.formats.runtime.errors import Corrupt, Forbidden, NotFound, RetryLater, StorageError
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.api.rest import events as endpoint
from seamark.metaserver.catalog import documents
from seamark.metaserver.runtime.large_metadata import LargeMetadata
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.timeline.events import build_cloud_event
from tests.api.rest.standard import SPEC, read_specification
from tests.seeds import mark_fast
from tests.server.rig import RunningServer, run_server

DRAFT = SPEC.parent / "events-draft.yaml"
UPDATES = TypeAdapter(tuple[TableUpdate, ...])
ISSUER_SETTINGS = {"oidc_issuer": "https://issuer.invalid", "oidc_audience": "seamark"}
"""Settings with which a server that has no tokens starts."""
FIELDS = [{"id": 1, "name": "id", "type": "long", "required": False}]


def validate_page(page: dict[str, Any]) -> None:
    """Check a page of events against the schemas of the specification's draft for events."""
    draft = yaml.safe_load(DRAFT.read_text())["components"]["schemas"]
    schemas = {**read_specification()["components"]["schemas"], **draft}
    document = {"components": {"schemas": schemas}, "$ref": "#/components/schemas/QueryEventsResponse"}
    jsonschema.Draft202012Validator(document).validate(page)


async def query_events(server: RunningServer, token: str = "", **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    fields = {name.replace("_", "-"): value for name, value in body.items()}
    async with server.http.post(f"{server.url}/v1/events", json=fields, headers=headers) as answer:
        page: dict[str, Any] = await answer.json()
        assert answer.status == 200, page
        validate_page(page)
        return page


async def read_all(server: RunningServer, token: str = "", page_size: int = 3, **body: Any) -> list[dict[str, Any]]:
    """Read pages of events until a page is empty, and return all events.

    Check that no page has more than `page_size` events.
    """
    events: list[dict[str, Any]] = []
    token_field: dict[str, Any] = {}
    while True:
        page = await query_events(server, token, page_size=page_size, **token_field, **body)
        assert len(page["events"]) <= page_size
        token_field = {"continuation_token": page["continuation-token"]}
        if not page["events"]:
            return events
        events += page["events"]


def summarize(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    summaries = []
    for event in events:
        operation = event["operation"]
        names = [operation[key] for key in ("identifier", "source", "destination") if key in operation]
        shown_names = " → ".join(".".join((*name["namespace"], name["name"])) for name in names)
        if "namespace" in operation:
            shown_names = ".".join(operation["namespace"])
        summaries.append((operation["operation-type"], shown_names))
    return summaries


async def send_request(
    server: RunningServer, method: str, path: str, body: Any = None, token: str = ""
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with server.http.request(method, f"{server.url}{path}", json=body, headers=headers) as answer:
        assert answer.status < 300, await answer.text()
        return {} if answer.status == 204 else dict(await answer.json())


async def create_table(server: RunningServer, name: str, token: str = "", namespace: str = "db") -> dict[str, Any]:
    body = {"name": name, "schema": {"type": "struct", "schema-id": 0, "fields": FIELDS}}
    return await send_request(server, "POST", f"/v1/namespaces/{namespace}/tables", body, token)


async def set_property(server: RunningServer, name: str, value: str, token: str = "") -> None:
    body = {"requirements": [], "updates": [{"action": "set-properties", "updates": {"p": value}}]}
    await send_request(server, "POST", f"/v1/namespaces/db/tables/{name}", body, token)


def change_table_at_random(url: str, rng: random.Random, steps: int) -> None:
    """Apply at most `steps` random changes to the table `db.t` with PyIceberg.

    A change that is not possible is skipped, for example a tag of a table without a snapshot.
    """
    table = load_catalog("sea", type="rest", uri=url).load_table("db.t")
    for step in range(steps):
        match rng.randrange(8):
            case 0 | 1:
                table.append(pa.table({"id": pa.array([step], pa.int64())}))
            case 2:
                with table.update_schema() as schema:
                    schema.add_column(f"c{step}", StringType(), doc="text")
            case 3:
                with table.update_spec() as spec:
                    if fields := table.spec().fields:
                        spec.remove_field(fields[0].name)
                    else:
                        spec.add_field("id", "identity", f"b{step}")
            case 4:
                with table.transaction() as transaction:
                    transaction.set_properties({f"p{step}": str(step), "shared": str(step)})
            case 5 if "shared" in table.properties:
                with table.transaction() as transaction:
                    transaction.remove_properties("shared")
            case 6 if table.current_snapshot() is not None:
                snapshot = table.current_snapshot()
                assert snapshot is not None
                table.manage_snapshots().create_tag(snapshot.snapshot_id, f"tag{step}").commit()
            case 7 if table.scan().count():
                table.delete("id >= 0")


def apply_updates(metadata: TableMetadata, update_groups: list[list[dict[str, Any]]]) -> TableMetadata:
    """Return the metadata after all updates, as PyIceberg applies them."""
    for updates in update_groups:
        metadata = update_table_metadata(metadata, UPDATES.validate_python(updates), enforce_validation=False)
    return metadata


def select_compared_fields(metadata: TableMetadata) -> dict[str, Any]:
    """Return the metadata as a dict, without logs and times, which the updates of events do not determine."""
    document = metadata.model_dump(by_alias=True, mode="json")
    times = ("last-updated-ms", "metadata-log", "snapshot-log")
    return {name: value for name, value in document.items() if name not in times}


@pytest.mark.parametrize("seed", mark_fast(range(12), fast_count=1))
async def test_updates_of_events_lead_to_the_metadata_of_the_table(tmp_path: Path, seed: int) -> None:
    async with run_server(tmp_path) as server:
        created_metadata = (await create_table(server, "t"))["metadata"]
        await asyncio.to_thread(change_table_at_random, server.url, random.Random(seed), 14)
        table = await asyncio.to_thread(lambda: load_catalog("sea", type="rest", uri=server.url).load_table("db.t"))
        events = await read_all(server, page_size=random.Random(seed).choice((1, 3, 100)))
        assert [event["operation"]["operation-type"] for event in events[:2]] == ["create-table", "update-table"]
        groups = [event["operation"]["updates"] for event in events]
        assert groups[0] == [
            {"action": "assign-uuid", "uuid": created_metadata["table-uuid"]},
            {"action": "upgrade-format-version", "format-version": created_metadata["format-version"]},
            {"action": "set-location", "location": created_metadata["location"]},
            {"action": "add-schema", "schema": created_metadata["schemas"][0]},
            {"action": "set-current-schema", "schema-id": 0},
            {"action": "add-spec", "spec": created_metadata["partition-specs"][0]},
            {"action": "set-default-spec", "spec-id": 0},
            {"action": "add-sort-order", "sort-order": created_metadata["sort-orders"][0]},
            {"action": "set-default-sort-order", "sort-order-id": 0},
            {"action": "set-properties", "updates": created_metadata["properties"]},
        ]
        assert select_compared_fields(
            apply_updates(TableMetadataUtil.parse_obj(created_metadata), groups[1:])
        ) == select_compared_fields(table.metadata)
        # A page that begins in the middle finds the metadata before its first event.
        first_page = await query_events(server, page_size=len(events) // 2)
        token = first_page["continuation-token"]
        second_page = await query_events(server, page_size=100, continuation_token=token)
        paged_events = first_page["events"] + second_page["events"]
        assert [event["event-id"] for event in paged_events] == [event["event-id"] for event in events]
        assert [event["operation"] for event in paged_events] == [event["operation"] for event in events]


async def test_updates_of_compressed_metadata_are_complete(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        properties = {"write.metadata.compression-codec": "gzip"}
        body = {"name": "t", "schema": {"type": "struct", "schema-id": 0, "fields": FIELDS}, "properties": properties}
        table = await send_request(server, "POST", "/v1/namespaces/db/tables", body)
        assert table["metadata-location"].endswith(".gz.metadata.json")
        await set_property(server, "t", "1")
        created_updates, changed_updates = [event["operation"]["updates"] for event in await read_all(server)]
        assert [update["action"] for update in created_updates][:2] == ["assign-uuid", "upgrade-format-version"]
        assert changed_updates == [{"action": "set-properties", "updates": {"p": "1"}}]


async def test_large_metadata_of_all_requests_are_in_memory_one_pair_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair is the metadata before and after an event, which the server decodes to compare them.

    Decoded metadata files of 256 MiB need gigabytes of memory.
    """
    async with run_server(tmp_path) as server:
        await create_table(server, "t")
        for step in range(3):
            await set_property(server, "t", str(step))
        expected_events = await read_all(server)
        monkeypatch.setattr(endpoint, "SMALL_DOCUMENT_BYTES_MAX", 100)
        # The limits are so small that every metadata file is large, and a pair exceeds the share of a principal.
        monkeypatch.setattr(documents, "LARGE_METADATA_BYTES", 100)
        monkeypatch.setattr(server.components.catalog.documents, "_large", LargeMetadata(2_000))
        compare, running_count, max_running = endpoint._compare_sources, 0, 0

        def count_pairs(*arguments: Any) -> Any:
            nonlocal running_count, max_running
            running_count += 1
            max_running = max(max_running, running_count)
            time.sleep(0.002)  # Without the queue, the threads of other requests run during this time.
            try:
                return compare(*arguments)
            finally:
                running_count -= 1

        monkeypatch.setattr(endpoint, "_compare_sources", count_pairs)
        for _ in range(2):
            pages = await asyncio.gather(*(read_all(server, page_size=number + 1) for number in range(4)))
            assert pages == [expected_events] * 4
            assert max_running == 1
            server.components.catalog.documents.cache.clear()
        assert server.components.worker_limits.imports.is_idle


async def test_unavailable_storage_fails_the_request_and_a_damaged_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        await create_table(server, "t")
        for error, status in (
            (RetryLater("the storage is away"), 503),
            (StorageError("the storage refuses the keys"), StorageError.code),
            (NotFound("deleted"), 200),
            (Forbidden("overwritten"), 200),
            (Corrupt("damaged"), 200),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(server.components.catalog.documents, "peek", AsyncMock(side_effect=error))
                async with server.http.post(f"{server.url}/v1/events", json={}) as answer:
                    page = await answer.json()
                    assert answer.status == status, page
            if status == 200:
                assert [event["operation"]["updates"] for event in page["events"]] == [[]]
            else:
                assert "continuation-token" not in page
        (event,) = await read_all(server)
        assert event["operation"]["updates"]


@pytest.mark.slow
async def test_page_ends_at_its_limit_of_bytes_and_all_pages_have_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        await create_table(server, "t")
        for step in range(5):
            await set_property(server, "t", str(step) * 3000)
        whole_page = await query_events(server)
        assert len(whole_page["events"]) == 6
        for limit, size_bytes in (("UPDATES_BYTES_MAX", 6000), ("DOCUMENT_BYTES_MAX", 12_000)):
            with monkeypatch.context() as patch:
                patch.setattr(endpoint, limit, size_bytes)
                page = await query_events(server)
                assert 1 < len(page["events"]) < 6, limit
                assert await read_all(server, page_size=100) == whole_page["events"]


@pytest.mark.slow
async def test_long_list_of_names_is_answered_up_to_the_limit(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await create_table(server, "t")
        names = [[f"x{number}"] for number in range(endpoint.NAMES_MAX - 1)]
        assert summarize(await read_all(server, catalog_objects_by_name=[*names, ["db"]])) == [("create-table", "db.t")]
        assert summarize(await read_all(server, catalog_objects_by_name=[[]])) == [("create-table", "db.t")]
        body = {"catalog-objects-by-name": [*names, ["db"], ["db", "t"]]}
        async with server.http.post(f"{server.url}/v1/events", json=body) as answer:
            assert answer.status == 400
            assert "at most 10000" in await answer.text()


async def test_renames_and_drops_are_events_but_jobs_are_not(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        table = await create_table(server, "t")
        await server.record("t", "maintenance", uuid=table["metadata"]["table-uuid"], summary={"service": "x"})
        await set_property(server, "t", "1")
        rename = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "u"}}
        await send_request(server, "POST", "/v1/tables/rename", rename)
        await set_property(server, "u", "2")
        await send_request(server, "DELETE", "/v1/namespaces/db/tables/u?purgeRequested=false")
        (dropped_entry,) = (await send_request(server, "GET", "/api/v1/dropped"))["dropped"]
        await send_request(server, "POST", f"/api/v1/dropped/{dropped_entry['id']}/undrop", {})
        version = {
            "version-id": 1, "timestamp-ms": 1, "schema-id": 0, "summary": {}, "default-namespace": ["db"],
            "representations": [{"type": "sql", "sql": "select 1", "dialect": "trino"}],
        }  # fmt: skip
        schema = {"type": "struct", "schema-id": 0, "fields": FIELDS}
        view = {"name": "v", "schema": schema, "view-version": version, "properties": {"a": "b"}}
        await send_request(server, "POST", "/v1/namespaces/db/views", view)
        updates = [{"action": "set-properties", "updates": {"a": "c"}}]
        await send_request(server, "POST", "/v1/namespaces/db/views/v", {"requirements": [], "updates": updates})
        await send_request(server, "DELETE", "/v1/namespaces/db/views/v")
        events = await read_all(server)
        expected = [
            ("create-table", "db.t"), ("update-table", "db.t"), ("rename-table", "db.t → db.u"),
            ("update-table", "db.u"), ("drop-table", "db.u"), ("register-table", "db.u"),
            ("create-view", "db.v"), ("update-view", "db.v"),
            ("drop-view", "db.v"),
        ]  # fmt: skip
        assert summarize(events) == expected
        assert [
            event["operation"]["updates"] for event in events if event["operation"]["operation-type"] == "update-view"
        ] == [updates]
        assert {event["actor"]["id"] for event in events} == {"anonymous"}
        assert len({event["event-id"] for event in events}) == len(events)
        assert all(event["request-event-count"] == 1 for event in events)
        # Filters.
        assert summarize(await read_all(server, operation_types=["drop-view", "x-other"])) == [("drop-view", "db.v")]
        assert summarize(await read_all(server, catalog_objects_by_name=[["db", "t"]])) == expected[:3]
        assert summarize(await read_all(server, catalog_objects_by_name=[["db"], ["d"]])) == expected
        assert await read_all(server, catalog_objects_by_name=[["d"]]) == []
        assert await read_all(server, object_types=["namespace"]) == []
        assert summarize(await read_all(server, object_types=["view"])) == expected[6:]
        uuid = table["metadata"]["table-uuid"]
        assert summarize(await read_all(server, catalog_objects_by_uuid=[uuid])) == expected[:6]
        since_ms = events[4]["timestamp-ms"]
        late_event_ids = [event["event-id"] for event in await read_all(server, since_timestamp_ms=since_ms)]
        assert late_event_ids == [event["event-id"] for event in events if event["timestamp-ms"] >= since_ms]
        # With the token of the last page, a request returns later events.
        last_page = await query_events(server, page_size=1000)
        assert (await query_events(server, continuation_token=last_page["continuation-token"]))["events"] == []
        await create_table(server, "later")
        page = await query_events(server, continuation_token=last_page["continuation-token"])
        assert summarize(page["events"]) == [("create-table", "db.later")]
        for body in (
            {"page-size": 0},
            {"continuation-token": "x"},
            {"object-types": ["function"]},
            {"custom-filters": {"a": "b"}},
        ):
            async with server.http.post(f"{server.url}/v1/events", json=body) as answer:
                assert answer.status == 400, body


async def test_changes_of_namespaces_are_events(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        for path in (["shop"], ["shop", "inner"]):
            await send_request(server, "POST", "/v1/namespaces", {"namespace": path, "properties": {"a": "secret"}})
        body: dict[str, Any] = {"removals": ["a", "none"], "updates": {"b": "1", "c": "2"}}
        await send_request(server, "POST", "/v1/namespaces/shop/properties", body)
        # A declaration that changes nothing is not an event.
        for properties in ({"b": "1", "d": "2"}, {"b": "1", "d": "2"}):
            await send_request(server, "PUT", "/api/v1/namespaces/shop", {"properties": properties})
        await create_table(server, "t", namespace="shop")
        await send_request(server, "DELETE", "/v1/namespaces/shop%1Finner")
        for path, status in (("shop", 409), ("none", 404)):  # A refused request is not an event.
            async with server.http.delete(f"{server.url}/v1/namespaces/{path}") as answer:
                assert answer.status == status
        # These names have 40,000 characters in total, which is too long for an event, so the event lists no names.
        long_names = {f"{number:04}{'x' * 96}": "" for number in range(400)}
        await send_request(server, "POST", "/v1/namespaces/shop/properties", {"updates": long_names})
        events = await read_all(server)
        assert summarize(events) == [
            ("create-namespace", "shop"), ("create-namespace", "shop.inner"),
            ("update-namespace-properties", "shop"), ("update-namespace-properties", "shop"),
            ("create-table", "shop.t"), ("drop-namespace", "shop.inner"), ("update-namespace-properties", "shop"),
        ]  # fmt: skip
        assert [
            (event["operation"]["updated"], event["operation"]["removed"])
            for event in events
            if "updated" in event["operation"]
        ] == [(["b", "c"], ["a"]), (["d"], ["c"]), ([], [])]
        assert "secret" not in str(events[:2])
        assert summarize(await read_all(server, object_types=["table"])) == [("create-table", "shop.t")]
        inner_events = [("create-namespace", "shop.inner"), ("drop-namespace", "shop.inner")]
        assert summarize(await read_all(server, catalog_objects_by_name=[["shop", "inner"]])) == inner_events
        assert summarize(await read_all(server, operation_types=["drop-namespace"])) == inner_events[1:]
        timeline = (await send_request(server, "GET", "/api/v1/timeline?action=update"))["instants"]
        assert [(instant["kind"], instant["namespace"], instant["name"]) for instant in timeline] == [
            ("namespace", ["shop"], "")
        ] * 3
        event = build_cloud_event(
            (await server.components.store.list_instants(InstantFilter(action="drop"), limit=10))[0], "s3://lake"
        )
        assert (event["type"], event["subject"]) == ("io.seamark.namespace.drop.completed", "shop/inner")


async def test_events_of_one_transaction_share_their_request(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        for name in ("a", "b", "c"):
            await create_table(server, name)
        changes = [
            {
                "identifier": {"namespace": ["db"], "name": name},
                "requirements": [],
                "updates": [{"action": "set-properties", "updates": {"x": "1"}}],
            }
            for name in ("a", "b", "c")
        ]
        await send_request(server, "POST", "/v1/transactions/commit", {"table-changes": changes})
        for page_size in (1, 2, 10):
            events = (await read_all(server, page_size=page_size))[3:]
            assert len({event["request-id"] for event in events}) == 1
            assert [event["request-event-count"] for event in events] == [3, 3, 3]


async def test_caller_receives_only_events_of_objects_that_it_may_browse(tmp_path: Path) -> None:
    async with run_server(tmp_path, auth="token+oidc", **ISSUER_SETTINGS) as server:
        store, clock = server.components.store, server.components.clock
        root_token = await create_token(store, clock, "root", ttl_s=None, grants=[Grant("root", "admin")])
        token_with_one_right = await create_token(store, clock, "one", ttl_s=None, grants=[])
        reader_token = await create_token(store, clock, "most", ttl_s=None, grants=[Grant("most", "browse", ("db",))])
        token_without_rights = await create_token(store, clock, "nothing", ttl_s=None, grants=[])
        await send_request(server, "POST", "/v1/namespaces", {"namespace": ["hidden"]}, root_token)
        await create_table(server, "t", root_token)
        await send_request(server, "DELETE", "/v1/namespaces/db/tables/t", token=root_token)
        await create_table(server, "t", root_token)
        await create_table(server, "secret", root_token)
        await create_table(server, "moved", root_token)
        rename = {
            "source": {"namespace": ["db"], "name": "moved"},
            "destination": {"namespace": ["hidden"], "name": "m"},
        }
        await send_request(server, "POST", "/v1/tables/rename", rename, root_token)
        await store.transact(
            [
                SaveGrant(Grant("one", "browse", ("db",), "table", "t")),
                SaveGrant(Grant("most", "browse", ("db",), "table", "secret", deny=True)),
            ]
        )
        all_events = summarize(await read_all(server, root_token))
        assert all_events == [
            ("create-namespace", "hidden"), ("create-table", "db.t"), ("drop-table", "db.t"), ("create-table", "db.t"),
            ("create-table", "db.secret"), ("create-table", "db.moved"), ("rename-table", "db.moved → hidden.m"),
        ]  # fmt: skip
        # The first table of this name was dropped. Only readers of the namespace may see its schema.
        assert summarize(await read_all(server, token_with_one_right)) == [("create-table", "db.t")]
        assert summarize(await read_all(server, reader_token)) == all_events[1:4]
        async with server.http.post(
            f"{server.url}/v1/events", json={}, headers={"Authorization": f"Bearer {token_without_rights}"}
        ) as answer:
            assert answer.status == 403


async def test_rights_of_a_page_are_decided_together_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, auth="token+oidc", **ISSUER_SETTINGS) as server:
        store, clock = server.components.store, server.components.clock
        root_token = await create_token(store, clock, "root", None, [Grant("root", "admin")])
        reader_token = await create_token(
            store, clock, "reader", None, [Grant("reader", "browse", ("db",), "table", "t0")]
        )
        for name in ("t0", "t1", "t2"):
            await create_table(server, name, root_token)
            await set_property(server, name, "1", root_token)
        decided_securables: list[Securable] = []
        batch_count = 0
        authorizer = type(server.components.authorizer)
        allows_each = authorizer.allows_each

        async def record_batch(
            self: Authorizer, principal: Principal, operation: str, securables: Sequence[Securable]
        ) -> list[bool]:
            nonlocal batch_count
            batch_count += 1
            decided_securables.extend(securables)
            return await allows_each(self, principal, operation, securables)

        monkeypatch.setattr(authorizer, "allows_each", record_batch)
        monkeypatch.setattr(
            authorizer,
            "allows",
            AsyncMock(side_effect=AssertionError("the rights of one object were checked separately")),
        )
        page = await query_events(server, reader_token)
        assert summarize(page["events"]) == [("create-table", "db.t0"), ("update-table", "db.t0")]
        assert batch_count == 1
        assert sorted(decided_securables) == [Securable(("db",), "table", name) for name in ("t0", "t1", "t2")]
