"""Operations on further warehouses: their records, and the state of the database that each of them has.

The database of a server has the records. The database of a warehouse has its id in `catalog_state`, so that a lost or
exchanged database is noticed. A transaction that adds a namespace of the first level locks this row FOR KEY SHARE, and
a transaction that drops the warehouse locks it FOR UPDATE. So no namespace is created in a dropped warehouse.
"""

from __future__ import annotations

from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchWarehouse,
)
from seamark.metaserver.store import operations
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.store.sql.rows import WAREHOUSE, pack_json
from seamark.metaserver.store.sql.statement import Steps, StoreStatement

_CONTENT = ("namespaces", "entries", "dropped", "retained", "claims")
"""The tables that are empty if the catalog has nothing that could own files."""


def create(op: operations.CreateWarehouse, now_ms: int) -> Steps[None]:
    yield StoreStatement("SELECT turn FROM claim_turns", lock="UPDATE")
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses ORDER BY name")  # noqa: S608
    stored = [WAREHOUSE.decode(row) for row in rows]
    new = op.warehouse
    for other in stored:
        if other.name == new.name:
            raise AlreadyExists(f"Warehouse already exists: {new.name}")
        if _is_within(new.location_key, other.location_key) or _is_within(other.location_key, new.location_key):
            raise BadRequest(
                f"The location {new.location!r} overlaps the location {other.location!r} of the warehouse "
                f"{other.name!r}; choose another"
            )
    if len(stored) >= op.limit:
        raise BadRequest(
            f"There are {len(stored)} further warehouses, as many as the setting warehouses_limit allows; drop one, or "
            "have the operator raise the limit"
        )
    yield StoreStatement(
        f"INSERT INTO warehouses ({WAREHOUSE}) VALUES ({WAREHOUSE.placeholders}) ON CONFLICT DO NOTHING",  # noqa: S608
        WAREHOUSE.encode(new),
    )


def _is_within(key: str, folder: str) -> bool:
    return key == folder or key.startswith(folder.rstrip("/") + "/")


def change(op: operations.ChangeWarehouse, now_ms: int) -> Steps[None]:
    changed = op.warehouse
    rows = yield StoreStatement(
        "UPDATE warehouses SET settings = $1, credentials = $2, version = $3 WHERE id = $4 AND version = $5 "
        "RETURNING 1",
        (pack_json(changed.settings), changed.credentials, changed.version, changed.id, changed.version - 1),
    )
    if not rows:
        raise CommitConflict(f"The warehouse {changed.name} was changed by another request; read it again and retry")


def remove(op: operations.RemoveWarehouse, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement("DELETE FROM warehouses WHERE id = $1 RETURNING 1", (op.id,))
    if not rows:
        raise NoSuchWarehouse(f"The warehouse with the id {op.id} does not exist")


def name_catalog(op: operations.NameCatalog, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement("UPDATE catalog_state SET id = $1 WHERE id = '' OR id = $1 RETURNING 1", (op.id,))
    if not rows:
        raise CommitConflict("The database belongs to another warehouse")


def close_catalog(op: operations.CloseCatalog, now_ms: int) -> Steps[None]:
    yield StoreStatement("SELECT closed FROM catalog_state", lock="UPDATE")
    counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in _CONTENT)  # noqa: S608
    rows = yield StoreStatement(f"SELECT {counts}")
    if rows[0][0]:
        raise NamespaceNotEmpty(
            f"The warehouse has {rows[0][0]} namespaces: drop its tables, views and namespaces first"
        )
    if any(rows[0]):
        raise NamespaceNotEmpty(
            "The warehouse has dropped tables or views whose files are left: purge them with seamark undrop and "
            "seamark retained, or wait until their retention ends"
        )
    yield StoreStatement("UPDATE catalog_state SET closed = 1")


def hold_catalog() -> Steps[None]:
    """Prevent that the warehouse of this database is dropped until this transaction ends.

    Raises:
        NoSuchWarehouse: The warehouse is dropped.
    """
    rows = yield StoreStatement("SELECT closed FROM catalog_state", lock="KEY SHARE")
    if rows and rows[0][0]:
        raise NoSuchWarehouse("The warehouse is being dropped, so nothing can be created in it")


def find(name: str) -> Steps[StoredWarehouse | None]:
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses WHERE name = $1", (name,))  # noqa: S608
    return WAREHOUSE.decode(rows[0]) if rows else None


def list_all() -> Steps[list[StoredWarehouse]]:
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses ORDER BY name")  # noqa: S608
    return [WAREHOUSE.decode(row) for row in rows]


def catalog_id() -> Steps[str]:
    rows = yield StoreStatement("SELECT id FROM catalog_state")
    return str(rows[0][0]) if rows else ""
