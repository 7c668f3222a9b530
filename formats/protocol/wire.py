"""Wire formats, pure: JSON, namespace strings, page tokens. Every decoder raises BadRequest for invalid input."""

from __future__ import annotations

import base64
import re
import unicodedata
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from seamark.formats.runtime.decoding import from_json
from seamark.formats.runtime.errors import BadRequest

NAMESPACE_SEPARATOR = "\x1f"
"""Separator of namespace levels in a URL, always accepted (Iceberg REST spec, parameter `namespace`)."""
INDEX_FOLDER = "_seamark/index"
"""Folder of index files below a table's location. It contains nothing else, so a purge deletes all of it. Spark's
`remove_orphan_files` skips folders whose names begin with an underscore (Iceberg's `HiddenPathFilter`)."""
FORMER_INDEX_FOLDER = "metadata/seamark-index"
"""Where earlier versions stored index files, and where Spark's `remove_orphan_files` deletes them. Merges move them."""
INDEX_FILES_MAX = 1000
"""Limit for one change of a table."""
PRODUCER_KEY, SEQUENCE_KEY = "seamark.producer-id", "seamark.producer-sequence"
"""In a snapshot's summary: the producer of the change, and its sequence number."""

PROXY_ENGINE = "seamark-trino-proxy"
"""In scan reports of the Trino proxy, as the name of the engine."""
PLANS_FOLDER = "_seamark/plans"
"""Folder of plan tables' files below the location of a table or view."""
FORMER_PLANS_FOLDER = "plans"
"""The same of earlier versions, below the metadata folder."""
FRESH_FOLDER = "_seamark/fresh"
"""Folder below a table's location for files with rows of a stream that no commit has added yet. Plans name them, and
the server deletes them."""
CLOCK_FOLDER = "_seamark/clock"
"""Folder below a table's location for objects by which the server reads the storage's clock, and which it deletes."""
PLAN_MARK = "~plan~"
"""Part of a plan table's name, between the table's name and a digest; reserved for plan tables."""
RECHECK_AFTER = "recheck_after_s"
"""A name in the totals of a job: seconds after which it is worth another run, though the table may not change."""
ACCESS_CHECK = "access-check"
"""The name of the job that checks whether worker processes reach the server and the storage. It has no table."""
MINIMUM, MAXIMUM = "min", "max"
"""In place of the transform of a join: the column has the least or the greatest value of the other table's column."""
LIKES_MAX, PATTERN_MAX = 16, 1_000
"""Limits of LIKE predicates for one dimension, and of the characters of a pattern."""
NAME_MAX = 255
"""In characters."""
LEVELS_MAX = 1000
"""Of a namespace."""
PATH_CHARACTERS_MAX = 6000
"""Of all levels of a namespace, as a URL has them: no request could name a longer namespace."""
_SHORT = PATH_CHARACTERS_MAX // 12
"""Text of this length has at most `PATH_CHARACTERS_MAX` characters in a URL."""
_FOLDED_CHARACTERS = 64
"""Characters of a name that are folded together: more than any name that the server looks for."""
_PLAN_NAME = re.compile(r"(?s:.+)~plan~[0-9a-f]{32}")

T = TypeVar("T")

encode_json = msgspec.json.encode


def decode_json(body: bytes, subject: str) -> Any:
    """Any JSON value.

    Raises:
        BadRequest: With `subject` and the position of the error.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{subject} is not valid JSON: {error}") from None


def decode_as(body: bytes, shape: type[T], subject: str) -> T:
    """JSON of the msgspec type `shape`.

    Raises:
        BadRequest: With `subject` and the invalid field.
    """
    try:
        return from_json(body, shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{subject} is malformed: {error}") from None


def fold_name(name: str) -> str:
    """Return a name as a reader sees it who ignores case, surrounding blanks and the width of letters (NFKC).

    `unicodedata` sorts a run of combining marks by insertion, so its time grows with the square of the run. This
    function folds the name in parts. The result can differ from NFKC of the whole name only in marks, not in letters.
    """
    name = name.strip()
    parts = range(0, len(name), _FOLDED_CHARACTERS)
    folded = "".join(unicodedata.normalize("NFKC", name[at : at + _FOLDED_CHARACTERS]) for at in parts)
    return folded.strip().casefold()


def fold_path(path: str) -> str:
    """Return a path of files as a file system sees it that ignores case and the composition of letters.

    A segment with more than 255 characters stays unchanged: it is the name of no file.
    """
    return "/".join(
        unicodedata.normalize("NFC", unicodedata.normalize("NFC", segment).casefold())
        if len(segment) <= NAME_MAX
        else segment
        for segment in path.split("/")
    )


def to_base64url(data: bytes) -> str:
    """Encode without padding (RFC 4648, 5)."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64url(text: str) -> bytes:
    """ValueError for other text, also if it has characters outside the alphabet, which Python would ignore."""
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)


def parse_namespace(text: str) -> tuple[str, ...]:
    """Return a namespace from a URL, already percent-decoded.

    Raises:
        BadRequest: For an invalid level.
    """
    return check_namespace(tuple(text.split(NAMESPACE_SEPARATOR)))


def check_namespace(path: tuple[str, ...]) -> tuple[str, ...]:
    if not path:
        raise BadRequest("A namespace needs at least one level")
    if len(path) > LEVELS_MAX:
        raise BadRequest(f"The namespace has {len(path):,} levels; the limit is {LEVELS_MAX:,}")
    for level in path:
        check_name(level, "namespace level")
    if sum(map(len, path)) + len(path) > _SHORT:
        encoded = len(quote(NAMESPACE_SEPARATOR.join(path), safe=""))
        if encoded > PATH_CHARACTERS_MAX:
            raise BadRequest(
                f"The namespace has {encoded:,} characters in a URL; the limit is {PATH_CHARACTERS_MAX:,}, as servers "
                "and proxies refuse longer URLs"
            )
    return path


def check_name(name: str, subject: str) -> str:
    """Return a name of a table, view, function or namespace level: 1 to 255 characters, no control characters, no
    dot segment.
    """
    if not name:
        raise BadRequest(f"Empty {subject}: give it a name")
    if len(name) > NAME_MAX:
        raise BadRequest(f"The {subject} {name[:40]!r}… has {len(name)} characters; the limit is {NAME_MAX} characters")
    if any(ch < " " or ch == "\x7f" or "\ud800" <= ch <= "\udfff" for ch in name):
        raise BadRequest(f"The {subject} {name!r} holds a control character; remove it")
    if name in (".", ".."):
        raise BadRequest(f"Invalid {subject} {name!r}: HTTP clients remove it from URLs")
    return name


def check_new_name(name: str, subject: str) -> str:
    """Return the same as `check_name`, for new names, which must not have the form of a plan table's name."""
    check_name(name, subject)
    if PLAN_MARK in name.lower():
        raise BadRequest(f"The {subject} {name!r} holds {PLAN_MARK}, which marks names of plan tables; choose another")
    return name


def check_changeable(name: str) -> str:
    """BadRequest for a plan table's name, because plan tables are read-only."""
    if is_plan_name(name):
        raise BadRequest(f"{name} is a plan table, which is read-only; change its source table")
    return name


def is_plan_name(name: str) -> bool:
    """Return whether the name has the form of a plan table's name."""
    return PLAN_MARK in name and _PLAN_NAME.fullmatch(name) is not None


def show(path: tuple[str, ...], name: str | None = None) -> str:
    """Return the name in messages: levels and name joined by dots."""
    return ".".join((*path, name) if name is not None else path)
