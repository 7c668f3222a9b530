"""Tests of a server whose store is unreachable or refuses it.

It logs one warning with the fix, and one message after recovery.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.objects import reachability
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from tests.services.process import choose_free_port, is_http_ok
from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.waits import until


def build_settings(s3: S3, home: Path, bucket: str) -> Settings:
    return Settings(
        home=home,
        warehouse=f"s3://{bucket}/lake",
        s3_endpoint=s3.endpoint,
        s3_access_key_id=s3.access_key,
        s3_secret_access_key=s3.secret_key,
        s3_region=s3.region,
        storage_retries=0,
    )


async def read_start_log(settings: Settings) -> list[dict[str, object]]:
    """Check the reachability of the storage, as at the start of a server.

    Return a list with the first log messages. It is empty if the check ends without a message.
    """
    async with open_objects(settings, SystemClock()) as objects:
        with structlog.testing.capture_logs() as events:
            task = asyncio.create_task(reachability.wait_until_reachable(objects, settings))
            await until(lambda: events or task.done())
            task.cancel()
    return [dict(event) for event in events]


async def test_store_that_answers_causes_no_log_message(s3: S3, s3_bucket: str, tmp_path: Path) -> None:
    assert await read_start_log(build_settings(s3, tmp_path, s3_bucket)) == []


@pytest.mark.parametrize(
    ("change", "error", "fix"),
    [
        ({"s3_endpoint": "dead"}, "did not answer", "--s3-endpoint"),
        ({"s3_secret_access_key": "wrong"}, "refused access", "SEAMARK_S3_SECRET_ACCESS_KEY"),
        ({"warehouse": "s3://no-such-bucket/lake"}, "does not exist", "bucket exists"),
    ],
)
async def test_one_line_names_the_endpoint_the_error_and_the_fix(
    s3: S3, s3_bucket: str, tmp_path: Path, change: dict[str, str], error: str, fix: str
) -> None:
    if "s3_endpoint" in change:
        change = {"s3_endpoint": f"http://127.0.0.1:{choose_free_port()}"}
    settings = replace(build_settings(s3, tmp_path, s3_bucket), **change)  # type: ignore[arg-type]
    (event,) = await read_start_log(settings)
    assert event["log_level"] == "warning"
    assert (event["warehouse"], event["endpoint"]) == (settings.warehouse, settings.s3_endpoint)
    assert error in str(event["error"])
    assert fix in str(event["fix"])
    assert s3.secret_key not in str(event)


class RecoveringStorage:
    """A storage that does not answer the first two pings, and answers all later pings."""

    pings = 0

    async def ping(self) -> None:
        self.pings += 1
        if self.pings < 3:
            raise TimeoutError


async def test_failure_is_logged_once_and_recovery_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "INTERVAL_S", 0.0)
    store: ObjectStore = RecoveringStorage()  # type: ignore[assignment]
    with structlog.testing.capture_logs() as events:
        await reachability.wait_until_reachable(store, Settings(home=tmp_path))
    assert [event["log_level"] for event in events] == ["warning", "info"]
    assert "no answer within" in events[0]["error"]


class UnreadyServer(Seamark):
    """A server that counts as started when it is alive and has logged the warning."""

    def _is_ready(self) -> bool:
        return is_http_ok(f"{self.base_url}/healthz") and b"the warehouse is not usable" in self.log.read_bytes()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_server_with_an_unreachable_store_starts_and_logs_one_line(tmp_path: Path, workers: str) -> None:
    dead_url = f"http://127.0.0.1:{choose_free_port()}"
    env = {"SEAMARK_S3_ACCESS_KEY_ID": "a", "SEAMARK_S3_SECRET_ACCESS_KEY": "b", "SEAMARK_STORAGE_RETRIES": "0"}
    flags = ("--s3-endpoint", dead_url, "--workers", workers)
    with UnreadyServer(tmp_path, warehouse="s3://lake/warehouse", env=env, flags=flags) as server:
        assert not is_http_ok(f"{server.base_url}/readyz")
        assert server.terminate() == 0
    lines = [line for line in server.log.read_text().splitlines() if "the warehouse is not usable" in line]
    assert len(lines) == 1
    assert dead_url in lines[0]
    assert "Set --s3-endpoint" in lines[0]
