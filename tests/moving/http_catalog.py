"""A REST catalog in a separate thread. A test chooses its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Responder = Callable[[str, Mapping[str, str]], tuple[int, Any]]
"""Returns the status and the JSON answer for a request, by its path with the query and its headers."""


@dataclass
class HttpCatalog:
    """A running catalog that records the headers of the requests it received."""

    url: str
    received_headers: list[Mapping[str, str]] = field(default_factory=list)


@contextmanager
def serve_catalog(respond: Responder, config: Any = None) -> Iterator[HttpCatalog]:
    """Serve a catalog in a thread until the end of the block.

    Args:
        respond: Answers each request except those for the configuration. A redirect goes to `location` in the answer.
        config: The configuration. The default has no settings.
    """

    class Handler(BaseHTTPRequestHandler):
        """A handler that answers each request with `config` or `respond`."""

        def do_GET(self) -> None:
            headers = dict(self.headers)
            catalog.received_headers.append(headers)
            self.rfile.read(int(headers.get("Content-Length", 0)))
            status, body = 200, {"defaults": {}, "overrides": {}} if config is None else config
            if self.path.partition("?")[0] != "/v1/config":
                status, body = respond(self.path, headers)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if 300 <= status < 400:
                self.send_header("Location", body["location"])
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    catalog = HttpCatalog(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield catalog
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
