"""Tests that no principal and no namespace can fill the database, and that each can always drop its entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import Forbidden, TooManyRequests
from seamark.metaserver.access.principal import set_principal
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.catalog import database_limits
from seamark.metaserver.catalog.database_limits import DatabaseShares, NamespaceSizes
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import AuditRecord, Grant, MetricsReport
from seamark.metaserver.store.operations import (
    AdvanceProducer,
    CreateNamespace,
    DropNamespace,
    RecordInstant,
    SaveAudit,
    SaveMetricsReport,
)
from tests.api.client import Answer, Api, create_key
from tests.attacks.world import SCHEMA
from tests.server.rig import RunningServer, run_server
from tests.store.samples import make_instant

GRANTS = (Grant("ann", "writer", ("a",)), Grant("bob", "writer", ("b",)))


@asynccontextmanager
async def _serve_two_tenants(home: Path, **settings: Any) -> AsyncIterator[tuple[RunningServer, Any]]:
    """Open a server with two tenants, and a function that sends a request of one of them."""
    async with run_server(home) as admin:
        store, clock = admin.components.store, admin.components.clock
        await store.transact([CreateNamespace(path=(name,), properties={}) for name in ("a", "b")])
        tokens = {
            grant.principal: await create_token(store, clock, grant.principal, ttl_s=None, grants=[grant])
            for grant in GRANTS
        }
    async with run_server(home, auth="token", **settings) as server:
        api = Api(server)

        async def send_request(principal: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
            return await api(method, path, body, headers={"Authorization": f"Bearer {tokens[principal]}", **headers})

        yield server, send_request


async def test_entries_are_limited_for_each_namespace_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_limits, "COUNTED_AGAIN_S", 0.0)  # Each request counts the entries again.
    async with _serve_two_tenants(tmp_path, namespace_entries_limit=4) as (_, send):
        table_body = {"name": "t2", "schema": SCHEMA}
        for name in ("t0", "t1"):
            assert (
                await send("ann", "POST", "/v1/namespaces/a/tables", {"name": name, "schema": SCHEMA})
            ).status == 200
        assert (await send("ann", "POST", "/v1/namespaces", {"namespace": ["a", "x"]})).status == 200
        for path, body in (
            ("/v1/namespaces/a/tables", {"name": "t2", "schema": SCHEMA}),
            ("/v1/namespaces/a%1Fx/tables", table_body),
            ("/v1/namespaces", {"namespace": ["a", "y"]}),
            ("/v1/namespaces", {"namespace": ["a", "x", "y"]}),
        ):
            response = await send("ann", "POST", path, body)
            assert response.status == 403, path
            assert "namespace_entries_limit" in response.json["error"]["message"]
        assert (await send("bob", "POST", "/v1/namespaces/b/tables", {"name": "t", "schema": SCHEMA})).status == 200
        # Existing entries can be changed, moved within the namespace, and dropped.
        rename_body = {
            "source": {"namespace": ["a"], "name": "t0"},
            "destination": {"namespace": ["a", "x"], "name": "t"},
        }
        assert (await send("ann", "POST", "/v1/tables/rename", rename_body)).status == 204
        assert (await send("ann", "DELETE", "/v1/namespaces/a%1Fx/tables/t")).status == 204
        second_answer = await send("ann", "POST", "/v1/namespaces/a/tables", {"name": "t2", "schema": SCHEMA})
        assert second_answer.status == 403  # A dropped table is retained, so it still counts.
        (dropped_entry,) = (await send("ann", "GET", "/api/v1/dropped?namespace=a%1Fx")).json["dropped"]
        assert (await send("ann", "POST", f"/api/v1/dropped/{dropped_entry['id']}/undrop", {})).status == 200
        assert (await send("ann", "DELETE", "/v1/namespaces/a%1Fx/tables/t")).status == 204
        assert (await send("ann", "DELETE", "/v1/namespaces/a%1Fx")).status == 204
        assert (await send("ann", "POST", "/v1/namespaces", {"namespace": ["a", "y"]})).status == 200


async def test_properties_of_a_namespace_and_its_descendants_are_limited_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_limits, "COUNTED_AGAIN_S", 0.0)  # Each request measures the properties again.
    async with _serve_two_tenants(tmp_path, namespace_properties_limit=5_000) as (_, send):
        for name in ("x", "y"):
            document = {"namespace": ["a", name], "properties": {"note": "n" * 2_000}}
            assert (await send("ann", "POST", "/v1/namespaces", document)).status == 200
        response = await send(
            "ann", "POST", "/v1/namespaces", {"namespace": ["a", "z"], "properties": {"n": "n" * 2_000}}
        )
        assert response.status == 403
        assert "namespace_properties_limit" in response.json["error"]["message"]
        answer = await send("ann", "POST", "/v1/namespaces/a/properties", {"updates": {"n": "n" * 2_000}})
        assert answer.status == 403
        # A change that needs no more space is always allowed.
        for note in ("m" * 2_000, "m" * 1_900, "m" * 2_000):
            updated_answer = await send("ann", "POST", "/v1/namespaces/a%1Fx/properties", {"updates": {"note": note}})
            assert updated_answer.status == 200
        assert (await send("ann", "POST", "/v1/namespaces/a%1Fx/properties", {"removals": ["note"]})).status == 200
        assert (await send("ann", "POST", "/v1/namespaces/a/properties", {"updates": {"n": "n" * 2_000}})).status == 200


async def test_writes_of_a_principal_are_limited_each_hour_without_affecting_other_principals(tmp_path: Path) -> None:
    async with _serve_two_tenants(tmp_path, database_rows_limit=40) as (server, send):
        statuses = []
        for number in range(40):
            body = {"updates": {"n": str(number)}}
            key = {"Idempotency-Key": create_key()}
            statuses.append((await send("ann", "POST", "/v1/namespaces/a/properties", body, **key)).status)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        response = await send("ann", "POST", "/v1/namespaces/a/properties", {"updates": {"n": "x"}})
        assert "database_rows_limit" in response.json["error"]["message"]
        assert response.headers["Retry-After"]
        assert (await send("ann", "GET", "/v1/namespaces/a")).status == 200
        assert (await send("bob", "POST", "/v1/namespaces/b/properties", {"updates": {"n": "x"}})).status == 200
        # Rejected requests write nothing, so they are not recorded one by one.
        await asyncio.sleep(0)
        audit_record_count_before = len(await server.components.store.read_audit_records(after_id=None, limit=10_000))
        for _ in range(20):
            assert (await send("ann", "POST", "/v1/namespaces/a/properties", {"updates": {"n": "x"}})).status == 429
        assert (
            len(await server.components.store.read_audit_records(after_id=None, limit=10_000))
            <= audit_record_count_before + 1
        )
        assert (await send("ann", "DELETE", "/v1/namespaces/a")).status == 204


def test_written_bytes_count_for_their_principal_for_one_hour() -> None:
    clock = SimulatedClock(0)
    shares = DatabaseShares(Settings(database_bytes_limit=10_000), clock)
    record = AuditRecord(
        id="1",
        at_ms=0,
        principal_name="ann",
        action="x" * 9_000,
        resource="r",
        outcome="ok",
        status=200,
        request_id="",
        remote="",
    )
    # A drop adds no rows, so its size does not count.
    shares.charge([SaveAudit((record,)), DropNamespace(("a" * 50_000,))])
    shares.require_room("ann")
    shares.charge([SaveAudit((record,))])
    with pytest.raises(TooManyRequests, match="database_bytes_limit"):
        shares.require_room("ann")
    shares.require_room("bob")
    shares.require_room("anonymous")
    clock.advance(1000 * (int(database_limits.WINDOW_S) + 10))
    shares.require_room("ann")


def test_transaction_of_several_principals_counts_for_each() -> None:
    """One task commits concurrent changes of a table together, in the context of the first request.

    An instant counts for its principal. The principals of the instants share the other rows of the transaction.
    """
    shares = DatabaseShares(Settings(database_rows_limit=20), SimulatedClock(0))
    producer_changes = [
        AdvanceProducer("u", f"producer {number}", sequence=1, snapshot_id=1, now_ms=0) for number in range(2)
    ]
    with set_principal("ann"):
        for number in range(9):  # Each transaction counts two rows for bob, two for cid, and none for ann.
            instants = [make_instant(f"{number} {principal}", principal_name=principal) for principal in ("bob", "cid")]
            shares.charge([*producer_changes, *(RecordInstant(instant) for instant in instants)])
    shares.require_room("ann")
    for principal in ("bob", "cid"):
        shares.require_room(principal)
    with set_principal("ann"):  # This transaction counts three rows for bob, who now has 21.
        shares.charge([RecordInstant(make_instant("9 bob", principal_name="bob")), *producer_changes])
    with pytest.raises(TooManyRequests):
        shares.require_room("bob")
    shares.require_room("cid")


def test_size_of_any_operation_can_be_computed() -> None:
    """An operation that cannot be encoded, such as one with a huge integer, counts with a large size."""
    shares = DatabaseShares(Settings(database_bytes_limit=10_000), SimulatedClock(0))
    deep_list: list[Any] = []
    for _ in range(50):
        deep_list = [deep_list]
    report = MetricsReport(
        id="1", uuid="u", namespace=(), name="t", report_type="scan-report", snapshot_id=1, received_ms=0,
        principal_name="ann",
        report={"number": 10**60, "text": "é\ud800", "deep": deep_list},
    )  # fmt: skip
    with set_principal("ann"):
        shares.charge([SaveMetricsReport(report, keep=1)])
    with pytest.raises(TooManyRequests):
        shares.require_room("ann")


class _CountingStore:
    """A store that counts how often the namespace is measured."""

    def __init__(self, rows: int) -> None:
        self.rows, self.measurement_count = rows, 0

    async def measure_namespace(self, top: str) -> tuple[int, int]:
        self.measurement_count += 1
        await asyncio.sleep(0)
        return self.rows, 0


async def test_namespace_is_measured_rarely_and_never_exceeds_its_limit() -> None:
    store, clock, sizes = _CountingStore(0), SimulatedClock(0), NamespaceSizes()
    settings = Settings(namespace_entries_limit=10_000)

    async def require_room(count: int = 1) -> None:
        create_namespaces = [CreateNamespace(("a", "x"), {}) for _ in range(count)]
        await sizes.check_and_count_additions(store, settings, clock, create_namespaces)  # type: ignore[arg-type]
        store.rows += count

    await asyncio.gather(*(require_room() for _ in range(500)))
    assert store.measurement_count == 1
    for _ in range(9_500):
        await require_room()
    assert store.measurement_count < 30  # The 9,500 namespaces need few measurements.
    store.measurement_count = 0
    for _ in range(50):
        with pytest.raises(Forbidden, match="10,000"):
            await require_room()
    assert store.measurement_count <= 1
    store.rows -= 5
    clock.advance(1000 * int(database_limits.COUNTED_AGAIN_S))
    await require_room(5)
    assert store.rows == 10_000
