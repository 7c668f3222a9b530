"""Logins that the server issues for processes that it starts.

Jobs of the table services use service tokens. The worker that runs one SQL statement of a caller uses a statement
token.

A token is valid for a short time, on every replica, with any value of the setting `auth`. It is signed with a key of
the keyring, so it is not stored. After the prefix, it contains in base64: key id (8 bytes), MessagePack of the claims,
HMAC-SHA256 of both (32 bytes).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import msgspec

from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import BadRequest, Unauthenticated
from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.access.principal import Principal, Role
from seamark.metaserver.access.rights.decisions import narrow_read_grants, select_read_grants
from seamark.metaserver.access.rights.privileges import ROLE_BITS, Privilege
from seamark.metaserver.store.model import TABLE, Grant, NamespacePath

SERVICE_PRINCIPAL = "service:seamark"
"""The principal of service tokens. It has no grants, because no bearer token or OIDC subject can have this name."""
STATEMENT_CHARACTERS_MAX = 6000
"""The maximum length of a statement token, which is sent in a header of at most 8 KiB.

If a caller has too many grants for a token, its statements may read less (`narrow_read_grants`), or fail.
"""
_MAC_BYTES = 32


class _ServiceClaims(msgspec.Struct, frozen=True, array_like=True):
    namespace: NamespacePath
    expires_ms: int
    readable_tables: tuple[tuple[NamespacePath, str], ...] = ()
    """Further tables that the job may read: the namespace and the name of each."""


class _StatementClaims(msgspec.Struct, frozen=True, array_like=True):
    name: str
    namespaces: tuple[NamespacePath, ...]
    """The namespaces in which the caller may read everything, except `exceptions`."""
    expires_ms: int
    exceptions: tuple[tuple[NamespacePath, str, str, bool], ...] = ()
    """Further tables, views and functions that the caller may read, and objects that it may not read.

    Each item contains the namespace, the kind and the name of the object, and whether reading it is denied.
    """
    groups: tuple[str, ...] = ()
    """The groups and roles of the caller, for a policy server."""


def _state_claims(name: str, grants: Sequence[Grant], end_ms: int, groups: tuple[str, ...]) -> _StatementClaims:
    wide_namespaces, exceptions = list[NamespacePath](), list[tuple[NamespacePath, str, str, bool]]()
    for grant in grants:
        if grant.deny or grant.name:
            exceptions.append((grant.namespace, grant.kind, grant.name, grant.deny))
        else:
            wide_namespaces.append(grant.namespace)
    return _StatementClaims(name, tuple(wide_namespaces), end_ms, tuple(exceptions), groups)


def _measure_grant(grant: Grant) -> int:
    """Return the number of bytes that a grant takes in the claims of a worker's token.

    A token states a grant on a whole namespace as the path of the namespace. All other grants are exceptions, which are
    stated with all of their fields: denials, and grants on single objects.
    """
    is_exception = grant.deny or grant.name
    claim = (grant.namespace, grant.kind, grant.name, grant.deny) if is_exception else grant.namespace
    return len(msgspec.msgpack.encode(claim))


_Claims = TypeVar("_Claims", _ServiceClaims, _StatementClaims)


class _SignedTokens:
    """Signs claims and verifies them."""

    prefix: ClassVar[str]
    _purpose: ClassVar[str]
    """The purpose of the derived key. Messages use it as the name of the tokens."""

    def __init__(self, keyring: Keyring, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock

    def _compute_end_ms(self, ttl_s: float) -> int:
        return self._clock.now_ms() + int(ttl_s * 1000)

    def _sign(self, claims: _ServiceClaims | _StatementClaims) -> str:
        key_id, key = self._keyring.find_signing_key(self._purpose)
        signed_part = key_id + msgspec.msgpack.encode(claims)
        return self.prefix + to_base64url(signed_part + _compute_mac(key, signed_part))

    def _count_characters(self, claims_bytes: int) -> int:
        """Return the number of characters of a token with claims of this size."""
        token_bytes = ID_BYTES + claims_bytes + _MAC_BYTES
        return len(self.prefix) + math.ceil(token_bytes * 4 / 3)  # Base64 has four characters for three bytes.

    def _verify(self, token: str, kind: type[_Claims], expiry_message: str) -> _Claims:
        """Return the claims of a token.

        Args:
            token: The token.
            kind: The class of the claims.
            expiry_message: The message for an expired token.

        Raises:
            Unauthenticated: The token has expired, or is not a token of this kind.
        """
        try:
            raw = decode_base64url(token.removeprefix(self.prefix))
            signed_bytes, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            key = self._keyring.find_verification_key(self._purpose, signed_bytes[:ID_BYTES])
            if key is None or not hmac.compare_digest(mac, _compute_mac(key, signed_bytes)):
                raise ValueError
            claims = convert_msgpack(signed_bytes[ID_BYTES:], kind)
        except (ValueError, msgspec.DecodeError):
            name = self._purpose.replace("-", " ")
            raise Unauthenticated(f"This server did not issue the {name}") from None
        if claims.expires_ms <= self._clock.now_ms():
            raise Unauthenticated(expiry_message)
        return claims


def _compute_mac(key: bytes, signed_bytes: bytes) -> bytes:
    return hmac.new(key, signed_bytes, hashlib.sha256).digest()


class ServiceTokens(_SignedTokens):
    """Tokens of jobs, with the role writer in one namespace, and the role reader on some tables of other namespaces."""

    prefix = "sms_"
    _purpose = "service-token"

    def issue(
        self, namespace: NamespacePath, ttl_s: float, readable_tables: Sequence[tuple[NamespacePath, str]] = ()
    ) -> str:
        return self._sign(_ServiceClaims(namespace, self._compute_end_ms(ttl_s), tuple(readable_tables)))

    def verify_token(self, token: str) -> tuple[Principal, int]:
        """Return the principal of a token, and the expiry of the token in milliseconds.

        Raises:
            Unauthenticated: The token is not a valid service token.
        """
        expiry_message = "The service token has expired; the server issues one for each job"
        claims = self._verify(token, _ServiceClaims, expiry_message)
        grants = [Grant(SERVICE_PRINCIPAL, Role.WRITER.value, claims.namespace)]
        for namespace, name in claims.readable_tables:
            grants.append(Grant(SERVICE_PRINCIPAL, Role.READER.value, namespace, TABLE, name))
        return Principal(SERVICE_PRINCIPAL, tuple(grants), "token"), claims.expires_ms


class StatementTokens(_SignedTokens):
    """Tokens of SQL statements, with the caller's name and its privilege to read.

    A token never gives more rights than the caller has, and never the right to write, even on objects that the caller
    owns. Its lifetime is the time limit of the statement.
    """

    prefix = "smq_"
    _purpose = "statement-token"

    def __init__(self, keyring: Keyring, clock: Clock, *, needs_groups: bool = True) -> None:
        """Create an issuer of statement tokens.

        Args:
            keyring: The keys that sign them.
            clock: The clock.
            needs_groups: Whether the rights of a statement depend on the groups of its caller, because a policy server
                decides.
        """
        super().__init__(keyring, clock)
        self._needs_groups = needs_groups

    def issue(self, caller: Principal, ttl_s: float) -> str:
        """Return a token for a statement of the caller.

        If the caller has grants and denials on too many objects for a token, the statement may read less than the
        caller: the token leaves out grants in the namespaces with the most of these objects.

        Raises:
            BadRequest: The caller has grants on too many namespaces for a token, or belongs to too many groups.
        """
        read_grants = select_read_grants(caller.grants)
        groups, end_ms = caller.groups, self._compute_end_ms(ttl_s)
        remaining = dict.fromkeys(read_grants)
        sizes = {grant: _measure_grant(grant) for grant in read_grants}
        size_bytes = sum(sizes.values())
        steps = narrow_read_grants(read_grants)
        while True:
            empty_claims = _StatementClaims(caller.name, (), end_ms, (), groups)
            # Sign the claims only if they probably fit, because a signature takes as long as many steps. The estimate
            # is at most four bytes too low.
            if (
                self._count_characters(len(msgspec.msgpack.encode(empty_claims)) + size_bytes)
                <= STATEMENT_CHARACTERS_MAX
            ):
                token = self._sign(_state_claims(caller.name, list(remaining), end_ms, groups))
                if len(token) <= STATEMENT_CHARACTERS_MAX:
                    return token
            if groups and not self._needs_groups:
                groups = ()  # The grants suffice without a policy server.
                continue
            # Leave out rights in one namespace at a time: its managers may have added too many grants and denials.
            removed_grants, denials = next(steps, ([], []))
            if not removed_grants:
                break
            for grant in removed_grants:
                del remaining[grant]
                size_bytes -= sizes[grant]
            for grant in denials:
                remaining[grant] = None
                sizes[grant] = _measure_grant(grant)
                size_bytes += sizes[grant]
        if groups:
            raise BadRequest(
                f"{caller.name} belongs to {len(groups):,} groups and roles and has grants on many objects, too many "
                "for a statement. The policy server needs the groups: have the issuer state fewer, or ask an admin for "
                "grants on a namespace above"
            )
        raise BadRequest(
            f"{caller.name} has grants on {len(read_grants):,} objects, too many for a "
            "statement; ask an admin for the role reader on a namespace above them"
        )

    def verify_token(self, token: str) -> tuple[Principal, int]:
        """Return the principal of a token, and the expiry of the token in milliseconds.

        The statement may not even browse an object that its caller may not read. Otherwise the worker could load the
        metadata of the object, and an error message of the engine could reveal the names of its columns.
        """
        expiry_message = "The statement token has expired: the statement ran longer than sql_time_s"
        claims = self._verify(token, _StatementClaims, expiry_message)
        read_privilege = Privilege.READ.value
        grants = [Grant(claims.name, read_privilege, path) for path in claims.namespaces]
        for namespace, kind, name, is_denied in claims.exceptions:
            privilege = Privilege.BROWSE.value if is_denied else read_privilege
            grants.append(Grant(claims.name, privilege, namespace, kind, name, is_denied))
        reader_bits = ROLE_BITS["reader"]
        return Principal(claims.name, tuple(grants), "token", claims.groups, reader_bits), claims.expires_ms
