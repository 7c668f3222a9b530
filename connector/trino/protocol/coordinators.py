"""Trino's coordinators behind the proxy, and which of them a request is for.

New statements go round. What belongs to a statement stays with the coordinator that took it, and the proxy remembers
nothing for that: where there are several, each is told in `X-Forwarded-Prefix` to put a path of its own before every
URI that it hands out, and Trino does (nextUri, infoUri, spooled segments, OAuth's redirects). The path is drawn from
the coordinator's URL, so that any proxy over the same coordinators understands what another one's clients bring.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

OWN = "/seamark"
"""Below it lies what is the proxy's own; Trino has nothing there."""
_PREFIX = f"{OWN}/c/"


class NoSuchCoordinator(Exception):
    """A path with the prefix of a coordinator that is not, or no longer, behind this proxy."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    url: str
    """Scheme, host and port, nothing after them."""
    prefix: str
    """What its URIs begin with; empty where it is the only one."""

    def __str__(self) -> str:
        return self.url


class Coordinators:
    """ValueError for a URL that is none, or more than scheme, host and port."""

    def __init__(self, urls: Sequence[str]) -> None:
        origins = [_origin(url) for url in urls]
        if not origins or len(set(origins)) < len(origins):
            raise ValueError(f"{', '.join(origins) or 'none'}: at least one coordinator is needed, and none twice")
        several = len(origins) > 1
        self.all = tuple(Coordinator(one, _prefix(one) if several else "") for one in origins)
        self._by_prefix = {_prefix(one.url): one for one in self.all}
        self._turn = itertools.count()

    def in_turn(self) -> tuple[Coordinator, ...]:
        """All of them, another one first each time: who cannot be reached is passed over."""
        first = next(self._turn) % len(self.all)
        return self.all[first:] + self.all[:first]

    def named(self, target: str) -> tuple[Coordinator | None, str]:
        """Whose prefix a request's target begins with, None for none, and the target without it. NoSuchCoordinator."""
        if not target.startswith(_PREFIX):
            return None, target
        end = target.find("/", len(_PREFIX))
        prefix, rest = (target, "/") if end < 0 else (target[:end], target[end:])
        found = self._by_prefix.get(prefix)
        if found is None:
            raise NoSuchCoordinator(prefix.removeprefix(_PREFIX))
        return found, rest

    def of_page(self, referer: str) -> Coordinator | None:
        """Whose page asks: Trino's web console asks for paths without the prefix that its page came by."""
        try:
            return self.named(urlsplit(referer).path)[0]
        except (NoSuchCoordinator, ValueError):
            return None


def _prefix(url: str) -> str:
    return _PREFIX + hashlib.sha256(url.encode()).hexdigest()[:8]


def _origin(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no address of a coordinator: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address of a coordinator: it begins with http:// or https://")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{url!r}: an address of a coordinator is a scheme, a host and a port, and nothing else")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
