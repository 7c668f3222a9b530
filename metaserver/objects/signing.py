"""Signs S3 requests of clients (remote signing).

A client describes the request that it wants to send, and receives the server's signature. Only requests that `s3_scope`
accepts for the table are signed. The signature covers all parts on which the check depends: the method, path, query,
host, every `x-amz-` header and, if the body names objects, the hash of the body. So the keys never leave the server,
and a signed request cannot be changed.

The messages are `RemoteSignRequest` and `RemoteSignResult` of the REST specification (`S3SignRequest` in Iceberg before
1.11).

The module considers the behaviour of Iceberg's S3V4RestSignerClient and of PyIceberg's S3V4RestSigner:

- Java's own headers override the returned headers, so a header of the client is signed unchanged.
- Java caches an answer to GET and HEAD for 30 s by method, region and address if `Cache-Control` is private, so Range
  is never signed.
- PyIceberg sends no `body`, so its DeleteObjects requests cannot be checked and are rejected.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import SplitResult

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.objects.credentials import load_server_keys
from seamark.metaserver.objects.s3_scope import (
    READ_METHODS,
    UNSIGNED_PAYLOAD,
    WRITE_METHODS,
    Address,
    check_request,
    parse_address,
    strip_default_port,
)
from seamark.metaserver.settings.settings import Settings

HEADERS_MAX = 100
CLOCK_SKEW_MS = 300_000
"""The maximum difference of a client's x-amz-date from the server's time. S3 allows 15 minutes."""

_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_AMZ_DATE = "%Y%m%dT%H%M%SZ"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_SIGNED_BESIDES_AMZ = frozenset(("host", "content-type", "content-md5"))
_COMPUTED = frozenset(("authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"))


def sign_s3_request(
    request: dict[str, Any], *, table_location: str, writable: bool, settings: Settings, now_ms: int
) -> dict[str, Any]:
    """Return the RemoteSignResult for a decoded RemoteSignRequest.

    The result is `{"uri": …, "headers": {name: [value, …]}}`. The client sends these headers with its request.

    Raises:
        BadRequest: The request is malformed, or the table is not on S3.
        Forbidden: The request reaches outside `table_location`, writes without `writable`, or signing is disabled.
        StorageError: The server has no keys.
    """
    table = _parse_signable_location(table_location, settings)
    method, uri, header_lists, body = _decode_request(request, settings)
    if method in WRITE_METHODS and not writable:
        raise Forbidden(f"{method} needs write access to this table")
    parts, address = parse_address(uri, settings)
    headers = _join_headers(header_lists)
    _check_host(headers, parts)
    check_request(method, address, headers, body, table)
    timestamp = _choose_timestamp(headers, now_ms)
    payload = _choose_payload_hash(headers, address, body)
    signed_headers = _sign_with_sigv4(
        AWSRequest(method, uri, params=address.query), headers, payload, timestamp, settings
    )
    unsigned_headers = {name: values for name, values in header_lists.items() if name.lower() not in _COMPUTED}
    return {"uri": uri, "headers": {**unsigned_headers, **{name: [value] for name, value in signed_headers.items()}}}


def choose_cache_control(request: dict[str, Any]) -> str:
    """Return the `Cache-Control` header of the answer.

    Clients may cache signatures of reads for a short time, but never signatures of writes.
    """
    return "private" if str(request.get("method", "")).upper() in READ_METHODS else "no-cache"


def _parse_signable_location(table_location: str, settings: Settings) -> Location:
    table = parse_location(table_location, "The table's location")
    if table.scheme != "s3":
        raise BadRequest(f"The table is at {str(table)!r}, not on S3, so its requests need no signature")
    if settings.s3_client_access == "none":
        raise Forbidden(
            "This server does not sign S3 requests; the operator enables it with s3_client_access = signing"
        )
    return table


def _decode_request(request: dict[str, Any], settings: Settings) -> tuple[str, str, dict[str, list[str]], str | None]:
    for name in ("region", "uri", "method"):
        if not isinstance(request.get(name), str):
            raise BadRequest(f"A sign request needs {name!r} as a string")
    provider = request.get("provider")
    if provider is not None and str(provider).lower() != "s3":
        raise BadRequest(f"This server signs for the provider 's3', not for {provider!r}")
    if request["region"] != settings.s3_region:
        raise BadRequest(
            f"This server signs for the region {settings.s3_region!r}, not for {request['region']!r}; "
            "take client.region from the table's config"
        )
    method = request["method"].upper()
    if method not in READ_METHODS | WRITE_METHODS:
        raise BadRequest(f"The method {request['method']!r} is not signed; use GET, HEAD, PUT, POST or DELETE")
    body = request.get("body")
    if body is not None and not isinstance(body, str):
        raise BadRequest("`body` must be a string")
    return method, request["uri"], _decode_headers(request.get("headers")), body


def _decode_headers(headers: Any) -> dict[str, list[str]]:
    if not isinstance(headers, dict) or len(headers) > HEADERS_MAX:
        raise BadRequest(f"A sign request needs 'headers', an object of at most {HEADERS_MAX} lists of strings")
    for name, values in headers.items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise BadRequest(f"{name!r} cannot be the name of a header")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise BadRequest(f"The header {name!r} must be a list of strings")
        if any((ch < " " and ch != "\t") or ch == "\x7f" for value in values for ch in value):
            raise BadRequest(f"The header {name!r} holds a control character")
    return headers


def _join_headers(header_lists: dict[str, list[str]]) -> dict[str, str]:
    """Return the headers by lower-case name. Several values of a header are joined with commas."""
    headers_by_name: dict[str, str] = {}
    for name, values in header_lists.items():
        lower_name = name.lower()
        if lower_name in headers_by_name:
            raise BadRequest(f"The header {name!r} is present twice in different spellings; send it once")
        headers_by_name[lower_name] = ",".join(value.strip() for value in values)
    return headers_by_name


def _check_host(headers: dict[str, str], parts: SplitResult) -> None:
    # Stores with virtual hosts select the bucket by the Host header, so it must equal the host of the checked URI.
    host = headers.get("host")
    if host is not None and host.lower() not in (parts.netloc.lower(), strip_default_port(parts)):
        raise Forbidden(f"The Host header is {host!r}, but the host of the uri is {parts.netloc!r}")


def _choose_timestamp(headers: dict[str, str], now_ms: int) -> str:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    amz_date = headers.get("x-amz-date")
    if amz_date is None:
        return now.strftime(_AMZ_DATE)
    try:
        signed_time = datetime.strptime(amz_date, _AMZ_DATE).replace(tzinfo=UTC)
    except ValueError:
        raise BadRequest(f"x-amz-date is {amz_date!r}; it must have the form 20261121T120000Z") from None
    if abs((signed_time - now).total_seconds()) * 1000 > CLOCK_SKEW_MS:
        raise BadRequest(
            f"x-amz-date is {amz_date}, but the server's time is {now.strftime(_AMZ_DATE)}; "
            "set the clock or leave it out"
        )
    return amz_date


def _choose_payload_hash(headers: dict[str, str], address: Address, body: str | None) -> str:
    header_hash = headers.get("x-amz-content-sha256")
    if "delete" in address.query and body is not None:
        # Only the keys in this body were checked, so the signature must cover its hash.
        body_hash = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()
        if header_hash not in (None, body_hash):
            raise Forbidden("When objects are deleted, x-amz-content-sha256 must be the hash of `body`; leave it out")
        return body_hash
    if header_hash is None:
        return UNSIGNED_PAYLOAD
    if header_hash in (UNSIGNED_PAYLOAD, _UNSIGNED_TRAILER) or _SHA256.fullmatch(header_hash):
        return header_hash
    raise BadRequest(
        f"x-amz-content-sha256 {header_hash!r} cannot be signed remotely: send a hash or {UNSIGNED_PAYLOAD}"
    )


class _GivenHeadersAuth(S3SigV4Auth):  # type: ignore[misc]
    """Signs only the headers that it receives, because the client's HTTP library may still change other headers."""

    def headers_to_sign(self, request: AWSRequest) -> Any:
        return request.headers


