"""A test's certificate authority, which signs the certificates of its servers and their clients."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS_VALID = 2


@dataclass(frozen=True)
class ClientFiles:
    """The certificate and the key of a client."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority.

    The certificates of servers that it issues are valid for `names`: addresses and host names.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("127.0.0.1",), file: str = "ca.pem") -> None:
        self._folder = folder
        self._names = tuple(map(_build_general_name, names))
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.file = folder / file
        certificate = self._build_certificate(self._name, self._key, self._names, is_authority=True)
        self.pem = _encode_pem(certificate).decode()
        self.digest = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
        """The digest of the authority's certificate. Rules for client certificates use it to name the authority."""
        self.file.write_text(self.pem)
        self.certificate, self.key = folder / "server.pem", folder / "server.key"

    def issue(self, name: str, *, key_too: bool = True) -> None:
        """Write a new certificate for the server `name`, and its key if `key_too`, to the files of the server."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate.write_bytes(_encode_pem(self._build_certificate(subject, key, self._names)))
        if key_too:
            self.key.write_bytes(encode_key_pem(key))
            self.key.chmod(0o600)

    def issue_client(
        self,
        file: str,
        *names: x509.GeneralName,
        common_name: str = "",
        valid_s: float = _DAYS_VALID * 86400,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    ) -> ClientFiles:
        """Write a certificate and a key of a client to `<file>.pem` and `<file>.key`.

        Args:
            file: The name of the files.
            names: The alternative names of the client.
            common_name: The common name of the client.
            valid_s: The seconds from now until the certificate expires. If negative, it has expired.
            usage: The only extended key usage of the certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=valid_s)
        certificate = self._build_certificate(subject, key, names, end=end, usage=usage)
        files = ClientFiles(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        files.certificate.write_bytes(_encode_pem(certificate))
        files.key.write_bytes(encode_key_pem(key))
        return files

    def build_revocation_list(
        self, *revoked_files: ClientFiles, valid_s: float = _DAYS_VALID * 86400, issuer: x509.Name | None = None
    ) -> str:
        """Return the list of revoked certificates as PEM.

        Args:
            revoked_files: The files of the revoked certificates.
            valid_s: The seconds from now until the next list is due. If negative, this list is out of date.
            issuer: The issuer that the list names. By default it is this authority.
        """
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name if issuer is None else issuer)
            .last_update(now - datetime.timedelta(days=_DAYS_VALID))
            .next_update(now + datetime.timedelta(seconds=valid_s))
        )
        for files in revoked_files:
            serial_number = x509.load_pem_x509_certificate(files.certificate.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial_number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def _build_certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: Sequence[x509.GeneralName],
        *,
        is_authority: bool = False,
        end: datetime.datetime | None = None,
        usage: x509.ObjectIdentifier | None = None,
    ) -> x509.Certificate:
        """Return a certificate signed by this authority. It ends after `_DAYS_VALID` days unless `end` is given."""
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=_DAYS_VALID))
            .not_valid_after(end or now + datetime.timedelta(days=_DAYS_VALID))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_authority,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=is_authority,
                    crl_sign=is_authority,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )
        if names:
            # Without a subject, X.509 requires the alternative names to be critical.
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not list(subject))
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _build_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _encode_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def encode_key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    kind = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind)
