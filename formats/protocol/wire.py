"""Wire formats: JSON, namespace strings, page tokens. Every decoder raises BadRequest for invalid input."""

from __future__ import annotations

import base64
import re
import unicodedata
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest

NAMESPACE_SEPARATOR = "\x1f"
"""The separator of namespace levels in a URL, which is always accepted (Iceberg REST spec, parameter `namespace`)."""
INDEX_FOLDER = "_seamark/index"
"""The folder of index files below a table's location.

It contains nothing else, so a purge deletes the whole folder. Spark's `remove_orphan_files` skips folders whose
names begin with an underscore (Iceberg's `HiddenPathFilter`).
"""
FORMER_INDEX_FOLDER = "metadata/seamark-index"
"""The folder in which earlier versions stored index files.

Spark's `remove_orphan_files` deletes files there. Merges of index files move them to `INDEX_FOLDER`.
"""
INDEX_FILES_MAX = 1000
"""The maximum number of index files in a change of a table."""
PRODUCER_KEY, SEQUENCE_KEY = "seamark.producer-id", "seamark.producer-sequence"
"""The keys in a snapshot's summary for the producer of the change, and for its sequence number."""
FLUSH_KEYS = ("stream-flush", "stream-offsets", "stream-table", "stream-log")
FLUSH_MARK, FLUSH_OFFSETS, FLUSH_TABLE, FLUSH_LOG = FLUSH_KEYS
"""The keys in the summary of a flush's snapshot. The server refuses them in commits of clients.

The mark is `true`. The offsets are those of the flushed rows, as `shard:start-end` joined by commas. The table is the
UUID of the table that was flushed, because a copy of the table that is registered with another UUID has another log.
The log is a hash of the identity of the log that contained the rows, because offsets are positions in one log.
"""

PROXY_ENGINE = "seamark-trino-proxy"
"""The name of the engine in scan reports of the Trino proxy."""
PLANS_FOLDER = "_seamark/plans"
"""The folder of plan tables' files below the location of a table or view."""
FORMER_PLANS_FOLDER = "plans"
"""The folder of plan tables' files in earlier versions, below the metadata folder."""
FRESH_FOLDER = "_seamark/fresh"
"""The folder below a table's location for files with rows of a stream that no commit has added yet.

Plans name these files, and the server deletes them later.
"""
STREAM_ENABLED = "seamark.stream.enabled"
"""The property that makes a table a stream table."""
FRESH_HEADER = "X-Seamark-Fresh"
"""The header with which a request also reads rows of stream tables that no commit has added yet."""
AFTER_HEADER = "X-Seamark-After"
"""The header with tokens of rows that an answer must include."""
CLOCK_FOLDER = "_seamark/clock"
"""The folder below a table's location for objects with which the server reads the storage's clock.

The server deletes the objects.
"""
CUBE_PLAN = "plan"
"""The key of the plan in the metadata of the groups that a cube plan returns."""
CUBE_COST_MAX_FRACTION = 0.7
"""The maximum cost of an answer from a cube, as a fraction of the rows that are read without the cube.

The cost includes the rows of files without groups. A query for which a cube costs more reads all rows.
"""
CUBE_UNCHECKED_ROWS_MAX = 200_000
"""The maximum number of rows of a plan for which a cube is used without a comparison of costs, which are small."""
PLAN_MARK = "~plan~"
"""The text between the table's name and a digest in a plan table's name. It is reserved for plan tables."""
RECHECK_AFTER = "recheck_after_s"
"""The key of a value in the totals of a job: the seconds after which another run is worthwhile.

The run is worthwhile even if the table does not change.
"""
ACCESS_CHECK = "access-check"
"""The name of the job that checks whether worker processes can reach the server and the storage. It has no table."""
MINIMUM, MAXIMUM = "min", "max"
"""The transforms of a join that compare the column with the minimum or maximum of the other table's column."""
RANGE = "range"
"""The transform of a join that compares the column with the other table's column by less or greater."""
LIKES_MAX, PATTERN_MAX = 16, 1_000
"""The maximum number of LIKE predicates for a dimension, and of characters of a pattern."""
NAME_MAX = 255
"""The maximum number of characters of a name."""
LEVELS_MAX = 1000
"""The maximum number of levels of a namespace."""
PATH_CHARACTERS_MAX = 6000
"""The maximum number of characters of all levels of a namespace in a URL. No request could name a longer one."""
_SHORT_PATH_CHARACTERS = PATH_CHARACTERS_MAX // 12
"""The maximum number of characters of a text that certainly has at most `PATH_CHARACTERS_MAX` characters in a URL."""
_FOLDED_CHARACTERS = 64
"""The number of characters of a name that are folded together. No name for which the server looks is longer."""
_SHOWN_MAX = 40
_PATH_ENDS = re.compile(r"[?#\x00-\x1f\x7f]")
"""Matches the characters that end a path in a URL, and control characters."""
_PATH_MARKS = frozenset("/\\?#")
"""The characters that end a part of a path in a URL, for some servers."""
_PLAN_NAME = re.compile(r"(?s:.+)~plan~[0-9a-f]{32}")

