"""TLS: a server certificate that is reloaded while the server runs, and the authorities that Seamark's clients trust.

A certificate is renewed by replacing its files. They are checked every few seconds, and immediately on SIGHUP. New
handshakes use the new certificate once certificate and key match; open connections continue. Files that do not match
are logged, and the previous certificate stays in use.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path

import structlog

from seamark.metaserver.errors import ConfigError

CA_VARIABLE = "SEAMARK_CA"
"""The environment variable for a PEM file with authorities that our clients trust in addition to the system's."""
RELOAD_S = 5.0
_log = structlog.get_logger("seamark.tls")


class Certificate:
    """A server's certificate chain and key, both PEM. ConfigError, with the file, if one is unusable."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._state()
        self._current = _server_context(certificate, key)
        self.context = _server_context(certificate, key)
        """For servers; it presents the current certificate."""
        self.context.sni_callback = self._present

    def _present(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def reload(self) -> None:
        """Loads the current files."""
        self._seen = self._state()
        try:
            self._current = _server_context(*self._files)
        except ConfigError as error:
            _log.error("the certificate stays as it was", error=error.message)
        else:
            _log.info("the certificate is loaded again", file=str(self._files[0]))

    async def watch(self) -> None:
        """Reloads the files after each change; runs until it is cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            if self._state() != self._seen:
                self.reload()

    def _state(self) -> list[tuple[int, int, int]]:
        states = []
        for path in self._files:
            with suppress(OSError):
                status = os.stat(path)
                states.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return states


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS context of a server, with the current files.

    OSError (including ssl.SSLError) for files that cannot be read or do not match; ConfigError for a key with a
    passphrase.
    """
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
        raise ConfigError(
            f"The TLS certificate {certificate} and key {key} are not a matching PEM pair: {reason}"
        ) from None


def trusted_by_clients(authorities: str | None = None) -> ssl.SSLContext | None:
    """The context with which clients verify servers: authorities of the given file or of SEAMARK_CA; None for the
    system's.

    ValueError for a file without certificates.
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
