"""Checks with Trino whether it accepts the login of a request, before the proxy requests plans for it.

A plan opens files and counts against a quota, so plans are requested only for senders whose login Trino accepts. The
proxy cannot check passwords or tokens itself. It sends a request for the information of a query that does not exist,
with the headers of the statement. Trino authenticates the sender before it searches the query. An accepted login is
stored for a minute, as a keyed hash of the headers with the login. Trino still checks the login of each statement.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import aiohttp
import structlog
from multidict import CIMultiDict

from seamark.connector.trino.protocol.coordinators import Coordinator

REMEMBERED_S = 60.0
"""The time in seconds for which an accepted login is stored."""
LOGINS_MAX = 10_000
"""The maximum number of accepted logins in memory."""
CHECK_S = 2.0
"""The maximum time in seconds for which a statement waits for Trino's decision. It then runs without plans."""
LOGIN_PATH = "/v1/query/20000101_000000_00000_aaaaa"
"""The path of the information of a query that does not exist. Trino requires a query id of this form."""
_SINGLE_USE_SCHEMES = ("negotiate", "ntlm")
"""The authentication schemes whose tokens are valid for one request. A check would use the statement's token."""
_IDENTITY_HEADERS = ("authorization", "cookie", "x-forwarded-proto")
_IDENTITY_HEADER_SUFFIXES = ("-user", "-role", "-roles", "-credential", "-authorization")
"""The suffixes of the names of Trino's headers for users, roles and credentials.

The prefix of these names is a setting of Trino.
"""
_ACCEPTED_STATUSES = (200, 404, 410)
"""The statuses of Trino's response if a login is accepted. Any other status, such as a redirect, is a refusal."""
_log = structlog.get_logger("seamark.trino-proxy")

Send = Callable[[str, Coordinator, str, CIMultiDict[str]], Awaitable[aiohttp.ClientResponse]]
"""A function that sends a method, a target and headers to a coordinator."""


class AcceptedLogins:
    """Checks logins with Trino, and caches accepted logins. An instance belongs to one event loop."""

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._now_s = clock
        self._key = secrets.token_bytes(32)
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        """The times, on the clock, until which accepted logins are stored, by the hash of the login."""
        self._login_checks: dict[bytes, asyncio.Task[bool]] = {}

    async def accepts(self, coordinator: Coordinator, headers: CIMultiDict[str]) -> bool:
        """Return whether Trino accepts the login in the headers.

        Return False if Trino refuses the login, if Trino does not answer within `CHECK_S`, or if the login is valid
        only for a single request.

        Args:
            coordinator: The coordinator that decides.
            headers: The headers that the coordinator receives.
        """
        if headers.get("Authorization", "").partition(" ")[0].lower() in _SINGLE_USE_SCHEMES:
            return False
        login = self._hash_login(coordinator, headers)
        if self._until_s.get(login, 0.0) > self._now_s():
            return True
        task = self._login_checks.get(login)
        if task is None:
            task = self._login_checks[login] = asyncio.create_task(self._ask_trino(login, coordinator, headers))
            task.add_done_callback(lambda _: self._login_checks.pop(login, None))
        try:
            async with asyncio.timeout(CHECK_S):
                # The request is shielded from cancellation, because other statements of the sender need its result.
                return await asyncio.shield(task)
        except TimeoutError:
            return False

    async def close(self) -> None:
        """Cancel the running checks of logins with Trino, and wait until they have ended."""
        tasks = list(self._login_checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_trino(self, login: bytes, coordinator: Coordinator, headers: CIMultiDict[str]) -> bool:
        """Send a request with the login to Trino, and return whether Trino accepts it.

        An accepted login is remembered for a time. The result is False if Trino does not answer.
        """
        try:
            async with await self._send("GET", coordinator, LOGIN_PATH, headers) as response:
                status = response.status
                response.close()  # Only the status is needed. The body may be long, so it is not read.
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("Trino did not answer whether it accepts a login", error=repr(error))
            return False
        if status not in _ACCEPTED_STATUSES:
            return False
        self._until_s[login] = self._now_s() + REMEMBERED_S
        self._until_s.move_to_end(login)
        while len(self._until_s) > LOGINS_MAX:
            self._until_s.popitem(last=False)
        return True

    def _hash_login(self, coordinator: Coordinator, headers: CIMultiDict[str]) -> bytes:
        identity_headers = sorted(
            (name.lower(), value)
            for name, value in headers.items()
            if name.lower() in _IDENTITY_HEADERS or name.lower().endswith(_IDENTITY_HEADER_SUFFIXES)
        )
        text = repr((coordinator.url, identity_headers)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()
