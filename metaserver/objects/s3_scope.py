"""Checks that all objects of an S3 request are inside one table. The module does no I/O.

A request is accepted only if every object in its address, query, headers and body is below the table's
location, and if no S3 server can interpret the address differently. Queries and `x-amz-` headers must be on allow
lists. So the check rejects a copy from another location, a canned ACL, and a second address in a Host header or an XML
entity.

The requests and headers are from the Amazon S3 API reference. The requests that clients send are from Iceberg's
S3FileIO and s3fs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit
from xml.etree import ElementTree

from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.formats.storage.locations import Location, parse_object
from seamark.metaserver.settings.settings import Settings

READ_METHODS = frozenset(("GET", "HEAD"))
WRITE_METHODS = frozenset(("PUT", "POST", "DELETE"))
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
"""The value of `x-amz-content-sha256` if the signature does not cover the body."""
DELETE_KEYS_MAX = 1000
"""The maximum number of keys of one DeleteObjects request, which S3 defines."""
DELETE_BODY_MAX = 8 << 20
"""The maximum number of characters of a DeleteObjects body.

It suffices for a thousand keys of a kilobyte each if every character is escaped.
"""

_DELETE_TAGS_MAX = 8 * DELETE_KEYS_MAX
"""The maximum number of tags of a DeleteObjects body.

