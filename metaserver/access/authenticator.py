"""Authentication: determines the `Principal` of a request from its headers and its client certificate.

| setting auth | accepted |
|---|---|
| none | all clients, as admins, but only from this machine |
| token | bearer tokens of this server, and access tokens made from them (`issued.py`) |
| oidc | JWTs of the configured issuers |
| cert | client certificates of the authorities of `tls_client_ca` |
| token+oidc, … | the credentials of each listed mode |

A request with a certificate of one principal and a token of another principal is refused, because otherwise its rights
would be ambiguous. A certificate that names no principal, such as that of a proxy, is ignored.

All modes except `none` also accept the logins that the server issues for its own processes: the table services, and the
workers that run SQL statements (`worker_tokens.py`).

Nothing is cached: a revoked token or grant is invalid for the next request, on every replica. The price is two reads by
key for each request, which take microseconds with SQLite.

Without logins, web pages are a danger. Any page could make a browser send requests to loopback. If a name
resolves to 127.0.0.1, a page with this name could also read the answers. Therefore a request must not come from a
page of a different site (`Origin`), and must not be addressed to a different host (`Host`). Engines send no
`Origin`, and send the configured host.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from multidict import MultiMapping

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Forbidden, Unauthenticated
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.runtime.memoization import memoize
from seamark.formats.runtime.tls import ClientCertificate
from seamark.metaserver.access import jwt
from seamark.metaserver.access.certificates.identities import (
    CertificateIdentities,
    CertificateIdentity,
    digest_certificate,
)
from seamark.metaserver.access.certificates.rules import read_rules
from seamark.metaserver.access.guard import is_loopback_address
from seamark.metaserver.access.issued import Issuer
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.principal import ANONYMOUS, Principal
from seamark.metaserver.access.rights.membership import load_grants
from seamark.metaserver.access.tokens import PREFIX, compute_digest, is_live
from seamark.metaserver.access.worker_tokens import ServiceTokens, StatementTokens
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import AccessToken
from seamark.metaserver.store.port import PointerStore

if TYPE_CHECKING:
    from seamark.metaserver.access import oidc
else:
    oidc = LazyModule("seamark.metaserver.access.oidc")

_HOWTO = "send the header Authorization: Bearer <token>"
_NO_TOKENS = ("None", "null", "undefined")
"""The texts that clients send as a token if no token is set."""


class Login(msgspec.Struct, frozen=True):
    """A principal, and the token that proved its identity."""

    principal: Principal
    token: AccessToken | None = None
    """The bearer token of this server on which the login is based, or None."""
    expires_ms: int | None = None
    """The expiry of the presented token, or None if the token has no expiry."""
    certificate_digest: bytes = b""
    """The digest of the certificate to which the token is bound (RFC 8705), or empty if it is not bound."""


class Authenticator:
    """Authenticates requests. `open_authenticator` opens an instance."""

    def __init__(
        self,
        settings: Settings,
        store: PointerStore,
        clock: Clock,
        issuer: Issuer,
        service_tokens: ServiceTokens,
        statement_tokens: StatementTokens,
        verifiers: Mapping[str, oidc.Oidc],
        certificates: CertificateIdentities | None,
        warehouse_store: PointerStore | None = None,
    ) -> None:
        """Create an authenticator.

        Args:
            settings: The settings of the server.
            store: The pointer store of the server, which contains the tokens.
            clock: The clock.
            issuer: Issues and checks access tokens of the server.
            service_tokens: The logins of jobs.
            statement_tokens: The logins of SQL statements.
            verifiers: The verifiers of OIDC issuers, by URL.
            certificates: Finds the principals of client certificates. If it is None, certificates are not logins.
            warehouse_store: The pointer store of a further warehouse of the server, which contains the grants. The
                rights that a token states do not count there. It is None for the server's own warehouse.
        """
        self._settings = settings
        self._grants = store if warehouse_store is None else warehouse_store
        self._is_additional_warehouse = warehouse_store is not None
        self._mode = settings.auth
        self._host = settings.host.lower()
        self._is_here = memoize(1024)(self._names_this_machine)
        self._store = store
        self._clock = clock
        self._verifiers = verifiers
        self._certificates = certificates
        self._checks_certificates = bool(settings.tls_client_ca)
        self._requires_certificate = settings.tls_client_auth == "required"
        self.open = settings.auth == "none"
        """Whether the server accepts requests without a login."""
        self.issuer = issuer
        self.service_tokens = service_tokens
        self.statement_tokens = statement_tokens

    def copy_for_warehouse(self, store: PointerStore, keyring: Keyring) -> Authenticator:
        """Return an authenticator for a further warehouse.

        It accepts the same principals. The warehouse has its own grants, and its own logins of jobs and statements.

        Args:
            store: The pointer store of the warehouse.
            keyring: The signing keys of the warehouse.
        """
        service = ServiceTokens(keyring, self._clock)
        statements = StatementTokens(
            keyring, self._clock, needs_groups=bool(self._settings.opa_url or self._settings.openfga_url)
        )
        return Authenticator(
            self._settings, self._store, self._clock, self.issuer, service, statements, self._verifiers,
            self._certificates, store,
        )  # fmt: skip

    async def authenticate(
        self, headers: Mapping[str, str], remote: str | None, certificate: ClientCertificate | None = None
    ) -> Principal:
        """Return the principal that sent these headers.

        The names in `headers` are case-insensitive, as in aiohttp.

        Args:
            headers: The headers of the request.
            remote: The address of the client.
            certificate: The verified certificate of the client's connection.

        Raises:
            Unauthenticated: The request has no valid login (401).
            Forbidden: The server requires no logins, and the request is from another machine or from a web page.
            RetryLater: The database or the issuer is unavailable.
        """
        if self.open:
            self.check_certificate(certificate)
            return self.identify_local(headers, remote)
        if isinstance(headers, MultiMapping) and len(headers.getall("Authorization", ())) > 1:
            # A proxy that checks logins may have checked the other header.
            raise Unauthenticated("The request has the header Authorization twice; send it once")
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        bearer = bearer.strip()
        identity = None
        if certificate is not None and self._certificates is not None:
            identity = self._certificates.identify(certificate)
            if not scheme or bearer in _NO_TOKENS:
                return await self._log_in_by_certificate(identity)
        if not scheme:
            raise Unauthenticated(f"This server requires a login: {_HOWTO}")
        if scheme.lower() != "bearer" or not bearer:
            raise Unauthenticated(f"The Authorization header is not a bearer token: {_HOWTO}")
        if bearer in _NO_TOKENS:
            raise Unauthenticated(
                f"This server requires a login, and the client has no token: it sends {bearer!r}, as PyIceberg does; "
                "set token or credential of its catalog"
            )
        login = await self.find_login(bearer)
        if not bearer.startswith((self.service_tokens.prefix, self.statement_tokens.prefix)):
            self.check_certificate(certificate)
        self._check_same_client(login, certificate, identity)
        return login.principal

    def check_certificate(self, certificate: ClientCertificate | None) -> None:
        """Check that the client has a certificate, if the server requires one.

        Raises:
            Unauthenticated: The client has no certificate.
        """
        if certificate is None and self._requires_certificate:
            raise Unauthenticated("This server requires a client certificate: configure one in the client")

    def _check_same_client(
        self, login: Login, certificate: ClientCertificate | None, identity: CertificateIdentity | None
    ) -> None:
        if identity is not None and identity.name and identity.name != login.principal.name:
            raise Unauthenticated(
                f"The client's certificate is of {identity.name}, and the token of {login.principal.name}; send only "
                "one of them"
            )
        if login.certificate_digest and self._checks_certificates:
            digest = b"" if certificate is None else digest_certificate(certificate)
            if not hmac.compare_digest(digest, login.certificate_digest):
                raise Unauthenticated("The token is bound to a certificate that the client does not use")

    async def _log_in_by_certificate(self, identity: CertificateIdentity) -> Principal:
        if not identity.name:
            raise Unauthenticated(f"The client's certificate names no principal: {identity.problem}")
        stated_grants = () if self._is_additional_warehouse else identity.roles
        grants, groups = await load_grants(self._grants, identity.name, identity.groups, stated_grants)
        return Principal(identity.name, grants, "certificate", groups)

    async def find_login(self, bearer: str) -> Login:
        """Return the login of a token of any accepted kind.

        Raises:
            Unauthenticated, RetryLater: See `authenticate`.
        """
        if bearer.startswith(PREFIX):
            return await self.find_token_holder(bearer)
        for tokens in (self.service_tokens, self.statement_tokens):
            if bearer.startswith(tokens.prefix):
                principal, expires_ms = tokens.verify_token(bearer)
                return Login(principal, None, expires_ms)
        if not jwt.looks_like_jwt(bearer):
            raise Unauthenticated(f"The token is unknown: it is neither a token of this server nor a JWT; {_HOWTO}")
        parsed_token = jwt.parse_token(bearer)
        if self.issuer.is_ours(parsed_token):
            return await self._log_in_by_access_token(bearer, parsed_token, accepts_expired=False)
        if not self._verifiers:
            raise Unauthenticated("The token is from another issuer; this server accepts only its own tokens")
        url = parsed_token.claims.get("iss")
        verifier = self._verifiers.get(url) if isinstance(url, str) else None
        if verifier is None:
            raise Unauthenticated(f"The token is not from the issuer {' or '.join(self._verifiers)}")
        identity = await verifier.identify(bearer, parsed_token)
        # The roles in a token are rights in the server's own warehouse, so they do not count in a further warehouse.
        stated_grants = () if self._is_additional_warehouse else identity.roles
        grants, groups = await load_grants(self._grants, identity.name, identity.groups, stated_grants)
        principal = Principal(identity.name, grants, "oidc", groups)
        return Login(principal, None, identity.expires_ms, identity.certificate_digest)

    async def find_token_holder(self, secret: str) -> Login:
        """Return the login of a bearer token of this server."""
        self._check_tokens_accepted()
        return await self._log_in_by_token(await self._store.find_token_by_digest(compute_digest(secret)))

    async def find_expired_login(self, access_token: str) -> Login:
        """Return the login of an access token of this server, even if the token has expired.

        The login token from which the access token was made must still be valid. Call this method only for a client
        that has also presented the login token, because an expired access token alone is not a login.
        """
        return await self._log_in_by_access_token(access_token, jwt.parse_token(access_token), accepts_expired=True)

    async def _log_in_by_access_token(
        self, access_token: str, parsed_token: jwt.Unverified, *, accepts_expired: bool
    ) -> Login:
        """Return the login of an access token that this server issued.

        The login expires as soon as the access token expires, or the login token from which it was made.

        Args:
            access_token: The access token.
            parsed_token: The parsed access token.
            accepts_expired: Whether an expired access token is accepted.
        """
        self._check_tokens_accepted()
        claims = self.issuer.check(access_token, parsed_token, accepts_expired=accepts_expired)
        if not claims.digest:
            raise Unauthenticated("The token was issued while this server required no login; get a new token")
        login = await self._log_in_by_token(await self._store.find_token_by_digest(claims.digest))
        ends_ms = [end for end in (claims.expires_ms, login.expires_ms) if end is not None]
        return msgspec.structs.replace(login, expires_ms=min(ends_ms, default=None))

    async def _log_in_by_token(self, token: AccessToken | None) -> Login:
        if token is None:
            raise Unauthenticated("The token is unknown; an operator creates tokens with: seamark token create")
        if not is_live(token, self._clock.now_ms()):
            end_text = "was revoked" if token.revoked_ms not in (None, token.expires_ms) else "has expired"
            raise Unauthenticated(f"The token {token.name} {end_text}; an operator creates a new token")
        grants, roles = await load_grants(self._grants, token.name)
        return Login(Principal(token.name, grants, "token", roles), token, token.expires_ms)

    def _check_tokens_accepted(self) -> None:
        if "token" not in self._mode:
            accepted_kinds = " and ".join(
                text
                for mode, text in (("oidc", "tokens of its OIDC issuers"), ("cert", "client certificates"))
                if mode in self._mode
            )
            raise Unauthenticated(f"This server accepts only {accepted_kinds}")

    def identify_local(self, headers: Mapping[str, str], remote: str | None) -> Principal:
        """Return the principal of all clients of an `open` server.

        Raises:
            Forbidden: See `authenticate`.
        """
        if not self.open:
            raise RuntimeError("This server requires logins")
        if remote and not is_loopback_address(remote):
            raise Forbidden("Without logins this server accepts only requests from its own machine")
        # Host and Origin show whether a browser sends the request for a web page of another site. Such a page can also
        # reach this server under its own name, if that name resolves to this machine.
        host, origin = headers.get("Host"), headers.get("Origin")
        if host and not self._is_here("//" + host):
            raise Forbidden(
                "Without logins this server accepts only requests for localhost; configure auth to serve other names"
            )
        if origin is not None and not self._is_here(origin):
            raise Forbidden(
                "Without logins this server accepts no requests from web pages of other sites; configure auth for them"
            )
        return ANONYMOUS

    def _names_this_machine(self, url: str) -> bool:
        host = _parse_host(url)
        return host == "localhost" or host.endswith(".localhost") or host == self._host or is_loopback_address(host)


def _parse_host(url: str) -> str:
    """Return the host of a URL, or an empty text if the URL is invalid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@asynccontextmanager
async def open_authenticator(
    settings: Settings, store: PointerStore, keyring: Keyring, clock: Clock
) -> AsyncIterator[Authenticator]:
    """Open an authenticator with the settings auth, oidc_…, tls_client_…, oauth_token_ttl_s and clock_leeway_s."""
    issuer = Issuer(keyring, clock, ttl_s=settings.oauth_token_ttl_s, leeway_s=settings.clock_leeway_s)
    async with AsyncExitStack() as stack:
        has_oidc = "oidc" in settings.auth
        verifiers = await stack.enter_async_context(oidc.open_oidc(settings, clock)) if has_oidc else {}
        service = ServiceTokens(keyring, clock)
        statements = StatementTokens(keyring, clock, needs_groups=bool(settings.opa_url or settings.openfga_url))
        certificates = CertificateIdentities(read_rules(settings), clock) if "cert" in settings.auth else None
        yield Authenticator(settings, store, clock, issuer, service, statements, verifiers, certificates)
