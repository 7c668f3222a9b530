"""How much faster are first and repeated reads through the gateway's cache than direct reads?

Direct and cached reads alternate, and both reads of a pair have the same delay. The store is a real S3 server behind a
proxy that delays each request, as a store in the cloud does (`bench.gateway`). For some rows, the proxy also limits
each connection to the rate of one connection to S3. A first read finds nothing in the cache. Later reads of the same
ranges come from the disk (in a server without a memory tier) and from memory. Cached reads are also compared with a
process that sends files by sendfile, which is the limit of the loopback interface. The client is a plain socket,
because a Python client library takes longer than the server.

    python -m bench.fleet.gateway_cache
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import psutil

from bench.gateway import OBJECT_BYTES, run_delaying_store
from bench.report import Report, Row
from seamark.formats.runtime.connections import raise_descriptor_limit
from tests.gateway.rig import GatewayRig, Keys, open_rig
from tests.services.s3 import S3, run_s3


class RangeCase(NamedTuple):
    """The ranges of one case.

    Attributes:
        label: The size of a range for the report.
        range_bytes: The size of a range.
        step_bytes: The distance between the starts of two ranges. It is so large that a read does not load a block of
            another range.
        objects: The number of objects that are read.
    """

    label: str
    range_bytes: int
    step_bytes: int
    objects: int


CASES = (
    RangeCase("64 KiB", 64 << 10, 512 << 10, 1),
    RangeCase("1 MiB", 1 << 20, 1 << 20, 2),
    RangeCase("8 MiB", 8 << 20, 8 << 20, 4),
)
FIRST_READ_SPEED_MIN = 1 / 1.05
"""The goal for first reads: a read through the gateway takes at most 5 % longer than a direct read."""
THROUGHPUT_SHARE_MIN = 0.8
"""The goal for cached ranges: the share of the throughput of sendfile."""
MEBIBYTE = 1 << 20
LIMIT = "sendfile"
S3_RATE = 90e6
"""Bytes per second of one connection; Amazon states 85 to 90 MB/s for byte-range requests."""
SLOW_CASES = (("1 MiB of memory", 1, {}), ("8 MiB of the disk", 8, {"SEAMARK_GATEWAY_CACHE_MEMORY_BYTES": "0"}))
"""(name, MiB of a range, server settings) for slow readers. For reads from the disk, each has its own copies."""


Read = Callable[[int], float]
"""A function that reads the n-th range of an object, and returns the seconds."""


def build_reader(client: Any, keys: Keys, size: int, name: str) -> Read:
    """Return a function that reads the n-th range of an object on one connection and returns the seconds.

    The function fails unless all bytes arrive.
    """
    url = _presign(client, keys, name)
    connection = socket.create_connection((str(url.hostname), int(url.port or 80)))
    buffer = memoryview(bytearray(2 * MEBIBYTE))

    def read(number: int) -> float:
        start = number * size % (OBJECT_BYTES - size + 1)
        request = _get(url, start, size)
        began_s = time.perf_counter()
        _receive(connection, request, size, buffer)
        return time.perf_counter() - began_s

    return read


def _presign(client: Any, keys: Keys, name: str) -> SplitResult:
    object_address = {"Bucket": keys.bucket, "Key": keys.prefix + name}
    return urlsplit(client.generate_presigned_url("get_object", Params=object_address, ExpiresIn=3600))


def _get(url: SplitResult, start: int, size: int) -> bytes:
    head = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
    return f"{head}Range: bytes={start}-{start + size - 1}\r\n\r\n".encode()


class Ranges:
    """The ranges of several objects in a random order that is the same for all readers with the same seed.

    Args:
        readers: For each object, the function that reads its n-th range of `size` bytes.
        size: The size of a range in bytes.
        step: The distance between the starts of two ranges of an object in bytes, a multiple of `size`.
    """

    def __init__(self, readers: list[Read], size: int, step: int, seed: int) -> None:
        self._readers = readers
        ranges = [(index, start // size) for index in range(len(readers)) for start in range(0, OBJECT_BYTES, step)]
        random.Random(seed).shuffle(ranges)
        self._ranges = [(index, number) for index, number in ranges if (number + 1) * size <= OBJECT_BYTES]

    def __len__(self) -> int:
        return len(self._ranges)

    def read(self, number: int) -> float:
        """Read the range at position `number` of the random order, and return the seconds."""
        object_index, range_number = self._ranges[number % len(self._ranges)]
        return self._readers[object_index](range_number)


def add_rows(
    report: Report,
    case: str,
    seamark_s: list[float],
    direct_s: list[float],
    factor: float,
    sendfile_s: list[float] | None = None,
) -> None:
    """Add the rows of a case to the report.

    A second median row compares with the process that sends by sendfile, which is the fastest possible server for this
    client.

    Args:
        seamark_s: The seconds of each read through the gateway.
        direct_s: The seconds of each direct read.
        factor: The goal: how many times faster than the direct read.
        sendfile_s: The seconds of each read from the sendfile process, or None without this comparison.
    """
    for name, aggregate in (("median", statistics.median), ("mean", statistics.fmean)):
        values = {"seamark": aggregate(seamark_s) * 1000, "direct": aggregate(direct_s) * 1000}
        goal = values["direct"] / factor if name == "median" else None
        if sendfile_s is not None:
            values[LIMIT] = aggregate(sendfile_s) * 1000
        report.rows.append(Row(case, name, "ms", values, peer="direct", goal=goal))
    if sendfile_s is not None:
        bound = {"seamark": statistics.median(seamark_s) * 1000, LIMIT: statistics.median(sendfile_s) * 1000}
        report.rows.append(Row(case, "median (ratio to sendfile, the client's bound)", "ms", bound, peer=LIMIT))


def upload_objects(rig: GatewayRig, s3: S3, count: int) -> tuple[Keys, Keys, list[str]]:
    """Upload new objects.

    Return the keys of the gateway, the keys of the store, and the names of the objects.
    """
    if not rig.has_table("t"):
        rig.create_table("t")
    keys = rig.load_keys("t")
    store_keys = replace(keys, endpoint=s3.endpoint, access_key=s3.access_key, secret=s3.secret_key, token="")
    names = [f"data/{uuid.uuid4()}.parquet" for _ in range(count)]
    with closing(store_keys.make_client()) as client:
        for name in names:
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + name, Body=os.urandom(OBJECT_BYTES))
    return keys, store_keys, names


def compare_ranges(seamark_ranges: Ranges, peer_ranges: Ranges, count: int) -> tuple[list[float], list[float]]:
    """Read the first `count` ranges with both readers, and return the seconds of the reads of each reader.

    The readers begin alternately, so that neither always reads first.
    """
    pairs = [
        (seamark_ranges.read(n), peer_ranges.read(n))
        if n % 2
        else (peer_ranges.read(n), seamark_ranges.read(n))[::-1]  # (Seamark's seconds, the peer's), as in each pair
        for n in range(count)
    ]
    return [seamark_s for seamark_s, _ in pairs], [peer_s for _, peer_s in pairs]


def measure_tier(
    report: Report,
    rig: GatewayRig,
    near_store: S3,
    slow_store: S3,
    tier: str,
    factor: float,
    rounds: int,
    make_sendfile_reader: Callable[[int], Read],
) -> None:
    """Measure first reads, and reads of ranges that are in the cache tier `tier`.

    Args:
        factor: The goal: how many times faster than the direct read.
        make_sendfile_reader: Returns, for a size in bytes, a function that reads the n-th range of this size from the
            process that sends by sendfile, and returns the seconds.
    """
    for seed, case in enumerate(CASES):
        with open_pairs(rig, near_store, slow_store, case, seed) as (seamark_ranges, peer_ranges):
            count = min(rounds, len(seamark_ranges) - 1)
            first = compare_ranges(seamark_ranges, peer_ranges, count)
            if tier == "memory":
                add_rows(report, f"first read, {case.label}", *first, FIRST_READ_SPEED_MIN)
            time.sleep(1)  # The server writes blocks to the disk after the answer.
            limit = [make_sendfile_reader(case.range_bytes)(number) for number in range(count)]
            add_rows(
                report, f"in {tier}, {case.label}", *compare_ranges(seamark_ranges, peer_ranges, count), factor, limit
            )


def measure_first(report: Report, rig: GatewayRig, near_store: S3, slow_store: S3, rounds: int) -> None:
    """Measure first reads while each connection of the store has the rate of one connection to S3."""
    for seed, case in enumerate(CASES):
        with open_pairs(rig, near_store, slow_store, case, seed) as (seamark_ranges, peer_ranges):
            first = compare_ranges(seamark_ranges, peer_ranges, min(rounds, len(seamark_ranges) - 1))
            add_rows(report, f"first read, {case.label}, {S3_RATE / 1e6:.0f} MB/s", *first, FIRST_READ_SPEED_MIN)


@contextmanager
def open_pairs(
    rig: GatewayRig, near_store: S3, slow_store: S3, case: RangeCase, seed: int
) -> Iterator[tuple[Ranges, Ranges]]:
    """Yield the same ranges of new objects through the gateway and directly, on open connections."""
    _, size, step, objects = case
    keys, store_keys, names = upload_objects(rig, near_store, objects)
    with (
        closing(keys.make_client()) as client,
        closing(replace(store_keys, endpoint=slow_store.endpoint).make_client()) as direct_client,
    ):
        seamark_ranges = Ranges([build_reader(client, keys, size, name) for name in names], size, step, seed)
        peer_ranges = Ranges([build_reader(direct_client, store_keys, size, name) for name in names], size, step, seed)
        # The last range opens the connections of the servers to the store. It is not measured.
        for item in (seamark_ranges, peer_ranges):
            item.read(len(item) - 1)
        yield seamark_ranges, peer_ranges


def measure_sequential_reads(report: Report, rig: GatewayRig, near_store: S3, slow_store: S3) -> None:
    """Measure reads of a whole object in successive requests of 1 MiB."""
    keys, store_keys, names = upload_objects(rig, near_store, 3)
    durations: dict[str, list[float]] = {"seamark": [], "direct": []}
    for name in names:
        for server, tested_keys in (("seamark", keys), ("direct", replace(store_keys, endpoint=slow_store.endpoint))):
            with closing(tested_keys.make_client()) as client:
                read_range = build_reader(client, tested_keys, MEBIBYTE, name)
                durations[server].append(sum(read_range(number) for number in range(OBJECT_BYTES // MEBIBYTE)) * 1000)
    values = {server: statistics.median(times) for server, times in durations.items()}
    report.rows.append(Row("64 MiB, one MiB after another, first read", "median", "ms", values, peer="direct"))


# Throughput


def _serve_file(listener: socket.socket, path: str) -> None:
    """Answer each request line with the part of the file that the line names, by sendfile."""

    def serve(connection: socket.socket) -> None:
        with connection, open(path, "rb") as file:
            while request := connection.recv(4096):
                size, start = (int(part) for part in request.split())
                connection.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\n" % size)
                while size:
                    sent_bytes = os.sendfile(connection.fileno(), file.fileno(), start, size)
                    start, size = start + sent_bytes, size - sent_bytes

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


@contextmanager
def run_sendfile_server(path: str) -> Iterator[int]:
    """Run a process that sends the file by sendfile, and yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if not child:
        try:
            _serve_file(listener, path)
        finally:
            os._exit(0)
    try:
        yield listener.getsockname()[1]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        listener.close()


