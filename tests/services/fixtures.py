"""Pytest fixtures for the services. They start at the first use, run for the session, and give each test separate data.

`tests/conftest.py` loads them. A test that stops, kills or breaks a service starts its own service with the context
managers in this folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from seamark.metaserver.api.http.observability import logs
from tests.services import fork_server
from tests.services.java import run_java_fixture
from tests.services.memory import find_folder_in_memory
from tests.services.nats import Nats, run_nats
from tests.services.postgres import Postgres, postgres_server
from tests.services.s3 import S3, run_s3
from tests.services.seamark import Seamark
from tests.support.migrated_database import replace_database_creation_by_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.services.clouds.azurite import Azurite
    from tests.services.clouds.gcs import GoogleStorage
    from tests.services.kafka import Kafka


def pytest_configure(config: pytest.Config) -> None:
    """Put the folders of `tmp_path` into memory, unless `--basetemp` or PYTEST_DEBUG_TEMPROOT names another folder.

    New databases are copies of a migrated database. Logs show plain tracebacks, because the default shows the variables
    of each frame in colours, which takes a second of CPU time.
    """
    structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback
    replace_database_creation_by_copies()
    folder = find_folder_in_memory()
    if folder and not config.getoption("basetemp") and not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))


def pytest_collection_finish() -> None:
    """Start the fork server before the first test.

    Imported test modules may have set environment variables, as Polars does. The fork server must have these variables,
    because otherwise every server of the run would be started as a new interpreter.
    """
    fork_server.enable()


@pytest.fixture(autouse=True)
def _restore_log_configuration() -> Iterator[None]:
    """Restore the log configuration after each test, because commands in a test configure the logs of the process."""
    configure = structlog.configure
    with pytest.MonkeyPatch.context() as patch:
        # A cached logger would keep its configuration.
        patch.setattr(
            structlog, "configure", lambda **kwargs: configure(**kwargs | {"cache_logger_on_first_use": False})
        )
        yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root = logging.getLogger()
        root.handlers = [handler for handler in root.handlers if type(handler).__module__ != logs.__name__]
        root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Yield a PostgreSQL server with the configuration of the Docker Compose setup."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def _postgres_database(postgres: Postgres) -> str:
    return postgres.create_database()


@pytest.fixture
def postgres_url(postgres: Postgres, _postgres_database: str) -> Iterator[str]:
    """Yield the URL of an empty database for this test.

    No client is connected to it after the test.
    """
    yield _postgres_database
    postgres.clear_database(_postgres_database)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Yield a real S3-compatible server."""
    with run_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_bucket(s3: S3) -> str:
    """Return the name of a new bucket for this test."""
    return s3.create_bucket()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Yield an emulator of Azure storage."""
    # The import of the client library is slow, and most test processes do not need it.
    from tests.services.clouds.azurite import run_azurite

    with run_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def google_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleStorage]:
    """Yield an emulator of Google Cloud Storage."""
    from tests.services.clouds.gcs import run_gcs

    with run_gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Yield a broker of Apache Kafka. Each test has its own topics, whose names begin with `create_prefix()`."""
    # The import of the client library is slow, and most test processes do not need it.
    from tests.services.kafka import run_kafka_broker

    with run_kafka_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    """Yield a NATS server with JetStream."""
    with run_nats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def java_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of Iceberg's own Java REST server."""
    folder = tmp_path_factory.mktemp("java")
    with run_java_fixture(folder / "warehouse", log=folder / "java.log") as base_url:
        yield base_url


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Yield the only Spark session of this run, without catalogs."""
    # The import of PySpark takes a second, and most test processes do not need it.
    from tests.services.java import configure_local_files
    from tests.services.spark import INTERPRETED, spark_session

    with spark_session(tmp_path_factory.mktemp("spark"), INTERPRETED | configure_local_files()) as session:
        yield session


@pytest.fixture
def spark_catalog(spark: SparkSession) -> Callable[..., str]:
    """Return `spark_catalog(uri, token="", extra={…})`, which adds a catalog and returns its name."""

    from tests.services.spark import new_catalog

    def add_catalog(uri: str, **options: object) -> str:
        return new_catalog(spark, uri, **options)  # type: ignore[arg-type]

    return add_catalog


@pytest.fixture
def start_seamark(tmp_path: Path) -> Iterator[Callable[..., Seamark]]:
    """Yield a function that starts a `Seamark` until the test ends.

    `start_seamark(name="seamark", **settings)` starts it in the folder `tmp_path / name`.
    """
    with ExitStack() as stack:

        def start(name: str = "seamark", **settings: object) -> Seamark:
            return stack.enter_context(Seamark(tmp_path / name, **settings))  # type: ignore[arg-type]

        yield start
