"""The contract of pointer stores for further warehouses: their records, and the state of a catalog."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchWarehouse,
)
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.store.operations import (
    AssignCatalogToWarehouse,
    ChangeWarehouse,
    CloseCatalog,
    CreateNamespace,
    CreateWarehouse,
    DropNamespace,
    RemoveWarehouse,
)
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS
from tests.store.store_pair import StorePair

WAREHOUSES_LIMIT = 3


def build_warehouse(name: str, path: str, **fields: Any) -> StoredWarehouse:
    values = {"name": name, "id": f"id-of-{name}", "location": path, "location_key": path, "settings": {"a": 1}}
    return StoredWarehouse(**{**values, "credentials": b"\x00", "created_ms": 5, "principal_name": "ann", **fields})


class WarehousesContract(StorePair):
    """The tests of recorded warehouses that each store passes."""

    async def test_recorded_warehouses_are_found_by_name(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        sales, stock = (
            build_warehouse("sales", "s3://b/sales"),
            build_warehouse("stock", "s3://b/stock", credentials=None),
        )
        await store.transact([CreateWarehouse(stock, WAREHOUSES_LIMIT), CreateWarehouse(sales, WAREHOUSES_LIMIT)])
        assert await other_store.list_warehouses() == [sales, stock]
        assert await other_store.load_warehouse("sales") == sales
        assert await other_store.load_warehouse("none") is None
        await other_store.transact([RemoveWarehouse(sales.id)])
        assert await store.list_warehouses() == [stock]
        with pytest.raises(NoSuchWarehouse):
            await store.transact([RemoveWarehouse(sales.id)])

    async def test_names_locations_and_number_of_warehouses_are_checked(self, store: GeneratorStore) -> None:
        await store.transact([CreateWarehouse(build_warehouse("sales", "s3://b/sales"), WAREHOUSES_LIMIT)])
        with pytest.raises(AlreadyExists):
            await store.transact([CreateWarehouse(build_warehouse("sales", "s3://b/other"), WAREHOUSES_LIMIT)])
        for path in ("s3://b/sales", "s3://b/sales/x", "s3://b"):
            with pytest.raises(BadRequest, match="overlaps"):
                await store.transact([CreateWarehouse(build_warehouse("new", path), WAREHOUSES_LIMIT)])
        for path in ("s3://b/sales2", "s3://c"):
            await store.transact([CreateWarehouse(build_warehouse(path[5:].replace("/", "-"), path), WAREHOUSES_LIMIT)])
        with pytest.raises(BadRequest, match="warehouses_limit"):
            await store.transact([CreateWarehouse(build_warehouse("new", "s3://d"), WAREHOUSES_LIMIT)])

    async def test_change_of_a_warehouse_requires_its_current_version(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        sales = build_warehouse("sales", "s3://b/sales")
        await store.transact([CreateWarehouse(sales, WAREHOUSES_LIMIT)])
        changed_sales = msgspec.structs.replace(sales, settings={}, credentials=None, version=2)
        await store.transact([ChangeWarehouse(changed_sales, expected_version=1)])
        assert await other_store.load_warehouse("sales") == changed_sales
        with pytest.raises(CommitConflict):
            await other_store.transact([ChangeWarehouse(changed_sales, expected_version=1)])

    async def test_database_can_be_claimed_by_only_one_warehouse(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await store.load_catalog_id() == ""
        with pytest.raises(CommitConflict, match="has namespaces"):
            await store.transact([AssignCatalogToWarehouse("one")])
        await store.transact([DropNamespace(NS)])
        sales = build_warehouse("sales", "s3://b/sales")
        await store.transact([CreateWarehouse(sales, WAREHOUSES_LIMIT)])
        with pytest.raises(CommitConflict, match="has warehouses"):
            await store.transact([AssignCatalogToWarehouse("one")])
        await store.transact([RemoveWarehouse(sales.id)])
        for _ in range(2):
            await store.transact([AssignCatalogToWarehouse("one")])
        assert await other_store.load_catalog_id() == "one"
        with pytest.raises(CommitConflict):
            await other_store.transact([AssignCatalogToWarehouse("two")])

    async def test_closed_catalog_accepts_no_new_namespaces(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        with pytest.raises(NamespaceNotEmpty):
            await store.transact([CloseCatalog()])
        await store.transact([CreateNamespace(("new",), {}), DropNamespace(("new",))])
        await store.transact([DropNamespace(NS)])
        for _ in range(2):
            await store.transact([CloseCatalog()])
        with pytest.raises(NoSuchWarehouse):
            await other_store.transact([CreateNamespace(("new",), {})])
