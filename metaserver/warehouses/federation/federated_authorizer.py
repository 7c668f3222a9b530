"""The authorizer of a federated warehouse, which refuses changes of tables but allows changes of indexes and grants."""

from __future__ import annotations

from collections.abc import Sequence

from seamark.formats.runtime.errors import ReadOnlyServer
from seamark.formats.storage.storages import is_remote
from seamark.metaserver.access.authorizer import Authorizer, WarehouseAuthorizer, needs_writer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore

_ALLOWED_CHANGES = frozenset(
    (
        *("addGrant", "removeGrant"),
        *("putIndex", "dropIndex", "startIndexBuild", "registerIndexFiles", "finishIndexBuild"),
        *("quarantineIndexFile", "rebuildIndexRegistry", "listUnheldFiles", "recordIndexAudit"),
    )
)


_PLANS_IN_FILES = frozenset(("makePlanTable", "makeCubePlan", "leasePlanSnapshots"))
"""Operations that read a table, but write files of a plan, which clients read with the keys of the table."""
_PLANS_OF_VIEWS = frozenset(("makePlanView",))
"""Operations that read a view, but write files into its folder."""


class FederatedAuthorizer(WarehouseAuthorizer):
    """The authorizer of a federated warehouse. Clients get keys for reads only.

    Args:
        store: The pointer store of the warehouse, which contains the owners of tables.
        uri: The URI of the other catalog, for messages.
        is_local: Whether the tables are local files. In other stores, the keys of a table give no access to the files
            of plans, which are not in the folder of the table.
    """

    def __init__(self, store: PointerStore | None, uri: str, *, is_local: bool) -> None:
        super().__init__(store)
        self._uri = uri
        self._refused_reads = _PLANS_OF_VIEWS if is_local else _PLANS_OF_VIEWS | _PLANS_IN_FILES

    async def require(
        self, principal: Principal, operation: str, securable: Securable, shown_name: str | None = None
    ) -> None:
        self._refuse_changes(operation)
        await super().require(principal, operation, securable, shown_name)

    async def require_somewhere(self, principal: Principal, operation: str) -> None:
        self._refuse_changes(operation)
        await super().require_somewhere(principal, operation)

    async def allows(self, principal: Principal, operation: str, securable: Securable) -> bool:
        return not self._is_refused(operation) and await super().allows(principal, operation, securable)

    async def allows_each(self, principal: Principal, operation: str, securables: Sequence[Securable]) -> list[bool]:
        if self._is_refused(operation):
            return [False] * len(securables)
        return await super().allows_each(principal, operation, securables)

    def _refuse_changes(self, operation: str) -> None:
        if self._is_refused(operation):
            raise ReadOnlyServer(
                f"This warehouse shows the tables of the catalog {self._uri} and is read-only: send {operation} there"
            )

    def _is_refused(self, operation: str) -> bool:
        return operation in self._refused_reads or (needs_writer(operation) and operation not in _ALLOWED_CHANGES)


def make_warehouse_authorizer(settings: Settings, store: PointerStore) -> Authorizer:
    """Return the authorizer of a further warehouse.

    Args:
        settings: The settings of the warehouse.
        store: The pointer store of the warehouse.
    """
    if not settings.federation_uri:
        return WarehouseAuthorizer(store)
    return FederatedAuthorizer(store, settings.federation_uri, is_local=not is_remote(settings.make_warehouse_uri()))
