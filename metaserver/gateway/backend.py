"""The port of the gateway to a backend, which answers authorised S3 requests: an S3-compatible store, or a folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from seamark.metaserver.gateway.body import Body
from seamark.metaserver.objects.s3_scope import Address


@dataclass(frozen=True, slots=True)
class S3Read:
    """An authorised request without its body.

    `headers` have lower-case names; `address.query` has no authentication. `principal_name` is the principal that
    received the keys. `pinned` is whether the table's objects are pinned in the cache.
    """

    method: str
    address: Address
    headers: dict[str, str]
    request_id: str
    principal_name: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class S3Call(S3Read):
    """A request that its keys allow.

    If the call has an XML body, `document` contains the body, because the keys in it were checked. All other bodies
    are in `body`, and are not read yet.
    """

    request: web.Request
    body: Body | None
    document: bytes | None


@dataclass(slots=True)
class StartedAnswer:
    """An answer whose header and first bytes are sent.

    `send_body` sends the remaining bytes. It is None if all bytes are sent. The function may be called more than once.

    Attributes:
        abandon: Releases the memory of the answer if the remaining bytes will not be sent.
    """

    status: int
    length: int
    send_body: Callable[[AbstractStreamWriter], Awaitable[None]] | None
    abandon: Callable[[], None] | None = None


class BrokenAnswer(Exception):
    """The rest of an answer cannot be sent.

    The header is sent already, so only an aborted connection shows the client that bytes are missing.
    """


class PromptResponse(web.StreamResponse):
    """An answer in pieces. Its header and its first piece are sent together.

    Two writes would wake the client twice. On a busy machine, the client would run between them.
    """

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._send_headers_immediately = request.method == "HEAD" or not self.content_length
        return await super().prepare(request)


class Backend(Protocol):
    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Return the answer, which is sent in pieces.

        Raises:
            S3Error, SeamarkError: The request failed before the first piece was sent.
        """

    async def close(self) -> None: ...
