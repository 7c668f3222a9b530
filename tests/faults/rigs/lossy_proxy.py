"""An HTTP proxy that loses requests and replies, like networks and load balancers.

`choose_fault(method, path)` decides the fault of a request. The proxy records the server's answers to forwarded
requests, so that a test knows the outcomes that the client does not receive.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("lost request", "lost reply", "gateway timeout", "sent twice")
"""The faults of a request.

- lost request: The request is lost.
- lost reply: The server executes the request, but the connection breaks before the answer.
- gateway timeout: The server executes the request, but the load balancer answers 504.
- sent twice: The load balancer sends the request twice and forwards the second answer.
"""

FaultChooser = Callable[[str, str], str | None]


def make_fault_chooser(seed: int, rate: float, *, applies: Callable[[str, str], bool]) -> FaultChooser:
    """Print the seed, and return a function that chooses a fault for a request.

    For each (method, path) that `applies` accepts, the function chooses one of FAULTS with the probability `rate`.
    """
    print(f"lossy proxy: seed {seed}, rate {rate}")
    rng = random.Random(seed)

    def choose_fault(method: str, path: str) -> str | None:
        return rng.choice(FAULTS) if applies(method, path) and rng.random() < rate else None

    return choose_fault


class LossyProxy:
    """A proxy that loses or repeats requests, as `choose_fault` decides. Clients reach it at `base_url`.

    `requests` has (fault, method, path, status of the server) of each request, in order. The status is None if the
    proxy did not forward the request.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.choose_fault: FaultChooser = lambda _method, _path: None
        self.requests: list[tuple[str | None, str, str, int | None]] = []
        self.base_url = ""

    def forward_request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Forward a request, and return the server's answer with its body in `.data`."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            answer.data = answer.read()  # type: ignore[attr-defined]
            return answer
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: LossyProxy

    def _forward(self) -> None:
        """Forward the request, with the fault that the proxy chooses for it."""
        proxy, method, path = self.proxy, self.command, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        fault = proxy.choose_fault(method, path)
        if fault == "lost request":
            proxy.requests.append((fault, method, path, None))
            return self._break_connection()
        answer = proxy.forward_request(method, path, body, headers)
        if fault == "sent twice":
            answer = proxy.forward_request(method, path, body, headers)
        proxy.requests.append((fault, method, path, answer.status))
        if fault == "lost reply":
            return self._break_connection()
        if fault == "gateway timeout":
            return self._answer(504, [("Content-Type", "text/html")], b"<html>504 Gateway Timeout</html>")
        own_headers = ("transfer-encoding", "content-length", "connection", "date", "server")
        kept_headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in own_headers]
        return self._answer(answer.status, kept_headers, answer.data)  # type: ignore[attr-defined]

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _forward  # noqa: N815  names that http.server looks for

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _break_connection(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def run_lossy_proxy(upstream: str) -> Iterator[LossyProxy]:
    """Open a proxy on a free port of 127.0.0.1 for the server at `upstream`.

    It loses nothing until a test sets `choose_fault`.
    """
    proxy = LossyProxy(upstream)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    # Persistent connections outlive the test, and their threads wait for a request that never arrives.
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
