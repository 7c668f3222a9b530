"""Checks that a grant is still valid while its keys are in use.

The table must still be in the catalog and own its location, and the principal that received the keys must still
have a login and the rights. A result is cached for a short time, or until the timeline has a new instant of the table
that is not a commit.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Forbidden
from seamark.formats.storage.locations import make_location_key, parse_location
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.gateway_keys import ObjectGrant
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.catalog.ownership.claims import list_keys_above
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import TABLE, NamespacePath
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.timeline import Timeline

_REMEMBERED_MAX = 16_384
_INSTANTS_PER_BATCH = 500


class _GrantKey(NamedTuple):
    """The parts of a grant on which the result of a check depends."""

    table_uuid: str
    location: str
    namespace: NamespacePath
    principal_name: str
    writable: bool


def _make_grant_key(grant: ObjectGrant) -> _GrantKey:
    return _GrantKey(grant.table_uuid, grant.location, grant.namespace, grant.principal_name, grant.writable)


class GrantChecker:
    """Checks grants. For each table and principal, it queries the database at most once in `recheck_s`."""

    def __init__(
        self, store: PointerStore, clock: Clock, settings: Settings, authorizer: Authorizer | None = None
    ) -> None:
        self._store = store
        self._mode = settings.auth
        self._rights = StandingRights(store, clock, settings, authorizer)
        self._clock = clock
        self._recheck_s = settings.rights_recheck_s
        self._expiry_times: OrderedDict[_GrantKey, float] = OrderedDict()
        self._forget_count = 0

    def is_confirmed(self, grant: ObjectGrant) -> bool:
        """Return whether `check` would succeed without querying the database."""
        until_s = self._expiry_times.get(_make_grant_key(grant))
        return until_s is not None and self._clock.monotonic() < until_s

    async def check(self, grant: ObjectGrant) -> None:
        """Check that a grant is still valid.

        A staged table has no name and no claims yet, so it may use a location that no table has claimed.

        Raises:
            Forbidden: The principal has lost its login or its rights, or the table was dropped, was moved to another
                namespace, or does not own the location.
        """
        if self.is_confirmed(grant):
            return
        grant_key, now_s = _make_grant_key(grant), self._clock.monotonic()
        forget_count = self._forget_count
        await self._check_rights(grant, await self._find_names(grant))
        key = await asyncio.to_thread(make_location_key, parse_location(grant.location))
        own_locations = {claim.location for claim in await self._store.claims(grant.table_uuid) if not claim.allowed}
        if own_locations.isdisjoint(list_keys_above(key)) and (
            own_locations or await self._store.find_overlapping_claims([key], grant.table_uuid, 1)
        ):
            self._expiry_times.pop(grant_key, None)
            raise Forbidden("The keys are for a location that their table does not own; load the table again")
        if forget_count != self._forget_count:
            # A table has changed during this check. Do not cache the result, because it may be from before the change.
            return
        self._expiry_times[grant_key] = now_s + self._recheck_s
        self._expiry_times.move_to_end(grant_key)
        while len(self._expiry_times) > _REMEMBERED_MAX:
            self._expiry_times.popitem(last=False)

    async def _check_rights(self, grant: ObjectGrant, names: Sequence[str]) -> None:
        """Check that the principal still has its login and its rights.

        Nothing is checked for the server itself, or if the server does not authenticate clients. Rights from roles that
        only an OIDC token states are not checked. Keys without a namespace, which are the keys of preloads and of
        earlier versions, are not checked either.

        Args:
            grant: The grant of the keys.
            names: The names of the table in the namespace of the keys. A right on one of them is sufficient. They are
                empty for a staged table, for which the rights on the namespace are checked.

        Raises:
            Forbidden: The principal has lost its login or its rights.
        """
        if self._mode == "none" or not grant.namespace or grant.principal_name == SERVICE_PRINCIPAL:
            return
        tables = [Securable(grant.namespace, TABLE, name) for name in names]
        operation = "updateTable" if grant.writable else "signRequest"
        reason = None
        for securable in tables or [Securable(grant.namespace)]:
            reason = await self._rights.explain_loss(grant.principal_name, operation, securable)
            if reason is None:
                return
        raise Forbidden(f"The keys are refused: {reason}; log in and load the table again")

    async def _find_names(self, grant: ObjectGrant) -> list[str]:
        """Return the names of the table for which the storage keys were issued.

        Only names in the namespace of the keys count. A table that is being created has no name yet.

        Raises:
            Forbidden: The table was dropped, or moved to another namespace.
        """
        uuid, namespace = grant.table_uuid, grant.namespace or None
        entries = await self._store.list_entries_by_uuid(uuid)
        names = [entry.name for entry in entries if namespace is None or entry.namespace == namespace]
        if names:
            return names
        if grant.staged and not await self._store.count_names(uuid):
            return []
        if entries:
            raise Forbidden("The table of the keys was moved to another namespace; load it there")
        raise Forbidden("The table of the keys was dropped")

    async def follow(self, timeline: Timeline) -> None:
        """Follow the timeline until the task is cancelled.

        If a table has an instant that is not a commit, its cached results are removed. A check that is running then
        caches no result.
        """
        head = await timeline.load_head()
        async with timeline.watch_instants(InstantFilter(since=head), counted=False) as watcher:
            while True:
                instants = await timeline.read_next(watcher, _INSTANTS_PER_BATCH)
                changed_uuids = {instant.uuid for instant in instants if instant.uuid and instant.action != "commit"}
                if changed_uuids:
                    self._forget_count += 1
                    for grant_key in [
                        grant_key for grant_key in self._expiry_times if grant_key.table_uuid in changed_uuids
                    ]:
                        del self._expiry_times[grant_key]
