"""Certificates that their authorities have revoked, according to the lists (CRLs, RFC 5280) in a PEM file.

TLS checks the lists in each handshake. This module is for connections that were open before a certificate was revoked
or a list went out of date, and for sessions that are resumed without a check of the certificate.
"""

from __future__ import annotations

import math
import re
import string
from functools import lru_cache
from pathlib import Path

from cryptography import x509

_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_SPACES = re.compile(r"[ \t\n\v\f\r]+")
_TO_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_CERTIFICATES_MAX = 10_000
"""The maximum number of certificates whose issuers and serial numbers are cached."""
_FoldedName = tuple[frozenset[tuple[str, str | bytes]], ...]


class RevokedCertificates:
    """The serial numbers of revoked certificates and the next update of the lists, by issuer.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has no list, or a list is invalid.
    """

    def __init__(self, path: Path) -> None:
        lists = [x509.load_pem_x509_crl(text) for text in _LIST.findall(path.read_bytes())]
        if not lists:
            raise ValueError("the file has no certificate revocation list")
        self._serial_numbers: dict[_FoldedName, set[int]] = {}
        self._next_updates_ms: dict[_FoldedName, float] = {}
        """The latest next update of an issuer's lists, by issuer. A list without one stays current."""
        for revocations in lists:
            issuer, next_update = _fold_name(revocations.issuer), revocations.next_update_utc
            next_update_ms = math.inf if next_update is None else next_update.timestamp() * 1000
            self._next_updates_ms[issuer] = max(next_update_ms, self._next_updates_ms.get(issuer, next_update_ms))
            serial_numbers = self._serial_numbers.setdefault(issuer, set())
            serial_numbers.update(revocation.serial_number for revocation in revocations)

    def includes(self, certificate: bytes) -> bool:
        """Return whether a certificate (DER) is revoked. A certificate that cannot be read counts as revoked."""
        try:
            issuer, serial_number = _read_issuer_and_number(certificate)
        except ValueError:
            return True
        return serial_number in self._serial_numbers.get(issuer, ())

    def is_covered(self, certificate: bytes, now_ms: int) -> bool:
        """Return whether there is a certificate revocation list of the issuer of a certificate (DER) that is still
        valid.

        A list is valid until its next update. Without a valid list, it is unknown whether the certificate was revoked.
        """
        try:
            issuer, _ = _read_issuer_and_number(certificate)
        except ValueError:
            return False
        return now_ms < self._next_updates_ms.get(issuer, 0)


@lru_cache(maxsize=_CERTIFICATES_MAX)
def _read_issuer_and_number(certificate: bytes) -> tuple[_FoldedName, int]:
    certificate_object = x509.load_der_x509_certificate(certificate)
    return _fold_name(certificate_object.issuer), certificate_object.serial_number


def _fold_name(name: x509.Name) -> _FoldedName:
    """Return a key that is equal for names that TLS regards as equal (RFC 5280, section 7.1).

    The type of a string, the case of ASCII letters, and the amount of white space are ignored. The order of the
    relative names is significant.
    """
    return tuple(
        frozenset((attribute.oid.dotted_string, _fold_value(attribute.value)) for attribute in relative_name)
        for relative_name in name.rdns
    )


def _fold_value(value: str | bytes) -> str | bytes:
    return value if isinstance(value, bytes) else _SPACES.sub(" ", value).strip(" ").translate(_TO_LOWER)
