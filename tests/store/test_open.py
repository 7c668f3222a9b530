"""Tests of opening a store by URL: accepted and rejected URLs, and that no error shows a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ConfigError, RetryLater, SeamarkError
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.sql import postgres as driver
from tests.services.postgres import PASSWORD, Postgres
from tests.services.process import choose_free_port

CLOCK = SimulatedClock(seed=1)


async def open_and_catch_error(url: str, kind: type[SeamarkError] = ConfigError) -> str:
    with pytest.raises(kind) as error:
        async with open_store(url, clock=CLOCK):
            pass
    return error.value.message


@pytest.mark.parametrize("slashes", ["sqlite://", "sqlite:///", "SQLITE://"])
async def test_sqlite_url_names_an_absolute_path(tmp_path: Path, slashes: str) -> None:
    async with open_store(f"{slashes}{tmp_path}/a%20folder/x.db", clock=CLOCK) as store:
        await store.ping()
    assert (tmp_path / "a folder" / "x.db").exists()


@pytest.mark.parametrize(
    "url", ["mysql://ann:hunter2@host/db", "hunter2", "", "sqlite://hunter2/x", "sqlite:///", "sqlite:", "://hunter2"]
)
async def test_unsupported_url_is_rejected_without_being_shown(url: str) -> None:
    message = await open_and_catch_error(url)
    assert "hunter2" not in message
    assert "sqlite:///" in message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@127.0.0.1:notaport/db",
        "postgresql://ann:hunter2@[::1/db",
        "postgresql://ann:hunter2@127.0.0.1/db?sslmode=hunter2",
    ],
)
async def test_malformed_postgres_url_is_rejected_without_being_shown(url: str) -> None:
    assert "hunter2" not in await open_and_catch_error(url)


async def test_credentials_rejected_by_the_server_are_named_but_not_shown(postgres: Postgres) -> None:
    message = await open_and_catch_error(postgres.make_url().replace(f":{PASSWORD}@", ":hunter2@"))
    assert "hunter2" not in message
    assert f"127.0.0.1:{postgres.port}" in message
    assert "does not exist" in await open_and_catch_error(postgres.make_url("no_such_database"))


async def test_open_waits_for_a_silent_server_only_up_to_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CONNECT_TIMEOUT_S", 0.3)
    message = await open_and_catch_error(f"postgresql://ann:hunter2@127.0.0.1:{choose_free_port()}/db", RetryLater)
    assert "does not answer" in message
    assert "hunter2" not in message
