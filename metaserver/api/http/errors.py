"""Error answers: the ErrorModel of the Iceberg REST specification on every route.

    {"error": {"message": "...", "type": "NoSuchTableException", "code": 404, "stack": []}}

All errors have this form: the errors of Seamark, those of aiohttp (unknown path, wrong method, large body) and
unexpected errors. The message of an unexpected error contains only the request id; the log has the details.
"""

from __future__ import annotations

import re

from aiohttp import web

from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import (
    NoSuchTable,
    NoSuchView,
    RetryLater,
    SeamarkError,
    TooLarge,
    UnsupportedMediaType,
)
from seamark.metaserver.api.http.content_codings import ACCEPTED

_FIRST_REQUEST = re.compile(r"(.+)/v1/(?:config|oauth/tokens)")
"""The end of the path of a client's first request.

A path before it means that the client's catalog URI has a path.
"""
_EMPTY_NAMESPACE = re.compile(r"^/v1/(?:[^/]+/)?namespaces//(tables|views)/[^/]")
MESSAGE_CHARACTERS_MAX = 8_000
"""The maximum length of a message. A message quotes names and values of the request, which may have megabytes."""
_TYPES = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NotFoundException",
    405: "UnsupportedOperationException",
    406: "UnsupportedOperationException",
    413: TooLarge.type,
    415: UnsupportedMediaType.type,
    503: RetryLater.type,
}


def make_error_response(status: int, kind: str, message: str, *, head: bool = False) -> web.Response:
    """Return an ErrorModel answer, without a body for HEAD (RFC 9110, 9.3.2)."""
    if head:
        return web.Response(status=status)
    return web.Response(status=status, body=encode_error_body(status, kind, message), content_type="application/json")


def encode_error_body(status: int, kind: str, message: str) -> bytes:
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = f"{message[:MESSAGE_CHARACTERS_MAX]}… ({len(message):,} characters)"
    return encode_json({"error": {"message": message, "type": kind, "code": status, "stack": []}})


def from_seamark_error(error: SeamarkError, *, head: bool = False) -> web.Response:
    """Return the answer for `error`.

    Temporary errors get Retry-After, a missing login gets a challenge, and an unsupported coding of the body gets the
    list of the supported codings.
    """
    response = make_error_response(error.code, error.type, error.message, head=head)
    if isinstance(error, RetryLater):
        response.headers["Retry-After"] = str(max(1, error.retry_after_s))
    if isinstance(error, UnsupportedMediaType):
        response.headers["Accept-Encoding"] = ", ".join(ACCEPTED)  # RFC 9110, 15.5.16
    if error.code == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="seamark"'
    return response


def from_http_exception(error: web.HTTPException, request: web.Request) -> web.Response:
    """Return the answer for aiohttp's errors, with the relevant headers, such as Allow for 405."""
    is_head = request.method == "HEAD"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"The request body is too large: {error.text}"
    elif error.status == 404 and (empty_namespace := _EMPTY_NAMESPACE.search(request.path)):
        # Spark requests this when it tries `table.files` as namespace and table; another error type fails its query.
        error_class = NoSuchTable if empty_namespace[1] == "tables" else NoSuchView
        return from_seamark_error(error_class(f"The namespace is empty in {request.path[:200]}"), head=is_head)
    elif error.status == 404:
        message = f"No such route: {request.method} {request.path[:200]}"
        # A client whose URI of the catalog has a path begins with a request for the configuration below this path.
        if first_request := _FIRST_REQUEST.fullmatch(request.path[:200]):
            message = f"{message}; leave {first_request[1]!r} out of the URI of the catalog, which has no path"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        message = f"{error.method} is not allowed here; allowed: {', '.join(sorted(error.allowed_methods))}"
    else:
        message = error.text or error.reason
    response = make_error_response(error.status, _TYPES.get(error.status, "BadRequestException"), message, head=is_head)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def from_unexpected(request_id: str, *, head: bool = False) -> web.Response:
    """Return 500 for an unexpected error, with the request id under which the log has the traceback."""
    message = f"Internal error; see the server log for request id {request_id}"
    return make_error_response(500, SeamarkError.type, message, head=head)
