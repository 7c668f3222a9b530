"""Tests that compare random transactions with a model, on both databases."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.seeds import examples
from tests.services.postgres import Postgres
from tests.store.machine import StoreMachine

_TABLES = "namespaces, entries, dropped, instants, instants_archive, producers"


def _run_machine(machine: type[StoreMachine], runs: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def _check_sqlite(tmp_path: Path, runs: int, steps: int) -> None:
    class Machine(StoreMachine):
        def create_url(self) -> str:
            return f"sqlite:///{tempfile.mkdtemp(dir=tmp_path)}/seamark.db"

    _run_machine(Machine, runs, steps)


def _check_postgres(url: str, runs: int, steps: int) -> None:
    """Compare the store with the model in `runs` runs of at most `steps` random steps.

    Each run begins with empty tables in the database at `url`.
    """

    class Machine(StoreMachine):
        def create_url(self) -> str:
            async def empty_database() -> None:
                connection = await asyncpg.connect(url)
                if await connection.fetchval("SELECT to_regclass('schema_version')"):
                    await connection.execute(f"TRUNCATE {_TABLES}")
                await connection.close()

            asyncio.run(empty_database())
            return url

    _run_machine(Machine, runs, steps)


def test_sqlite_equals_a_model_of_plain_dicts(tmp_path: Path) -> None:
    _check_sqlite(tmp_path, runs=examples(40, 3), steps=30)


def test_postgres_equals_a_model_of_plain_dicts(postgres_url: str) -> None:
    _check_postgres(postgres_url, runs=examples(8, 2), steps=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sqlite_equals_a_model_of_plain_dicts_in_long_runs(tmp_path: Path) -> None:
    _check_sqlite(tmp_path, runs=400, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_postgres_equals_a_model_of_plain_dicts_in_long_runs(postgres: Postgres, postgres_url: str) -> None:
    _check_postgres(postgres_url, runs=60, steps=60)
