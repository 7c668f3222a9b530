"""Opens a client's connections to a server, and decides when a client repeats a request.

Requests are repeated after failed connections and after some responses.
"""

from __future__ import annotations

import os
import random
from typing import Any

import urllib3

from seamark.formats.runtime.tls import build_seamark_context, trust_only

_CONNECTIONS_MAX = 64
"""The maximum number of idle connections: the maximum number of threads of an import."""
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 10
_RETRY_AFTER_MAX_S = 30


class ClientConnections:
    """The connections that a client and its copies share. Each process opens its own connections."""

    def __init__(self, timeout: urllib3.Timeout, certificates: str) -> None:
        """Create a pool without connections.

        Args:
            certificates: The certificates (PEM) that are accepted from the server. If it is empty, certificates of
                trusted authorities are accepted.
        """
        self._timeout, self._certificates = timeout, certificates
        self._pool: tuple[int, urllib3.PoolManager] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def get(self) -> urllib3.PoolManager:
        """Return the connections of this process.

        A process and its forked child must not share a connection, because each could receive the other's responses.
        """
        pool = self._pool
        if pool is None or pool[0] != os.getpid():
            pool = self._pool = (os.getpid(), _open_pool(self._timeout, self._certificates))
        return pool[1]

    def close_idle(self) -> None:
        """Close the idle connections. Later requests open new connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            _, connections = pool
            connections.clear()  # This closes the idle connections. A running request keeps its connection.


def _open_pool(timeout: urllib3.Timeout, certificates: str) -> urllib3.PoolManager:
    tls: dict[str, Any] = {"ssl_context": build_seamark_context()}
    if certificates:
        tls = {"ssl_context": trust_only(certificates), "assert_hostname": False}
    return urllib3.PoolManager(maxsize=_CONNECTIONS_MAX, timeout=timeout, **tls)


def make_connection_retries(times: int, *, repeatable: bool) -> urllib3.Retry:
    """Return the rules for repeats after failed connections. `compute_wait_s` has the rules for responses.

    A request that is not repeatable is repeated only if no connection was made. It is not repeated after an error of
    reading (`read`, `other`), because the server may have received it.

    Args:
        times: The maximum number of repeats.
        repeatable: Whether the request can be repeated even if the server has received it.
    """
    return urllib3.Retry(
        total=times,
        read=None if repeatable else 0,
        other=None if repeatable else 0,
        status=0,
        respect_retry_after_header=False,
        allowed_methods=None,  # All methods are repeated, including POST.
        backoff_factor=_BACKOFF_S,
        backoff_max=_BACKOFF_MAX_S,
        backoff_jitter=_BACKOFF_S,
        raise_on_status=False,
    )


def compute_wait_s(status: int, retry_after: str | None, number: int, *, repeatable: bool) -> float | None:
    """Return the wait in seconds before a request is repeated, or None if it is not repeated after this response.

    A request that is not repeatable is repeated only after a 503 or 429 with Retry-After. A 503 without this header
    comes from a proxy, which may already have forwarded the request.

    Args:
        status: The status of the response.
        retry_after: The header Retry-After of the response, or None.
        number: The number of earlier repeats. After a 503 without Retry-After, the first repeat has no wait.
        repeatable: Whether the request can be repeated even if the server has already processed it.
    """
    if status in (429, 503) and retry_after is not None and retry_after.isascii() and retry_after.isdecimal():
        # The first digits are sufficient, because any number of 9 digits is above the maximum.
        return float(min(int(retry_after[:9]), _RETRY_AFTER_MAX_S))
    if status != 503 or not repeatable:
        return None
    jitter_s = random.SystemRandom().uniform(0, _BACKOFF_S)
    return min(_BACKOFF_MAX_S, _BACKOFF_S * 2**number) + jitter_s if number else 0.0
