"""The HTTP client that requests files from other replicas."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.tls import build_client_context
from seamark.metaserver.peers.protocol import (
    CHECK_HEADER,
    FILE_PATH,
    FROM_CACHE,
    HEAD_BYTES,
    SOURCE_HEADER,
    BadAnswer,
    Outcome,
    PeerTickets,
)
from seamark.metaserver.settings.settings import Settings

_CONNECTIONS_PER_REPLICA_MAX = 32
_READ_BYTES = 512 << 10
"""The size of the buffer into which the answer of a replica is read."""
_IDLE_CONNECTION_S = 30


class PeerFailed(Exception):
    """The replica did not answer with the content. The message contains the reason."""


class PeerDamaged(PeerFailed):
    """The answer was changed in transit, or does not come from a replica."""


@dataclass(slots=True)
class PendingRequest:
    """A request that is in progress.

    Attributes:
        answer: The task that receives the answer.
        acknowledged: Set when the first bytes of the answer arrive.
        from_cache: Whether the replica already has the file.
    """

    answer: asyncio.Task[bytes]
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)
    from_cache: bool = False


class PeerClient:
    """A client that requests files from other replicas.

    An instance belongs to one event loop, and is opened by `open_peer_client`.
    """

    def __init__(self, session: aiohttp.ClientSession, tickets: PeerTickets, *, scheme: str) -> None:
        self._session = session
        self._tickets = tickets
        self._scheme = scheme
        self.damaged = 0
        """The number of answers whose content did not match the digest."""

    def request_file(self, address: str, location: str, limit_bytes: int | None) -> PendingRequest:
        """Send a request in a task, and return the pending request.

        Raises:
            PeerFailed: The answer is not the intact content, or has more than `limit_bytes`. The task of the answer
                raises this error, not the call.
        """
        pending: PendingRequest

        def acknowledge(from_cache: bool) -> None:
            pending.from_cache = from_cache
            pending.acknowledged.set()

        read_coroutine = self._read_intact(address, location, limit_bytes, acknowledge)
        pending = PendingRequest(asyncio.get_running_loop().create_task(read_coroutine, name="peer"))
        return pending

    async def _read_intact(
        self, address: str, location: str, limit_bytes: int | None, acknowledge: Callable[[bool], None]
    ) -> bytes:
        """Return the content. If it arrives damaged, request it once more, and ask the replica to check its copy.

        `acknowledge` is called as soon as the replica answers. Its argument is whether the replica has the file in its
        cache.

        Raises:
            PeerFailed: The replica does not answer, or does not send the content.
            PeerDamaged: The content is damaged in the second answer too.
        """
        try:
            return await self._read(address, location, limit_bytes, acknowledge, {})
        except PeerDamaged:
            # The replica's cached copy may be damaged. If the replica compares the digest itself, it discards the copy.
            return await self._read(address, location, limit_bytes, acknowledge, {CHECK_HEADER: "1"})

    async def _read(
        self,
        address: str,
        location: str,
        limit_bytes: int | None,
        acknowledge: Callable[[bool], None],
        request_headers: Mapping[str, str],
    ) -> bytes:
        """Send a request to another replica, and return the content of the file.

        Args:
            address: The address of the replica.
            location: The location of the file.
            limit_bytes: The maximum size of the file, or None for no maximum.
            acknowledge: Called as soon as the replica answers, with True if the replica has the file in its cache, or
                False if it must read the storage first.
            request_headers: Further headers of the request.

        Raises:
            PeerFailed: The replica does not answer, or does not send the content.
            PeerDamaged: The answer is not authentic, or its content does not match its digest.
        """
        headers, mac = self._tickets.issue(address, location)
        url = URL(f"{self._scheme}://{address}{FILE_PATH}", encoded=True)
        try:
            async with self._session.get(url, headers={**headers, **request_headers}, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise PeerFailed(f"status {answer.status}")
                acknowledge(answer.headers.get(SOURCE_HEADER) == FROM_CACHE)
                head = self._tickets.unseal(mac, await answer.content.readexactly(HEAD_BYTES))
                if head.outcome is not Outcome.FOUND:
                    raise PeerFailed(head.outcome.name.lower())
                if limit_bytes is not None and head.length > limit_bytes:
                    raise PeerFailed(f"the file has {head.length} bytes, but at most {limit_bytes} are read")
                content, sha256 = await _read_content(answer.content, head.length)
        except BadAnswer as error:
            self.damaged += 1
            raise PeerDamaged(str(error)) from None
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            raise PeerFailed(type(error).__name__) from None
        if sha256 != head.sha256:
            self.damaged += 1
            raise PeerDamaged("the content does not match its digest")
        return content


async def _read_content(stream: aiohttp.StreamReader, length: int) -> tuple[bytes, bytes]:
    """Return the content and its SHA-256. The digest is computed while the content arrives.

    Raises:
        PeerFailed: The content does not have this length.
    """
    pieces, remaining_bytes, sha256 = [], length, hashlib.sha256()
    while remaining_bytes:
        piece = await stream.readany()
        if not piece or len(piece) > remaining_bytes:
            raise PeerFailed(f"the content does not have the {length} bytes that its head states")
        sha256.update(piece)
        pieces.append(piece)
        remaining_bytes -= len(piece)
    return b"".join(pieces), sha256.digest()


@asynccontextmanager
async def open_peer_client(settings: Settings, tickets: PeerTickets) -> AsyncIterator[PeerClient]:
    """Open a client. It uses https if the server has a certificate, because all replicas have the same settings.

    The client trusts the certificate authorities of the system and those in SEAMARK_CA.

    Raises:
        ConfigError: The certificate authorities cannot be read.
    """
    try:
        tls_context = build_client_context() if settings.tls_cert else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    connector = aiohttp.TCPConnector(
        limit_per_host=_CONNECTIONS_PER_REPLICA_MAX,
        keepalive_timeout=_IDLE_CONNECTION_S,
        ssl=True if tls_context is None else tls_context,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=settings.storage_timeout_s, sock_connect=settings.peer_connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        read_bufsize=_READ_BYTES,
    ) as session:
        yield PeerClient(session, tickets, scheme="https" if settings.tls_cert else "http")
