"""Checks that a server runs at its start to refuse unsafe or unusable access settings.

Without logins, every client is an admin, so the server may listen only on loopback. The error names
the commands that change the settings.
"""

from __future__ import annotations

import ipaddress
import shlex
import socket
from functools import lru_cache

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.certificates.rules import read_rules
from seamark.metaserver.access.tokens import list_live_tokens
from seamark.metaserver.settings.issuers import read_issuers
from seamark.metaserver.settings.settings import Settings, redact_url
from seamark.metaserver.store.port import PointerStore

_log = structlog.get_logger("seamark.access")


def check_binding(settings: Settings) -> None:
    """Check that a server without a required login listens only on loopback addresses.

    All addresses to which a host name resolves are checked. The function may block while it resolves the name.

    Raises:
        ConfigError: The server would listen on an address that is not a loopback address.
    """
    if settings.auth != "none" or is_loopback(settings.host):
        return
    raise ConfigError(
        f"Binding {settings.host or 'all addresses'} with auth = none would make every client an admin. "
        f"Create a token and require it:\n  {format_token_command(settings)}\n  {format_serve_command(settings)}\n"
        "Or listen on this machine only, with --host 127.0.0.1"
    )


async def check_logins(settings: Settings, store: PointerStore, clock: Clock) -> None:
    """Check that at least one token can log in. If no OIDC user or certificate has a right, log a warning.

    Raises:
        ConfigError: The server accepts only tokens, and no token is valid.
    """
    if settings.auth == "token" and not await list_live_tokens(store, clock):
        raise ConfigError(
            "auth = token, but there is no live token, so no client could log in. Create one:\n  "
            + format_token_command(settings)
        )
    if settings.auth == "cert" and not any(rule.has_rights_outside_database for rule in read_rules(settings)):
        if not await store.grants(None):
            _log.warning(
                "no client certificate has a grant: add one with seamark grant add cert:<name>, or roles to the rules"
            )
        return
    has_no_roles = settings.auth == "oidc" and not any(issuer.roles_claim for issuer in read_issuers(settings))
    if has_no_roles and not await store.grants_page(None, None, 1):
        _log.warning(
            "no user has a grant and no issuer has a roles claim: add a grant with "
            "seamark grant add <issuer>:<subject>, such as oidc:ann"
        )


def is_loopback(host: str) -> bool:
    """Return whether `host` resolves only to loopback addresses.

    An empty host means all addresses, so the result is False.

    Raises:
        ConfigError: The host cannot be resolved.
    """
    if not host:
        return False
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot resolve the host {host!r}: {error}") from None
    return bool(addresses) and all(is_loopback_address(str(address[0])) for *_, address in addresses)


@lru_cache(maxsize=1024)
def is_loopback_address(text: str) -> bool:
    """Return whether an address is a loopback address: IPv4, IPv4 mapped to IPv6, or IPv6 with a zone."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    ipv4_address = getattr(address, "ipv4_mapped", None)
    return (ipv4_address or address).is_loopback


def format_token_command(settings: Settings) -> str:
    return f"seamark token create admin --role admin {_describe_server_options(settings)}"


def format_serve_command(settings: Settings) -> str:
    host = shlex.quote(settings.host)
    return f"seamark serve --auth token --host {host} --port {settings.port} {_describe_server_options(settings)}"


def _describe_server_options(settings: Settings) -> str:
    options = f"--home {shlex.quote(str(settings.home))}"
    if settings.database:
        options += f" --database {shlex.quote(redact_url(settings.database))}"
    return options
