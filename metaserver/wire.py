"""What crosses the wire, pure: JSON, namespace strings, page tokens. Every decoder answers nonsense with BadRequest."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from metaserver.errors import BadRequest

NAMESPACE_SEPARATOR = "\x1f"
"""Between the levels of a namespace in a URL, always accepted (Iceberg REST spec, parameter `namespace`)."""
INDEX_FOLDER = "metadata/seamark-index"
"""Below a table's location: where its index files lie. Nothing else does, so that a purge takes all that is there."""
INDEX_FILES_MAX = 1000
"""That one change of a table may bring."""
PRODUCER_KEY, SEQUENCE_KEY = "seamark.producer-id", "seamark.producer-sequence"
"""In the summary of a snapshot: who made it, and as its how-manieth change."""

PLANS_FOLDER = "plans"
"""Below a table's metadata folder: the files of its plan tables."""
PLAN_MARK = "~plan~"
"""In the names of plan tables, between the table's and a digest. No engine takes it for anything else."""
NAME_MAX = 255
"""Characters."""
_PLAN_NAME = re.compile(r"(?s:.+)~plan~[0-9a-f]{32}")

T = TypeVar("T")

encode_json = msgspec.json.encode


def decode_json(body: bytes, what: str) -> Any:
    """Any JSON value. BadRequest names `what` and where the JSON breaks."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{what} is not valid JSON: {error}") from None


def decode_as(body: bytes, shape: type[T], what: str) -> T:
    """JSON of a given shape (a msgspec type). BadRequest names `what` and the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{what} is malformed: {error}") from None


def parse_namespace(text: str) -> tuple[str, ...]:
    """A namespace as it stands in a URL, already percent-decoded. BadRequest for what no level can be."""
    return check_namespace(tuple(text.split(NAMESPACE_SEPARATOR)))


def check_namespace(path: tuple[str, ...]) -> tuple[str, ...]:
    if not path:
        raise BadRequest("A namespace needs at least one level")
    for level in path:
        check_name(level, "namespace level")
    return path


def check_name(name: str, what: str) -> str:
    """A table, view, function or namespace level: 1 to 255 characters, none of them a control; no dot segment."""
    if not name:
        raise BadRequest(f"Empty {what}: give it a name")
    if len(name) > NAME_MAX:
        raise BadRequest(f"The {what} {name[:40]!r}… has {len(name)} characters; at most {NAME_MAX} are allowed")
    if any(ch < " " or ch == "\x7f" or "\ud800" <= ch <= "\udfff" for ch in name):
        raise BadRequest(f"The {what} {name!r} holds a control character; remove it")
    if name in (".", ".."):
        raise BadRequest(f"No {what} can be called {name!r}: HTTP clients take it out of every URL")
    return name


def check_new_name(name: str, what: str) -> str:
    """As `check_name`, of a name that is to be given: not one that looks like a plan table's."""
    check_name(name, what)
    if PLAN_MARK in name.lower():
        raise BadRequest(f"The {what} {name!r} holds {PLAN_MARK}, which marks names of plan tables; choose another")
    return name


def check_changeable(name: str) -> str:
    """BadRequest for a plan table's name: there is nothing that could be changed of one."""
    if is_plan_name(name):
        raise BadRequest(f"{name} is a plan table, which can only be read; change the table that it is of")
    return name


def is_plan_name(name: str) -> bool:
    """Whether it has the form of a plan table's name."""
    return PLAN_MARK in name and _PLAN_NAME.fullmatch(name) is not None


def show(path: tuple[str, ...], name: str | None = None) -> str:
    """As messages show it: levels and name joined by dots."""
    return ".".join((*path, name) if name is not None else path)
