"""What a server must not start with: an open door, or one that nobody has a key to.

Without a login everybody is an admin, so then only this machine may knock. The refusal carries the commands that mend
it, since the one who reads it wants to go on.
"""

from __future__ import annotations

import ipaddress
import shlex
import socket
from functools import lru_cache

import structlog

from metaserver.access.tokens import live_tokens
from metaserver.clock import Clock
from metaserver.errors import ConfigError
from metaserver.settings import Settings, redact_url
from metaserver.store.port import PointerStore

_log = structlog.get_logger("seamark.access")


def check_binding(settings: Settings) -> None:
    """ConfigError when the server would listen beyond loopback without asking for a login.

    A host name counts by every address that it stands for. Looks it up, so it may block."""
    if settings.auth != "none" or is_loopback(settings.host):
        return
    raise ConfigError(
        f"Binding {settings.host or 'all addresses'} with auth = none would make everybody who reaches it an admin. "
        f"Make a token and ask for it:\n  {token_command(settings)}\n  {serve_command(settings)}\n"
        "Or stay on this machine with --host 127.0.0.1"
    )


async def check_logins(settings: Settings, store: PointerStore, clock: Clock) -> None:
    """ConfigError when only tokens are accepted and there is no live one; a warning when OIDC users may do nothing."""
    if settings.auth == "token" and not await live_tokens(store, clock):
        raise ConfigError(
            "auth = token, but there is no live token, so nobody could log in. Make one:\n  " + token_command(settings)
        )
    if settings.auth == "oidc" and not settings.oidc_roles_claim and not await store.grants(None):
        _log.warning("nobody has a grant and oidc_roles_claim is empty: give one with seamark grant add oidc:<subject>")


def is_loopback(host: str) -> bool:
    """Whether all that `host` stands for is loopback. Empty means all addresses, so no. ConfigError if unknown."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot resolve the host {host!r}: {error}") from None
    return bool(found) and all(is_loopback_address(str(address[0])) for *_, address in found)


@lru_cache(maxsize=1024)
def is_loopback_address(text: str) -> bool:
    """Of an IPv4 or IPv6 address as text, with or without a zone; an IPv4 one within IPv6 counts as itself."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def token_command(settings: Settings) -> str:
    return f"seamark token create admin --role admin {_where(settings)}"


def serve_command(settings: Settings) -> str:
    host = shlex.quote(settings.host)
    return f"seamark serve --auth token --host {host} --port {settings.port} {_where(settings)}"


def _where(settings: Settings) -> str:
    where = f"--home {shlex.quote(str(settings.home))}"
    if settings.database:
        where += f" --database {shlex.quote(redact_url(settings.database))}"
    return where
