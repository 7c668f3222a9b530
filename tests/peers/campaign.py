"""Parts of a campaign against a fleet: clients that plan through all replicas, and faults of single replicas."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.rigs.disk import SmallDisk
from tests.faults.rigs.http import HttpClient, OutcomeUnknown
from tests.peers.fleet import NAMESPACE, Fleet, count_peer_reads
from tests.peers.networks import Network
from tests.waits import block_until

TABLES, APPENDS, CLIENTS = 6, 5, 3
WITHOUT_MEMORY_CACHES = {
    "SEAMARK_PLAN_MEMORY_BYTES": "0",
    "SEAMARK_PLAN_DISK_BYTES": "0",
    "SEAMARK_PLAN_ANSWERS_BYTES": "0",
    "SEAMARK_METADATA_CACHE_BYTES": "0",
    "SEAMARK_PEER_MEMORY_BYTES": "40000",
    "SEAMARK_STORAGE_TIMEOUT_S": "20",
}
"""Settings that disable caches in memory.

Every plan then reads its manifests through the peers, from their disks or from the storage.
"""


@dataclass
class PlanReaders:
    """Threads that plan tables, and compare the answers with `expected_files`, the data files of each table."""

    fleet: Fleet
    expected_files: dict[str, list[str]]
    wrong_answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    faults: Counter[int] = field(default_factory=Counter)
    """A counter for each replica.

    It rises at the beginning and at the end of a fault that the replica's own clients notice, so it is odd during a
    fault.
    """
    _stop_event: threading.Event = field(default_factory=threading.Event)

    def read(self, seed: int) -> None:
        """Plan random tables on random replicas until the end.

        Record each failed request to a replica that had no fault during the request. An odd count in `faults` means
        that the replica has a fault now.
        """
        rng = random.Random(seed)
        while not self._stop_event.is_set():
            number = rng.randrange(len(self.fleet.replicas))
            fault_count = self.faults[number]
            if fault_count % 2:
                time.sleep(0.01)
                continue
            table = rng.choice(list(self.expected_files))
            client = HttpClient(self.fleet.replicas[number].base_url, timeout_s=60)
            try:
                status, body = client.call("POST", f"/v1/namespaces/{NAMESPACE}/tables/{table}/plan", {})
            except OutcomeUnknown as unknown_outcome:
                if self.faults[number] == fault_count:
                    self.failures.append(f"replica {number}, {table}: {unknown_outcome}")
                continue
            finally:
                client.close()
            if status != 200:
                if self.faults[number] == fault_count:
                    self.failures.append(f"replica {number}, {table}: {status} {body}")
                continue
            self.answers[number] += 1
            file_paths = sorted(task["data-file"]["file-path"] for task in body["file-scan-tasks"])
            if file_paths != self.expected_files[table]:
                self.wrong_answers.append(f"replica {number}, {table}: {file_paths}")

    def is_answering(self, number: int) -> bool:
        client, table = HttpClient(self.fleet.replicas[number].base_url, timeout_s=60), next(iter(self.expected_files))
        try:
            return client.call("POST", f"/v1/namespaces/{NAMESPACE}/tables/{table}/plan", {})[0] == 200
        except OutcomeUnknown:
            return False
        finally:
            client.close()

    @contextmanager
    def run_clients(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.read, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop_event.set()
            for thread in threads:
                thread.join(90)

    @contextmanager
    def tolerate_failures(self, number: int) -> Iterator[None]:
        self.faults[number] += 1
        try:
            yield
        finally:
            self.faults[number] += 1


class FleetFaults:
    """Faults of replicas. Each method returns when its fault has ended. The duration of most faults is random."""

    def __init__(
        self, readers: PlanReaders, rng: random.Random, disk: SmallDisk, network: Network | None = None
    ) -> None:
        self._readers = readers
        self._fleet = readers.fleet
        self._rng = rng
        self._disk = disk
        self._network = network

    def kill(self, number: int) -> None:
        with self._readers.tolerate_failures(number):
            self._fleet.replicas[number].kill9()
            time.sleep(self._rng.uniform(0, 4))
            self._fleet.replicas[number].start()

    def pause(self, number: int) -> None:
        with self._readers.tolerate_failures(number):
            pid = self._fleet.replicas[number].pid
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.1, 5))
            os.kill(pid, signal.SIGCONT)

    def isolate(self, number: int) -> None:
        """Cut a replica off from requests of the other replicas for a random time.

        It still reaches them, the database and the storage.
        """
        self._fleet.links[number].is_cut = True
        time.sleep(self._rng.uniform(0.1, 5))  # Shorter and longer than a lease of 3 seconds
        self._fleet.links[number].is_cut = False

    def divide(self, number: int) -> None:
        """Cut all replicas off from each other for a random time, so that no replica reads from another one.

        All replicas reach the database and the storage. `number` is not used.
        """
        assert self._network is not None
        avoided_before = self._count_avoided_reads()
        with self._network.divide():
            block_until(lambda: self._count_avoided_reads() > avoided_before)
            time.sleep(self._rng.uniform(0.1, 8))  # Shorter and longer than a lease of 3 seconds

    def disconnect(self, number: int) -> None:
        """Disconnect a replica in both directions for a random time, and wait until it answers again."""
        assert self._network is not None
        with self._readers.tolerate_failures(number):
            with self._network.hosts[number].isolate():
                time.sleep(self._rng.uniform(0.1, 6))
            block_until(lambda: self._readers.is_answering(number))  # TCP sends packets again after growing pauses.

    def damage_disk(self, number: int) -> None:
        for path in self._list_cached_files(number):
            try:
                with path.open("r+b") as file:
                    file.seek(self._rng.randrange(path.stat().st_size))
                    file.write(self._rng.randbytes(3))  # A few bytes suffice to damage the file.
            except OSError:
                continue  # The cache has evicted the file.
        time.sleep(1)  # The clients read damaged files.

    def fill_disk(self, number: int) -> None:
        """Fill the disk of replica 0, which has its cache on a small disk, for two seconds. `number` is not used."""
        self._disk.fill()
        time.sleep(2)  # The clients read while nothing can be cached.
        self._disk.free_space()

    def _count_avoided_reads(self) -> float:
        """Return the number of reads that did not wait for an answer of the replica that owns the file."""
        sources = ("hedged", "failed", "skipped")
        return sum(count_peer_reads(replica, source) for replica in self._fleet.replicas for source in sources)

    def _list_cached_files(self, number: int) -> list[Path]:
        folder = self._disk.root if number == 0 else self._fleet.replicas[number].home / "cache" / "files"
        return [path for path in folder.rglob("*.block") if path.is_file()]


def write_tables(fleet: Fleet) -> dict[str, list[str]]:
    """Create the tables, and return the data files of each."""
    expected = {}
    for number in range(TABLES):
        fleet.write(APPENDS, f"t{number}")
        client = fleet.build_clients()[0]
        _, body = client.call("POST", f"/v1/namespaces/{NAMESPACE}/tables/t{number}/plan", {})
        expected[f"t{number}"] = sorted(task["data-file"]["file-path"] for task in body["file-scan-tasks"])
        assert len(expected[f"t{number}"]) == APPENDS
    return expected


def run_campaign(readers: PlanReaders, kinds: Sequence[Callable[[int], None]], rounds: int, rng: random.Random) -> None:
    """Run each kind of fault once, then random faults of random replicas.

    No answer may be wrong. No request may fail, except to a replica during its own fault.
    """
    fleet = readers.fleet
    with readers.run_clients():
        for number in range(rounds):
            fault = kinds[number] if number < len(kinds) else rng.choice(kinds)
            fault(rng.randrange(len(fleet.replicas)))
    fleet.wait_for_replicas()
    assert readers.wrong_answers == []
    assert readers.failures == []
    # With fewer answers, or fewer reads of files from other replicas, the campaign would have tested little.
    assert min(readers.answers[number] for number in range(len(fleet.replicas))) > 20
    assert (
        sum(count_peer_reads(replica, "hits") + count_peer_reads(replica, "fetched") for replica in fleet.replicas) > 50
    )
