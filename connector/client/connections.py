"""Connections of a client to a server."""

from __future__ import annotations

from typing import Any

import urllib3

from seamark.formats.runtime.tls import only_these, trusted_by_clients

_CONNECTIONS = 8


def open_pool(timeout: urllib3.Timeout, certificates: str) -> urllib3.PoolManager:
    """Return a pool of connections. `certificates`: a server has to present one of these (PEM); empty: any certificate
    of the authorities that clients trust."""
    tls: dict[str, Any] = {"ssl_context": trusted_by_clients()}
    if certificates:
        tls = {"ssl_context": only_these(certificates), "assert_hostname": False}
    return urllib3.PoolManager(maxsize=_CONNECTIONS, timeout=timeout, **tls)