T = TypeVar("T")

encode_json = msgspec.json.encode


def decode_json(body: bytes, subject: str) -> Any:
    """Decode JSON.

    Raises:
        BadRequest: The body is not JSON. The message has `subject` and the position of the error.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{subject} is not valid JSON: {error}") from None


def decode_as(body: bytes, shape: type[T], subject: str) -> T:
    """Decode JSON to the msgspec type `shape`.

    Raises:
        BadRequest: The body does not have this type. The message has `subject` and the invalid field.
    """
    try:
        return convert_json(body, shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{subject} is malformed: {error}") from None


def fold_name(name: str) -> str:
    """Return a name without differences in case, surrounding blanks and the width of letters (NFKC).

    `unicodedata` sorts a sequence of combining marks by insertion, so its time grows with the square of the length of
    the sequence. This function therefore folds the name in parts. The result can differ from NFKC of the whole name
    only in marks, not in letters.
    """
    name = name.strip()
    starts = range(0, len(name), _FOLDED_CHARACTERS)
    folded_name = "".join(unicodedata.normalize("NFKC", name[start : start + _FOLDED_CHARACTERS]) for start in starts)
    return folded_name.strip().casefold()


def fold_path(path: str) -> str:
    """Return the path of a file without differences in case and in the composition of letters.

    Some file systems ignore these differences. Letters are composed again after the case is folded, because folding can
    decompose them. A segment with more than 255 characters is not changed, because no file can have this name.
    """
    return "/".join(
        unicodedata.normalize("NFC", unicodedata.normalize("NFC", segment).casefold())
        if len(segment) <= NAME_MAX
        else segment
        for segment in path.split("/")
    )


def to_base64url(data: bytes) -> str:
    """Encode bytes as base64url without padding (RFC 4648, 5)."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_base64url(text: str) -> bytes:
    """Decode base64url without padding.

    Raises:
        ValueError: The text is not base64url. Characters outside the alphabet, which Python would ignore, are refused
            too.
    """
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)


def parse_namespace(text: str) -> tuple[str, ...]:
    """Parse the namespace in a URL, which is already percent-decoded.

    Raises:
        BadRequest: A level is invalid.
    """
    return check_namespace(tuple(text.split(NAMESPACE_SEPARATOR)))


