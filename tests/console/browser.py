"""A Chromium browser for the tests of the console. It records errors, and requests to other hosts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, Request, async_playwright, expect

from tests.waits import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
AXE = REPO / ".cache" / "console" / "node_modules" / "axe-core" / "axe.min.js"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = PATIENCE_S * 1000
expect.set_options(timeout=PATIENCE_MS)  # The default is five seconds.


@dataclass
class RecordedPage:
    """A page with its recorded errors and requests."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    async def open(self, address: str) -> None:
        """Show a page of the console, and wait until its data are shown.

        `address` is the part of the URL from `#` on.
        """
        await self.page.goto(f"{self.url}/{address}")
        await self.settle()

    async def settle(self) -> None:
        """Wait until the page shows its heading and loads no data."""
        await self.page.wait_for_selector("h1")
        await self.page.wait_for_selector(".loading, [aria-busy=true]", state="detached")

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression.

        It runs as in the console of the browser, because the page's policy forbids other scripts.
        """
        session = await self.page.context.new_cdp_session(self.page)
        answer = await session.send(
            "Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True}
        )
        await session.detach()
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def find_violations(self) -> list[str]:
        """Return the serious and critical violations that the accessibility checker axe finds."""
        await self.run(AXE.read_text() + "\n;0")
        violations = await self.run("axe.run(document).then((result) => result.violations)")
        return [
            f"{violation['id']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes'][:3]]}"
            for violation in violations
            if violation["impact"] in ("serious", "critical")
        ]


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(ARGUMENTS), timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def open_page(browser: Browser, url: str, theme: str = "light") -> AsyncIterator[RecordedPage]:
    """Open a page that records its errors and the hosts of its requests."""
    context = await browser.new_context(
        viewport={"width": 1360, "height": 900}, color_scheme="dark" if theme == "dark" else "light"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    recorded_page = RecordedPage(page, url)

    def note_host(request: Request) -> None:
        recorded_page.hosts.add(urlsplit(request.url).netloc)

    page.on("request", note_host)
    page.on("console", lambda message: message.type == "error" and recorded_page.errors.append(message.text))
    page.on("pageerror", lambda error: recorded_page.errors.append(str(error)))
    try:
        yield recorded_page
    finally:
        await context.close()
