"""Decoding of requests: the names in the path, the values of the query, and the idempotency key.

Names are decoded from the raw path, because aiohttp's decoded path does not distinguish `%25FF` from `%FF`. In a path
segment, `+` is a space, as in a form: Iceberg Java's client (Spark, Trino, Flink) encodes names in this way, and
PyIceberg sends a plus as `%2B`. If a parameter cannot be decoded, BadRequest names it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes

import msgspec
from aiohttp import web

from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR, check_name, parse_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize
from seamark.metaserver.api.http import bodies
from seamark.metaserver.api.http.keys import PRINCIPAL
from seamark.metaserver.catalog.values import IdempotencyKey
from seamark.metaserver.store.model import NamespacePath

IDEMPOTENCY_KEY = "Idempotency-Key"
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_HEX = frozenset(b"0123456789abcdefABCDEF")
_INT_DIGITS_MAX = 18
_BOOLEANS = {"true": True, "false": False}


# Engines send the same names repeatedly. Invalid names are not cached, so the cached paths are short.
@lru_cache(maxsize=2048)
def parse_names(raw_path: str, template: str, variables: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in these variables of the path.

    A position in `template`, the path of the route with variables in braces, is also the position in `raw_path`.

    Raises:
        BadRequest: A name is invalid.
    """
    segments = raw_path.split("/")
    return tuple(
        check_name(_decode_segment(segments[_find_position(template, variable)], variable), f"{variable} name")
        for variable in variables
    )


@memoize(2048)
def read_namespace(raw_path: str, template: str) -> NamespacePath:
    """Return the namespace in the path. Its levels are separated by 0x1F (`%1F`).

    Raises:
        BadRequest: The namespace is invalid.
    """
    return parse_namespace(_decode_segment(raw_path.split("/")[_find_position(template, "namespace")], "namespace"))


@lru_cache(maxsize=8192)  # Each load of a table calls the function.
def make_table_path(namespace: NamespacePath, name: str, prefix: str) -> str:
    """Return `v1/…/namespaces/{namespace}/tables/{name}`, percent-encoded, relative to the catalog's URI."""
    levels = quote(NAMESPACE_SEPARATOR.join(namespace), safe="")
    base = f"v1/{quote(prefix, safe='')}" if prefix else "v1"
    return f"{base}/namespaces/{levels}/tables/{quote(name, safe='')}"


def read_page_query(query: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return `pageToken` and `pageSize` of a listing of the REST specification, or None for an absent parameter.

    A size without a token is checked, and then ignored: a client that uses pages first sends an empty token, and all
    other clients must receive all items in one answer.
    """
    size, token = query.get("pageSize"), query.get("pageToken")
    checked_size = None if size is None else _parse_page_size(size)
    return token, None if token is None else checked_size


def read_boolean_query(query: Mapping[str, str], name: str) -> bool:
    """Return the value of a boolean parameter, or False if it is absent.

    PyIceberg sends `True`, and Iceberg Java sends `true`, so the case is ignored.

    Raises:
        BadRequest: The value is not a boolean.
    """
    text = query.get(name, "false")
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be true or false")
    return value


async def read_request_key(request: web.Request) -> IdempotencyKey | None:
    """Return the idempotency key with the scope and the digest of the request, or None if there is no such header.

    Raises:
        BadRequest: The key is invalid.
    """
    keys = request.headers.getall(IDEMPOTENCY_KEY, None)
    if not keys:
        return None
    if len(keys) > 1:
        raise BadRequest(f"The request has {len(keys)} {IDEMPOTENCY_KEY} headers; send one header")
    key = keys[0].strip().lower()
    if not _UUID7.fullmatch(key):
        raise BadRequest(f"{IDEMPOTENCY_KEY} is {keys[0][:60]!r}; it must be a UUID of version 7 (RFC 9562)")
    scope = "\n".join((request[PRINCIPAL].name, request.method, request.rel_url.raw_path))
    body, query = await bodies.read_body(request), request.query_string
    is_large = len(body) > bodies.QUICK_BYTES
    digest = await asyncio.to_thread(_hash_request, body, query) if is_large else _hash_request(body, query)
    return IdempotencyKey(key=key, scope=scope, request_hash=digest)


def _hash_request(body: bytes, query: str) -> str:
    """Return a digest of the request.

    For JSON, the digest sorts keys, so a repeated request may be serialised differently. A large body must be repeated
    byte by byte, because decoding 64 MB blocks the interpreter for seconds, and takes ten times the memory.
    """
    canonical_body = body
    if len(body) <= bodies.QUICK_BYTES:
        # If the body cannot be decoded, the handler refuses it with a better message.
        with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            canonical_body = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    digest = hashlib.sha256(canonical_body)
    digest.update(b"\n" + query.encode())
    return digest.hexdigest()


def _parse_page_size(text: str) -> int:
    # int() accepts '1_000' and Unicode digits, and its time is quadratic in the number of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= _INT_DIGITS_MAX and int(text) > 0):
        raise BadRequest(f"pageSize is {text[:40]!r}; it must be a whole number of at least 1")
    return int(text)


@lru_cache(maxsize=256)  # The cache has one entry for each variable of each route.
def _find_position(template: str, variable: str) -> int:
    """Return the position of a variable among the segments of a path template."""
    return template.split("/").index(f"{{{variable}}}")


def _decode_segment(segment: str, subject: str) -> str:
    """Decode a segment of a path.

    The library leaves an invalid `%` unchanged, so each `%` is checked first. A `+` is a space, as in forms, because
    Iceberg Java encodes spaces as `+`.

    Raises:
        BadRequest: The segment is not percent-encoded UTF-8.
    """
    segment_bytes = segment.encode()
    position = segment_bytes.find(b"%")
    while position >= 0:
        if (
            len(segment_bytes) < position + 3
            or segment_bytes[position + 1] not in _HEX
            or segment_bytes[position + 2] not in _HEX
        ):
            raise BadRequest(f"The {subject} in the path is not percent-encoded; encode % as %25")
        position = segment_bytes.find(b"%", position + 3)
    try:
        return unquote_to_bytes(segment_bytes.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"The {subject} in the path is not valid UTF-8 after percent-decoding") from None
