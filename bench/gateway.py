"""Measure what the objects gateway costs: compare reads of ranges through the gateway with direct reads.

The two kinds of reads alternate. Each pair reads the same object from the same store: first a real S3 server, then the
same server behind a proxy that delays each answer as a store in the cloud does (15 ms in the median, up to 200 ms).
The gateway over a folder is compared with the S3 server over a folder. The requests are presigned in advance, so the
time contains no signing.

    python -m bench.gateway
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import random
import re
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from bench.report import Report, Row
from tests.gateway.rig import GatewayRig, Keys, open_rig
from tests.services.process import choose_free_port
from tests.services.s3 import S3, run_s3

OBJECT_BYTES = 64 << 20
MEDIAN_S, TAIL_S, SIGMA = 0.015, 0.2, 0.84
CASES = (("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("8 MiB", 8 << 20))


_START = re.compile(rb"\r\nrange: *bytes=([0-9]*)", re.IGNORECASE)


class Delays:
    """Log-normal delays of requests.

    The n-th request of the client (presigned) and the n-th request of the gateway (signed in a header) for the same
    number of bytes have the same delay. A read through the gateway and the direct read therefore wait equally long, and
    the difference is the cost of the gateway. With 60 pairs of independent delays, the medians would differ by a fifth
    by chance.
    """

    def __init__(self, seed: int, sigma: float) -> None:
        self._seed, self._sigma = seed, sigma
        self._requests: Counter[tuple[str, bool]] = Counter()

    def draw_delay_s(self, request: bytes) -> float:
        """Return the delay in seconds of `request`, which begins with the head of an HTTP request."""
        start, target = _START.search(request), request.partition(b" HTTP/")[0]
        context = f"{target.partition(b'?')[0]!r} {start and start[1]!r}"
        # A presigned request of the client has the signature in the URL; the gateway signs in a header.
        counter_key = context, b"X-Amz-Signature=" in target
        request_number = self._requests[counter_key]
        self._requests[counter_key] += 1
        return min(
            TAIL_S, MEDIAN_S * random.Random(f"{self._seed} {context} {request_number}").lognormvariate(0, self._sigma)
        )


def _run_delaying_proxy(store: str, delays: Delays, rate: float, port: int) -> None:
    store_address = urlsplit(store)

    async def ask(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 18):
            await asyncio.sleep(delays.draw_delay_s(data))
            target.write(data)
            await target.drain()
        target.close()

    async def answer(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        clock, due_s = asyncio.get_running_loop().time, 0.0
        while data := await source.read(1 << 18):
            if rate:
                due_s = max(due_s, clock()) + len(data) / rate
                await asyncio.sleep(due_s - clock())
            target.write(data)
            await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(store_address.hostname, store_address.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(reader, back_writer))
                group.create_task(answer(back_reader, writer))
        except* ConnectionError:  # An error on one side of the connection ends the other side.
            pass
        finally:
            writer.close()
            back_writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
            await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@contextmanager
def run_delaying_store(store: str, seed: int, *, sigma: float = SIGMA, rate: float = 0) -> Iterator[str]:
    """Run a proxy in front of `store` that delays each request, and yield the proxy's URL.

    The delays are log-normal: 15 ms in the median, 200 ms at the 99.9th percentile. If `sigma` is 0, all are equal.
    The proxy is a separate process, because a thread would slow down the client that measures.
    Args:
        rate: The maximum bytes per second of each connection; 0 means no limit.
    """
    port = choose_free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=_run_delaying_proxy, args=(store, Delays(seed, sigma), rate, port), daemon=True
    )
    process.start()
    while not _is_answering(port):
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def _is_answering(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def build_reader(client: Any, keys: Keys, size: int, name: str = "o") -> Callable[[int], float]:
    """Return a function that reads the n-th range of an object on one connection and returns the seconds.

    The function fails unless all bytes arrive.
    """
    url = urlsplit(
        client.generate_presigned_url(
            "get_object", Params={"Bucket": keys.bucket, "Key": keys.prefix + name}, ExpiresIn=3600
        )
    )
    connection = http.client.HTTPConnection(url.netloc, timeout=60)

    def read(number: int) -> float:
        start = number * size % (OBJECT_BYTES - size + 1)
        began_s = time.perf_counter()
        connection.request("GET", f"{url.path}?{url.query}", headers={"Range": f"bytes={start}-{start + size - 1}"})
        data = connection.getresponse().read()
        elapsed = time.perf_counter() - began_s
        assert len(data) == size, data[:300]
        return elapsed

    return read


def read_alternately(
    read_from_seamark: Callable[[int], float], read_from_peer: Callable[[int], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Read ranges through the gateway and directly, alternately, and return the seconds of the reads of both.

    Both read the same ranges, with the same delays on average. Three reads of each are a warm-up, and are not returned.
    """
    for number in range(3):
        read_from_seamark(number), read_from_peer(number)
    pairs = [
        (read_from_seamark(n), read_from_peer(n))
        if n % 2
        else (read_from_peer(n), read_from_seamark(n))[::-1]  # Seamark's seconds come first in each pair.
        for n in range(rounds)
    ]
    return [seamark_s for seamark_s, _ in pairs], [peer_s for _, peer_s in pairs]


