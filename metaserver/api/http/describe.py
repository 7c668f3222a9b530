"""Descriptions of handlers: operation id, parameters, answers, and whether the route is public.

`describe` attaches the description to the function. The middleware reads the operation and the flags from it, and
`openapi.py` the rest, so that document, metrics and log agree with the route. Handlers of Iceberg routes need no
description: their operation id is the function name in camel case, and the Iceberg specification describes them.
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
    """JSON schema of the body; None when it is empty or not JSON."""
    content_type: str = "application/json"


class Description(msgspec.Struct, frozen=True):
    operation: str
    summary: str
    tags: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: dict[str, Any] | None = None
    answers: tuple[ResponseSpec, ...] = ()
    public: bool = False
    """Answered without a login and outside the limit on requests, so that probes work under load."""
    waits: bool = False
    """The request may wait for long: it has a separate limit and is not counted as in flight."""
    body_type: Any = None
    """The type of the JSON body, from which OpenAPI's schema is derived; then `body` is None."""


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
    """Decorates a handler with its `Description`. The function is returned unchanged."""
    description = Description(operation, summary, tags, parameters, body, answers, public, waits)

    def mark(handler: Handler) -> Handler:
        attach(handler, description)
        return handler

    return mark


def attach(handler: Handler, description: Description) -> None:
    setattr(handler, _ATTRIBUTE, description)


def description_of(handler: object) -> Description:
    """The description from `describe`; otherwise one with the operation id of the function name: load_table →
    loadTable."""
    given = getattr(handler, _ATTRIBUTE, None)
    if isinstance(given, Description):
        return given
    first, *rest = getattr(handler, "__name__", "unknown").strip("_").split("_")
    return Description(first + "".join(word.capitalize() for word in rest), "")


def is_described(handler: object) -> bool:
    return hasattr(handler, _ATTRIBUTE)
