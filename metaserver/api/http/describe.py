"""Descriptions of routes: path, operation id, parameters, body, answers, limits, and whether the route is public.

`dispatch.Route` adds the functions that handle requests. The description is attached to the function that aiohttp
calls. The middleware, `bodies.py` and `openapi.py` read it, so that limits, document, metrics and log agree with the
route. The description of a route of the Iceberg REST specification has no answers, because the specification describes
them.
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
    name: str
    where: str
    """The location of the parameter: path, query or header."""
    description: str
    schema: dict[str, Any]
    required: bool = False


_PATH = {
    "namespace": "Levels joined by the unit separator 0x1F, percent-encoded as %1F.",
    "table": "Name of the table or view.",
    "view": "Name of the view.",
    "function": "The name of the function.",
    "index": "The name of the index.",
    "build": "The id of the build.",
    "column": "Full name of the column, levels joined by dots.",
    "id": "Id of the dropped entry, from the list.",
    "name": "Name of the token.",
    "warehouse": "Name of the further warehouse.",
    "statement": "Id of the statement, from the request or the header X-Seamark-Statement.",
}
"""The variables of the paths of Seamark's API."""


def doc(description: str, **schema: Any) -> msgspec.Meta:
    """Document a field of a body or an answer.

    `schema` contains further entries of its JSON schema. They are not enforced when the field is decoded.
    """
    return msgspec.Meta(description=description, extra_json_schema=schema or None)


class ResponseSpec(msgspec.Struct, frozen=True):
    status: int
    description: str
    schema: Any = None
    """The JSON schema of the body, or the type from which it is derived. None if the body is empty or not JSON."""


class BodySize(Enum):
    """The class of a body's limit. Each class has a setting."""

    LOGIN = "the only body that is read from strangers: two tokens of the longest kind fit"
    SMALL = "the default"
    MEDIUM = "a filter, a schema, or a list of index files"
    LARGE = "commits that list files, and keys in Arrow, whose values are not parsed one by one"


class Description(msgspec.Struct, frozen=True):
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
    """Whether the route needs no login and does not count toward the limit on requests, so that probes work under
    load.
    """
    waits: bool = False
    """Whether the request may wait for a long time.

    If it may, it has a separate limit and is not counted as in flight.
    """

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the path, in order, in the form that aiohttp uses."""
        return tuple(name.replace("-", "_") for name in VARIABLE.findall(self.path) if name != "prefix")

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        path = [Parameter(name, "path", _PATH[name], {"type": "string"}, True) for name in self.variables]
        return (*path, *self.parameters)


_UNKNOWN = Description("", "", "unknown")


def attach(handler: Handler, description: Description) -> None:
    setattr(handler, _ATTRIBUTE, description)


def get_description(handler: object) -> Description:
    description = getattr(handler, _ATTRIBUTE, _UNKNOWN)
    assert isinstance(description, Description)
    return description
