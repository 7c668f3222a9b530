"""Defines the errors of a client, grouped by what a caller can do.

ClientError
├── Refused             4xx: a repeat is refused again; `message` explains what to do
│   ├── InvalidRequest      400
│   ├── LoginRequired       401
│   ├── AccessDenied        403
│   ├── NoSuchResource      404
│   └── Conflict            409 of a commit: a concurrent commit conflicts; nothing was changed
├── Unavailable         503 after all repeats: try later
│   └── ServerStorageFull   503 at once: a disk of the server is full
├── ServerFailed        another 5xx, or an invalid answer
└── Unreachable         no answer: connection refused, timeout, or connection lost
"""

from __future__ import annotations

import json
import re
import ssl


class ClientError(Exception):
    """Raised if a request fails.

    Attributes:
        message: The reason, and what to do.
        kind: The server's name for the error, such as `NoSuchTableException`.
        status: The HTTP status, or 0 if there was no response.
    """

    def __init__(self, message: str, *, status: int = 0, kind: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.request_id = request_id
        """The id of the request in the server's log."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.message, self.status, self.kind, self.request_id)


def _rebuild_error(
    error_class: type[ClientError], message: str, status: int, kind: str, request_id: str
) -> ClientError:
    return error_class(message, status=status, kind=kind, request_id=request_id)


class Refused(ClientError):
    """Raised if the server refuses a request with a status of 400 to 499. A repeat would also be refused."""

    has_unknown_earlier_outcome = False
    """Whether an earlier attempt of the same request may have been, or may still be, successful."""


class InvalidRequest(Refused):
    """Raised if a request is invalid."""

    pass


class LoginRequired(Refused):
    """Raised if the token is missing or invalid."""

    pass


class AccessDenied(Refused):
    """Raised if the principal does not have the right to make a request."""

    pass


class NoSuchResource(Refused):
    """Raised if a table, namespace or other resource does not exist."""

    pass


class Conflict(Refused):
    """Raised if a commit conflicts with a concurrent commit. Nothing was changed."""

    pass


class Unavailable(ClientError):
    """Raised if the server is still unavailable after all repeats of a request."""

    pass


class ServerStorageFull(Unavailable):
    """Raised if a disk of the server is full."""

    pass


class ServerFailed(ClientError):
    """Raised if the server fails, or if its response is invalid."""

    pass


class Unreachable(ClientError):
    """Raised if there is no response: the connection was refused or lost, or a timeout has passed."""

    pass


_CAUSES_MAX = 8
"""The maximum number of nested causes of an error that are searched for the innermost cause."""
_BODY_BYTES_MAX, _BODY_CHARACTERS_MAX = 400, 200
"""The maximum length of the text of a proxy that is searched for a message, and of the message."""
_TAG = re.compile(r"<[^<>]*>")
_BY_STATUS: dict[int, type[ClientError]] = {
    400: InvalidRequest,
    401: LoginRequired,
    403: AccessDenied,
    404: NoSuchResource,
    503: Unavailable,
}


def parse_error(status: int, body: bytes, request_id: str) -> ClientError:
    """Return the error for an unsuccessful response.

    The body is an error in Iceberg's form, or a text of a proxy. Of a page in HTML, only the text is used. A few error
    types have a class that is more specific than the class of their status.
    """
    error_class = _BY_STATUS.get(status, Refused if status < 500 else ServerFailed)
    try:
        error = json.loads(body)["error"]
        if status == 409 and error["type"] == "CommitFailedException":
            error_class = Conflict
        elif status == 503 and error["type"] == "StorageFullException":
            error_class = ServerStorageFull
        return error_class(str(error["message"]), status=status, kind=str(error["type"]), request_id=request_id)
    except (ValueError, KeyError, TypeError):
        html = body[:_BODY_BYTES_MAX].decode("utf-8", "replace")
        text = " ".join(_TAG.sub(" ", html).split())[:_BODY_CHARACTERS_MAX]
        message = f"HTTP {status}; the response is not from Seamark, but perhaps from a proxy: {text or 'no message'}"
        return error_class(message, status=status, request_id=request_id)


def describe_cause(error: Exception, url: str = "") -> str:
    """Return the innermost cause of an error as text, without urllib3's texts about its own objects.

    If the cause shows a wrong setting of TLS, the text states how to correct it.

    Args:
        url: The URL of the server.
    """
    cause: BaseException = error
    for _ in range(_CAUSES_MAX):
        inner = getattr(cause, "reason", None) or cause.__cause__
        # The cause of urllib3's ProtocolError is its last argument.
        if cause.args and isinstance(cause.args[-1], OSError):
            inner = cause.args[-1]
        if not isinstance(inner, Exception):
            break
        cause = inner
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause.verify_message}; name a file with the authority of its certificate in the variable SEAMARK_CA"
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return "the server does not answer by TLS; a server without TLS has an http:// URL"
    # RemoteDisconnected is a subclass of ConnectionResetError.
    if isinstance(cause, ConnectionResetError) and url.startswith("http://"):
        return "the server closed the connection without an answer; a server with TLS has an https:// URL"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    # Before the reason, urllib3 writes the object that failed in parentheses.
    return str(cause).partition("): ")[2] or str(cause)
