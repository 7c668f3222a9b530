"""Connections of a client to a server, and when a request is repeated."""

from __future__ import annotations

from typing import Any

import urllib3

from seamark.metaserver.tls import only_these, trusted_by_clients

_CONNECTIONS = 8
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 10
_RETRY_AFTER_MAX_S = 30


def open_pool(timeout: urllib3.Timeout, certificates: str) -> urllib3.PoolManager:
    """Return a pool of connections. `certificates`: a server has to present one of these (PEM); empty: any certificate
    of the authorities that clients trust."""
    tls: dict[str, Any] = {"ssl_context": trusted_by_clients()}
    if certificates:
        tls = {"ssl_context": only_these(certificates), "assert_hostname": False}
    return urllib3.PoolManager(maxsize=_CONNECTIONS, timeout=timeout, **tls)


def retry_policy(times: int, repeatable: bool) -> urllib3.Retry:
    """Return when a request is repeated. `repeatable`: also after the server may have processed it."""
    return urllib3.Retry(
        total=times,
        read=None if repeatable else 0,
        other=None if repeatable else 0,
        # Of what is not repeatable only a 503 with Retry-After, which urllib3 honours: those without are
        # a proxy's, and may be about a request that it had sent on.
        status_forcelist=(503,) if repeatable else (),
        allowed_methods=None,  # POST included
        backoff_factor=_BACKOFF_S,
        backoff_max=_BACKOFF_MAX_S,
        backoff_jitter=_BACKOFF_S,
        raise_on_status=False,
        retry_after_max=_RETRY_AFTER_MAX_S,
    )
