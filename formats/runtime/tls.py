"""TLS certificates and authorities.

A server certificate is reloaded while the server runs: an operator renews it by replacing its files. The server checks
the files every few seconds, and immediately on SIGHUP. When the certificate and the key match, new handshakes use them;
open connections continue. If the files do not match, this is logged, and the previous certificate stays in use. The
authorities are those that Seamark's clients trust.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import ssl
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import structlog

from seamark.formats.runtime.errors import ConfigError, Unauthenticated
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.formats.runtime import revocations
else:
    revocations = LazyModule("seamark.formats.runtime.revocations")

CA_VARIABLE = "SEAMARK_CA"
"""The environment variable for a PEM file with authorities that Seamark's clients trust in addition to the system's."""
CLIENT_CERTIFICATE_VARIABLE = "SEAMARK_CLIENT_CERT"
"""The environment variable for a PEM file with the certificate, and its chain, with which a client logs in."""
CLIENT_KEY_VARIABLE = "SEAMARK_CLIENT_KEY"
"""The environment variable for the PEM file with the client's key. If it is not set, the certificate's file has the
key.
"""
RELOAD_S = 5.0
"""The interval at which the files are checked for changes."""
_RESUMABLE_CERTIFICATES_MAX = 10_000
"""The number of client certificates whose authorities are cached for resumed sessions of TLS 1.2."""
_PEM_END = "-----END CERTIFICATE-----"
_DER = 2
"""The encoding DER of certificates in Python's module `_ssl`."""
_log = structlog.get_logger("seamark.tls")


@dataclass(frozen=True)
class ClientCertificate:
    """A certificate that a client presented, and that the handshake verified."""

    leaf: bytes
    """The certificate (DER)."""
    authority: bytes
    """The trusted certificate (DER) at the end of its chain."""