def check_namespace(path: tuple[str, ...]) -> tuple[str, ...]:
    """Check the levels of a namespace, and return them.

    Raises:
        BadRequest: There are too many levels, a level is invalid, or the namespace is too long for a URL.
    """
    if not path:
        raise BadRequest("A namespace needs at least one level")
    if len(path) > LEVELS_MAX:
        raise BadRequest(f"The namespace has {len(path):,} levels; the limit is {LEVELS_MAX:,}")
    for level in path:
        check_name(level, "namespace level")
    # A shorter path cannot exceed the limit, even if each character is percent-encoded.
    if sum(map(len, path)) + len(path) > _SHORT_PATH_CHARACTERS:
        encoded_characters = len(quote(NAMESPACE_SEPARATOR.join(path), safe=""))
        if encoded_characters > PATH_CHARACTERS_MAX:
            raise BadRequest(
                f"The namespace has {encoded_characters:,} characters in a URL; the limit is "
                f"{PATH_CHARACTERS_MAX:,}, because servers and proxies refuse longer URLs"
            )
    return path


def check_name(name: str, subject: str) -> str:
    """Check the name of a table, view, function or namespace level, and return it.

    A name has 1 to 255 characters, no control characters or surrogates, and is not a dot segment.

    Raises:
        BadRequest: The name is invalid.
    """
    if not name:
        raise BadRequest(f"The {subject} is empty: give it a name")
    if len(name) > NAME_MAX:
        raise BadRequest(
            f"The {subject} {name[:_SHOWN_MAX]!r}… has {len(name)} characters; the limit is {NAME_MAX} characters"
        )
    if any(character < " " or character == "\x7f" or "\ud800" <= character <= "\udfff" for character in name):
        raise BadRequest(f"The {subject} {name!r} contains a control character; remove it")
    if name in (".", ".."):
        raise BadRequest(f"The {subject} cannot be {name!r}, because HTTP clients remove it from URLs")
    return name


def check_route_prefix(prefix: str) -> str:
    """Check the prefix of routes in the configuration of another catalog, and return it.

    The other catalog is not trusted, so its prefix must not lead to other paths of its host.

    Raises:
        BadRequest: The prefix contains a dot segment, a query, a fragment or a control character.
    """
    path = unquote(prefix)
    if _PATH_ENDS.search(prefix) or {".", ".."} & set(path.replace("\\", "/").split("/")):
        raise BadRequest(f"The prefix {prefix[:100]!r} of the other catalog's routes is not a plain path")
    return prefix


def check_path_separator(separator: str) -> None:
    """Check the separator between the levels of a namespace, which is in the configuration of another catalog.

    Clients write the separator into paths of requests. The other catalog is not trusted, so the names of its namespaces
    must not lead to other paths of its host.

    Raises:
        BadRequest: The separator contains a character that separates path segments or ends a path.
    """
    if not _PATH_MARKS.isdisjoint(separator):
        raise BadRequest(f"The separator {separator[:100]!r} of its namespaces contains one of the characters / \\ ? #")


def check_new_name(name: str, subject: str) -> str:
    """Check the name of a new table, view or function, and return it.

    It must not contain the mark of plan tables, which are read-only tables with the files of a scan plan.

    Raises:
        BadRequest: The name is invalid.
    """
    check_name(name, subject)
    if PLAN_MARK in name.lower():
        raise BadRequest(
            f"The {subject} {name!r} contains {PLAN_MARK}, which is reserved for plan tables; choose another name"
        )
    return name


def check_changeable(name: str) -> str:
    """Check that the name is not that of a plan table, a read-only table with the files of a scan plan. Return it.

    Raises:
        BadRequest: The name belongs to a plan table, which is read-only.
    """
    if is_plan_name(name):
        raise BadRequest(f"{name} is a plan table, which is read-only; change its source table")
    return name


def is_plan_name(name: str) -> bool:
    """Return whether the name has the form of a plan table's name.

    A plan table is a read-only table with the files of a scan plan.
    """
    return PLAN_MARK in name and _PLAN_NAME.fullmatch(name) is not None


def format_path(path: tuple[str, ...], name: str | None = None) -> str:
    """Format a name for messages: levels and name joined by dots."""
    return ".".join((*path, name) if name is not None else path)
