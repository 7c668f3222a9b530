"""The port to the store: one request for an object, and its answer in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """`headers` have lower-case names.

    `pieces` is read once, and only for the answer to a GET.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Store(Protocol):
    def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[StoreAnswer]:
        """GET or HEAD of an object.

        Raises:
            RetryLater: If the store does not answer, or if its answer ends early.
        """
