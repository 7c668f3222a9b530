"""Faults of a campaign. When a fault function returns, the fault has ended and everything runs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from tests.faults.rigs.disk import SmallDisk
from tests.peers.networks import Network
from tests.services.kafka import Kafka
from tests.services.seamark import Seamark
from tests.streams.chaos.readers import StreamReaders


class ServerFaults:
    """The faults that a rig supports."""

    def __init__(
        self,
        servers: Sequence[Seamark],
        readers: StreamReaders,
        rng: random.Random,
        *,
        disk: SmallDisk | None = None,
        kafka: Kafka | None = None,
        network: Network | None = None,
    ) -> None:
        """Create the faults.

        Args:
            servers: The servers.
            readers: The readers, which may be killed.
            rng: The source of all random choices.
            disk: The disk with the log of the first server.
            kafka: The broker of the log.
            network: The network, with a host for each server.
        """
        self._servers = servers
        self._readers = readers
        self._rng = rng
        self._disk = disk
        self._kafka = kafka
        self._network = network
        self.counts: Counter[str] = Counter()

    def cause_random_fault(self) -> None:
        """Cause a random fault, and end it."""
        # A fault that is listed twice is twice as likely.
        possible_faults: list[Callable[[], None]] = [
            self.kill_and_restart_server,
            self.kill_and_restart_server,
            self.pause,
            self.kill_child,
        ]
        possible_faults += [self.kill_reader]
        possible_faults += [self.fill_disk, self.fill_disk] if self._disk is not None else []
        possible_faults += [self.kill_broker] if self._kafka is not None else []
        possible_faults += [self.isolate_server, self.isolate_server] if self._network is not None else []
        kind = self._rng.choice(possible_faults)
        self.counts[kind.__name__] += 1
        kind()

    def kill_and_restart_server(self) -> None:
        server = self._rng.choice(self._servers)
        server.kill9()
        time.sleep(self._rng.choice((0, 0, 2, 4)))  # The leases of owners end after two seconds.
        server.start()

    def pause(self) -> None:
        """Stop a server with its workers for a time. During this time it may lose its lease."""
        server = self._rng.choice(self._servers)
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(self._rng.choice((0.5, 3)))
        os.killpg(server.pid, signal.SIGCONT)

    def kill_child(self) -> None:
        """Kill a process that a server has started: a worker, or a table service."""
        server = self._rng.choice(self._servers)
        with suppress(psutil.Error):
            if children := psutil.Process(server.pid).children(recursive=True):
                self._rng.choice(children).kill()

    def kill_reader(self) -> None:
        self._readers.kill(self._rng)

    def fill_disk(self) -> None:
        """Fill the disk of the log and of the database for some seconds."""
        assert self._disk is not None
        self._disk.fill()
        time.sleep(self._rng.choice((1, 3, 6)))
        self._disk.free_space()

    def kill_broker(self) -> None:
        assert self._kafka is not None
        self._kafka.kill()
        time.sleep(self._rng.choice((0, 2)))
        self._kafka.start()

    def isolate_server(self) -> None:
        """Drop all packets between a server and the broker, the database and the clients. TCP connections stay open."""
        assert self._network is not None
        with self._rng.choice(self._network.hosts).isolate():
            time.sleep(self._rng.choice((0.5, 3, 6)))
