"""The port of the gateway to a backend, which answers authorised S3 requests from a store, a cloud or a folder."""

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

    Attributes:
        address: The bucket, the key, and the query without the parameters of the authentication.
        headers: The headers. Their names are in lower case.
        principal_name: The principal to which the keys were issued.
        pinned: Whether the objects of the table are pinned in the cache.
    """

    method: str
    address: Address
    headers: dict[str, str]
    request_id: str
    principal_name: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class S3Call(S3Read):
    """An authorised request with its body.

    Attributes:
        body: The unread body, or None if there is no body or it was read into `document`.
        document: The XML body, or None. It was read already, to check the keys of objects in it.
    """

    request: web.Request
    body: Body | None
    document: bytes | None


@dataclass(slots=True)
class StartedAnswer:
    """An answer whose header and first bytes were sent.

    Attributes:
        length: The length of the body in bytes.
        send_body: Sends the remaining bytes. It is None if all bytes were sent. It may be called several times.
        abandon: Releases the memory of the answer if the remaining bytes will not be sent.
    """

    status: int
    length: int
    send_body: Callable[[AbstractStreamWriter], Awaitable[None]] | None
    abandon: Callable[[], None] | None = None


class BrokenAnswer(Exception):
    """Raised if the rest of an answer cannot be sent.

    The header was already sent, so only an aborted connection shows the client that bytes are missing.
    """


class PromptResponse(web.StreamResponse):
    """An answer in pieces that sends its header together with its first piece.

    With two writes, a client on a busy machine would wake up twice.
    """

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        # An answer without a body has no first piece, so its header is sent at once.
        self._send_headers_immediately = request.method == "HEAD" or not self.content_length
        return await super().prepare(request)


class Backend(Protocol):
    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Answer a request, and return the response after its pieces were sent.

        Raises:
            S3Error, SeamarkError: The request failed before the first piece was sent.
        """

    async def close(self) -> None: ...
