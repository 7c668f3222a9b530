"""Checks that the operator allows the receivers to which a further warehouse sends events.

The check compares parsed addresses, because the clients of HTTP, NATS and Kafka read an address in different ways. An
address that two parsers could read differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import structlog

from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.metaserver.settings.settings import Settings, redact_url
from seamark.metaserver.timeline.addresses import parse_subject, parse_topic

EVENT_TARGETS = ("webhook_urls", "event_kafka", "event_nats", "openlineage_url")
"""The settings that name receivers of events."""
WEBHOOKS_MAX = 16
"""The maximum number of webhooks of a warehouse."""
_DEFAULT_PORTS = {"http": 80, "https": 443, "nats": 4222, "tls": 4222, "kafka": 9092}
_LIST_SCHEMES = ("kafka", "nats", "tls")
"""The schemes whose addresses can name several servers, separated by commas."""
_UNSAFE = re.compile(r"[^\x21-\x7e]|[\\?#]")
"""A character that an address must not have: a space, a non-ASCII character, or one that parsers read differently."""
_USER = re.compile(r"[^@/\[\]]*@")
"""The user and the password before the host."""
_HOST = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_log = structlog.get_logger("seamark.warehouses")


class _Server(NamedTuple):
    scheme: str
    host: str
    port: int


class _Target(NamedTuple):
    servers: frozenset[_Server]
    path: str


def check_event_targets(name: str, value: Any, settings: Settings) -> None:
    """Check that the operator allows the receivers of events in a setting of a warehouse.

    The messages do not show passwords and queries, which can be secret.

    Args:
        name: The name of the setting, one of `EVENT_TARGETS`.
        value: The value of the setting, converted to its type.
        settings: The settings of the server.

    Raises:
        BadRequest: The operator does not allow a receiver, an address is invalid, or there are too many webhooks.
    """
    urls = value if isinstance(value, tuple) else (value,)
    if len(urls) > WEBHOOKS_MAX:
        raise BadRequest(f"{name} has {len(urls)} URLs; a warehouse can have at most {WEBHOOKS_MAX}")
    for url in filter(None, urls):
        _check_event_target(name, url, settings)


def _check_event_target(name: str, url: str, settings: Settings) -> None:
    """Check that the operator allows one receiver of events.

    Raises:
        BadRequest: The address is invalid, or no item of the setting `warehouse_event_targets` includes it.
    """
    try:
        if name == "event_kafka":
            parse_topic(url, "")
        if name == "event_nats":
            parse_subject(url)
    except ConfigError as error:
        raise BadRequest(error.message) from None
    target = _parse_target(url)
    if target is None:
        raise BadRequest(
            f"{name} has the invalid address {redact_url(url)[:200]!r}; write it in ASCII and without a query, a "
            "fragment, backslashes, and the segments . and .."
        )
    for allowed_url in settings.warehouse_event_targets:
        allowed_target = _parse_target(allowed_url)
        if allowed_target is None or not target.servers <= allowed_target.servers:
            continue
        # An allowed path that ends with a slash includes all paths below it.
        if target.path == allowed_target.path or (
            allowed_target.path.endswith("/") and target.path.startswith(allowed_target.path)
        ):
            return
    raise BadRequest(
        f"{name} has the address {redact_url(url)[:200]!r}, to which a warehouse cannot send events; have the operator "
        "add it to the setting warehouse_event_targets"
    )


def _parse_target(url: str) -> _Target | None:
    """Return the servers and the path of an address, or None if parsers could read the address differently."""
    scheme, _, rest = url.partition("://")
    authorities, slash, path = rest.partition("/")
    if scheme not in _DEFAULT_PORTS or _UNSAFE.search(url):
        return None
    servers = set()
    for authority in authorities.split(",") if scheme in _LIST_SCHEMES else (authorities,):
        # An address of Kafka has no user and password before the host.
        user = None if scheme == "kafka" else _USER.match(authority)
        address = _HOST.fullmatch(authority, 0 if user is None else user.end())
        if address is None:
            return None
        servers.add(_Server(scheme, address["host"].lower(), int(address["port"] or _DEFAULT_PORTS[scheme])))
    # A receiver could resolve a segment of dots, and so receive events at another path. It could ignore the parameters
    # of a segment, which follow a semicolon, and it could decode the path more than once.
    while path != (decoded_path := unquote(path)):
        path = decoded_path
    segments = {segment.partition(";")[0] for segment in path.replace("\\", "/").split("/")}
    if {".", ".."} & segments or _CONTROL.search(path):
        return None
    return _Target(frozenset(servers), slash + rest.partition("/")[2])


def drop_refused_targets(values: Mapping[str, Any], settings: Settings, warehouse_name: str) -> dict[str, Any]:
    """Return stored settings without the receivers of events that the operator no longer allows.

    An error in the log names the settings. The warehouse is opened without these receivers, because otherwise the
    operator could not withdraw a receiver without a stop of the warehouse.

    Args:
        values: The own settings or the credentials of a warehouse, in their stored form.
        settings: The settings of the server.
        warehouse_name: The name of the warehouse, for the log.
    """
    remaining_values = dict(values)
    for name in EVENT_TARGETS:
        if not (stored_value := values.get(name)):
            continue
        urls = [stored_value] if isinstance(stored_value, str) else list(stored_value)
        allowed_urls = [url for url in urls if _is_allowed(name, url, settings)][:WEBHOOKS_MAX]
        if len(allowed_urls) < len(urls):
            _log.error(
                "events are not sent to receivers that warehouse_event_targets does not allow",
                warehouse=warehouse_name,
                setting=name,
                receivers=len(urls) - len(allowed_urls),
            )
            if isinstance(stored_value, str):
                del remaining_values[name]
            else:
                remaining_values[name] = allowed_urls
    return remaining_values


def _is_allowed(name: str, url: str, settings: Settings) -> bool:
    """Return whether a warehouse may have this URL in the setting `name`."""
    try:
        _check_event_target(name, url, settings)
    except BadRequest:
        return False
    return True