A key has four tags. Twice as many are accepted, for example for <Quiet>. Parsing a body of only tags takes a
second.
"""
_OBJECT_QUERIES = {
    "GET": {"versionId", "partNumber", "uploadId", "max-parts", "part-number-marker", "tagging", "attributes"},
    "HEAD": {"versionId", "partNumber"},
    "PUT": {"partNumber", "uploadId", "tagging"},
    "POST": {"uploads", "uploadId"},
    "DELETE": {"uploadId", "tagging"},
}
_LIST_QUERIES = {
    *("list-type", "prefix", "delimiter", "max-keys", "encoding-type"),
    *("continuation-token", "start-after", "marker", "fetch-owner"),
}
_LIST_VALUES = {
    "list-type": re.compile("2"),
    "delimiter": re.compile("/?"),
    "max-keys": re.compile("[0-9]{1,9}"),
    "encoding-type": re.compile("(?:url)?"),
    "fetch-owner": re.compile("(?:true|false)?"),
}
_OPAQUE = frozenset(("continuation-token", "uploadId", "versionId", "part-number-marker", "partNumber", "max-parts"))
_DOTS = re.compile(r"(?:^|[/\\])\.{1,2}(?:$|[/\\])")
_DECODE_ROUNDS_MAX = 4
_NOT_ENCODED = re.compile(r'[^\x21-\x7e]|[\\"<>^`{|}]')
_HEADERS_ALLOWED = frozenset(
    (
        *("x-amz-content-sha256", "x-amz-date", "x-amz-decoded-content-length", "x-amz-trailer", "x-amz-te"),
        *("x-amz-sdk-checksum-algorithm", "x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type"),
        *("x-amz-storage-class", "x-amz-tagging", "x-amz-tagging-directive", "x-amz-metadata-directive"),
        *("x-amz-request-payer", "x-amz-expected-bucket-owner", "x-amz-source-expected-bucket-owner"),
        *("x-amz-mp-object-size", "x-amz-object-attributes", "x-amz-optional-object-attributes", "x-amz-max-parts"),
        *("x-amz-part-number-marker", "x-amz-user-agent", "x-amz-copy-source", "x-amz-api-version"),
    )
)
_HEADER_FAMILIES = ("x-amz-meta-", "x-amz-checksum-", "x-amz-server-side-encryption", "x-amz-copy-source-")
_HARMLESS_ACLS = frozenset(("private", "bucket-owner-full-control", "bucket-owner-read"))
_AWS_HOST = re.compile(r"s3(?:\.dualstack)?(?:[.-]([a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?")
_XML_DECLARATION = re.compile(
    r"\s*<\?xml\s+version=[\"']1\.0[\"'](?:\s+encoding=[\"']utf-8[\"'])?\s*\?>", re.IGNORECASE
)
_S3_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True, slots=True)
class Address:
    """The target of a request. `key` is decoded, and is empty for a request to the bucket."""

    bucket: str
    key: str
    query: dict[str, str]


def parse_address(uri: str, settings: Settings) -> tuple[SplitResult, Address]:
    """Return a tuple of the parsed URI and its address.

    Raises:
        BadRequest: The URI is ambiguous.
        Forbidden: The URI has another endpoint.
    """
    _check_encoded(uri)
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  reading the attribute raises ValueError for port 99999
    except ValueError as error:
        raise BadRequest(f"uri is malformed: {error}") from None
    if "#" in uri or "@" in parts.netloc:
        raise BadRequest("uri has a fragment or user information; send the plain address")
    _check_plus(parts.path + parts.query)
    bucket, raw_key = _split_bucket(parts, settings)
    return parts, Address(bucket, _decode_escapes(raw_key), _parse_query(parts.query))


def parse_target(target: str) -> Address:
    """Return the address of a request target in path style, `/bucket/key?query`.

    Raises:
        BadRequest: The target is ambiguous.
    """
    _check_encoded(target)
    _check_plus(target)
    path, _, query = target.partition("?")
    if not path.startswith("/") or path.startswith("//") or "#" in target:
        raise BadRequest("The path must start with a single '/', followed by the bucket")
    bucket, _, raw_key = path[1:].partition("/")
    if "%" in bucket:
        raise BadRequest("The bucket in the path has percent escapes; bucket names never need them")
    return Address(bucket, _decode_escapes(raw_key), _parse_query(query))


def _check_encoded(uri: str) -> None:
    if _NOT_ENCODED.search(uri):
        raise BadRequest("uri has a character that must be percent-encoded")


def _check_plus(text: str) -> None:
    if "+" in text:
        raise BadRequest("uri has a '+', which S3 servers read in two ways; encode a plus as %2B, a space as %20")


def _split_bucket(parts: SplitResult, settings: Settings) -> tuple[str, str]:
    """Return the bucket and the encoded key of a URI in path style (`host/bucket/key`) or virtual-host style.

    Raises:
        BadRequest: The path is ambiguous.
        Forbidden: The URI has an endpoint other than that of the settings, or of AWS in the region of the settings.
    """
    host, path = strip_default_port(parts), parts.path
    if settings.s3_endpoint:
        endpoint = urlsplit(settings.s3_endpoint.rstrip("/"))
        base, allows_virtual_host = strip_default_port(endpoint), not settings.s3_path_style
        if parts.scheme != endpoint.scheme or not path.startswith(endpoint.path):
            raise _make_endpoint_error(parts, settings)
        path = path[len(endpoint.path) :]
    else:
        if parts.scheme != "https":
            raise _make_endpoint_error(parts, settings)
        # The host of AWS begins with s3 and a region, after the bucket if there is one.
        host_match = re.search(r"(?:^|\.)(s3[.-].*)$", host)
        base = host_match[1] if host_match else ""
        match = _AWS_HOST.fullmatch(base)
        if match is None or match[1] not in (None, settings.s3_region):
            raise _make_endpoint_error(parts, settings)
        allows_virtual_host = True
    if path.startswith("//") or (path and not path.startswith("/")):
        raise BadRequest("uri has a path that does not start with a single '/'")
    if host == base:
        bucket, _, key = path.removeprefix("/").partition("/")
        if "%" in bucket:
            raise BadRequest("The bucket in uri has percent escapes; bucket names never need them")
        return bucket, key
    # The operator must enable virtual hosts. A store without them would use the first segment of the key as the
    # bucket, and the request would reach an object that was not checked.
    if allows_virtual_host and host.endswith("." + base):
        return host[: -len(base) - 1], path.removeprefix("/")
    raise _make_endpoint_error(parts, settings)


def strip_default_port(parts: SplitResult) -> str:
    default = {"http": ":80", "https": ":443"}.get(parts.scheme, "")
    return parts.netloc.lower().removesuffix(default) if default else parts.netloc.lower()


def _make_endpoint_error(parts: SplitResult, settings: Settings) -> Forbidden:
    endpoint = settings.s3_endpoint or f"https://s3.{settings.s3_region}.amazonaws.com"
    style = "path-style" if settings.s3_endpoint and settings.s3_path_style else "path-style or virtual-host"
    return Forbidden(
        f"This server signs {style} requests to {endpoint} only, not to {parts.scheme}://{parts.netloc}; "
        "take s3.endpoint and s3.path-style-access from the table's config"
    )


def _decode_escapes(raw: str) -> str:
    try:
        return unquote(raw, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("uri has percent escapes that are not UTF-8") from None


def _parse_query(raw: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for pair in raw.split("&") if raw else ():
        name, _, value = pair.partition("=")
        name = _decode_escapes(name)
        if name in query or ";" in pair:
            raise BadRequest(f"uri has the query {name!r} twice, or ';' in it; S3 servers interpret this differently")
        query[name] = _decode_escapes(value)
    return query


def check_request(method: str, address: Address, headers: dict[str, str], body: str | None, table: Location) -> None:
    """Check that all objects of the request are inside `table`, and that `method` is permitted.

    `headers` have lower-case names.

    Raises:
        Forbidden: The request names an object outside the table, or a query or header that is not on the allow lists.
        BadRequest: The request is malformed.
    """
    # The SDKs add this query, which names the operation.
    names = set(address.query) - {"x-id"}
    _check_opaque(address.query)
    if address.key:
        _check_key(address.bucket, address.key, table, "uri")
        _check_names(names, _OBJECT_QUERIES[method], method, "an object")
        if method == "POST" and not names:
            raise Forbidden("POST on an object is allowed only for multipart uploads")
    elif method == "GET" and "prefix" in names:
        _check_listing(address, table)
        _check_names(names, _LIST_QUERIES, method, "a bucket")
    elif method == "POST" and "delete" in names:
        _check_names(names, {"delete"}, method, "a bucket")
        for key in parse_delete_body(body):
            _check_key(address.bucket, key, table, "the body")
    else:
        raise Forbidden(f"{method} on a bucket is allowed only for listing a prefix and for deleting objects")
    _check_headers(method, headers, table)


def _check_names(names: set[str], allowed_names: set[str], method: str, target: str) -> None:
    if not names <= allowed_names:
        raise Forbidden(f"{method} on {target} with the query {sorted(names - allowed_names)} is not allowed here")


def _check_key(bucket: str, key: str, table: Location, place_text: str, *, is_table_allowed: bool = False) -> None:
    try:
        parsed_location = parse_object(f"s3://{bucket}/{key}", f"The key in {place_text}")
    except BadRequest as error:
        raise Forbidden(error.message) from None
    if (parsed_location == table and not is_table_allowed) or not table.holds(parsed_location):
        raise Forbidden(
            f"{place_text} names {str(parsed_location)!r}, which is outside this table's location {str(table)!r}"
        )


def _check_listing(address: Address, table: Location) -> None:
    """Check that a listing returns only objects of the table.

    Raises:
        BadRequest: `max-keys` is not a number.
        Forbidden: The listing could return other objects, or has a value that is not allowed.
    """
    # Stores on file systems resolve dots in a prefix, so a prefix that starts with the table's location may still refer
    # to another folder. Stores may also interpret markers and tokens as paths.
    for name in ("prefix", "start-after", "marker"):
        text = address.query.get(name)
        if text is None or (name != "prefix" and not text):
            continue
        # The prefix must include the slash. Otherwise a prefix of the table t1 would also list t10.
        if address.bucket != table.bucket or not text.startswith(f"{table.path}/"):
            raise Forbidden(
                f"The {name} of a listing must start with {table.path + '/'!r}, this table's location and a slash"
            )
        _check_key(address.bucket, text, table, f"the query {name}", is_table_allowed=True)
    for name, value_pattern in _LIST_VALUES.items():
        value = address.query.get(name)
        if value is not None and not value_pattern.fullmatch(value):
            # All stores answer with 400 to a value that is not a number.
            if name == "max-keys":
                raise BadRequest(f"max-keys={value[:100]!r} is not a number of keys")
            raise Forbidden(f"The query {name}={value[:100]!r} of a listing is not allowed here")


def _check_opaque(query: dict[str, str]) -> None:
    """Check the tokens and ids, which the store has created.

    Raises:
        Forbidden: A store could interpret a token or id as a path to another place.
    """
    for name in _OPAQUE & query.keys():
        text = query[name]
        for _ in range(_DECODE_ROUNDS_MAX):  # A store could decode the text more than once.
            if not text.isprintable() or _DOTS.search(text):
                raise Forbidden(f"The query {name} holds a '.' or '..' segment or a control character")
            text = unquote(text)


def _check_headers(method: str, headers: dict[str, str], table: Location) -> None:
    for name, value in headers.items():
        if not name.startswith("x-amz-"):
            continue
        if name == "x-amz-acl":
            if value not in _HARMLESS_ACLS:
                raise Forbidden(f"The canned ACL {value!r} would open the object to others; leave s3.acl out")
        elif name not in _HEADERS_ALLOWED and not name.startswith(_HEADER_FAMILIES):
            raise Forbidden(f"A request with the header {name!r} is not allowed here; leave it out")
    source = headers.get("x-amz-copy-source")
    if source is not None:
        if method != "PUT":
            raise Forbidden(f"A copy is allowed only with PUT, not with {method}")
        if "?" in source:
            raise Forbidden(f"x-amz-copy-source has a version, which is not allowed: {source[:200]!r}")
        if "+" in source:
            raise Forbidden(f"x-amz-copy-source has a '+', which is ambiguous; write %2B: {source[:200]!r}")
        bucket, _, key = _decode_escapes(source).removeprefix("/").partition("/")
        _check_key(bucket, key, table, "x-amz-copy-source")


def parse_delete_body(body: str | None) -> list[str]:
    """Return the keys of a DeleteObjects body.

    The XML must be unambiguous: no DTD, entity, comment, CDATA or attribute. Otherwise the store could read other keys
    than this function, which were not checked.

    Raises:
        BadRequest: The body is missing, too long, ambiguous or no such request.
    """
    if not body:
        raise BadRequest("A request that deletes several objects must be signed with its body: send it in `body`")
    if len(body) > DELETE_BODY_MAX:
        raise BadRequest(f"The body has {len(body)} characters; at most {DELETE_BODY_MAX} are read")
    declaration = _XML_DECLARATION.match(body)
    text = body[declaration.end() :] if declaration else body
    if "<!" in text or "<?" in text or "\x00" in text:
        raise BadRequest("The body has an XML declaration, comment or section that is not allowed here")
    if text.count("<") > _DELETE_TAGS_MAX:
        raise BadRequest(f"The body has {text.count('<'):,} tags; at most {_DELETE_TAGS_MAX:,} are accepted")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314  without <! there are no entities to expand
    except (ElementTree.ParseError, ValueError) as error:
        raise BadRequest(f"The body is not XML: {error}") from None
    keys: list[str] = []
    if _read_name(root) != "Delete":
        raise BadRequest(f"The body is a <{_read_name(root)[:100]}> element; send a <Delete> element of the S3 API")
    for child in root:
        if _read_name(child) == "Quiet":
            continue
        if _read_name(child) != "Object" or [_read_name(part) for part in child] != ["Key"] or child[0].text is None:
            raise BadRequest("The body must contain only <Quiet> and <Object>, and each <Object> only one <Key>")
        if len(child[0]):
            raise BadRequest("A <Key> in the body contains another element; remove it")
        keys.append(child[0].text)
    if not 0 < len(keys) <= DELETE_KEYS_MAX:
        raise BadRequest(f"The body names {len(keys)} keys; send 1 to {DELETE_KEYS_MAX} keys")
    return keys


def _read_name(element: ElementTree.Element) -> str:
    if element.attrib:
        raise BadRequest("The body has an XML attribute; remove it")
    return element.tag.removeprefix(_S3_NAMESPACE)
