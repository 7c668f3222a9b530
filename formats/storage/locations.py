"""Normalised storage locations.

A parsed location means the same for every reader, including readers that decode percent escapes, replace backslashes
or resolve dots. Locations with these are rejected, not repaired.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from seamark.formats.protocol.wire import fold_path
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoized

LOCATION_CHARS_MAX = 4096
"""Maximum length of a location: a Linux path's limit, and four times that of an S3 key."""

_S3_SCHEMES = frozenset(("s3", "s3a", "s3n"))
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # a loop over characters cost 10 µs, three times a request
_DECODE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location. `bucket` is empty for files; `path` has no leading or trailing slash and may be empty."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/") if self.path else self.root()

    def root(self) -> str:
        return f"s3://{self.bucket}" if self.scheme == "s3" else "file:///"

    @property
    def file_path(self) -> str:
        """The absolute path of a file location."""
        return "/" + self.path

    def holds(self, other: Location) -> bool:
        """Whether `other` is this location or is below it."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            return False
        return not self.path or other.path == self.path or other.path.startswith(self.path + "/")


_REFUSED_IN_KEYS = (("\\", "a backslash"),)
_REFUSED_MARKS = (("?", "a query"), ("#", "a fragment"), *_REFUSED_IN_KEYS)


@memoized(8192)  # each load of a table parses its location three times
def parse_location(text: str, what: str = "The location") -> Location:
    """The normalised location: `file:/p` equals `file:///p`, `s3a` and `s3n` become s3, a trailing slash is dropped.

    BadRequest, with `what`, for text that readers could interpret differently.
    """
    return _parse(text, what, _REFUSED_MARKS)


def parse_object(text: str, what: str = "The location") -> Location:
    """As `parse_location`, for one object of a request of the S3 API: its key is not a part of a URI, so `?` and `#`
    are characters of it."""
    return _parse(text, what, _REFUSED_IN_KEYS)


def _parse(text: str, what: str, refused: tuple[tuple[str, str], ...]) -> Location:
    if len(text) > LOCATION_CHARS_MAX:
        raise BadRequest(f"{what} has {len(text)} characters; at most {LOCATION_CHARS_MAX} are allowed")
    shown = repr(text if len(text) <= 200 else text[:200] + "…")
    if _CONTROL.search(text):
        raise BadRequest(f"{what} {shown} holds a control character; remove it")
    matched = _SCHEME.fullmatch(text)
    if matched is None:
        raise BadRequest(f"{what} {shown} is not a URI; write file:///path or s3://bucket/path")
    scheme, rest = matched[1].lower(), matched[2]
    for mark, name in refused:
        if mark in rest:
            raise BadRequest(f"{what} {shown} holds {name} ({mark}); a location is a plain path")
    if scheme == "file":
        bucket, path = "", _file_path(rest, what, shown)
    elif scheme in _S3_SCHEMES:
        scheme = "s3"
        bucket, path = _bucket_and_key(rest, what, shown)
    else:
        raise BadRequest(f"{what} {shown} has the scheme {scheme!r}; this server stores on file:// and s3://")
    path = path.rstrip("/")
    _check_segments(path, what, shown)
    return Location(scheme, bucket, path)


def _file_path(rest: str, what: str, shown: str) -> str:
    if rest.startswith("//"):
        authority, slash, path = rest[2:].partition("/")
        if authority:
            raise BadRequest(f"{what} {shown} names the host {authority!r}; write file:///path")
        rest = slash + path
    if not rest.startswith("/"):
        raise BadRequest(f"{what} {shown} is not absolute; write file:///path")
    return rest[1:]


def _bucket_and_key(rest: str, what: str, shown: str) -> tuple[str, str]:
    if not rest.startswith("//"):
        raise BadRequest(f"{what} {shown} has no bucket; write s3://bucket/path")
    bucket, _, key = rest[2:].partition("/")
    if "@" in bucket:
        raise BadRequest(f"{what} carries user information before '@'; write s3://bucket/path")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise BadRequest(f"{what} {shown} has the invalid bucket {bucket!r}; correct its name")
    return bucket, key


def _check_segments(path: str, what: str, shown: str) -> None:
    if not path:
        return
    if "" in path.split("/"):
        raise BadRequest(f"{what} {shown} holds an empty path segment (//); write single slashes")
    decoded = path
    for _ in range(_DECODE_ROUNDS):
        if any(part in (".", "..") for part in decoded.replace("\\", "/").split("/")):
            raise BadRequest(f"{what} {shown} holds a '.' or '..' segment; write the path out")
        if "\x00" in decoded:
            raise BadRequest(f"{what} {shown} holds an encoded NUL; remove it")
        further = unquote(decoded)
        if further == decoded:
            return
        decoded = further
    raise BadRequest(f"{what} {shown} is percent-encoded more than {_DECODE_ROUNDS} times; decode it")


def location_key(location: Location) -> str:
    """A canonical key of a location, equal for all spellings that any reader treats as the same.

    Percent escapes are decoded; for files, symbolic links are resolved and letters are composed and case-folded,
    because some file systems ignore these differences. Reads the file system. For files below a root of the warehouse
    use `Warehouse.key`, because no link below a root is followed.
    """
    path = location.path
    if location.scheme == "file":
        path = os.path.realpath(location.file_path).strip("/")
    return canonical_key(location, path)


def canonical_key(location: Location, path: str) -> str:
    """The key of a location whose path leads through no symbolic link."""
    for _ in range(_DECODE_ROUNDS):
        path = unquote(path)
    if location.scheme == "file":
        path = fold_path(path)
    return f"{location.scheme}://{location.bucket}/{path}".rstrip("/")


def plain_location(text: str) -> str:
    """Equal for all spellings that a reader may treat as one location; unlike `location_key`, defined for any text and
    without a look at the file system. Different locations may have the same plain form."""
    matched = _SCHEME.fullmatch(text)
    scheme, rest = (matched[1].lower(), matched[2]) if matched is not None else ("file", text)
    if "%" in rest:
        rest = unquote(rest)
    if scheme in _S3_SCHEMES:
        return f"s3:{rest}"
    return f"{scheme}:/" + "/".join(part for part in rest.split("/") if part not in ("", "."))


def spellings(text: str) -> list[str]:
    """The location unchanged, and as other writers usually spell it."""
    matched = _SCHEME.fullmatch(text)
    if matched is None:
        return [text, f"file:{text}", f"file://{text}"]
    scheme, rest = matched[1].lower(), matched[2]
    if scheme in _S3_SCHEMES:
        return [text, *(f"{name}:{rest}" for name in sorted(_S3_SCHEMES))]
    plain = "/" + rest.lstrip("/")
    return [text, plain, f"{scheme}:{plain}", f"{scheme}://{plain}"]
