"""TLS: a server certificate that is reloaded while the server runs, and the authorities that Seamark's
clients trust.

An operator renews a certificate by replacing its files. The server checks the files every few seconds,
and immediately on SIGHUP. New handshakes use the new certificate when certificate and key match; open
connections continue. If the files do not match, this is logged, and the previous certificate stays in
use.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import ssl
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import structlog

from seamark.formats.runtime.errors import ConfigError

CA_VARIABLE = "SEAMARK_CA"
"""The environment variable for a PEM file with authorities that Seamark's clients trust in addition to the
system's.
"""
RELOAD_S = 5.0
_PEM_END = "-----END CERTIFICATE-----"
_log = structlog.get_logger("seamark.tls")


class Certificate:
    """A server's certificate chain and key, both PEM.

    Raises:
        ConfigError: A file is unusable; the message names it.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._read_state()
        self._current = _make_server_context(certificate, key)
        self._leaves = [_read_leaf(certificate)]
        """The previous certificate, and then the certificate for new connections."""
        self.context = _make_server_context(certificate, key)
        """The context for servers; it presents the current certificate."""
        self.context.sni_callback = self._present_certificate

    def _present_certificate(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def reload(self) -> None:
        """Load the current files. If they are unusable, the previous certificate stays in use."""
        self._seen = self._read_state()
        try:
            self._current = _make_server_context(*self._files)
        except ConfigError as error:
            _log.error("the new certificate cannot be used; the previous certificate stays in use", error=error.message)
        else:
            self._leaves = [self._leaves[-1], _read_leaf(self._files[0])]
            _log.info("the certificate was loaded again", file=str(self._files[0]))

    def leaves(self) -> str:
        """Return all certificates that workers of this server may present now, as PEM, without their chains.

        All workers load a renewed certificate within `RELOAD_S`. Therefore the result has the current
        certificate, the previous certificate, and the certificate of the file.
        """
        leaves = list(self._leaves)
        with suppress(OSError):
            leaves.append(_read_leaf(self._files[0]))
        return "\n".join(dict.fromkeys(filter(None, leaves)))

    async def watch(self) -> None:
        """Reload the files after each change, until the task is cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            if self._read_state() != self._seen:
                self.reload()

    def _read_state(self) -> list[tuple[int, int, int]]:
        states = []
        for path in self._files:
            with suppress(OSError):
                status = os.stat(path)
                states.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return states


def _read_leaf(path: Path) -> str:
    """Return the first certificate of a PEM file, or "" if it has none.

    Raises:
        OSError: The file cannot be read.
    """
    before, end, _ = path.read_text(encoding="utf-8", errors="replace").partition(_PEM_END)
    return before[before.find("-----BEGIN") :] + end if end else ""


def create_server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server, with the current files.

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


def build_client_context(authorities: str | None = None) -> ssl.SSLContext | None:
    """Return the context with which clients verify servers.

    It trusts the authorities of the given file, or of SEAMARK_CA. Return None to trust only the system's
    authorities.

    Raises:
        ValueError: The file has no certificates.
    """
    path = authorities or os.environ.get(CA_VARIABLE)
    if not path:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"Cannot read authorities from {path}: {error.strerror or error}") from None
    return context


def trust_only(certificates: str) -> ssl.SSLContext:
    """Return a client's context that accepts a server with one of these certificates (PEM), and no other server.

    It is for processes that a server starts on its own machine. Such processes have the server's certificate, and
    connect to the server at an address that the certificate need not name. Therefore the name is not compared.

    Raises:
        ValueError: The text has no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # The certificate itself is trusted, not its issuer.
    try:
        context.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ValueError(f"The certificates of the server cannot be read: {error.reason or error}") from None
    return context


@cache
def find_authorities_file() -> str | None:
    """Return the file of authorities with which this process verifies an S3 store, or None for the system's.

    If AWS_CA_BUNDLE is set, it names the file. Otherwise, if SEAMARK_CA is set, the file is a new temporary
    file with the authorities of SEAMARK_CA and of the system: the store may be behind the objects gateway,
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
