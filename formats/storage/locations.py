"""Normalized storage locations.

A parsed location means the same for every reader, including readers that decode percent escapes, replace backslashes or
resolve dots. Locations that contain any of these are rejected, not repaired.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from seamark.formats.protocol.wire import fold_path
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize
from seamark.formats.storage.storages import LOCAL, STORAGES, find_rules, normalize_path

LOCATION_CHARS_MAX = 4096
"""The maximum number of characters of a location. It is the limit of a Linux path, and four times that of an S3 key."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
# A loop over the characters took 10 µs, and each request parses three locations.
_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_DECODE_ROUNDS_MAX = 8
"""The maximum number of times that percent escapes of a location are decoded."""
_SHOWN_MAX = 200


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location.

    Attributes:
        scheme: The scheme of the storage.
        bucket: The bucket. It is empty for files.
        path: The path without a leading or trailing slash. It can be empty.
    """

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/") if self.path else self.root()

    def root(self) -> str:
        """The location of the bucket, or for a storage without buckets, the location that contains everything."""
        return f"{self.scheme}://{self.bucket}" if self.bucket else f"{self.scheme}:///"

    @property
    def is_local(self) -> bool:
        """Whether this is a location of files on this machine."""
        return self.scheme == LOCAL

    @property
    def file_path(self) -> str:
        """The absolute path of a file location."""
        return "/" + self.path

    def holds(self, other: Location) -> bool:
        """Return whether `other` is this location or is below it."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            return False
        return not self.path or other.path == self.path or other.path.startswith(self.path + "/")


_REFUSED_IN_KEYS = (("\\", "a backslash"),)
_REFUSED_MARKS = (("?", "a query"), ("#", "a fragment"), *_REFUSED_IN_KEYS)


def parse_location(text: str, subject: str = "The location") -> Location:
    """Parse and normalize a location: a trailing slash is dropped, `file:/p` becomes `file:///p`, `s3a` becomes `s3`.

    Raises:
        BadRequest: The text has an unknown scheme, or readers could interpret it differently. The message begins with
            `subject`.
    """
    return _parse_valid(text) or _parse_checked(text, subject, _REFUSED_MARKS)


@memoize(8192)  # Each load of a table parses its location three times, and an import five times.
def _parse_valid(text: str) -> Location | None:
    """Return the parsed location, or None if the text is not a valid location."""
    try:
        return _parse_checked(text, "The location", _REFUSED_MARKS)
    except BadRequest:
        return None


def parse_stored_location(text: str, subject: str = "The location") -> Location:
    """Parse a location in a file of a table, like `parse_location`. A path without a scheme is a local file.

    Tables of Iceberg's Hadoop catalog have such paths, and readers open them on this machine.
    """
    return parse_location(add_scheme(text), subject)


def add_scheme(text: str) -> str:
    """Return the location, with the scheme of local files added if it is a path that begins with a slash."""
    return f"{LOCAL}://{text}" if text.startswith("/") else text


def parse_object(text: str, subject: str = "The location") -> Location:
    """Parse the location of an object in an S3 request, like `parse_location`.

    The key of such a request is not a part of a URI, so it can contain the characters `?` and `#`.
    """
    return _parse_checked(text, subject, _REFUSED_IN_KEYS)


def _parse_checked(text: str, subject: str, refused_marks: tuple[tuple[str, str], ...]) -> Location:
    """Parse and check a location.

    Args:
        text: The location.
        subject: The beginning of error messages, such as "The location".
        refused_marks: The characters that the location must not contain, such as `?`, each with its name.

    Raises:
        BadRequest: The location is invalid. The message begins with `subject`.
    """
    if len(text) > LOCATION_CHARS_MAX:
        raise BadRequest(f"{subject} has {len(text)} characters; the limit is {LOCATION_CHARS_MAX} characters")
    shown_location = repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…")
    if _CONTROL_CHARACTER.search(text):
        raise BadRequest(f"{subject} {shown_location} contains a control character; remove it")
    match = _SCHEME.fullmatch(text)
    if match is None:
        forms = " or ".join(rules.form for rules in STORAGES.values())
        raise BadRequest(f"{subject} {shown_location} is not a URI; write {forms}")
    scheme, bucket_path = match[1].lower(), match[2]
    for mark, name in refused_marks:
        if mark in bucket_path:
            raise BadRequest(f"{subject} {shown_location} contains {name} ({mark}); a location is a plain path")
    rules = find_rules(scheme)
    if rules is None:
        stored_on = " and ".join(f"{scheme_name}://" for scheme_name in STORAGES)
        raise BadRequest(f"{subject} {shown_location} has the scheme {scheme!r}; this server supports {stored_on}")
    bucket, path = rules.split(bucket_path, subject, shown_location)
    path = path.rstrip("/")
    _check_segments(path, subject, shown_location)
    return Location(rules.scheme, bucket, path)


