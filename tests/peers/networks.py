"""Hosts of a network on this machine: network namespaces on one bridge, whose links can be cut.

A namespace has its own addresses, routes and sockets. A host that is cut off loses packets, as with a broken switch: no
connection is refused or ends, and both sides detect the fault by their own timeouts. netem delays and loses packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

_numbers = itertools.count(1)
_CLONE_NEWNET = 0x40000000
"""The flag for `setns`, which Python's `os` module has from version 3.12 on."""


@dataclass(frozen=True)
class Host:
    """A host of the network.

    `address` is the address of its only interface, and `cable` the name of the interface's other end, on the bridge.
    """

    name: str
    address: str
    cable: str

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix for a command that must run on this host."""
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def connect(self, port: int) -> socket.socket:
        """Return a connection to a program that listens on the host's 127.0.0.1.

        A socket belongs to the network namespace of the thread that created it, even if another thread uses it.

        Raises:
            ConnectionRefusedError: The connection failed.
        """
        connections: list[socket.socket] = []

        def enter() -> None:
            namespace = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
                    return
            finally:
                os.close(namespace)
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if not connections:
            raise ConnectionRefusedError(f"no connection to port {port} of {self.name}")
        return connections[0]

    @contextmanager
    def isolate(self) -> Iterator[None]:
        """Cut the host off from all other hosts during the block."""
        with run_and_undo(f"ip link set {self.cable} down", f"ip link set {self.cable} up"):
            yield


@dataclass(frozen=True)
class Network:
    """A network of hosts, which are network namespaces. `address` is the address of this machine in the network."""

    address: str
    hosts: Sequence[Host]

    @contextmanager
    def divide(self) -> Iterator[None]:
        """Cut all hosts off from each other during the block.

        Each host and this machine still reach each other.
        """
        with ExitStack() as stack:
            for host in self.hosts:
                port_command = f"bridge link set dev {host.cable} isolated"
                stack.enter_context(run_and_undo(f"{port_command} on", f"{port_command} off"))
            yield


@contextmanager
def run_and_undo(begin_command: str, end_command: str) -> Iterator[None]:
    _run_command(begin_command)
    try:
        yield
    finally:
        _run_command(end_command)


def _run_command(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr.strip()}"


@contextmanager
def open_network(count: int) -> Iterator[Network]:
    """Open a network with `count` hosts.

    Skip the test if this user may not create network namespaces, or if a program for them is missing.
    """
    if not os.path.exists("/proc/self/ns/net") or os.geteuid():
        pytest.skip("network namespaces need Linux and root")
    missing_names = [program for program in ("ip", "bridge", "nsenter") if shutil.which(program) is None]
    if missing_names:
        pytest.skip(f"network namespaces need the programs {', '.join(missing_names)}")
    # Test processes that run at the same time have different numbers, and thus different names and subnets.
    # A process has 250 numbers and one subnet of 198.18.0.0/15, which is reserved for tests.
    number = os.getpid() % 200 * 250 + next(_numbers)
    subnet, tag = f"198.{18 + number // 25_000}.{number // 250 % 256}", f"{number:x}"
    with ExitStack() as stack:
        try:
            stack.enter_context(run_and_undo(f"ip link add smb{tag} type bridge", f"ip link del smb{tag}"))
            _run_command(f"ip addr add {subnet}.1/24 dev smb{tag}")
            _run_command(f"ip link set smb{tag} up")
            hosts = [Host(f"sm{tag}n{n}", f"{subnet}.{n + 2}", f"sm{tag}v{n}") for n in range(count)]
            for host in hosts:
                ip_command = f"ip -n {host.name}"
                stack.enter_context(run_and_undo(f"ip netns add {host.name}", f"ip netns del {host.name}"))
                _run_command(f"ip link add {host.cable} type veth peer name eth0 netns {host.name}")
                _run_command(f"ip link set {host.cable} master smb{tag} up")
                _run_command(f"{ip_command} addr add {host.address}/24 dev eth0")
                _run_command(f"{ip_command} link set eth0 up")
                _run_command(f"{ip_command} link set lo up")
            network = Network(f"{subnet}.1", hosts)
            with network.divide():  # This checks that the machine can isolate hosts.
                pass
        except (AssertionError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield network
