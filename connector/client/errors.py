"""What can go wrong between a client and the server, by what the one who catches it would do.

ClientError
├── Refused             4xx: asked again unchanged, it is refused again; `message` says what to do
│   ├── BadRequest          400
│   ├── Unauthenticated     401
│   ├── Forbidden           403
│   ├── NotFound            404
│   └── Conflict            409 of a commit: others have changed what it depends on; nothing was changed by it
├── Unavailable         503, still, after the retries: ask later
├── ServerFailed        another 5xx, or an answer that makes no sense
└── Unreachable         no answer at all: not listening, too slow, or cut off
"""

from __future__ import annotations

import json


class ClientError(Exception):
    """`kind` is the server's name for the error, as `NoSuchTableException`; `status` 0 where there was no answer."""

    def __init__(self, message: str, *, status: int = 0, kind: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.request_id = request_id
        """By which the server's log knows the request."""

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.message, self.status, self.kind, self.request_id)


def _again(made: type[ClientError], message: str, status: int, kind: str, request_id: str) -> ClientError:
    return made(message, status=status, kind=kind, request_id=request_id)


class Refused(ClientError):
    left_open = False
    """Whether the same was sent before, and nobody knows what became of that."""


class BadRequest(Refused):
    pass


class Unauthenticated(Refused):
    pass


class Forbidden(Refused):
    pass


class NotFound(Refused):
    pass


class Conflict(Refused):
    pass


class Unavailable(ClientError):
    pass


class ServerFailed(ClientError):
    pass


class Unreachable(ClientError):
    pass


_BY_STATUS: dict[int, type[ClientError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    503: Unavailable,
}


def parse_error(status: int, body: bytes, request_id: str) -> ClientError:
    """From an answer that is no success: the shape of Iceberg's REST errors, or whatever a proxy sent."""
    made = _BY_STATUS.get(status, Refused if status < 500 else ServerFailed)
    try:
        error = json.loads(body)["error"]
        if status == 409 and error["type"] == "CommitFailedException":
            made = Conflict
        return made(str(error["message"]), status=status, kind=str(error["type"]), request_id=request_id)
    except (ValueError, KeyError, TypeError):
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        return made(f"HTTP {status}: {text or 'without a word'}", status=status, request_id=request_id)