def _receive(connection: socket.socket, request: bytes, size: int, buffer: memoryview) -> None:
    connection.sendall(request)
    received_bytes = connection.recv_into(buffer)
    # A refusal is shorter than the range: the client would wait for the rest without end.
    assert bytes(buffer[9:12]) == b"206", bytes(buffer[:received_bytes])
    head = bytes(buffer[:received_bytes]).find(b"\r\n\r\n") + 4
    bytes_left = size - (received_bytes - head)
    while bytes_left:
        received_bytes = connection.recv_into(buffer)
        assert received_bytes, "the server closed the connection before the end of the range"
        bytes_left -= received_bytes


def measure_throughput(requests: Callable[[int], bytes], port: int, size: int, seconds: float) -> float:
    """Return the bytes per second on one connection."""
    buffer = memoryview(bytearray(2 * MEBIBYTE))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for number in range(8):  # These reads warm up the caches and the connection. They are not measured.
            _receive(connection, requests(number), size, buffer)
        count, began_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began_s) < seconds:
            _receive(connection, requests(count), size, buffer)
            count += 1
    return count * size / elapsed_s


def open_sendfile_reader(port: int, size: int) -> Read:
    """Return a function that reads the n-th range of `size` bytes from the sendfile process, and returns the seconds.

    A request is the size and the start of the range as text.
    """
    connection, buffer = socket.create_connection(("127.0.0.1", port)), memoryview(bytearray(2 * MEBIBYTE))

    def read(number: int) -> float:
        began_s = time.perf_counter()
        start = number * size % (OBJECT_BYTES // 2)  # The second half leaves room for the last range.
        _receive(connection, b"%d %d" % (size, start), size, buffer)
        return time.perf_counter() - began_s

    return read


def compare_throughput(report: Report, rig: GatewayRig, s3: S3, port: int, rounds: int) -> None:
    """Compare the throughput of cached ranges with that of a process that sends a file by sendfile.

    Args:
        port: The port of that process. A request to it is a size and an offset, as text.
        rounds: The number of measurements of each server. Each lasts a second.
    """
    keys, _, names = upload_objects(rig, s3, 1)
    with closing(keys.make_client()) as client:
        url = _presign(client, keys, names[0])
    for label, size, *_ in CASES[1:]:  # without the smallest ranges

        def build_gateway_request(number: int, size: int = size) -> bytes:
            return _get(url, number * size % (OBJECT_BYTES // 2), size)

        def build_sendfile_request(number: int, size: int = size) -> bytes:
            return b"%d %d" % (size, number * size % (OBJECT_BYTES // 2))

        results: dict[str, list[float]] = {"seamark": [], "direct": []}
        for _ in range(rounds):
            results["seamark"].append(
                measure_throughput(build_gateway_request, urlsplit(rig.gateway).port or 0, size, 1.0)
            )
            results["direct"].append(measure_throughput(build_sendfile_request, port, size, 1.0))
        rates = {server: statistics.median(values) / MEBIBYTE for server, values in results.items()}
        report.rows.append(
            Row(
                f"cached ranges of {label}",
                "throughput (direct: sendfile)",
                "MiB/s",
                rates,
                lower_is_better=False,
                peer="direct",
                goal=THROUGHPUT_SHARE_MIN * rates["direct"],
            )
        )
        report.rows.append(
            Row(
                f"cached ranges of {label}",
                "requests on one connection",
                "/s",
                {server: rate * MEBIBYTE / size for server, rate in rates.items()},
                lower_is_better=False,
                peer="direct",
            )
        )


# Memory


def _read_kernel_bytes() -> int:
    """Return the bytes in the buffers of all TCP connections of this machine."""
    match = re.search(r"^TCP: .* mem ([0-9]+)$", Path("/proc/net/sockstat").read_text(), re.MULTILINE)
    return int(match[1]) * os.sysconf("SC_PAGE_SIZE") if match else 0


def measure_concurrent_readers(
    rig: GatewayRig, keys: Keys, name: str, count: int, size: int
) -> tuple[int, int, int, int]:
    """Measure the memory while `count` connections read a range slowly.

    Returns:
        (MiB that the server's memory grew at the peak, MiB that the kernel's buffers grew, answers, refusals).
    """
    with closing(keys.make_client()) as client:
        url = _presign(client, keys, name)
        client.get_object(Bucket=keys.bucket, Key=keys.prefix + name)["Body"].read()  # Fills the cache.
    process, stop, peak = psutil.Process(rig.seamark.pid), threading.Event(), [0]
    bytes_before, kernel_before = process.memory_info().rss, _read_kernel_bytes()

    def watch() -> None:
        while not stop.wait(0.05):
            peak[0] = max(peak[0], process.memory_info().rss - bytes_before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    sockets: list[socket.socket] = []
    answered_count = refused_count = 0
    try:
        for number in range(count):
            item = socket.socket()
            # This is a slow client: the server cannot run ahead of it.
            item.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            item.settimeout(60)
            item.connect((url.hostname, url.port))
            sockets.append(item)
            start = number * MEBIBYTE % (OBJECT_BYTES - size)
            item.sendall(_get(url, start, size))
        for item in sockets:
            try:
                status = item.recv(4096)[9:12]
            except OSError:
                status = b""
            answered_count += status == b"206"
            refused_count += status != b"206"
        time.sleep(1)
        kernel = _read_kernel_bytes() - kernel_before
    finally:
        for item in sockets:
            item.close()
        stop.set()
        watcher.join()
    return peak[0] >> 20, kernel >> 20, answered_count, refused_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    report = Report("gateway_cache", "What does the cache of the objects gateway gain?", peer="direct")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        s3 = stack.enter_context(run_s3(Path(folder), keep_alive=True))
        slow_store_process = stack.enter_context(run_delaying_store(s3.endpoint, seed=1))
        slow_store = S3(slow_store_process, s3.access_key, s3.secret_key, s3.region, s3.root, s3.process)
        sent_path = Path(folder) / "sent"
        sent_path.write_bytes(os.urandom(OBJECT_BYTES))
        port = stack.enter_context(run_sendfile_server(str(sent_path)))
        memory = {"SEAMARK_GATEWAY_CACHE_MEMORY_BYTES": str(1 << 30)}
        with open_rig(Path(folder) / "memory", s3, SEAMARK_S3_ENDPOINT=slow_store_process, **memory) as rig:
            measure_tier(
                report,
                rig,
                s3,
                slow_store,
                "memory",
                factor=50,
                rounds=arguments.rounds,
                make_sendfile_reader=partial(open_sendfile_reader, port),
            )
            measure_sequential_reads(report, rig, s3, slow_store)
            compare_throughput(report, rig, s3, port, rounds=5)
        limited = stack.enter_context(run_delaying_store(s3.endpoint, seed=2, rate=S3_RATE))
        with open_rig(Path(folder) / "limited", s3, SEAMARK_S3_ENDPOINT=limited, **memory) as rig:
            measure_first(report, rig, s3, replace(slow_store, endpoint=limited), arguments.rounds)
        with open_rig(
            Path(folder) / "disk", s3, SEAMARK_S3_ENDPOINT=slow_store_process, SEAMARK_GATEWAY_CACHE_MEMORY_BYTES="0"
        ) as rig:
            measure_tier(
                report,
                rig,
                s3,
                slow_store,
                "disk",
                factor=10,
                rounds=arguments.rounds,
                make_sendfile_reader=partial(open_sendfile_reader, port),
            )
        raise_descriptor_limit()
        limits = {"SEAMARK_GATEWAY_REQUESTS_LIMIT": "40000", "SEAMARK_CONNECTIONS_LIMIT": "40000"}
        for number, (label, size, changes) in enumerate(SLOW_CASES):
            with open_rig(Path(folder) / f"many{number}", s3, **limits, **changes) as rig:
                keys, _, names = upload_objects(rig, s3, count=1)
                extra_ms, kernel, answered_count, refused_count = measure_concurrent_readers(
                    rig, keys, names[0], arguments.connections, size * MEBIBYTE
                )
            report.bounds[f"memory for concurrent range reads, {label}"] = (
                f"{extra_ms} MiB more in the server and {kernel} MiB in the kernel while "
                f"{arguments.connections} connections read {size} MiB each and take nothing; "
                f"{answered_count} were answered, and {refused_count} refused"
            )
    report.notes.append(
        "`direct` is versitygw behind a proxy that delays requests by 15 ms in the median and up to 200 ms, or for"
        " throughput a process that sends a file by sendfile. One connection, presigned requests. The delays of a read"
        " through the gateway and of the direct read beside it are equal."
    )
    report.notes.append(
        f"{S3_RATE / 1e6:.0f} MB/s: the proxy gives each connection the rate of one connection to S3. Elsewhere the"
        " store sends as fast as the machine copies, on the same two cores as the gateway and the client."
    )
    report.notes.append(
        "The goal in memory is a fiftieth of a direct read. The column sendfile is what the same client needs for the"
        " same bytes from a process that does nothing else: a goal near it or below it is out of reach of any server."
    )
    report.save()
    print(report.format_markdown())


if __name__ == "__main__":
    main()
