"""The port of the gateway: what answers an authorised S3 request. Implemented over a store and over a local folder."""

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
    """What an authorised request asks for, without its body.

    `headers` have lower-case names; `address.query` has no authentication. `who` is the principal that the keys were
    issued to, `pinned` whether the table's objects are pinned in the cache.
    """

    method: str
    address: Address
    headers: dict[str, str]
    request_id: str
    who: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class S3Call(S3Read):
    """A request that the keys of its sender allow.

    `document` is the XML body of a call that has one, read because the keys in it were checked; other bodies are
    `body`, unread.
    """

    request: web.Request
    body: Body | None
    document: bytes | None


@dataclass(slots=True)
class StartedAnswer:
    """An answer whose header and first bytes are sent.

    `rest` sends the others; None if there are none. May be called more than once.

    Attributes:
        abandon: It will not be sent; what it keeps is released.
    """

    status: int
    length: int
    rest: Callable[[AbstractStreamWriter], Awaitable[None]] | None
    abandon: Callable[[], None] | None = None


class BrokenAnswer(Exception):
    """The rest of an answer cannot be sent.

    Only an aborted connection shows the client that bytes are missing.
    """


class PromptResponse(web.StreamResponse):
    """An answer in pieces whose header is sent together with its first piece, if it has pieces.

    Two writes would wake the client twice, and it would run in between on a busy machine.
    """

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._send_headers_immediately = request.method == "HEAD" or not self.content_length
        return await super().prepare(request)


class Backend(Protocol):
    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Return the answer, sent in pieces.

        S3Error, or an error of SeamarkError's tree, before the first piece is sent.
        """

    async def close(self) -> None: ...
