"""Answers to requests that are not HTTP and never reach a handler. The answers do not quote the request."""

from __future__ import annotations

from aiohttp import http_exceptions

HEADER_TOO_LARGE = "RequestHeaderFieldsTooLargeException"
EXPECTATION_FAILED = "ExpectationFailedException"


def explain_unreadable(error: BaseException | None) -> tuple[int, str, str]:
    """Return the status, the type and the message of the answer to a request that is not HTTP.

    `error` is the error of aiohttp's parser. Its text is not used, because it can quote the request.
    """
    if isinstance(error, http_exceptions.LineTooLong):
        return 431, HEADER_TOO_LARGE, "The request line or a header is too long"
    if isinstance(error, http_exceptions.InvalidHeader):
        return 400, "BadRequestException", "A header of the request is malformed (RFC 9112, 5)"
    if isinstance(error, http_exceptions.BadStatusLine | http_exceptions.InvalidURLError):
        return 400, "BadRequestException", "The request line is malformed (RFC 9112, 3): use HTTP/1.1 and a valid path"
    if isinstance(error, http_exceptions.PayloadEncodingError):
        return 400, "BadRequestException", "The body does not have the encoding that the headers of the request state"
    return 400, "BadRequestException", "The request is not valid HTTP/1.1"
