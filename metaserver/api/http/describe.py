"""What a handler says about itself: operation id, parameters, answers, and whether it needs a login.

`describe` puts it on the function; the middleware reads the operation and the flags from there, `openapi.py` the
rest. So the document, the metrics and the log cannot disagree with the route. Handlers of the Iceberg routes need no
description: their operation id is their name in camel case, and the specification describes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ATTRIBUTE = "seamark_operation"


class Parameter(msgspec.Struct, frozen=True):
    name: str
    where: str
    """path, query or header."""
    description: str
    schema: dict[str, Any]
    required: bool = False


NAMESPACE = Parameter(
    "namespace", "path", "Levels joined by the unit separator 0x1F, percent-encoded as %1F.", {"type": "string"}, True
)
TABLE = Parameter("table", "path", "Name of the table or view.", {"type": "string"}, True)


class ResponseSpec(msgspec.Struct, frozen=True):
    status: int
    description: str
    schema: dict[str, Any] | None = None
    """JSON schema of the body; None for none, or for one that is not JSON."""
    content_type: str = "application/json"


class Description(msgspec.Struct, frozen=True):
    operation: str
    summary: str
    tags: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: dict[str, Any] | None = None
    answers: tuple[ResponseSpec, ...] = ()
    public: bool = False
    """Answered without a login and beyond the bound on requests, so that probes work when nothing else does."""
    waits: bool = False
    """May be held open for long: has a bound of its own and does not count as a request being answered."""


def describe(
    operation: str,
    summary: str,
    *,
    tags: tuple[str, ...] = (),
    parameters: tuple[Parameter, ...] = (),
    body: dict[str, Any] | None = None,
    answers: tuple[ResponseSpec, ...] = (),
    public: bool = False,
    waits: bool = False,
) -> Callable[[Handler], Handler]:
    """Decorates a handler with its `Description`; the function itself is returned unchanged."""
    description = Description(operation, summary, tags, parameters, body, answers, public, waits)

    def mark(handler: Handler) -> Handler:
        setattr(handler, _ATTRIBUTE, description)
        return handler

    return mark


def description_of(handler: object) -> Description:
    """As given by `describe`, else one with the operation id made from the function's name: load_table → loadTable."""
    given = getattr(handler, _ATTRIBUTE, None)
    if isinstance(given, Description):
        return given
    first, *rest = getattr(handler, "__name__", "unknown").strip("_").split("_")
    return Description(first + "".join(word.capitalize() for word in rest), "")


def is_described(handler: object) -> bool:
    return hasattr(handler, _ATTRIBUTE)