class Certificate:
    """A server's certificate chain and key, and the authorities of its clients' certificates, all in PEM files.

    Raises:
        ConfigError: A file cannot be used. The message names it.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        client_authorities: Path | None = None,
        client_revocations: Path | None = None,
    ) -> None:
        """Load the files.

        Args:
            certificate: The certificate chain of the server.
            key: The key of the server.
            client_authorities: The authorities that sign certificates of clients. None: clients have no certificates.
            client_revocations: The revocation lists of these authorities. None: no certificate is revoked.

        Raises:
            ConfigError: A file cannot be used.
        """
        self._files = (certificate, key)
        self._client_authorities = client_authorities
        self._client_revocations = client_revocations
        self._file_state = self._read_state()
        self._reload_event = asyncio.Event()
        self._revoked_certificates: revocations.RevokedCertificates | None = None
        self._current, self._current_login, self._authorities, self._revoked_certificates = self._load()
        self._leaves = [_read_leaf(certificate)]
        """The previous certificate, and then the certificate for new connections."""
        self.context = _make_server_context(certificate, key)
        """The TLS context for servers. It presents the current certificate."""
        self.context.sni_callback = self._present_certificate
        self.login_context = self.context
        """The TLS context for servers to which clients log in. It requests a certificate of the client."""
        if client_authorities is not None:
            self.login_context = _make_login_context(certificate, key, client_authorities, client_revocations)
            self.login_context.sni_callback = self._request_certificate
        self._clients: WeakKeyDictionary[ssl.SSLObject, ClientCertificate] = WeakKeyDictionary()
        self._resumable: OrderedDict[bytes, ClientCertificate] = OrderedDict()
        """The verified certificates of clients, by leaf certificate (DER). The last used certificate is last.

        A resumed TLS session has no certificate chain, so the authority of its client is looked up here.
        """

    def _load(
        self,
    ) -> tuple[ssl.SSLContext, ssl.SSLContext | None, frozenset[bytes], revocations.RevokedCertificates | None]:
        """Load the files of the server's certificate.

        Returns:
            The TLS context for connections, the TLS context for logins of clients with certificates or None, the
            authorities of these certificates, and the revoked certificates or None.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = _make_server_context(*self._files)
        if self._client_authorities is None:
            return context, None, frozenset(), None
        login_context = _make_login_context(*self._files, self._client_authorities, self._client_revocations)
        revoked_certificates = None if self._client_revocations is None else _read_revoked(self._client_revocations)
        return context, login_context, frozenset(login_context.get_ca_certs(binary_form=True)), revoked_certificates

    def _present_certificate(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _request_certificate(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current_login or self._current

    def read_client_certificate(self, connection: ssl.SSLObject, now_ms: int) -> ClientCertificate | None:
        """Return the certificate of the client of a connection, or None if the client presented none.

        Raises:
            Unauthenticated: After the handshake, the certificate was revoked, its authority was removed, or the
                authority's revocation list was removed or has expired (the time of its field `nextUpdate` has passed).
        """
        client = self._clients.get(connection)
        if client is None:
            leaf = connection.getpeercert(binary_form=True)
            if leaf is None:
                return None
            client = self._clients[connection] = self._find_client(connection, leaf)
        if client.authority not in self._authorities:
            raise Unauthenticated(
                "The server no longer trusts the authority of the client's certificate; renew the certificate"
            )
        if self._revoked_certificates is not None:
            if self._revoked_certificates.includes(client.leaf):
                raise Unauthenticated("The client's certificate was revoked; log in with a new certificate")
            if not self._revoked_certificates.is_covered(client.leaf, now_ms):
                raise Unauthenticated(
                    "The server has no current revocation list for the authority of the client's certificate; ask the "
                    "server's operator to renew the list"
                )
        return client

    def _find_client(self, connection: ssl.SSLObject, leaf: bytes) -> ClientCertificate:
        """Return the certificate and its authority.

        A resumed session has no chain, so the chain of its first connection is used.

        Raises:
            Unauthenticated: The chain of the first connection is no longer known.
        """
        chain = _read_verified_chain(connection)
        client = ClientCertificate(leaf, chain[-1]) if chain else self._resumable.get(leaf)
        if client is None:
            raise Unauthenticated("The TLS session was resumed without its certificates; connect with a new session")
        self._resumable[leaf] = client
        self._resumable.move_to_end(leaf)
        if len(self._resumable) > _RESUMABLE_CERTIFICATES_MAX:
            self._resumable.popitem(last=False)
        return client

    async def reload(self) -> None:
        """Load the current files. If they cannot be used, the previous certificate and authorities stay in use.

        A thread parses them, because a long revocation list would delay all requests.
        """
        self._file_state = self._read_state()
        try:
            contents = await asyncio.to_thread(self._load)
            self._current, self._current_login, self._authorities, self._revoked_certificates = contents
        except ConfigError as error:
            _log.error("the new certificate cannot be used; the previous certificate stays in use", error=error.message)
        else:
            # Other workers may still present the previous certificate, so `leaves` returns it too.
            self._leaves = [self._leaves[-1], _read_leaf(self._files[0])]
            _log.info("the certificate was loaded again", file=str(self._files[0]))

    def leaves(self) -> str:
        """Return all certificates that workers of this server may present now, as PEM, without their chains.

        All workers load a renewed certificate within `RELOAD_S`. Therefore the result contains the current certificate,
        the previous certificate, and the certificate in the file.
        """
        leaves = list(self._leaves)
        with suppress(OSError):
            leaves.append(_read_leaf(self._files[0]))
        return "\n".join(dict.fromkeys(filter(None, leaves)))

    def request_reload(self) -> None:
        """Make `watch` reload the files immediately, even if they have not changed."""
        self._reload_event.set()

    async def watch(self) -> None:
        """Reload the files after each change and each request, until the task is cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reload_event.wait(), RELOAD_S)
            if self._reload_event.is_set() or self._read_state() != self._file_state:
                self._reload_event.clear()
                await self.reload()

    def _read_state(self) -> list[tuple[int, int, int]]:
        return _read_file_states([*self._files, *filter(None, [self._client_authorities, self._client_revocations])])


def _read_file_states(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Return numbers that change when a file is replaced, for each file that exists."""
    states = []
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            states.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return states


def _read_verified_chain(connection: ssl.SSLObject) -> list[bytes]:
    """Return the chain (DER) that the handshake verified, from the client's certificate to a trusted certificate.

    Python 3.13 has a public method. Earlier versions have it only on the inner object. The list is empty if there is no
    such method, or if the connection has no verified chain.
    """
    source: Any = connection if hasattr(connection, "get_verified_chain") else getattr(connection, "_sslobj", None)
    if source is None or not hasattr(source, "get_verified_chain"):
        return []
    chain = source.get_verified_chain() or []
    return [entry if isinstance(entry, bytes) else entry.public_bytes(_DER) for entry in chain]


def _read_leaf(path: Path) -> str:
    """Return the first certificate of a PEM file, or "" if it has none.

    Raises:
        OSError: The file cannot be read.
    """
    first_part, end, _ = path.read_text(encoding="utf-8", errors="replace").partition(_PEM_END)
    return first_part[first_part.find("-----BEGIN") :] + end if end else ""


def create_server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server with the current files.

    Raises:
        OSError: A file cannot be read, or the files do not match (ssl.SSLError).
        ConfigError: The key has a passphrase.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_passphrase() -> str:
        raise ConfigError(
            f"The TLS key {key} has a passphrase; use a key without a passphrase that only the server can read"
        )

    context.load_cert_chain(certificate, key, password=refuse_passphrase)
    return context


def _make_server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server.

    The files are first read separately, because the error of the TLS library does not name the file.

    Raises:
        ConfigError: A file cannot be read, or the files do not match. The message names the file with the problem.
    """
    for path, file_kind in ((certificate, "certificate"), (key, "key")):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"Cannot read the TLS {file_kind} {path}: {error.strerror}") from None
    try:
        return create_server_tls(certificate, key)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"The TLS certificate {certificate} and key {key} are not a matching PEM pair: {reason}"
        ) from None


def _read_revoked(path: Path) -> revocations.RevokedCertificates:
    try:
        return revocations.RevokedCertificates(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the revocation lists of clients in {path}: {error}") from None


def _make_login_context(
    certificate: Path, key: Path, authorities: Path, revocations_path: Path | None
) -> ssl.SSLContext:
    """Return the TLS context of a server that requests a certificate of one of the authorities from clients.

    A client can have no certificate, because the server's own processes and probes have none. A certificate of another
    authority, or an expired or revoked one, fails the handshake. There are no session tickets, because a ticket would
    still be accepted after its certificate has expired.

    Raises:
        ConfigError: A file cannot be used.
    """
    context = _make_server_context(certificate, key)
    try:
        context.load_verify_locations(cafile=authorities)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise ConfigError(f"Cannot read the authorities of clients in {authorities}: {reason}") from None
    if not context.get_ca_certs():
        raise ConfigError(f"The file {authorities} has no certificate of an authority of clients: add one")
    if revocations_path is not None:
        _load_revocations(context, revocations_path)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _load_revocations(context: ssl.SSLContext, path: Path) -> None:
    """Make handshakes check certificates of clients against revocation lists.

    The library does not report what it has loaded, so the numbers of certificates and lists before and after are
    compared.

    Raises:
        ConfigError: The file cannot be read, has no list, or has a certificate, which the server would trust.
    """
    stats_before = context.cert_store_stats()
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise ConfigError(f"Cannot read the revocation lists of clients in {path}: {reason}") from None
    stats_after = context.cert_store_stats()
    if stats_after["x509"] != stats_before["x509"]:
        raise ConfigError(
            f"The file {path} has certificates in addition to the revocation lists of clients: remove the certificates"
        )
    if stats_after["crl"] == stats_before["crl"]:
        raise ConfigError(f"The file {path} has no revocation list of an authority of clients: add one")
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


class _IdentifiedContext(ssl.SSLContext):
    """The context of a client with a certificate. Each new connection presents the certificate in the current files."""

    _files: tuple[Path, Path]
    _file_state: list[tuple[int, int, int]]

    def load_client_certificate(self, certificate: Path, key: Path) -> None:
        """Load the client certificate and its key, and remember the files, so that changed files are loaded again.

        Raises:
            ValueError: A file cannot be used. The message names both files.
        """
        self._files, self._file_state = (certificate, key), _read_file_states((certificate, key))
        try:
            self.load_cert_chain(certificate, key, password=_refuse_client_passphrase)
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or error
            raise ValueError(
                f"The certificate {certificate} of {CLIENT_CERTIFICATE_VARIABLE} and the key {key} are not a matching "
                f"PEM pair: {reason}"
            ) from None

    def _reload(self) -> None:
        """Load the certificate again if its files have changed. If they are invalid, keep the old certificate.

        Invalid files are read again for the next connection.
        """
        state = _read_file_states(self._files)
        if state == self._file_state:
            return
        try:
            # A failed load would leave the new certificate with the old key, so a separate context tries the files.
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(*self._files, password=_refuse_client_passphrase)
            self.load_cert_chain(*self._files, password=_refuse_client_passphrase)
        except (OSError, ValueError) as error:
            _log.warning("the new client certificate cannot be used", file=str(self._files[0]), error=str(error))
        else:
            self._file_state = state

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        self._reload()
        return super().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        self._reload()
        return super().wrap_bio(*arguments, **options)


def _refuse_client_passphrase() -> str:
    raise ValueError(f"The key of {CLIENT_KEY_VARIABLE} has a passphrase; use a key without a passphrase")


def build_seamark_context(authorities: str | None = None) -> ssl.SSLContext | None:
    """Return the TLS context with which clients connect to a Seamark server.

    If SEAMARK_CLIENT_CERT names a file, the context presents the client certificate in it, with the key in the file of
    SEAMARK_CLIENT_KEY or in the same file. Otherwise, the result is that of `build_client_context`.

    Args:
        authorities: The file of trusted authorities. None: the file of SEAMARK_CA, if it is set.

    Raises:
        ValueError: A file cannot be used. The message names it.
    """
    certificate = os.environ.get(CLIENT_CERTIFICATE_VARIABLE)
    if not certificate:
        return build_client_context(authorities)
    context = _IdentifiedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_default_certs()
    _trust_authorities(context, authorities or os.environ.get(CA_VARIABLE))
    context.load_client_certificate(Path(certificate), Path(os.environ.get(CLIENT_KEY_VARIABLE) or certificate))
    return context


def build_client_context(authorities: str | None = None) -> ssl.SSLContext | None:
    """Return the TLS context with which clients verify servers, or None to trust only the system's authorities.

    Args:
        authorities: The file of additional trusted authorities. None: the file of SEAMARK_CA, if it is set.

    Raises:
        ValueError: The file has no certificates.
    """
    path = authorities or os.environ.get(CA_VARIABLE)
    if not path:
        return None
    context = ssl.create_default_context()
    _trust_authorities(context, path)
    return context


def _trust_authorities(context: ssl.SSLContext, path: str | None) -> None:
    """Trust the authorities in a file. Without a path, do nothing."""
    if not path:
        return
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"Cannot read authorities from {path}: {error.strerror or error}") from None


def trust_only(certificates: str) -> ssl.SSLContext:
    """Return a client's context that accepts only servers with one of these certificates (PEM).

    It is for processes that a server starts on its own machine. These processes have the server's certificate, and
    connect to the server at an address that the certificate need not contain. Therefore the name is not compared.

    Raises:
        ValueError: The text has no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # Trust the certificate itself, not its issuer.
    try:
        context.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ValueError(f"The certificates of the server cannot be read: {error.reason or error}") from None
    return context


@cache
def find_or_create_authorities_file() -> str | None:
    """Return the file of authorities that this process trusts for S3 stores, or None for the system's authorities.

    If AWS_CA_BUNDLE is set, it names the file. Otherwise, if SEAMARK_CA is set, the file is a new temporary file with
    the authorities of SEAMARK_CA and of the system. SEAMARK_CA is needed if the store is behind the objects gateway,
    which has the server's certificate.
    """
    aws_bundle, seamark_bundle = os.environ.get("AWS_CA_BUNDLE"), os.environ.get(CA_VARIABLE)
    if aws_bundle or not seamark_bundle:
        return aws_bundle or None
    system = ssl.get_default_verify_paths().cafile
    with tempfile.NamedTemporaryFile("wb", prefix="seamark-ca-", suffix=".pem", delete=False) as file:
        for path in filter(None, (system, seamark_bundle)):
            file.write(Path(path).read_bytes() + b"\n")
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name
