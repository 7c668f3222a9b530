"""Checks whether a principal still has a login and a right while it sends no request itself.

Keys and jobs act for such a principal.
"""

from __future__ import annotations

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.principal import Principal, Role, is_foreign
from seamark.metaserver.access.tokens import is_live
from seamark.metaserver.settings.issuers import read_issuers
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.store.port import PointerStore


class StandingRights:
    def __init__(self, store: PointerStore, clock: Clock, settings: Settings) -> None:
        self._store, self._clock, self._mode = store, clock, settings.auth
        issuers = read_issuers(settings) if "oidc" in settings.auth else ()
        self._issuers = {issuer.name: issuer for issuer in issuers}
        self._authorizer = Authorizer()

    async def why_lost(self, principal_name: str, role: Role, namespace: NamespacePath) -> str | None:
        """Return why the principal no longer has the right, or None if it still has the right.

        Only an OIDC token states the roles and groups of its subject. If the issuer states them, the right is not lost.
        """
        if self._mode == "none":
            return None
        issuer = self._issuers.get(principal_name.partition(":")[0]) if is_foreign(principal_name) else None
        if issuer is None and (is_foreign(principal_name) or "token" not in self._mode):
            return "the server no longer accepts this kind of login"
        if issuer is None:
            token = await self._store.token_named(principal_name)
            if token is None or not is_live(token, self._clock.now_ms()):
                return "its token has ended"
        elif issuer.states_rights:
            return None
        principal = Principal(principal_name, tuple(await self._store.grants(principal_name)))
        return None if self._authorizer.holds(principal, role, namespace) else "its rights were withdrawn"
