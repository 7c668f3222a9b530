"""Writers of a campaign. They send each request to any server, and repeat it until it is acknowledged."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.streams.chaos.model import ABSENT, AcknowledgedRows

WRITERS, KEY_WRITERS, KEYS = 4, 2, 40
_LARGE_REQUESTS = 0.15
"""The share of requests with large rows. They fill segments of the log, so that a new segment meets a full disk."""
_LARGE_REQUEST_BYTES = 1 << 20
_RETRIED = (429, 502, 503, 504, 507)
"""The statuses after which a request is repeated."""
_UNKNOWN = "CommitStateUnknownException"
"""The error type of a 500 after which a request is repeated, because the log may have the rows."""
_ANSWER_S = 40.0


class WriterLoad:
    """Writers of the tables `db.t` and `db.k`."""

    def __init__(self, urls: Sequence[str], model: AcknowledgedRows, rng: random.Random) -> None:
        self._urls = urls
        self._model = model
        self._rng = rng
        self.is_ending = False
        self.statuses: Counter[str] = Counter()
        """The number of answers by status, of unknown outcomes, and of lost answers."""

    async def run(self) -> None:
        """Write until `is_ending` is set, then repeat the last requests until they are acknowledged."""
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            for number in range(WRITERS):
                group.create_task(self._write_rows(http, f"w{number}"))
            for number in range(KEY_WRITERS):
                group.create_task(self._write_changes(http, number))

    async def _write_rows(self, http: aiohttp.ClientSession, producer: str) -> None:
        sequence = 0
        while not self.is_ending:
            numbers = self._model.reserve_rows(producer, self._rng.choice((1, 5, 50)))
            rows: list[dict[str, Any]] = [{"producer": producer, "number": number} for number in numbers]
            if self._rng.random() < _LARGE_REQUESTS:
                payload = "x" * (_LARGE_REQUEST_BYTES // len(rows))
                rows = [{**row, "payload": payload} for row in rows]
            await self._send(http, "t", producer, sequence, rows)
            self._model.acknowledge_rows(producer)
            sequence += 1
            await asyncio.sleep(self._rng.choice((0, 0.02, 0.1)))

    async def _write_changes(self, http: aiohttp.ClientSession, writer: int) -> None:
        """Upsert and delete random keys of this writer until the end. Each key belongs to one writer."""
        sequence = value = 0
        while not self.is_ending:
            rows: list[dict[str, Any]] = []
            keys = [KEY_WRITERS * self._rng.randrange(KEYS) + writer for _ in range(self._rng.choice((1, 4, 12)))]
            for key in dict.fromkeys(keys):
                value += 1
                is_deleted = self._rng.random() < 0.2
                self._model.begin_change(key, ABSENT if is_deleted else value)
                rows.append({"id": key, "_op": "delete"} if is_deleted else {"id": key, "value": value})
            await self._send(http, "k", f"k{writer}", sequence, rows)
            self._model.acknowledge_changes(row["id"] for row in rows)
            sequence += 1
            await asyncio.sleep(self._rng.choice((0.02, 0.1, 0.2)))

    async def _send(
        self, http: aiohttp.ClientSession, table: str, producer: str, sequence: int, rows: list[dict[str, Any]]
    ) -> None:
        """Send a request until it is acknowledged."""
        body, headers = json.dumps(rows).encode(), {"Content-Type": "application/json"}
        while True:
            base = self._rng.choice(self._urls)
            url = f"{base}/api/v1/tables/db/{table}/rows?producer={producer}&sequence={sequence}"
            try:
                async with http.post(
                    url, data=io.BytesIO(body), headers=headers, timeout=aiohttp.ClientTimeout(_ANSWER_S)
                ) as answer:
                    text = await answer.text()
                    is_unknown = answer.status == 500 and _UNKNOWN in text
                    self.statuses["unknown outcome" if is_unknown else str(answer.status)] += 1
                    if answer.status == 200:
                        return
                    assert is_unknown or answer.status in _RETRIED, f"{answer.status} {text}"
            except (aiohttp.ClientError, TimeoutError):
                self.statuses["lost"] += 1
            await asyncio.sleep(0.1)
