"""TLS: the certificate of a server that is replaced while it serves, and whom clients of ours trust.

A certificate is renewed by replacing its files. They are looked at every few seconds, and at once on SIGHUP; new
handshakes get the new one as soon as certificate and key are a pair, connections that are open go on. Files that are
no pair are logged, and the certificate before them stays.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path

import structlog

from metaserver.errors import ConfigError

CA_VARIABLE = "SEAMARK_CA"
"""Names a PEM file with the authorities that our own clients trust, besides those of the system."""
RELOAD_S = 5.0
_log = structlog.get_logger("seamark.tls")


class Certificate:
    """A server's certificate chain and key, both PEM. ConfigError names the file that will not do."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._state()
        self._current = _server_context(certificate, key)
        self.context = _server_context(certificate, key)
        """For servers; what it presents follows the files."""
        self.context.sni_callback = self._present

    def _present(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def reload(self) -> None:
        """Takes the files as they are now."""
        self._seen = self._state()
        try:
            self._current = _server_context(*self._files)
        except ConfigError as error:
            _log.error("the certificate stays as it was", error=error.message)
        else:
            _log.info("the certificate is loaded again", file=str(self._files[0]))

    async def watch(self) -> None:
        """Reloads whenever the files have changed; runs until it is cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            if self._state() != self._seen:
                self.reload()

    def _state(self) -> list[tuple[int, int, int]]:
        found = []
        for path in self._files:
            with suppress(OSError):
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server's connections, with what the files hold now. OSError (ssl.SSLError is one) for files that cannot be
    read or are no pair, ConfigError for a key with a passphrase."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_passphrase() -> str:
        raise ConfigError(f"The TLS key {key} has a passphrase; give one without, that only the server can read")

    context.load_cert_chain(certificate, key, password=refuse_passphrase)
    return context


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    for path, what in ((certificate, "certificate"), (key, "key")):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"Cannot read the TLS {what} {path}: {error.strerror}") from None
    try:
        return server_tls(certificate, key)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"The TLS certificate {certificate} and key {key} are no pair in PEM: {reason}") from None


def trusted_by_clients(authorities: str | None = None) -> ssl.SSLContext | None:
    """What clients of ours verify servers with: the file named, or by SEAMARK_CA; None is what the system trusts.

    ValueError for a file that holds no certificates."""
    path = authorities or os.environ.get(CA_VARIABLE)
    if not path:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"Cannot read authorities from {path}: {error.strerror or error}") from None
    return context
