"""Invalid bodies, names, locations, queries and headers, mostly for Iceberg's routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.api.client import SCHEMA, VIEW_VERSION
from tests.api.inputs.bad_input import (
    BAD_REQUEST,
    BODY_LIMIT_BYTES,
    NAMESPACE_PATH,
    NAMESPACES_PATH,
    TABLES_PATH,
    VIEWS_PATH,
    BadInput,
    build_table_commit,
    make_table,
)


def list_bad_bodies() -> Iterator[BadInput]:
    """Yield requests whose body is not the JSON object that the operation requires."""

    def build_input(
        description: str, body: Any, path: str = NAMESPACES_PATH, status: int = 400, type_: str = BAD_REQUEST
    ) -> BadInput:
        return BadInput("Bodies", description, "POST", path, body, status, type_)

    yield build_input("no body", None)
    yield build_input("an empty body", b"")
    yield build_input("text that is not JSON", b"namespace=db")
    yield build_input("truncated JSON", b'{"namespace": ["a"')
    yield build_input("JSON followed by more text", b'{"namespace": ["a"]} {}')
    yield build_input("bytes that are not UTF-8", b'{"namespace": ["\xff\xfe"]}')
    yield build_input("UTF-16", '{"namespace": ["a"]}'.encode("utf-16"))
    yield build_input("a lone surrogate", b'{"namespace": ["\\ud800"]}')
    yield build_input("a NUL in a name", b'{"namespace": ["a\\u0000b"]}')
    yield build_input("an array instead of an object", b"[]")
    yield build_input("null", b"null")
    yield build_input("a number", b"1e999")
    yield build_input("an empty object", b"{}")
    yield build_input("a field of the wrong type", {"namespace": "db"})
    yield build_input("a wrong type in a nested value", {"namespace": ["a", 5]})
    yield build_input("a property that is not a string", {"namespace": ["n"], "properties": {"a": 1}})
    yield build_input("a repeated key whose second value has the wrong type", b'{"namespace": ["a"], "namespace": 5}')
    yield build_input("arrays nested 100,000 deep", b"[" * 100_000)
    yield build_input("arrays nested 100,000 deep in an ignored field", b'{"x":' + b"[" * 100_000)
    yield build_input("a number of 5,000 digits", b'{"namespace": [' + b"9" * 5_000 + b"]}")
    large_body = b'{"namespace": ["' + b"a" * BODY_LIMIT_BYTES + b'"]}'
    yield build_input("a body larger than `body_limit_bytes`", large_body, status=413, type_="PayloadTooLargeException")
    yield BadInput(
        "Bodies",
        "`Content-Encoding: gzip` with a body that is not gzip",
        "POST",
        NAMESPACES_PATH,
        b"x" * 50,
        headers=(("Content-Encoding", "gzip"),),
    )
    unknown_encoding, error_type = (("Content-Encoding", "lzw"),), "UnsupportedMediaTypeException"
    yield BadInput(
        "Bodies",
        "unknown content encoding",
        "POST",
        NAMESPACES_PATH,
        b"x" * 50,
        status=415,
        type=error_type,
        headers=unknown_encoding,
    )


def list_bad_names() -> Iterator[BadInput]:
    """Yield requests whose path or name is malformed, too long or leaves its namespace."""

    def build_get(description: str, path: str, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Names and paths", description, "GET", path, None, status, type_)

    def build_post(description: str, path: str, body: Any, status: int = 400, type_: str = BAD_REQUEST) -> BadInput:
        return BadInput("Names and paths", description, "POST", path, body, status, type_)

    yield build_get("a NUL in a path", f"{NAMESPACES_PATH}/a%00b")
    yield build_get("a line break in a path", f"{NAMESPACES_PATH}/a%0D%0Ab")
    yield build_get("a truncated percent escape", f"{NAMESPACES_PATH}/a%2")
    yield build_get("an invalid percent escape", f"{NAMESPACES_PATH}/%zz")
    yield build_get("a path that is not UTF-8", f"{NAMESPACES_PATH}/%FF")
    yield build_get("an overlong UTF-8 slash", f"{NAMESPACES_PATH}/%C0%AF")
    yield build_get("an encoded surrogate", f"{NAMESPACES_PATH}/%ED%A0%80")
    yield build_get("an empty level", f"{NAMESPACES_PATH}/a%1F%1Fb")
    yield build_get("a name that is only a separator", f"{NAMESPACES_PATH}/%1F")
    yield build_get("a name of 256 characters", f"{TABLES_PATH}/{'x' * 256}")
    yield build_get(
        "a namespace that is a path with dots",
        f"{NAMESPACES_PATH}/..%2F..%2Fetc%2Fpasswd",
        404,
        "NoSuchNamespaceException",
    )
    yield build_get(
        "a table that is a path with dots", f"{TABLES_PATH}/..%2F..%2F..%2Fetc%2Fpasswd", 404, "NoSuchTableException"
    )
    yield build_get(
        "dots that are not percent-encoded", f"{TABLES_PATH}/../../../../etc/passwd", 404, "NotFoundException"
    )
    yield build_get("an empty name", f"{NAMESPACES_PATH}//tables", 404, "NotFoundException")
    yield build_get("unknown prefix", "/v1/other/namespaces", 404, "NoSuchWarehouseException")
    yield build_get("unknown route", "/v2/namespaces", 404, "NotFoundException")
    yield BadInput(
        "Names and paths", "unsupported method", "PUT", NAMESPACES_PATH, None, 405, "UnsupportedOperationException"
    )
    yield build_post("a namespace without levels", NAMESPACES_PATH, {"namespace": []})
    yield build_post("a level `..`", NAMESPACES_PATH, {"namespace": [".."]})
    yield build_post("a table name `.`", TABLES_PATH, make_table(name="."))
    yield build_post("an empty level in a body", NAMESPACES_PATH, {"namespace": ["a", ""]})
    yield build_post("a level that contains the separator", NAMESPACES_PATH, {"namespace": ["a\x1fb"]})
    yield build_post("a level of 256 characters", NAMESPACES_PATH, {"namespace": ["n" * 256]})
    yield build_post("a namespace with 10,000 levels", NAMESPACES_PATH, {"namespace": ["n"] * 10_000})
    yield build_post("a table without a name", TABLES_PATH, make_table(name=""))
    yield build_post("a table name with a tab", TABLES_PATH, make_table(name="a\tb"))
    yield build_post("a table name of 256 characters", TABLES_PATH, make_table(name="x" * 256))
    yield build_post(
        "a view name with a NUL", VIEWS_PATH, {"name": "a\x00", "schema": SCHEMA, "view-version": VIEW_VERSION}
    )
    identifiers = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "\x00"}}
    yield build_post("a rename to a name with a control character", "/v1/tables/rename", identifiers)
    yield build_post(
        "a rename to an empty name",
        "/v1/tables/rename",
        {**identifiers, "destination": {"namespace": ["db"], "name": ""}},
    )
    yield build_post(
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
        yield BadInput("Locations", f"a table at: {description}", "POST", TABLES_PATH, make_table(location=location))
        update = {"action": "set-location", "location": location}
        yield BadInput(
            "Locations", f"a table moved to: {description}", "POST", f"{TABLES_PATH}/t", build_table_commit(update)
        )
        body = {"name": "new", "metadata-location": location}
        yield BadInput("Locations", f"a registered file at: {description}", "POST", f"{NAMESPACE_PATH}/register", body)
    invalid_view = {"name": "new", "schema": SCHEMA, "view-version": VIEW_VERSION, "location": "file:///etc"}
    yield BadInput("Locations", "a view outside of the warehouse", "POST", VIEWS_PATH, invalid_view)
    view = {"name": "new", "metadata-location": "file:///etc/passwd"}
    yield BadInput(
        "Locations", "a registered view outside of the warehouse", "POST", f"{NAMESPACE_PATH}/register-view", view
    )
    properties = {"updates": {"location": "file:///etc"}}
    yield BadInput(
        "Locations", "a namespace location outside of the warehouse", "POST", f"{NAMESPACE_PATH}/properties", properties
    )
    commit_of_path = build_table_commit({"action": "set-properties", "updates": {"write.metadata.path": "file:///etc"}})
    yield BadInput("Locations", "a metadata path outside of the warehouse", "POST", f"{TABLES_PATH}/t", commit_of_path)
    missing_metadata = {"name": "new", "metadata-location": "{warehouse}/db/none.metadata.json"}
    yield BadInput(
        "Locations",
        "a registered file that does not exist",
        "POST",
        f"{NAMESPACE_PATH}/register",
        missing_metadata,
        404,
        "NotFoundException",
    )
    view_as_table = {"name": "new", "metadata-location": "{view}"}
    yield BadInput("Locations", "a view registered as a table", "POST", f"{NAMESPACE_PATH}/register", view_as_table)
    table_as_view = {"name": "new", "metadata-location": "{location}"}
    yield BadInput(
        "Locations", "a table registered as a view", "POST", f"{NAMESPACE_PATH}/register-view", table_as_view
    )


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
        for path in (NAMESPACES_PATH, TABLES_PATH, VIEWS_PATH, f"{NAMESPACE_PATH}/functions"):
            kind = path.rsplit("/", 1)[1]
            yield BadInput("Queries", f"{description}, listing {kind}", "GET", f"{path}?{query}")
    yield BadInput("Queries", "a parent with a control character", "GET", f"{NAMESPACES_PATH}?parent=a%00")
    yield BadInput("Queries", "a parent with an empty level", "GET", f"{NAMESPACES_PATH}?parent=a%1F")
    yield BadInput("Queries", "`snapshots` is neither `all` nor `refs`", "GET", f"{TABLES_PATH}/t?snapshots=some")
    yield BadInput("Queries", "a purge flag that is not a boolean", "DELETE", f"{TABLES_PATH}/t?purgeRequested=1")
    for description, warehouse in (
        ("a location that is not a warehouse", "s3://other"),
        ("unknown warehouse", "prod"),
    ):
        yield BadInput(
            "Queries",
            description,
            "GET",
            f"/v1/config?warehouse={warehouse}",
            status=404,
            type="NoSuchWarehouseException",
        )


def list_bad_headers() -> Iterator[BadInput]:
    for description, key in (
        ("that is not a UUID", "abc"),
        ("of version 4", "017f22e2-79b0-4cc3-98c4-dc0c0c07398f"),
        ("with a forbidden variant", "017f22e2-79b0-7cc3-18c4-dc0c0c07398f"),
        ("that is empty", ""),
        ("of 8,000 characters", "0" * 8_000),
    ):
        header = (("Idempotency-Key", key),)
        yield BadInput("Headers", f"an idempotency key {description}", "DELETE", f"{TABLES_PATH}/t", headers=header)
