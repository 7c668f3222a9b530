"""Tests that a logged error shows where it occurred, and never the values of variables."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_logged_error_shows_its_location_and_no_values_of_variables(log_format: str) -> None:
    program = dedent(
        f"""
        import structlog
        from seamark.metaserver.api.http.observability.logs import configure_logging
        from seamark.metaserver.settings.settings import Settings

        configure_logging(Settings(log_format="{log_format}"))

        def fails():
            key = "".join(["sec", "ret"]) + "-key"
            raise ValueError("it broke")

        try:
            fails()
        except ValueError:
            structlog.get_logger().exception("unexpected error")
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "it broke" in result.stderr
    assert "fails" in result.stderr
    assert "secret-key" not in result.stderr


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["asyncio", "aiohttp.server", "aiohttp.web"])
def test_logs_of_libraries_quote_nothing_of_a_failed_request(name: str) -> None:
    program = dedent(
        f"""
        import logging
        from seamark.metaserver.api.http.observability.logs import configure_logging
        from seamark.metaserver.settings.settings import Settings

        configure_logging(Settings(log_format="json"))

        def fails():
            raise ValueError("Authorization: Bearer sm_verysecret")

        try:
            fails()
        except ValueError as error:
            logging.getLogger("{name}").error(f"Error handling request\\ntask: {{error!r}}", exc_info=error)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "verysecret" not in result.stderr
    assert "Error handling request" in result.stderr
    assert "ValueError" in result.stderr
    assert "fails" in result.stderr
