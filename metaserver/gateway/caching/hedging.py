"""Hedged reads: sends a read of the store a second time if its answer does not begin soon.

A few percent of the answers of a cloud store begin ten times later than usual, and a query waits for the slowest of
its reads. So a read that has waited longer than 95 % of the earlier reads is sent again. The answer that begins first
is used, and the other request is cancelled (Dean and Barroso, The Tail at Scale, 2013). The number of second requests
is limited to a share of all reads, because otherwise a slow store would get twice the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.gateway.caching.store import Store, StoreAnswer
from seamark.metaserver.peers.latencies import Percentile

_INITIAL_WAIT_S = 1.0
"""The time after which a read is repeated while the latencies of the store are unknown."""
_WAIT_MIN_S, _WAIT_MAX_S = 0.01, 5.0
_SAVED_REQUESTS_MAX = 10.0
"""The maximum number of second requests that can be saved up for later."""


class _Attempt:
    """A request to the store, and the beginning of its answer. The task that uses an attempt must call `close`."""

    def __init__(self, request: AbstractAsyncContextManager[StoreAnswer]) -> None:
        self._request = request
        self.opening = asyncio.get_running_loop().create_task(request.__aenter__(), name="gateway-store-request")

    @property
    def is_usable(self) -> bool:
        return (
            self.opening.done()
            and not self.opening.cancelled()
            and self.opening.exception() is None
            and self.opening.result().status < 500
        )

    async def close(self, error: BaseException | None = None) -> bool:
        """End the request.

        Args:
            error: The error that the reader of the answer raised, or None.

        Returns:
            Whether the context manager of the request suppresses the error.
        """
        self.opening.cancel()
        await asyncio.wait((self.opening,))
        if self.opening.cancelled() or self.opening.exception() is not None:
            return False
        if error is None:
            await self._request.__aexit__(None, None, None)
            return False
        return bool(await self._request.__aexit__(type(error), error, error.__traceback__))


class HedgedStore:
    """A `Store` that passes requests on to a store, and sends slow reads twice.

    An instance belongs to one event loop. At most `percent` % of all reads are sent twice. 0 disables second requests.
    """

    def __init__(self, store: Store, clock: Clock, *, percent: int) -> None:
        self._store = store
        self._clock = clock
        self._share = percent / 100
        self._allowed_hedges = 0.0
        self._wait = Percentile(_INITIAL_WAIT_S, min_s=_WAIT_MIN_S, max_s=_WAIT_MAX_S, factor=1.0)
        self.hedged = 0

    @asynccontextmanager
    async def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AsyncIterator[StoreAnswer]:
        """Send a request. If the answer does not begin in the usual time, send the request again, and use the faster.

        The second request is sent only if the share of such requests (`_share`) allows it. See `Store.request`.
        """
        if not self._share:
            async with self._store.request(method, bucket, key, headers) as answer:
                yield answer
            return
        self._allowed_hedges = min(_SAVED_REQUESTS_MAX, self._allowed_hedges + self._share)
        began_s = self._clock.monotonic()
        attempts = [_Attempt(self._store.request(method, bucket, key, headers))]
        try:
            await asyncio.wait((attempts[0].opening,), timeout=self._wait.value_s)
            if not attempts[0].opening.done() and self._allowed_hedges >= 1:
                self._allowed_hedges -= 1
                self.hedged += 1
                attempts.append(_Attempt(self._store.request(method, bucket, key, headers)))
            used_attempt = await _await_usable(attempts)
        except BaseException:
            for attempt in attempts:
                await attempt.close()
            raise
        # Record the waiting time even if the second request was faster. It is a lower bound of the first request's
        # time.
        self._wait.add(self._clock.monotonic() - began_s)
        for attempt in attempts:
            if attempt is not used_attempt:
                await attempt.close()
        # This raises the error of the first attempt if all attempts failed.
        answer = await used_attempt.opening
        try:
            yield answer
        except BaseException as error:
            if not await used_attempt.close(error):
                raise
        else:
            await used_attempt.close()


async def _await_usable(attempts: list[_Attempt]) -> _Attempt:
    """Return the first attempt whose answer begins without an error, or the first attempt if all attempts fail."""
    pending_openings = {attempt.opening for attempt in attempts}
    while pending_openings:
        _, pending_openings = await asyncio.wait(pending_openings, return_when=asyncio.FIRST_COMPLETED)
        usable_attempts = [attempt for attempt in attempts if attempt.is_usable]
        if usable_attempts:
            return usable_attempts[0]
    return attempts[0]
