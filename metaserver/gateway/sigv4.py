"""AWS Signature Version 4 for S3: reads the claim of a request, checks its signature, and signs requests.

The module does no I/O. Source: Amazon S3 API reference, "Authenticating requests (AWS Signature Version 4)". S3 differs
from other services: the path is encoded once and not normalised.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes

from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.s3_scope import UNSIGNED_PAYLOAD

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
CLOCK_SKEW_MS = 900_000
"""The maximum difference between the clocks of client and server, as in S3."""
PRESIGNED_S_MAX = 604_800
SIGNED_HEADERS_MAX = 100
AMZ_DATE = "%Y%m%dT%H%M%SZ"
_DATE_CHARACTERS = len("20261121")
"""The length of the date at the start of a timestamp."""
_CREDENTIAL_PARTS = 5
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM}\s+Credential=([^,\s]+)\s*,\s*SignedHeaders=([^,\s]+)\s*,\s*Signature=([0-9a-f]{{64}})"
)
_SIGNATURE = re.compile("[0-9a-f]{64}")
_SHA256 = re.compile("[0-9a-f]{64}")
_STREAMING = frozenset(
    (
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
        "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
)
_PRESIGNED = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature", "Security-Token")


@dataclass(frozen=True, slots=True)
class SignatureClaim:
    """The authentication of a request.

    Attributes:
        token: The session token, or empty.
        payload: The hash of the body, or one of S3's names for a body without a hash.
    """

    access_key_id: str
    token: str
    timestamp: str
    region: str
    signed_headers: tuple[str, ...]
    signature: str
    payload: str

    @property
    def scope(self) -> str:
        return f"{self.timestamp[:_DATE_CHARACTERS]}/{self.region}/s3/aws4_request"


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The parts of a request that a signature covers.

    Attributes:
        path: The path as it was sent.
        query: The query string as it was sent.
        headers: The headers, by lower-case name.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


def split_presigned(query: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split a query into the parameters of the operation and the parameters of the authentication.

    The names of the authentication parameters are in lower case, and without `x-amz-`. A request
    that is not presigned has no authentication parameters.
    """
    names = {f"X-Amz-{name}".lower(): name.lower() for name in _PRESIGNED}
    authentication = {names[name.lower()]: value for name, value in query.items() if name.lower() in names}
    return {name: value for name, value in query.items() if name.lower() not in names}, authentication


def read_claim(target: RequestTarget, presigned_query: Mapping[str, str], *, now_ms: int) -> SignatureClaim:
    """Read the authentication of a request.

    Raises:
        S3Error: The authentication is missing or malformed, or its time differs too much from the server's time.
    """
    if "authorization" in target.headers:
        if presigned_query:
            raise S3Error(
                "InvalidArgument", "The request is authenticated in the header and in the query; use only one of them"
            )
        return _read_header(target.headers, now_ms)
    if presigned_query:
        return _read_query(presigned_query, now_ms)
    raise S3Error("AccessDenied", "The request is not signed; sign it with the keys in the table's config")


def _read_header(headers: Mapping[str, str], now_ms: int) -> SignatureClaim:
    match = _AUTHORIZATION.fullmatch(headers["authorization"].strip())
    if match is None:
        raise S3Error("AuthorizationHeaderMalformed", f"The Authorization header must be {ALGORITHM} (Signature V4)")
    timestamp = headers.get("x-amz-date", "")
    if abs(_read_time_ms(timestamp, "AccessDenied") - now_ms) > CLOCK_SKEW_MS:
        raise S3Error("RequestTimeTooSkewed", "x-amz-date differs too much from the server's time; set the clock")
    payload = headers.get("x-amz-content-sha256", "")
    if not (payload == UNSIGNED_PAYLOAD or payload in _STREAMING or _SHA256.fullmatch(payload)):
        raise S3Error("InvalidRequest", "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-… or a SHA-256")
    access_key_id, region = _read_credential(match[1], timestamp, "AuthorizationHeaderMalformed")
    signed_headers = tuple(match[2].split(";"))
    token = headers.get("x-amz-security-token", "")
    return SignatureClaim(access_key_id, token, timestamp, region, signed_headers, match[3], payload)


def _read_query(presigned_query: Mapping[str, str], now_ms: int) -> SignatureClaim:
    error_code = "AuthorizationQueryParametersError"
    if presigned_query.get("algorithm") != ALGORITHM:
        raise S3Error(error_code, f"X-Amz-Algorithm must be {ALGORITHM}")
    timestamp, expires = presigned_query.get("date", ""), presigned_query.get("expires", "")
    if not re.fullmatch("[0-9]{1,6}", expires) or not 0 < int(expires) <= PRESIGNED_S_MAX:
        raise S3Error(error_code, f"X-Amz-Expires must be a number of seconds from 1 to {PRESIGNED_S_MAX}")
    start_ms = _read_time_ms(timestamp, error_code)
    if start_ms - now_ms > CLOCK_SKEW_MS:
        raise S3Error("AccessDenied", "The URL is not valid yet")
    if now_ms >= start_ms + int(expires) * 1000:
        raise S3Error("AccessDenied", "Request has expired")
    if not _SIGNATURE.fullmatch(presigned_query.get("signature", "")):
        raise S3Error(error_code, "X-Amz-Signature must be 64 hexadecimal digits")
    access_key_id, region = _read_credential(presigned_query.get("credential", ""), timestamp, error_code)
    signed_headers = tuple(presigned_query.get("signedheaders", "").split(";"))
    token = presigned_query.get("security-token", "")
    return SignatureClaim(
        access_key_id, token, timestamp, region, signed_headers, presigned_query["signature"], UNSIGNED_PAYLOAD
    )


