"""Tests that no answer of the server reveals the version of its software."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.server.rig import RunningServer, run_server

REPO = Path(__file__).resolve().parents[2]
FORWARDED_ANSWERS = {"connector/trino/protocol/forwarder.py"}
"""Answers whose headers come from another server."""


def test_each_streamed_answer_names_the_server() -> None:
    """The middleware sets the header `Server` in all answers except streamed answers.

    Without the header, aiohttp would state its own version and that of Python.
    """
    streamed_answers = 0
    for package in ("commands", "metaserver", "connector"):
        for path in (REPO / package).rglob("*.py"):
            if path.relative_to(REPO).as_posix() in FORWARDED_ANSWERS:
                continue
            text = path.read_text()
            if "StreamResponse" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "web.StreamResponse":
                    streamed_answers += 1
                    assert "'Server': 'seamark'" in ast.unparse(node), f"{path}:{node.lineno}"
    assert streamed_answers


async def test_answers_name_the_server_without_a_version(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        for path in ("/healthz", "/readyz", "/v1/config", "/none", "/metrics", "/api/v1/openapi.json", "/console/"):
            assert await _read_server_header(server, path) == "seamark", path
        async with server.http.get(f"{server.url}/api/v1/timeline", headers={"Accept": "text/event-stream"}) as stream:
            assert (stream.status, stream.headers["Server"]) == (200, "seamark")


async def _read_server_header(server: RunningServer, path: str) -> str:
    async with server.http.get(server.url + path, allow_redirects=False) as answer:
        return str(answer.headers["Server"])
