"""Invalid bodies, names, locations, queries and headers, mostly for Iceberg's routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.client import SCHEMA, VIEW_VERSION
from tests.api.inputs.bad_input import (
    BAD_REQUEST,
    BODY_LIMIT_BYTES,
    BadInput,
    D,
    N,
    T,
    V,
    build_table_commit,
    make_table,
)


def list_bad_bodies() -> Iterator[BadInput]:
    """Yield requests whose body is not the JSON object that the operation requires."""

    def post(description: str, body: Any, path: str = N, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Bodies", description, "POST", path, body, status, type_)

    yield post("no body", None)
    yield post("an empty body", b"")
    yield post("text that is not JSON", b"namespace=db")
    yield post("truncated JSON", b'{"namespace": ["a"')
    yield post("JSON followed by more text", b'{"namespace": ["a"]} {}')
    yield post("bytes that are not UTF-8", b'{"namespace": ["\xff\xfe"]}')
    yield post("UTF-16", '{"namespace": ["a"]}'.encode("utf-16"))
    yield post("a lone surrogate", b'{"namespace": ["\\ud800"]}')
    yield post("a NUL in a name", b'{"namespace": ["a\\u0000b"]}')
    yield post("an array instead of an object", b"[]")
    yield post("null", b"null")
    yield post("a number", b"1e999")
    yield post("an empty object", b"{}")
    yield post("a field of the wrong type", {"namespace": "db"})
    yield post("a wrong type in a nested value", {"namespace": ["a", 5]})
    yield post("a property that is not a string", {"namespace": ["n"], "properties": {"a": 1}})
    yield post("a repeated key whose second value has the wrong type", b'{"namespace": ["a"], "namespace": 5}')
    yield post("arrays nested 100,000 deep", b"[" * 100_000)
    yield post("arrays nested 100,000 deep in an ignored field", b'{"x":' + b"[" * 100_000)
    yield post("a number of 5,000 digits", b'{"namespace": [' + b"9" * 5_000 + b"]}")
    large_body = b'{"namespace": ["' + b"a" * BODY_LIMIT_BYTES + b'"]}'
    yield post("a body larger than `body_limit_bytes`", large_body, status=413, type_="PayloadTooLargeException")
    yield BadInput(
        "Bodies",
        "`Content-Encoding: gzip` with a body that is not gzip",
        "POST",
        N,
        b"x" * 50,
        headers=(("Content-Encoding", "gzip"),),
    )
    unknown_encoding, media = (("Content-Encoding", "lzw"),), "UnsupportedMediaTypeException"
    yield BadInput("Bodies", "unknown content encoding", "POST", N, b"x" * 50, 415, media, unknown_encoding)


def list_bad_names() -> Iterator[BadInput]:
    """Yield requests whose path or name is malformed, too long or leaves its namespace."""

    def get(description: str, path: str, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Names and paths", description, "GET", path, None, status, type_)

    def post(description: str, path: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Names and paths", description, "POST", path, body, status, type_)

    yield get("a NUL in a path", f"{N}/a%00b")
    yield get("a line break in a path", f"{N}/a%0D%0Ab")
    yield get("a truncated percent escape", f"{N}/a%2")
    yield get("an invalid percent escape", f"{N}/%zz")
    yield get("a path that is not UTF-8", f"{N}/%FF")
    yield get("an overlong UTF-8 slash", f"{N}/%C0%AF")
    yield get("an encoded surrogate", f"{N}/%ED%A0%80")
    yield get("an empty level", f"{N}/a%1F%1Fb")
    yield get("a name that is only a separator", f"{N}/%1F")
    yield get("a name of 256 characters", f"{T}/{'x' * 256}")
    yield get("a namespace that is a path with dots", f"{N}/..%2F..%2Fetc%2Fpasswd", 404, "NoSuchNamespaceException")
    yield get("a table that is a path with dots", f"{T}/..%2F..%2F..%2Fetc%2Fpasswd", 404, "NoSuchTableException")
    yield get("dots that are not percent-encoded", f"{T}/../../../../etc/passwd", 404, "NotFoundException")
    yield get("an empty name", f"{N}//tables", 404, "NotFoundException")
    yield get("unknown prefix", "/v1/other/namespaces", 404, "NoSuchWarehouseException")
    yield get("unknown route", "/v2/namespaces", 404, "NotFoundException")
    yield BadInput("Names and paths", "unsupported method", "PUT", N, None, 405, "UnsupportedOperationException")
    yield post("a namespace without levels", N, {"namespace": []})
    yield post("a level `..`", N, {"namespace": [".."]})
    yield post("a table name `.`", T, make_table(name="."))
    yield post("an empty level in a body", N, {"namespace": ["a", ""]})
    yield post("a level that contains the separator", N, {"namespace": ["a\x1fb"]})
    yield post("a level of 256 characters", N, {"namespace": ["n" * 256]})
    yield post("a namespace with 10,000 levels", N, {"namespace": ["n"] * 10_000})
    yield post("a table without a name", T, make_table(name=""))
    yield post("a table name with a tab", T, make_table(name="a\tb"))
    yield post("a table name of 256 characters", T, make_table(name="x" * 256))
    yield post("a view name with a NUL", V, {"name": "a\x00", "schema": SCHEMA, "view-version": VIEW_VERSION})
    identifiers = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "\x00"}}
    yield post("a rename to a name with a control character", "/v1/tables/rename", identifiers)
    yield post(
        "a rename to an empty name",
        "/v1/tables/rename",
        {**identifiers, "destination": {"namespace": ["db"], "name": ""}},
    )
    yield post(
        "a rename to an empty namespace",
        "/v1/tables/rename",
        {**identifiers, "destination": {"namespace": [], "name": "x"}},
    )


def list_bad_locations() -> Iterator[BadInput]:
    """Yield requests that place or move a table outside of its warehouse."""
    for description, location in (
        ("a path outside of the warehouse", "file:///etc/passwd"),
        ("a path above the warehouse, with dots", "{warehouse}/../outside"),
        ("a path above the warehouse, with encoded dots", "{warehouse}/%2e%2e/outside"),
        ("a path above the warehouse, with doubly encoded dots", "{warehouse}/%252e%252e/outside"),
        ("a path above the warehouse, with backslashes", "{warehouse}/..\\outside"),
        ("a folder whose name begins with the name of the warehouse", "{warehouse}-other/t"),
        ("the warehouse itself", "{warehouse}"),
        ("a relative path", "db/t"),
        ("another host", "file://host/t"),
        ("an HTTP URL", "http://127.0.0.1/t"),
        ("the cloud's metadata service", "http://169.254.169.254/latest/meta-data"),
        ("a bucket of another warehouse", "s3://somebody/else"),
        ("a URL with credentials", "s3://key:secret@bucket/t"),
        ("a path with a NUL", "{warehouse}/a\x00b"),
        ("a URL with a query", "{warehouse}/t?x=1"),
        ("a path of 5,000 characters", "{warehouse}/" + "x" * 5_000),
    ):
        yield BadInput("Locations", f"a table at: {description}", "POST", T, make_table(location=location))
        update = {"action": "set-location", "location": location}
        yield BadInput("Locations", f"a table moved to: {description}", "POST", f"{T}/t", build_table_commit(update))
        body = {"name": "new", "metadata-location": location}
        yield BadInput("Locations", f"a registered file at: {description}", "POST", f"{D}/register", body)
    invalid_view = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "location": "file:///etc"}
    yield BadInput("Locations", "a view outside of the warehouse", "POST", V, invalid_view)
    view = {"name": "new", "metadata-location": "file:///etc/passwd"}
    yield BadInput("Locations", "a registered view outside of the warehouse", "POST", f"{D}/register-view", view)
    properties = {"updates": {"location": "file:///etc"}}
    yield BadInput("Locations", "a namespace location outside of the warehouse", "POST", f"{D}/properties", properties)
    path = build_table_commit({"action": "set-properties", "updates": {"write.metadata.path": "file:///etc"}})
    yield BadInput("Locations", "a metadata path outside of the warehouse", "POST", f"{T}/t", path)
    missing_metadata = {"name": "new", "metadata-location": "{warehouse}/db/none.metadata.json"}
    yield BadInput(
        "Locations",
        "a registered file that does not exist",
        "POST",
        f"{D}/register",
        missing_metadata,
        404,
        "NotFoundException",
    )
    view_as_table = {"name": "new", "metadata-location": "{view}"}
    yield BadInput("Locations", "a view registered as a table", "POST", f"{D}/register", view_as_table)
    table_as_view = {"name": "new", "metadata-location": "{location}"}
    yield BadInput("Locations", "a table registered as a view", "POST", f"{D}/register-view", table_as_view)


def list_bad_queries() -> Iterator[BadInput]:
    """Yield requests whose query parameters are invalid."""
    for description, query in (
        ("a page token that the server did not issue", "pageToken=%21%21"),
        ("a page token that is not text", "pageToken=_w"),
        ("a page token with a NUL", "pageToken=AA"),
        ("a page size of zero", "pageSize=0"),
        ("a negative page size", "pageSize=-1"),
        ("a page size that is not a number", "pageSize=ten"),
        ("a page size in Arabic digits", "pageSize=%D9%A3"),
        ("a page size of 5,000 digits", "pageSize=" + "9" * 5_000),
        ("an empty page size", "pageSize="),
    ):
        for path in (N, T, V, f"{D}/functions"):
            kind = path.rsplit("/", 1)[1]
            yield BadInput("Queries", f"{description}, listing {kind}", "GET", f"{path}?{query}")
    yield BadInput("Queries", "a parent with a control character", "GET", f"{N}?parent=a%00")
    yield BadInput("Queries", "a parent with an empty level", "GET", f"{N}?parent=a%1F")
    yield BadInput("Queries", "`snapshots` is neither `all` nor `refs`", "GET", f"{T}/t?snapshots=some")
    yield BadInput("Queries", "a purge flag that is not a boolean", "DELETE", f"{T}/t?purgeRequested=1")
    for description, warehouse in (
        ("a location that is not a warehouse", "s3://other"),
        ("unknown warehouse", "prod"),
    ):
        yield BadInput(
            "Queries",
            description,
            "GET",
            f"/v1/config?warehouse={warehouse}",
            None,
            404,
            "NoSuchWarehouseException",
        )


def list_bad_headers() -> Iterator[BadInput]:
    for description, key in (
        ("that is not a UUID", "abc"),
        ("of version 4", "017f22e2-79b0-4cc3-98c4-dc0c0c07398f"),
        ("with a forbidden variant", "017f22e2-79b0-7cc3-18c4-dc0c0c07398f"),
        ("that is empty", ""),
        ("of 10,000 characters", "0" * 8_000),
    ):
        header = (("Idempotency-Key", key),)
        yield BadInput("Headers", f"an idempotency key {description}", "DELETE", f"{T}/t", headers=header)