def _sign_with_sigv4(
    request: AWSRequest, headers: dict[str, str], payload: str, timestamp: str, settings: Settings
) -> dict[str, str]:
    """Return the headers of the signed request."""
    keys = load_server_keys(settings)
    auth = _GivenHeadersAuth(
        Credentials(keys.access_key_id, keys.secret_access_key, keys.token or None), "s3", settings.s3_region
    )
    computed_headers = {"X-Amz-Date": timestamp, "X-Amz-Content-SHA256": payload}
    if keys.token:
        computed_headers["X-Amz-Security-Token"] = keys.token
    client_headers = {name: value for name, value in headers.items() if _is_signed(name)}
    client_headers.setdefault("host", S3SigV4Auth.headers_to_sign(auth, request)["host"])
    for name, value in (*client_headers.items(), *computed_headers.items()):
        request.headers[name.lower()] = value
    # Do not use add_auth(), because it reads the wall clock.
    request.context["timestamp"] = timestamp
    text = auth.string_to_sign(request, auth.canonical_request(request))
    signature = auth.signature(text, request)
    names = auth.signed_headers(request.headers)
    authorization = f"AWS4-HMAC-SHA256 Credential={auth.scope(request)}, SignedHeaders={names}, Signature={signature}"
    return {**computed_headers, "Authorization": authorization}


def _is_signed(name: str) -> bool:
    return name in _SIGNED_BESIDES_AMZ or (name.startswith("x-amz-") and name not in _COMPUTED)
