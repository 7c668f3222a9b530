"""Ranges and preconditions of GET and HEAD. The module does no I/O.

Sources: RFC 9110, sections 13 and 14; Amazon S3 API reference, GetObject.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from seamark.metaserver.gateway.s3_errors import S3Error

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def read_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the length of the range in a Range header, or None for the whole object.

    The result is also None for a malformed header, which is ignored (RFC 9110, 14.2), and for several ranges,
    which S3 does not support.

    Args:
        text: The value of the header, or None without a header.
        size: The size of the object in bytes.

    Raises:
        S3Error: InvalidRange if the object has no byte of the range.
    """
    if text is None or not text.startswith("bytes="):
        return None
    match = _RANGE.fullmatch(text.replace(" ", ""))
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        if not size and int(match[2]):
            # A range of the last bytes of an empty object means the whole object.
            return None
        length = min(int(match[2]), size)
        start = size - length
    else:
        start = int(match[1])
        end = min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < start:
            return None  # The header is malformed.
        length = end - start + 1
    if length <= 0:
        raise S3Error("InvalidRange", "The requested range is not satisfiable", {"Content-Range": f"bytes */{size}"})
    return start, length


def check_read(headers: Mapping[str, str], etag: str, modified_s: int, prefix: str = "") -> None:
    """Check the conditions of a read.

    Args:
        headers: The headers of the request.
        etag: The ETag of the object.
        modified_s: The time of the object's last change.
        prefix: The prefix of the headers: `x-amz-copy-source-` for the source of a copy. With a prefix, every false
            condition raises PreconditionFailed.

    Raises:
        S3Error: PreconditionFailed or NotModified if a condition is false.
    """
    # If-Match replaces If-Unmodified-Since, and If-None-Match replaces If-Modified-Since (RFC 9110, 13.2.2).
    unmet_code = "PreconditionFailed" if prefix else "NotModified"
    if_match, if_none_match = headers.get(f"{prefix}if-match"), headers.get(f"{prefix}if-none-match")
    if if_match is not None:
        if not _matches_etag(if_match, etag):
            raise _make_condition_error("PreconditionFailed")
    elif (since_s := _parse_seconds(headers.get(f"{prefix}if-unmodified-since"))) is not None and modified_s > since_s:
        raise _make_condition_error("PreconditionFailed")
    if if_none_match is not None:
        if _matches_etag(if_none_match, etag):
            raise _make_condition_error(unmet_code, etag)
    elif (since_s := _parse_seconds(headers.get(f"{prefix}if-modified-since"))) is not None and modified_s <= since_s:
        raise _make_condition_error(unmet_code, etag)


def check_write(headers: Mapping[str, str], etag: str | None) -> None:
    """Check the conditions of a write.

    Args:
        headers: The headers of the request.
        etag: The ETag of the object that the write replaces, or None if there is no object.

    Raises:
        S3Error: PreconditionFailed if a condition is false, NoSuchKey if If-Match requires an object and there is none,
            or NotImplemented if If-None-Match is not `*`.
    """
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if if_none_match is not None:
        if if_none_match.strip() != "*":
            raise S3Error("NotImplemented", "A write supports only * in If-None-Match")
        if etag is not None:
            raise _make_condition_error("PreconditionFailed")
    if if_match is not None:
        if etag is None:
            raise S3Error("NoSuchKey", "The specified key does not exist")
        if not _matches_etag(if_match, etag):
            raise _make_condition_error("PreconditionFailed")


def _matches_etag(condition: str, etag: str) -> bool:
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in condition.split(",")}
    return "*" in tags or etag.strip('"') in tags


def _parse_seconds(text: str | None) -> float | None:
    """Return the date in seconds since the epoch, or None for an invalid date, which is ignored."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _make_condition_error(code: str, etag: str = "") -> S3Error:
    message = "At least one of the pre-conditions you specified did not hold"
    return S3Error(code, message, {"ETag": etag} if etag else None)
