"""Checks whether a principal still has a login and a right while keys or jobs act for it.

The principal itself sends no request that could be checked.
"""

from __future__ import annotations

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import Authorizer, GrantAuthorizer
from seamark.metaserver.access.certificates.rules import read_rules
from seamark.metaserver.access.principal import CERTIFICATE_PREFIX, Principal, is_foreign
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.rights.membership import load_grants
from seamark.metaserver.access.tokens import is_live
from seamark.metaserver.settings.issuers import read_issuers
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore


class StandingRights:
    """Checks whether a principal still has the rights that its access keys or background jobs use.

    Keys and jobs act for a principal after its request has ended. Without an authorizer, the grants in the store
    decide.
    """

    def __init__(
        self, store: PointerStore, clock: Clock, settings: Settings, authorizer: Authorizer | None = None
    ) -> None:
        self._store, self._clock, self._mode = store, clock, settings.auth
        issuers = read_issuers(settings) if "oidc" in settings.auth else ()
        self._issuers = {issuer.name: issuer for issuer in issuers}
        self._certificates_state_rights = "cert" in settings.auth and any(
            rule.has_rights_outside_database for rule in read_rules(settings)
        )
        self._authorizer = authorizer or GrantAuthorizer(store)

    async def explain_loss(self, principal_name: str, operation: str, securable: Securable) -> str | None:
        """Return the reason why the principal may no longer do the operation, or None if it still may.

        The roles and groups of an OIDC subject or a client certificate are known only during its requests. If the right
        may come from such roles or groups, the result is None.
        """
        if self._mode == "none":
            return None
        issuer = self._issuers.get(principal_name.partition(":")[0]) if is_foreign(principal_name) else None
        is_certificate = principal_name.startswith(CERTIFICATE_PREFIX) and "cert" in self._mode
        if issuer is None and not is_certificate and (is_foreign(principal_name) or "token" not in self._mode):
            return "the server no longer accepts this kind of login"
        if is_certificate:
            if self._certificates_state_rights:
                return None
        elif issuer is None:
            # The principal is the name of a bearer token of this server.
            token = await self._store.find_token_by_name(principal_name)
            if token is None or not is_live(token, self._clock.now_ms()):
                return "the token has ended"
        elif issuer.states_rights:
            return None
        grants, roles = await load_grants(self._store, principal_name)
        principal = Principal(principal_name, grants, groups=roles)
        is_allowed = await self._authorizer.allows(principal, operation, securable)
        return None if is_allowed else "the rights were withdrawn"
