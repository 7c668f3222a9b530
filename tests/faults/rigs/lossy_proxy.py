"""An HTTP proxy that loses requests and replies, like networks and load balancers.

`fate(method, path)` decides the fate of a request. The proxy records the server's answers to forwarded requests, so
that a test knows the outcomes that the client does not receive.
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

FATES = ("lost request", "lost reply", "gateway timeout", "sent twice")
"""The fates of a request.

- lost request: The request is lost.
- lost reply: The server executes the request, but the connection breaks before the answer.
- gateway timeout: The server executes the request, but the load balancer answers 504.
- sent twice: The load balancer sends the request twice and forwards the second answer.
"""

Fate = Callable[[str, str], str | None]


def choose_fates(seed: int, rate: float, *, applies: Callable[[str, str], bool]) -> Fate:
    """Return a function that chooses one of FATES with probability `rate` for each (method, path) that `applies`
    accepts.

    Print the seed.
    """
    print(f"lossy proxy: seed {seed}, rate {rate}")
    source = random.Random(seed)

    def choose_fate(method: str, path: str) -> str | None:
        return source.choice(FATES) if applies(method, path) and source.random() < rate else None

    return choose_fate


class LossyProxy:
    """A proxy that clients reach at `base_url`.

    `requests` has (fate, method, path, status of the server or None) of each request, in order.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.fate: Fate = lambda method, path: None
        self.requests: list[tuple[str | None, str, str, int | None]] = []
        self.base_url = ""

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
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
        """Pass the request on according to the fate that the proxy draws for it."""
        proxy, method, path = self.proxy, self.command, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        fate = proxy.fate(method, path)
        if fate == "lost request":
            proxy.requests.append((fate, method, path, None))
            return self._break_connection()
        answer = proxy.ask(method, path, body, headers)
        if fate == "sent twice":
            answer = proxy.ask(method, path, body, headers)
        proxy.requests.append((fate, method, path, answer.status))
        if fate == "lost reply":
            return self._break_connection()
        if fate == "gateway timeout":
            return self._answer(504, [("Content-Type", "text/html")], b"<html>504 Gateway Timeout</html>")
        skip = ("transfer-encoding", "content-length", "connection", "date", "server")
        kept_headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skip]
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

    It loses nothing until a test sets `fate`.
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
