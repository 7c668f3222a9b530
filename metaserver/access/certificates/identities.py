"""Finds the principal that a client certificate names.

Only the certificate of the connection is used. The server ignores headers with a certificate, such as
`X-Forwarded-Client-Cert`, because any client can send them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from seamark.cache.memory import MemoryCache
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, Unauthenticated
from seamark.formats.runtime.tls import ClientCertificate
from seamark.metaserver.access.certificates.rules import CertificateRule
from seamark.metaserver.store.model import Grant

_CACHE_BYTES = 4 << 20
_IDENTITY_BYTES = 1024
"""The approximate memory of a cached identity."""
_NAMES_MAX = 100
"""The maximum number of alternative names of a certificate."""
_WILDCARD = "*"


class CertificateIdentity(msgspec.Struct, frozen=True):
    """The principal, groups and roles that a client certificate states."""

    expires_ms: int
    name: str = ""
    """The principal, or empty if the certificate names no principal."""
    problem: str = ""
    """The reason why the certificate names no principal."""
    groups: tuple[str, ...] = ()
    roles: tuple[Grant, ...] = ()


class CertificateIdentities:
    """Maps certificates to principals according to rules."""

    def __init__(self, rules: Sequence[CertificateRule], clock: Clock) -> None:
        self._rules = rules
        self._clock = clock
        self._identities: MemoryCache[ClientCertificate, CertificateIdentity] = MemoryCache(
            _CACHE_BYTES, "client-certificates"
        )

    def identify(self, certificate: ClientCertificate) -> CertificateIdentity:
        """Return the identity that a certificate states. The handshake has verified the certificate.

        Raises:
            Unauthenticated: The certificate has expired since the handshake, or cannot be read.
        """
        identity = self._identities.get(certificate)
        if identity is None:
            identity = _read_identity(certificate, self._rules)
            self._identities.put(certificate, identity, len(certificate.leaf) + _IDENTITY_BYTES)
        if identity.expires_ms <= self._clock.now_ms():
            raise Unauthenticated("The client's certificate has expired; renew it, and connect again")
        return identity


def digest_certificate(certificate: ClientCertificate) -> bytes:
    """Return the SHA-256 digest of a certificate, which RFC 8705 calls `x5t#S256`."""
    return hashlib.sha256(certificate.leaf).digest()


def _read_identity(certificate: ClientCertificate, rules: Sequence[CertificateRule]) -> CertificateIdentity:
    try:
        leaf = x509.load_der_x509_certificate(certificate.leaf)
        expires_ms = int(leaf.not_valid_after_utc.timestamp() * 1000)
        names = _list_common_names(leaf)
    except ValueError as error:
        raise Unauthenticated(f"The client's certificate cannot be read: {error}") from None
    if any(rule.kind != "cn" for rule in rules):
        try:
            names |= _list_alternative_names(leaf)
        except (ValueError, x509.UnsupportedGeneralNameType, x509.DuplicateExtension) as error:
            return CertificateIdentity(expires_ms, problem=f"its alternative names cannot be read: {error}")
    authority = hashlib.sha256(certificate.authority).hexdigest()
    for rule in rules:
        if rule.authorities and authority not in rule.authorities:
            continue
        matches = [match for name in names[rule.kind] if (match := rule.pattern.fullmatch(name))]
        if len(matches) > 1:
            return CertificateIdentity(expires_ms, problem=f"it has several names of the kind {rule.kind}")
        if matches:
            parts = matches[0].groupdict()
            try:
                name = rule.name_principal(parts)
                groups, roles = rule.list_group_principals(parts), rule.list_grants(name, parts)
            except BadRequest as error:
                return CertificateIdentity(expires_ms, problem=error.message)
            return CertificateIdentity(expires_ms, name, groups=groups, roles=roles)
    kinds = ", ".join(dict.fromkeys(rule.kind for rule in rules))
    return CertificateIdentity(expires_ms, problem=f"it has no name of the kind {kinds} that a rule accepts")


def _list_common_names(leaf: x509.Certificate) -> dict[str, list[str]]:
    return {"cn": [str(attribute.value) for attribute in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]}


def _list_alternative_names(leaf: x509.Certificate) -> dict[str, list[str]]:
    """Return the alternative names of a certificate by kind. Leave out wildcard names, which identify no client.

    Raises:
        ValueError: The certificate has too many names.
    """
    try:
        alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {"uri": [], "dns": [], "email": []}
    if len(alternatives) > _NAMES_MAX:
        raise ValueError(f"the certificate has more than {_NAMES_MAX} names")
    return {
        "uri": alternatives.get_values_for_type(x509.UniformResourceIdentifier),
        "dns": [name.lower() for name in alternatives.get_values_for_type(x509.DNSName) if _WILDCARD not in name],
        "email": alternatives.get_values_for_type(x509.RFC822Name),
    }
