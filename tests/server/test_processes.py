"""Tests with real processes: draining under load, crashed workers, and a killed supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.services.process import is_http_ok, is_port_open
from tests.services.seamark import Seamark

Start = Callable[..., Seamark]


def send_get(url: str, timeout: float = 30) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def start_post(server: Seamark, body: bytes) -> socket.socket:
    """Send the headers of a POST and the first five bytes of its body, and wait until the server counts it.

    The request runs until the test sends the rest of the body on the returned socket.
    """
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/namespaces HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body[:5])
    # The server samples the metric once a second, so a read may not show the request yet.
    wait_until(lambda: is_http_ok(f"{server.base_url}/metrics", contains="seamark_requests_in_flight 1.0"))
    return sock


def test_running_request_is_finished_before_the_server_ends(start_seamark: Start) -> None:
    server = start_seamark()
    body = json.dumps({"namespace": ["late"], "properties": {}}).encode()
    with start_post(server, body) as sock:
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: not is_port_open(server.port))  # No new connection is accepted.
        assert server.running()
        sock.sendall(body[5:])  # `start_post` has sent the first five bytes.
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b"Connection: close" in answer
    assert server.wait(60) == 0


@pytest.mark.slow
def test_request_that_never_ends_delays_the_drain_only_up_to_the_time_limit(start_seamark: Start) -> None:
    server = start_seamark(flags=("--drain-timeout-s", "1"))
    with start_post(server, b"x" * 100):
        started_s = time.monotonic()
        assert server.terminate(60) == 0
        assert time.monotonic() - started_s > 0.9


def test_long_polls_and_streams_end_at_once_when_the_server_drains(start_seamark: Start) -> None:
    server = start_seamark()
    answers: list[Any] = []
    poll_thread = threading.Thread(
        target=lambda: answers.append(send_get(f"{server.base_url}/api/v1/timeline?wait=50"))
    )
    poll_thread.start()
    stream_request = urllib.request.Request(
        f"{server.base_url}/api/v1/timeline", headers={"Accept": "text/event-stream"}
    )
    with urllib.request.urlopen(stream_request, timeout=60) as events:
        assert events.readline().startswith(b"retry")
        wait_until(lambda: is_http_ok(f"{server.base_url}/metrics", contains="seamark_timeline_watchers 2.0"))
        assert server.terminate(60) == 0
        events.read()
    poll_thread.join(60)
    assert answers == [(200, {"instants": [], "next-since": None})]


def list_workers(server: Seamark) -> list[psutil.Process]:
    """Return the child processes that serve requests.

    multiprocessing's tracker and processes that have just ended are excluded.
    """
    serving_workers = []
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil also counts a zombie as a process.
            if not any("resource_tracker" in part for part in child.cmdline()):
                serving_workers.append(child)
    return serving_workers


def test_crashed_worker_is_replaced_while_other_workers_continue(start_seamark: Start) -> None:
    # With a prefix, the fork server does not start the server. So it spawns its workers, as a user's server does.
    server = start_seamark(flags=("--workers", "2"), prefix=("env",))
    wait_until(lambda: len(list_workers(server)) == 2 and server.log.read_text().count('"event":"serving"') == 2)
    victim, other_worker = list_workers(server)
    victim.kill()
    wait_until(
        lambda: len(list_workers(server)) == 2 and victim.pid not in {worker.pid for worker in list_workers(server)}
    )
    wait_until(lambda: server.log.read_text().count('"event":"serving"') == 3)
    assert other_worker.is_running()
    for _ in range(20):
        assert is_http_ok(f"{server.base_url}/v1/namespaces")
    assert server.terminate(60) == 0
    wait_until(lambda: not psutil.pid_exists(other_worker.pid))


def test_workers_share_one_port_and_one_page_of_metrics(start_seamark: Start) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_until(lambda: server.log.read_text().count('"event":"serving"') == 2)
    for _ in range(40):
        assert is_http_ok(f"{server.base_url}/v1/namespaces")
    serving_workers = {
        event["worker"]
        for event in map(json.loads, filter(lambda line: line.startswith("{"), server.log.read_text().splitlines()))
        if event["event"] == "request" and event["operation"] == "listNamespaces"
    }
    assert serving_workers == {0, 1}
    metric_line = 'seamark_requests_total{operation="listNamespaces",status="200"} 40.0'
    # The counts of other workers are at most a second old.
    wait_until(lambda: is_http_ok(f"{server.base_url}/metrics", contains=metric_line))


def test_workers_do_not_outlive_a_killed_supervisor(start_seamark: Start) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_until(lambda: server.log.read_text().count('"event":"serving"') == 2)
    workers = list_workers(server)
    os.kill(server.pid, signal.SIGKILL)
    ended_workers, live_workers = psutil.wait_procs(workers, timeout=60)
    assert not live_workers
    assert len(ended_workers) == 2


@pytest.mark.slow
def test_second_server_on_the_port_of_workers_is_rejected(start_seamark: Start, tmp_path: Path) -> None:
    server = start_seamark(flags=("--workers", "2"))
    second_server = Seamark(tmp_path / "second", port=server.port)
    second_process = second_server._process
    with pytest.raises(Exception, match="Cannot bind"):
        second_process.start(lambda: False, timeout_s=90)  # The server ends with an error and never becomes ready.
