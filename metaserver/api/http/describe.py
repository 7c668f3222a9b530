"""Descriptions of routes: path, operation id, parameters, body, answers, limits, and whether the route is public.

`dispatch.Route` adds the functions that handle requests. The description is attached to the function that aiohttp
calls. The middleware, `bodies.py` and `openapi.py` read the description, so that limits, the OpenAPI document, metrics
and log agree with the route. For a route of the Iceberg REST specification, the description has no answers, because the
specification describes them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VARIABLE = re.compile(r"\{([\w-]+)\}")
_ATTRIBUTE = "seamark_operation"


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of a route."""

    name: str
    where: str
    """The location of the parameter: path, query or header."""
    description: str
    schema: dict[str, Any]
    required: bool = False


_VARIABLE_DESCRIPTIONS = {
    "namespace": "The levels of the namespace, joined by the unit separator 0x1F, percent-encoded as %1F.",
    "table": "The name of the table or view.",
    "view": "The name of the view.",
    "function": "The name of the function.",
    "index": "The name of the index.",
    "build": "The id of the build.",
    "column": "The full name of the column, with levels joined by dots.",
    "id": "The id of the dropped entry, from the listing.",
    "name": "The name of the token.",
    "warehouse": "The name of the further warehouse.",
    "statement": "The id of the statement, from the request or the header X-Seamark-Statement.",
}
"""The descriptions of the variables in the paths of Seamark's API."""


def doc(description: str, **schema: Any) -> msgspec.Meta:
    """Document a field of a body or an answer.

    `schema` contains further entries of its JSON schema. They are not enforced when the field is decoded.
    """
    return msgspec.Meta(description=description, extra_json_schema=schema or None)


class ResponseSpec(msgspec.Struct, frozen=True):
    """The description of an answer."""

    status: int
    description: str
    schema: Any = None
    """The JSON schema of the body, or the type from which it is derived. None if the body is empty or not JSON."""


class BodySize(Enum):
    """The class of the size limit of a body. Each class has a setting."""

    LOGIN = "the only body that is read from unauthenticated clients: two tokens of the longest kind fit"
    SMALL = "the default"
    MEDIUM = "a filter, a schema, or a list of index files"
    LARGE = "commits that list files, and keys in Arrow, whose values are not parsed one by one"


class Description(msgspec.Struct, frozen=True):
    """The description of a route."""

    method: str
    path: str
    """The path with variables in braces. Iceberg routes have the template of the specification."""
    operation: str
    summary: str = ""
    tags: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    """The parameters, without the variables of the path."""
    answers: tuple[ResponseSpec, ...] = ()
    """The answers. The first answer is the success."""
    body: Any = None
    """The JSON schema of the JSON body, or the type from which it is derived. None if there is no body."""
    is_body_optional: bool = False
    body_size: BodySize = BodySize.SMALL
    public: bool = False
    """Whether the route needs no login.

    A public route is exempt from the limit on requests, so that health checks work under load.
    """
    waits: bool = False
    """Whether the request may wait for a long time.

    A waiting request has a separate limit, and is not counted as in flight.
    """

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the path, in order, in the form that aiohttp uses."""
        return tuple(name.replace("-", "_") for name in VARIABLE.findall(self.path) if name != "prefix")

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The variables of the path, and the other parameters."""
        path_parameters = [
            Parameter(name, "path", _VARIABLE_DESCRIPTIONS[name], {"type": "string"}, True) for name in self.variables
        ]
        return (*path_parameters, *self.parameters)


_UNKNOWN = Description("", "", "unknown")


def attach_description(handler: Handler, description: Description) -> None:
    setattr(handler, _ATTRIBUTE, description)


def get_description(handler: object) -> Description:
    description = getattr(handler, _ATTRIBUTE, _UNKNOWN)
    assert isinstance(description, Description)
    return description
