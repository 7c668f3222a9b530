"""Readers of a campaign: processes that scan both tables with unmodified PyIceberg in a loop, and that may be killed.

A thread sends each scan request to its process. The thread records the acknowledged rows before the scan, and checks
the returned rows against them.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from tests.streams.chaos.model import AcknowledgedRows, WrongRows

Scan = Callable[[str, str], "Counter[tuple[Any, ...]]"]
"""Returns the rows of a table: pairs (producer, number) of `t`, or pairs (key, value) of `k`."""
_COLUMNS = {"t": ("producer", "number"), "k": ("id", "value")}


def scan_by_pyiceberg(url: str, table: str) -> Counter[tuple[Any, ...]]:
    """Return the rows of a table, read with unmodified PyIceberg."""
    from pyiceberg.catalog.rest import RestCatalog

    with RestCatalog("chaos", uri=url, **{"rest-scan-planning-enabled": "true"}) as catalog:
        rows = catalog.load_table(f"db.{table}").scan(selected_fields=_COLUMNS[table]).to_arrow()
    return Counter(zip(*(rows.column(name).to_pylist() for name in _COLUMNS[table]), strict=True))


def serve_scans(requests: Connection) -> None:
    """Scan tables on request, in a separate process, until the other end of the pipe is closed."""
    while True:
        try:
            url, table = requests.recv()
        except EOFError:
            return
        try:
            requests.send(scan_by_pyiceberg(url, table))
        except Exception as error:  # noqa: BLE001  servers fail in a campaign
            requests.send(f"{type(error).__name__}: {error}"[:300])


class ReaderKilled(Exception):
    """Raised if the process of a reader has ended."""


class StreamReaders:
    """Threads that read and check the tables. `scans` are additional ways to read, such as engines, by name."""

    def __init__(
        self,
        urls: Sequence[str],
        model: AcknowledgedRows,
        rng: random.Random,
        count: int,
        scans: dict[str, Scan] | None = None,
    ) -> None:
        self._urls = urls
        self._model = model
        self._seeds = [rng.random() for _ in range(count + len(scans or {}))]
        self._ending = threading.Event()
        self.reads: Counter[str] = Counter()
        """The number of checked reads by the name of the reader."""
        self.failures: Counter[str] = Counter()
        """The number of reads that a server or an engine refused, by the beginning of the message."""
        self.wrong_reads: list[str] = []
        self._processes: dict[int, SpawnProcess] = {}
        self._threads = [
            threading.Thread(target=self._read_in_process, args=(number,), daemon=True) for number in range(count)
        ]
        self._threads += [
            threading.Thread(target=self._read, args=(name, scan, count + number), daemon=True)
            for number, (name, scan) in enumerate((scans or {}).items())
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(120)
        for process in self._processes.values():
            process.kill()

    def kill(self, rng: random.Random) -> None:
        """Kill a reader with SIGKILL, usually during a scan. Its thread starts another reader."""
        if self._processes:
            rng.choice(list(self._processes.values())).kill()

    def _read_in_process(self, number: int) -> None:
        """Read with PyIceberg in another process, and start a new one whenever it is killed."""
        context = multiprocessing.get_context("spawn")
        while not self._ending.is_set():
            scan_connection, reader_connection = context.Pipe()
            process = context.Process(target=serve_scans, args=(reader_connection,), daemon=True)
            process.start()
            reader_connection.close()
            self._processes[number] = process

            def scan(url: str, table: str, our_connection: Connection = scan_connection) -> Counter[tuple[Any, ...]]:
                try:
                    our_connection.send((url, table))
                    answer = our_connection.recv()
                except (EOFError, OSError) as error:
                    raise ReaderKilled from error
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                return answer  # type: ignore[no-any-return]

            try:
                self._read("pyiceberg", scan, number)
            except ReaderKilled:
                self.failures["a reader was killed"] += 1
            finally:
                scan_connection.close()
                process.kill()
                process.join()

    def _read(self, name: str, scan: Scan, number: int) -> None:
        """Scan random tables until the campaign ends, and check the rows against the bounds of the model."""
        rng = random.Random(f"{self._seeds[number]}/{time.monotonic()}")
        while not self._ending.is_set():
            table, url = rng.choice("ttk"), rng.choice(self._urls)  # The table t is read twice as often as k.
            bounds = self._model.snapshot()
            try:
                rows = scan(url, table)
            except ReaderKilled:
                raise
            except Exception as error:  # noqa: BLE001  servers fail in a campaign
                self.failures[f"{name}: {str(error)[:80]}"] += 1
                self._ending.wait(0.5)  # A failed server needs some time, so the next read waits.
                continue
            try:
                (self._model.check_rows if table == "t" else self._model.check_keys)(rows, bounds)
            except WrongRows as error:
                self.wrong_reads.append(f"{name}, {url}, db.{table}: {error}")
            self.reads[name] += 1
            self._ending.wait(rng.choice((0, 0.1, 0.5)))
