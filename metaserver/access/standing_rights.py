"""Checks whether a principal still has a login and a right while it sends no request itself.

Keys and jobs act for such a principal.
"""

from __future__ import annotations

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.principal import OIDC_PREFIX, Principal, Role
from seamark.metaserver.access.tokens import is_live
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.store.port import PointerStore


class StandingRights:
    def __init__(self, store: PointerStore, clock: Clock, settings: Settings) -> None:
        self._store, self._clock, self._mode = store, clock, settings.auth
        self._has_foreign_roles = bool(settings.oidc_roles_claim)
        self._authorizer = Authorizer()

    async def why_lost(self, principal_name: str, role: Role, namespace: NamespacePath) -> str | None:
        """Return why the principal no longer has the right, or None if it still has the right.

        Rights by roles that only an OIDC token states are not considered.
        """
        is_foreign = principal_name.startswith(OIDC_PREFIX)
        if self._mode == "none":
            return None
        if ("oidc" if is_foreign else "token") not in self._mode:
            return "the server no longer accepts this kind of login"
        if not is_foreign:
            token = await self._store.token_named(principal_name)
            if token is None or not is_live(token, self._clock.now_ms()):
                return "its token has ended"
        elif self._has_foreign_roles:
            return None
        principal = Principal(principal_name, tuple(await self._store.grants(principal_name)))
        return None if self._authorizer.holds(principal, role, namespace) else "its rights were withdrawn"