def _check_segments(path: str, subject: str, shown_location: str) -> None:
    """Check that a path has no empty segment, and that no reader can find a segment `.` or `..` or a NUL in it.

    Readers may decode percent escapes several times, so the last two checks are repeated after each decoding.

    Raises:
        BadRequest: The path has such a segment or a NUL, or is percent-encoded too often.
    """
    if not path:
        return
    if "" in path.split("/"):
        raise BadRequest(f"{subject} {shown_location} contains an empty path segment (//); write single slashes")
    decoded_path = path
    for _ in range(_DECODE_ROUNDS_MAX):
        if any(part in (".", "..") for part in decoded_path.replace("\\", "/").split("/")):
            raise BadRequest(
                f"{subject} {shown_location} contains a '.' or '..' segment; write the path without these segments"
            )
        if "\x00" in decoded_path:
            raise BadRequest(f"{subject} {shown_location} contains an encoded NUL; remove it")
        next_path = unquote(decoded_path)
        if next_path == decoded_path:
            return
        decoded_path = next_path
    raise BadRequest(f"{subject} {shown_location} is percent-encoded more than {_DECODE_ROUNDS_MAX} times; decode it")


def make_location_key(location: Location) -> str:
    """Return the canonical key of a location.

    The key is equal for all spellings that any reader treats as the same location.

    Percent escapes are decoded. For files, symbolic links are resolved, and letters are composed and case-folded,
    because some file systems ignore these differences. The function reads the file system. For files below a root of
    the warehouse, use `Warehouse.make_key`, because no link below a root is followed.
    """
    return make_canonical_key(location, STORAGES[location.scheme].resolve(location.path))


def make_canonical_key(location: Location, path: str) -> str:
    """Return the key of a location, which is equal for all spellings that a reader treats as the same location.

    Args:
        location: The location.
        path: Its path without symbolic links. Percent escapes are decoded repeatedly, because readers may decode twice.
    """
    for _ in range(_DECODE_ROUNDS_MAX):
        path = unquote(path)
    rules = STORAGES[location.scheme]
    if rules.ignores_case:
        path = fold_path(path)
    return f"{location.scheme}://{rules.make_bucket_key(location.bucket)}/{path}".rstrip("/")


def normalize_location(text: str) -> str:
    """Return a text that is equal for all spellings that a reader may treat as one location.

    Unlike `make_location_key`, the function accepts any text and does not read the file system. Different locations can
    have the same result.
    """
    match = _SCHEME.fullmatch(text)
    scheme, path = (match[1].lower(), match[2]) if match is not None else (LOCAL, text)
    if "%" in path:
        path = unquote(path)
    rules = find_rules(scheme)
    return normalize_path(scheme, path) if rules is None else rules.normalize(path)


def list_spellings(text: str) -> list[str]:
    """Return the location as given, and in the spellings that other writers usually use."""
    match = _SCHEME.fullmatch(text)
    if match is None:
        return [text, f"file:{text}", f"file://{text}"]
    scheme, bucket_path = match[1].lower(), match[2]
    rules = find_rules(scheme)
    if rules is not None:
        return rules.list_spellings(text, bucket_path)
    path = "/" + bucket_path.lstrip("/")
    return [text, path, f"{scheme}:{path}", f"{scheme}://{path}"]
