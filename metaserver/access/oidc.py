"""Verifies tokens of OpenID Connect issuers: JWTs signed with their keys (OIDC Core 1.0, 3.1.3.7; RFC 7517).

Keys are fetched for the first token, when they are older than `FRESH_S`, and when a token names an unknown key. For
unknown keys, they are fetched at most once a minute. A key that the issuer has withdrawn is accepted for at most
`FRESH_S`, or for at most `STALE_S` while the issuer is not available. If there are no keys, the answer is 503 instead
of 401, because the token may be valid.

Only the configured issuers are contacted, each with its own certificate authorities and bearer token. Redirects are not
followed, and keys are not read from an http URL if the issuer is https.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from seamark.formats.protocol.wire import check_name, decode_base64url, decode_json
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, ConfigError, RetryLater, Unauthenticated
from seamark.formats.runtime.tls import build_client_context
from seamark.metaserver.access import jwt
from seamark.metaserver.access.bearer_files import read_bearer_token
from seamark.metaserver.access.principal import ROLE_PREFIX, check_grantable_role, parse_role
from seamark.metaserver.settings.issuers import GROUP_SUFFIX, IssuerSettings, read_issuers
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.port import GROUPS_MAX

FRESH_S = 600.0
"""The age at which keys are fetched again."""
STALE_S = 86_400.0
"""The maximum age of keys that are used while the issuer is not available."""
REFRESH_S_MIN = 60.0
"""The minimum interval between fetches because of unknown keys."""
RETRY_S = 5.0
"""The interval between fetches while the issuer is not available."""
TIMEOUT_S = 5.0
BYTES_MAX = 1 << 20
"""The maximum size of a document of an issuer."""
RSA_BITS_MIN = 2048
_BASE64_BITS = 6
"""The number of bits of one character in base64, in which the modulus `n` of an RSA key is encoded."""
KEYS_MAX = 200
"""The maximum number of keys of an issuer. Each key takes about 0.1 ms of the event loop."""
_ROLES_MAX = 1000
_log = structlog.get_logger("seamark.oidc")


class VerifyKey(msgspec.Struct, frozen=True):
    """A public key and the algorithms that its type allows."""

    key: RSAKey | ECKey | OKPKey
    algorithms: tuple[str, ...]


class Identity(msgspec.Struct, frozen=True):
    """The identity that a token proves."""

    name: str
    """The name of the principal: the name of the issuer, a colon, and the value of the principal claim."""
    roles: tuple[Grant, ...]
    """The roles in the roles claim."""
    groups: tuple[str, ...]
    """The principals of the groups in the groups claim, such as `oidc-group:engineers`."""
    expires_ms: int
    certificate_digest: bytes = b""
    """The SHA-256 digest of the certificate to which the token is bound (RFC 8705, 3.1), or empty."""


class Oidc:
    """Verifies tokens of one issuer. `open_oidc` opens it."""

    def __init__(self, issuer: IssuerSettings, leeway_s: int, clock: Clock, http: aiohttp.ClientSession) -> None:
        self._settings = issuer
        self._issuer = issuer.url
        self._leeway_s = leeway_s
        self._clock = clock
        self._http = http
        self._keys: dict[str | None, VerifyKey] = {}
        self._fetched_s: float | None = None
        self._tried_s: float | None = None
        self._has_failed = False
        self._attempts = 0
        self._fetch_lock = asyncio.Lock()

    async def identify(self, token: str, parsed_token: jwt.Unverified) -> Identity:
        """Return the identity that the token proves.

        Raises:
            Unauthenticated: The token is invalid. The message contains the reason.
            RetryLater: The issuer's keys are unavailable.
        """
        algorithm = parsed_token.header.get("alg")
        key = await self._find_key(parsed_token.header.get("kid"))
        if not isinstance(algorithm, str) or algorithm not in key.algorithms:
            raise Unauthenticated(
                f"The token must be signed with {' or '.join(key.algorithms)}, which its key requires"
            )
        claims = jwt.verify_and_read_claims(token, parsed_token, key.key, algorithm)
        audience, expected = claims.get("aud"), self._settings.audience
        if audience != expected and not (isinstance(audience, list) and expected in audience):
            raise Unauthenticated(f"The token is not for the audience {expected}")
        expires_ms = jwt.check_times(claims, self._clock.now_ms(), early_s=self._leeway_s, late_s=self._leeway_s)
        name = self._read_name(claims)
        roles, groups = tuple(self._read_roles(claims, name)), self._read_groups(claims)
        return Identity(name, roles, groups, expires_ms, _read_certificate_digest(claims))

    def _read_name(self, claims: dict[str, Any]) -> str:
        claim = self._settings.principal_claim
        value = _find_claim(claims, claim)
        if not isinstance(value, str):
            raise Unauthenticated(f"The token's claim {claim} has no name")
        try:
            return f"{self._settings.name}:{check_name(value, claim)}"
        except BadRequest as error:
            raise Unauthenticated(f"The token's principal is invalid: {error.message}") from None

    def _read_roles(self, claims: dict[str, Any], name: str) -> list[Grant]:
        """Return the first `_ROLES_MAX` entries of the roles claim as grants, without entries that are not roles.

        Such entries may be for other services.
        """
        if not self._settings.roles_claim:
            return []
        value = _find_claim(claims, self._settings.roles_claim)
        grants = []
        for text in value[:_ROLES_MAX] if isinstance(value, list) else ():
            if not isinstance(text, str):
                continue
            try:
                if text.startswith(ROLE_PREFIX):
                    grants.append(Grant(name, check_grantable_role(text)))
                    continue
                role, path = parse_role(text)
            except BadRequest:
                continue
            grants.append(Grant(name, role.value, path))
        return grants

    def _read_groups(self, claims: dict[str, Any]) -> tuple[str, ...]:
        """Return the principals of the first `GROUPS_MAX` groups in the groups claim, which is a list or one text.

        Names that no grant can contain are ignored.
        """
        value = _find_claim(claims, self._settings.groups_claim) if self._settings.groups_claim else None
        groups: dict[str, None] = {}
        for text in [value] if isinstance(value, str) else value if isinstance(value, list) else ():
            if len(groups) == GROUPS_MAX:
                _log.warning(
                    "a token has too many groups; the others are ignored", issuer=self._issuer, limit=GROUPS_MAX
                )
                break
            with suppress(BadRequest):
                if isinstance(text, str):
                    groups[f"{self._settings.name}{GROUP_SUFFIX}:{check_name(text, 'group')}"] = None
        return tuple(groups)

    async def _find_key(self, kid: object) -> VerifyKey:
        if kid is not None and not isinstance(kid, str):
            raise Unauthenticated("The token's kid is not a string")
        age_s = self._measure_age_s(self._fetched_s)
        if age_s >= FRESH_S or (self._find_published_key(kid) is None and age_s >= REFRESH_S_MIN):
            await self._refresh(kid)
        key = self._find_published_key(kid)
        if key is None:
            raise Unauthenticated("The token is signed with a key that its issuer does not publish")
        return key

    def _find_published_key(self, kid: str | None) -> VerifyKey | None:
        """Return the key with this kid, or the issuer's only key if the token has no kid. Otherwise return None."""
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(kid)

    def _measure_age_s(self, since_s: float | None) -> float:
        return float("inf") if since_s is None else self._clock.monotonic() - since_s

    async def _refresh(self, kid: str | None) -> None:
        """Fetch new keys. Concurrent requests share one fetch. If the fetch fails, keep the old keys.

        Raises:
            RetryLater: The last fetch failed, and the old keys are older than `STALE_S` or do not include `kid`.
        """
        if (
            self._fetch_lock.locked()
            and self._find_published_key(kid) is not None
            and self._measure_age_s(self._fetched_s) < STALE_S
        ):
            return  # Do not wait for the running fetch of a slow issuer, because the old keys can still be used.
        # If another request fetches the keys while this request waits for the lock, use its result.
        attempts_before = self._attempts
        async with self._fetch_lock:
            is_paused = self._has_failed and self._measure_age_s(self._tried_s) < RETRY_S
            if self._attempts == attempts_before and not is_paused:
                await self._fetch()
                self._attempts += 1
        if not self._has_failed:
            return
        if self._measure_age_s(self._fetched_s) >= STALE_S or self._find_published_key(kid) is None:
            raise RetryLater(
                f"The keys of the issuer {self._issuer} are unavailable; try again shortly", retry_after_s=5
            )

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                keys = read_keys(await self._get(self._settings.jwks_url or await self._discover()))
            if not keys:
                raise ValueError("the JWK set has no key for RS256, ES256 or EdDSA")
        except (aiohttp.ClientError, OSError, TimeoutError, BadRequest, ValueError) as error:
            self._has_failed = True
            _log.warning("cannot read the issuer's keys", issuer=self._issuer, error=str(error) or type(error).__name__)
        else:
            self._has_failed = False
            self._keys = keys
            self._fetched_s = self._clock.monotonic()
        finally:
            self._tried_s = self._clock.monotonic()

    async def _discover(self) -> str:
        """Return the `jwks_uri` from the discovery document of this issuer (OpenID Connect Discovery 1.0, 4)."""
        document = await self._get(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if not isinstance(document, dict) or document.get("issuer") != self._issuer:
            raise ValueError(f"the discovery document does not name the issuer {self._issuer}")
        url = document.get("jwks_uri")
        if not isinstance(url, str):
            raise ValueError("the discovery document has no jwks_uri")
        # Over http, an attacker in the network could replace the keys of an https issuer.
        allowed_schemes = ("https",) if self._issuer.startswith("https:") else ("https", "http")
        if urlsplit(url).scheme not in allowed_schemes:
            raise ValueError(f"jwks_uri is not {' or '.join(allowed_schemes)}")
        return url

    async def _get(self, url: str) -> Any:
        headers = {"Accept": "application/json"}
        if self._settings.token_file:
            # Read the file for each request, because Kubernetes replaces the token in it before the token expires.
            token = await asyncio.to_thread(read_bearer_token, Path(self._settings.token_file))
            headers["Authorization"] = f"Bearer {token}"
        async with self._http.get(url, allow_redirects=False, headers=headers) as answer:
            if answer.status != 200:
                raise ValueError(f"{url} answered {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > BYTES_MAX:
                    raise ValueError(f"{url} sent more than {BYTES_MAX} bytes")
            return decode_json(bytes(body), url)


def read_keys(document: object) -> dict[str | None, VerifyKey]:
    """Return the usable keys of a JWK set (RFC 7517, 5), by kid.

    Raises:
        BadRequest: The JWK set is invalid, or has too many keys.
    """
    jwks = document.get("keys") if isinstance(document, Mapping) else None
    if not isinstance(jwks, list):
        raise BadRequest("The JWK set has no list of keys")
    if len(jwks) > KEYS_MAX:
        raise BadRequest(f"The JWK set has {len(jwks):,} keys; the limit is {KEYS_MAX}")
    keys: dict[str | None, VerifyKey] = {}
    for jwk in jwks:
        if isinstance(jwk, dict) and (key := _read_key(jwk)) is not None:
            kid = jwk.get("kid")
            keys[kid if isinstance(kid, str) else None] = key
    return keys


def _read_key(value: dict[str, Any]) -> VerifyKey | None:
    """Return a public key for a supported algorithm, or None for any other key, such as a symmetric key."""
    if value.get("use", "sig") != "sig":
        return None
    kind, curve = value.get("kty"), value.get("crv")
    # Check use, key_ops and alg here, because joserfc checks them only when the key is used.
    material = {name: value[name] for name in ("kty", "n", "e", "crv", "x", "y") if isinstance(value.get(name), str)}
    key: RSAKey | ECKey | OKPKey
    algorithms: tuple[str, ...]
    try:
        if kind == "RSA":
            if len(material.get("n", "")) * _BASE64_BITS < RSA_BITS_MIN:
                return None
            key, algorithms = RSAKey.import_key(material), ("RS256",)
        elif kind == "EC" and curve == "P-256":
            key, algorithms = ECKey.import_key(material), ("ES256",)
        elif kind == "OKP" and curve == "Ed25519":
            key, algorithms = OKPKey.import_key(material), ("EdDSA", "Ed25519")
        else:
            return None
        key.public_key  # noqa: B018  parsed here, so that a broken key is ignored instead of failing a request
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    declared_algorithm = value.get("alg")
    if declared_algorithm is not None and declared_algorithm not in algorithms:
        return None
    return VerifyKey(key, algorithms)


def _read_certificate_digest(claims: Mapping[str, Any]) -> bytes:
    confirmation = claims.get("cnf")
    if not isinstance(confirmation, Mapping) or "x5t#S256" not in confirmation:
        return b""
    try:
        digest = decode_base64url(confirmation["x5t#S256"])
    except (ValueError, TypeError, AttributeError):
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise Unauthenticated("The token's claim x5t#S256 is not the digest of a certificate")
    return digest


def _find_claim(claims: Mapping[str, Any], name: str) -> object:
    """Return the claim with this name or path, or None if it does not exist.

    Some issuers nest claims (`realm_access.roles`), and some claim names contain dots (`kubernetes.io.namespace`).
    Therefore, on each level, the function tries the longest existing name first.
    """
    if name in claims:
        return claims[name]
    parts = name.split(".")
    for part_count in range(len(parts) - 1, 0, -1):
        nested_claims = claims.get(".".join(parts[:part_count]))
        if isinstance(nested_claims, Mapping):
            return _find_claim(nested_claims, ".".join(parts[part_count:]))
    return None


@asynccontextmanager
async def open_oidc(settings: Settings, clock: Clock) -> AsyncIterator[Mapping[str, Oidc]]:
    """Open a verifier for each issuer, by the issuer's URL.

    The function fetches no keys, so that a server can start while an issuer is unavailable.

    Raises:
        ConfigError: An issuer is invalid, or its certificate authorities cannot be read.
    """
    verifiers = {}
    async with AsyncExitStack() as stack:
        for issuer in read_issuers(settings):
            if issuer.url.startswith("http:"):
                _log.warning(
                    "the OIDC issuer is not https; an attacker in the network can log in as any user", issuer=issuer.url
                )
            try:
                tls = build_client_context(issuer.ca_file) if issuer.ca_file else None
            except ValueError as error:
                raise ConfigError(f"ca_file of the OIDC issuer {issuer.name}: {error}") from None
            http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=tls or True), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            )
            await stack.enter_async_context(http)
            verifiers[issuer.url] = Oidc(issuer, settings.clock_leeway_s, clock, http)
        yield verifiers