@lru_cache(1024)
def _parse_time_ms(timestamp: str) -> int:
    return int(datetime.strptime(timestamp, AMZ_DATE).replace(tzinfo=UTC).timestamp() * 1000)


def _read_time_ms(timestamp: str, code: str) -> int:
    try:
        return _parse_time_ms(timestamp)
    except ValueError:
        raise S3Error(code, "The date of the request must have the form 20261121T120000Z") from None


def _read_credential(credential: str, timestamp: str, code: str) -> tuple[str, str]:
    parts = credential.split("/")
    if len(parts) == _CREDENTIAL_PARTS:
        access_key_id, date, region, *suffix = parts
        if suffix == ["s3", "aws4_request"] and date == timestamp[:_DATE_CHARACTERS]:
            return access_key_id, region
    raise S3Error(code, "Credential must be <access key>/<date>/<region>/s3/aws4_request with the request's date")


def check_signed_headers(claim: SignatureClaim, headers: Mapping[str, str]) -> None:
    """Check that the signature covers the host and every `x-amz-` header, so that no intermediary can add a header.

    Raises:
        S3Error: A header is not signed, a signed header was not sent, or the list of signed headers is invalid.
    """
    signed_headers = set(claim.signed_headers)
    if len(claim.signed_headers) > SIGNED_HEADERS_MAX or list(claim.signed_headers) != sorted(signed_headers):
        raise S3Error("AccessDenied", f"SignedHeaders must be a sorted list of at most {SIGNED_HEADERS_MAX} names")
    missing = [name for name in headers if name not in signed_headers and (name == "host" or name.startswith("x-amz-"))]
    if missing or "host" not in signed_headers:
        raise S3Error("AccessDenied", f"There were headers present in the request which were not signed: {missing}")
    absent = signed_headers - headers.keys()
    if absent:
        raise S3Error("SignatureDoesNotMatch", f"SignedHeaders names headers that were not sent: {sorted(absent)}")


def is_signed(claim: SignatureClaim, target: RequestTarget, secret: str) -> bool:
    """Return whether the signature matches the request. The comparison takes constant time."""
    expected = compute_signature(claim, target, derive_signing_key(secret, claim.scope))
    return hmac.compare_digest(expected, claim.signature)


def compute_signature(claim: SignatureClaim, target: RequestTarget, key: bytes) -> str:
    canonical = format_canonical_request(target, claim.signed_headers, claim.payload)
    digest = hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()
    return hmac.digest(key, f"{ALGORITHM}\n{claim.timestamp}\n{claim.scope}\n{digest}".encode(), "sha256").hex()


@lru_cache(1024)
def derive_signing_key(secret: str, scope: str) -> bytes:
    """Return the signing key, which is the same for all requests with a secret on one day. It takes four hashes."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def format_canonical_request(target: RequestTarget, signed_headers: Sequence[str], payload: str) -> str:
    headers = "".join(f"{name}:{' '.join(target.headers[name].split())}\n" for name in signed_headers)
    names = ";".join(signed_headers)
    path = quote(unquote_to_bytes(target.path), safe="/-_.~")
    return f"{target.method}\n{path}\n{_canonicalize_query(target.query)}\n{headers}\n{names}\n{payload}"


@lru_cache(1024)
def _canonicalize_query(query: str) -> str:
    """Return the canonical form of the query, without the signature itself.

    The result is cached, because a presigned URL has a long query, and clients use it for many ranges.
    """
    pairs = []
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name.lower() != "x-amz-signature":
            pairs.append((_encode(name), _encode(value)))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def _encode(text: str) -> str:
    return quote(unquote_to_bytes(text), safe="-_.~")


def sign_headers(
    target: RequestTarget, *, access_key_id: str, secret: str, token: str, region: str, payload: str, now_ms: int
) -> dict[str, str]:
    """Return all headers of the request, including the signature, by lower-case name."""
    timestamp = datetime.fromtimestamp(now_ms / 1000, UTC).strftime(AMZ_DATE)
    headers = {**target.headers, "x-amz-date": timestamp, "x-amz-content-sha256": payload}
    if token:
        headers["x-amz-security-token"] = token
    signed_headers = tuple(sorted(name for name in headers if _needs_signature(name)))
    claim = SignatureClaim(access_key_id, token, timestamp, region, signed_headers, "", payload)
    key = derive_signing_key(secret, claim.scope)
    signature = compute_signature(claim, RequestTarget(target.method, target.path, target.query, headers), key)
    headers["authorization"] = (
        f"{ALGORITHM} Credential={access_key_id}/{claim.scope}, SignedHeaders={';'.join(signed_headers)}, "
        f"Signature={signature}"
    )
    return headers


def _needs_signature(name: str) -> bool:
    return name in ("host", "content-type", "content-md5") or name.startswith("x-amz-")


def format_canonical_query(query: Iterable[tuple[str, str]]) -> str:
    """Return the query string of the parameters in their order, encoded as signatures require."""
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query)