def _read_cpu_ms(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    process = psutil.Process(pid)
    times = [item.cpu_times() for item in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times) * 1000


def measure_reads(report: Report, case: str, rig: GatewayRig, s3: S3, rounds: int) -> None:
    """Measure the reads of a case, and add its rows to the report.

    Args:
        s3: The store at the address that direct reads use.
    """
    table_access, peer = rig.create_table(f"t{case.replace(' ', '')}"), "direct"
    store_s3 = replace(table_access, endpoint=s3.endpoint, access_key=s3.access_key, secret=s3.secret_key, token="")
    with closing(table_access.make_client()) as client, closing(store_s3.make_client()) as store_client:
        data = os.urandom(OBJECT_BYTES)
        client.put_object(Bucket=table_access.bucket, Key=table_access.prefix + "o", Body=data)
        if rig.direct_store is None:
            store_client.create_bucket(Bucket=table_access.bucket)
            store_client.put_object(Bucket=table_access.bucket, Key=table_access.prefix + "o", Body=data)
        for label, size in CASES:
            seamark_ms, peer_ms = read_alternately(
                build_reader(client, table_access, size), build_reader(store_client, table_access, size), rounds
            )
            read_range, cpu_ms = build_reader(client, table_access, size), {}
            for server, pid, work in (
                ("seamark", rig.seamark.pid, read_range),
                (peer, s3.process.pid, build_reader(store_client, store_s3, size)),
            ):
                cpu_ms_before = _read_cpu_ms(pid)
                for number in range(rounds):
                    work(number)
                cpu_ms[server] = (_read_cpu_ms(pid) - cpu_ms_before) / rounds
            report.rows.append(Row(f"{case}, {label}", "CPU of the server", "ms", cpu_ms, peer=peer))
            for name, aggregate in (("median", statistics.median), ("mean", statistics.fmean)):
                values = {"seamark": aggregate(seamark_ms) * 1000, peer: aggregate(peer_ms) * 1000}
                report.rows.append(Row(f"{case}, {label}", name, "ms", values, peer=peer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    report = Report(
        "gateway", "What does a read through the objects gateway cost, beside a direct read?", peer="direct"
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        s3 = stack.enter_context(run_s3(Path(folder), keep_alive=True))
        slow_backend = stack.enter_context(run_delaying_store(s3.endpoint, 1))
        with open_rig(Path(folder) / "near", s3) as gateway_setup:
            measure_reads(report, "store on this machine", gateway_setup, s3, rounds)
            server_bytes_after_reads = psutil.Process(gateway_setup.seamark.pid).memory_info().rss
        slow_store = S3(slow_backend, s3.access_key, s3.secret_key, s3.region, s3.root, s3.process)
        with open_rig(Path(folder) / "far", s3, SEAMARK_S3_ENDPOINT=slow_backend) as gateway_setup:
            measure_reads(report, "store with 15 ms", gateway_setup, slow_store, rounds)
        with open_rig(Path(folder) / "folder", None) as gateway_setup:
            measure_reads(report, "folder", gateway_setup, s3, rounds)
    report.bounds["memory of the server after all reads of a store"] = f"{server_bytes_after_reads >> 20} MiB"
    report.notes.append(
        "`direct` is versitygw over a folder of the same disk, with connections that stay open. One connection,"
        " presigned requests, and objects that the gateway does not cache."
    )
    report.save()
    print(report.format_markdown())


if __name__ == "__main__":
    main()
