"""Errors of the S3 API: codes, statuses, and the XML that clients parse.

Source: the Amazon S3 API reference, "Error responses".
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from aiohttp import web

from seamark.formats.runtime.errors import (
    BadRequest,
    Forbidden,
    ObjectMissing,
    RequestTimeout,
    RetryLater,
    SeamarkError,
    TooLarge,
    TooManyRequests,
)
from seamark.metaserver.access.gateway_keys import ExpiredGrant

XML = "application/xml"
_STATUSES = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "BadDigest": 400,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "ExpiredToken": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidArgument": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidToken": 400,
    "KeyTooLongError": 400,
    "MalformedXML": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "XAmzContentSHA256Mismatch": 400,
}


class S3Error(Exception):
    """An error of the S3 API, which a client receives.

    Attributes:
        code: The error code of S3, such as `NoSuchKey`.
        headers: Additional headers of the answer.
    """

    def __init__(self, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = _STATUSES[code]
        self.message = message
        self.headers = headers or {}


def convert_error(error: SeamarkError) -> S3Error:
    """Return the S3 error for an error of the catalog."""
    match error:
        case ExpiredGrant():
            return S3Error("ExpiredToken", error.message)
        case Forbidden():
            return S3Error("AccessDenied", error.message)
        case ObjectMissing():
            return S3Error("NoSuchKey", error.message)
        case TooLarge():
            return S3Error("EntityTooLarge", error.message)
        case RequestTimeout():
            return S3Error("RequestTimeout", error.message)
        case TooManyRequests():
            return S3Error("SlowDown", error.message, {"Retry-After": "1"})
        case RetryLater():
            return S3Error("ServiceUnavailable", error.message, {"Retry-After": "1"})
        case BadRequest():
            return S3Error("InvalidArgument", error.message)
        case _:
            return S3Error("InternalError", error.message)


def build_error_answer(error: S3Error, resource: str, request_id: str, *, is_head: bool = False) -> web.Response:
    """Return the answer for an error. Answers to HEAD, and answers with status 304, have no body."""
    headers = {"x-amz-request-id": request_id, **error.headers}
    if is_head or error.status == 304:
        return web.Response(status=error.status, headers=headers)
    return web.Response(
        status=error.status, headers=headers, body=format_error_xml(error, resource, request_id), content_type=XML
    )


def format_error_xml(error: S3Error, resource: str, request_id: str) -> bytes:
    parts = {"Code": error.code, "Message": error.message, "Resource": resource[:1024], "RequestId": request_id}
    fields = "".join(f"<{name}>{escape_xml(value)}</{name}>" for name, value in parts.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{fields}</Error>'.encode()


def escape_xml(text: str) -> str:
    """Escape a text, and replace characters that XML 1.0 does not allow by U+FFFD or a question mark."""
    return (
        escape("".join(char if char >= " " or char in "\t\n" else "\ufffd" for char in text))
        .encode("utf-8", "replace")
        .decode()
    )
