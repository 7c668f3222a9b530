"""The port to the store, for requests that read objects in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The answer of the store.

    Attributes:
        headers: The headers. Their names are in lower case.
        pieces: The body of the answer to a GET. It can be read only once.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Store(Protocol):
    def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[StoreAnswer]:
        """Send a GET or HEAD request for an object, and yield the answer.

        Raises:
            RetryLater: The store does not answer, or its answer ends early.
        """
