"""Tests of the files that the server sends to a browser before a user has signed in."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from seamark.formats.index.kinds.kinds import KINDS
from seamark.metaserver.api.console.console import FOLDER, POLICY, load_assets
from tests.console.browser import REPO
from tests.console.world import create_tokens
from tests.server.rig import run_server


async def test_page_and_assets_are_public_and_complete_and_have_the_content_security_policy(tmp_path: Path) -> None:
    await create_tokens(tmp_path)
    async with run_server(tmp_path, auth="token") as server:
        async with server.http.get(f"{server.url}/") as answer:
            page = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["Content-Security-Policy"] == POLICY
            assert answer.headers["Cache-Control"] == "no-cache"
        linked_files = re.findall(r'(?:href|src)="([^"]+)"', page)
        # A link is console/DIGEST/NAME.
        names = {link.split("/", 2)[2] for link in linked_files}
        assert {f"{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.js")} <= names
        assert "unsafe" not in POLICY
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page)
        for link in linked_files:
            async with server.http.get(f"{server.url}/{link}") as answer:
                assert answer.status == 200, link
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "immutable" in answer.headers["Cache-Control"]
                assert answer.headers["Content-Encoding"] == "gzip"
                assert await answer.read() == load_assets().files[link.split("/", 2)[2]].content
        async with server.http.head(f"{server.url}/") as answer:
            assert answer.status == 200
        status, answer = await server.get("/v1/namespaces")
        assert status == 401


async def test_no_path_reaches_files_outside_of_the_assets(tmp_path: Path) -> None:
    digest = load_assets().digest
    async with run_server(tmp_path) as server:
        for path in (
            f"{digest}/index.html",
            f"{digest}/nothing.js",
            f"{digest}/..%2F__init__.py",
            f"{digest}/pages/..%2F..%2Fconsole.py",
            f"{digest}/%2Fetc/passwd",
            "0123456789abcdef/main.js",
        ):
            status, answer = await server.get(f"/console/{path}")
            assert status == 404, path
            assert answer["error"]["type"] == "NotFoundException"


def test_each_stage_of_a_plan_has_a_title() -> None:
    """The test reads the stages from the planner's code, because the console cannot cause some stages."""
    planner = REPO / "metaserver" / "planner"
    code = "".join((planner / name).read_text() for name in ("plan/stages.py", "indexes/probe.py"))
    names = {*re.findall(r'(?:yield |Stage\()"(\w+)"', code), *KINDS}
    assert {"manifests", "column_stats", "join_keys", "bitmap_rows"} <= names
    titles = re.search(r"export const STAGES = \{(.*)\};", (FOLDER / "pages" / "plan.js").read_text())
    assert titles is not None
    assert set(re.findall(r"(\w+):", titles[1])) == names


def test_vendored_libraries_equal_the_npm_packages() -> None:
    spec = importlib.util.spec_from_file_location("vendor", REPO / "deploy" / "console" / "vendor.py")
    assert spec is not None
    assert spec.loader is not None
    vendor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vendor)
    assets = vendor.read_vendored(REPO / ".cache" / "console" / "node_modules")
    assert {path.name: path.read_text() for path in vendor.FOLDER.iterdir()} == assets


def test_no_script_turns_text_into_markup() -> None:
    unsafe_pattern = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(|new Function|https?://"
    )
    for path in FOLDER.rglob("*.js"):
        assert not unsafe_pattern.search(path.read_text()), path
