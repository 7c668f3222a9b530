"""The port to the store: one request for an object, and its answer in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The answer of the store.

    `headers` have lower-case names. `pieces` may be read once, and only for the answer to a GET.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Store(Protocol):
    def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[StoreAnswer]:
        """Send a GET or HEAD request for an object.

        Raises:
            RetryLater: The store does not answer, or its answer ends early.
        """
