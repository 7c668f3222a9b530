"""Binds the sockets on which a server listens, and makes its URL."""

from __future__ import annotations

import socket

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.guard import check_binding
from seamark.metaserver.settings.settings import Settings


def bind_socket(settings: Settings, *, shared: bool, port: int | None = None) -> socket.socket:
    """Return a bound TCP socket that does not listen yet.

    Args:
        settings: The settings.
        shared: Whether other workers may bind the same port (SO_REUSEPORT).
        port: The port. The default is the port in the settings.

    Raises:
        ConfigError: The address is in use, does not belong to this machine, or would serve other machines without
            authentication.
    """
    check_binding(settings)
    port = settings.port if port is None else port
    try:
        family = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot resolve the host {settings.host!r}: {reason}; set host to an address") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((settings.host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot bind {settings.host}:{port}: {error.strerror}; choose another --host or --port "
            "(0 takes a free one)"
        ) from None
    return sock


def make_server_url(settings: Settings, sock: socket.socket) -> str:
    """Return the base URL of `sock`. If it is bound to all addresses, the URL has the loopback address."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not bound
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
