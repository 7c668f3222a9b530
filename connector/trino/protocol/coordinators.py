"""Chooses the Trino coordinator behind the proxy that receives a request.

New statements are distributed round-robin. Later requests for a statement are sent to the coordinator that received the
statement. The proxy does not store this coordinator: if there are several, each receives its own path prefix in
`X-Forwarded-Prefix`, and Trino adds the prefix to every URI that it returns (nextUri, infoUri, spooled segments, OAuth
redirects). The prefix is a hash of the coordinator's URL, so every proxy with the same coordinators understands it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

PROXY_PATH = "/seamark"
"""The prefix of the paths that the proxy itself answers. Trino has no paths with this prefix."""
_PREFIX = f"{PROXY_PATH}/c/"
_HASH_DIGITS = 8
"""The number of hexadecimal digits in a prefix, which only have to differ between the coordinators of one proxy."""


class UnknownCoordinator(Exception):
    """Raised if a path has the prefix of a coordinator that is not behind this proxy."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A coordinator behind the proxy."""

    url: str
    """The URL of the coordinator. It has only a scheme, a host and a port."""
    prefix: str
    """The path prefix of the coordinator's URIs. Empty if it is the only coordinator."""

    def __str__(self) -> str:
        return self.url


class Coordinators:
    """The coordinators behind a proxy.

    Raises:
        ValueError: A URL is invalid, or has more than scheme, host and port.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        origins = [_read_origin(url) for url in urls]
        if not origins or len(set(origins)) < len(origins):
            raise ValueError(
                f"The coordinators are {', '.join(origins) or 'none'}; set at least one coordinator, and each of "
                "them only once"
            )
        has_several = len(origins) > 1
        self.all = tuple(Coordinator(origin, _make_prefix(origin) if has_several else "") for origin in origins)
        self._by_prefix = {_make_prefix(coordinator.url): coordinator for coordinator in self.all}
        self._turn = itertools.count()

    def round_robin(self) -> tuple[Coordinator, ...]:
        """Return all coordinators. Each call rotates the order by one.

        The first coordinator receives the request. The others are used if the first cannot be reached.
        """
        start = next(self._turn) % len(self.all)
        return self.all[start:] + self.all[:start]

    def resolve(self, target: str) -> tuple[Coordinator | None, str]:
        """Return the coordinator with the target's path prefix, or None, and the target without the prefix.

        Raises:
            UnknownCoordinator: No coordinator has the prefix.
        """
        if not target.startswith(_PREFIX):
            return None, target
        end = target.find("/", len(_PREFIX))
        prefix, path = (target, "/") if end < 0 else (target[:end], target[end:])
        coordinator = self._by_prefix.get(prefix)
        if coordinator is None:
            raise UnknownCoordinator(prefix.removeprefix(_PREFIX))
        return coordinator, path

    def from_referer(self, referer: str) -> Coordinator | None:
        """Return the coordinator whose prefix the Referer has, or None.

        Trino's web console requests paths without the prefix of its page.
        """
        try:
            return self.resolve(urlsplit(referer).path)[0]
        except (UnknownCoordinator, ValueError):
            return None


def _make_prefix(url: str) -> str:
    return _PREFIX + hashlib.sha256(url.encode()).hexdigest()[:_HASH_DIGITS]


def _read_origin(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not the URL of a coordinator: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a coordinator; a URL starts with http:// or https://")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            f"{url!r} has parts in addition to a scheme, a host and a port; remove them from the URL of the coordinator"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
