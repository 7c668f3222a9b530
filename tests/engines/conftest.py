"""Fixtures for tests of engines.

A module has one server for each kind of storage, because Spark and servers start slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services.s3 import S3
from tests.services.seamark import Seamark

LOCAL_FILES, SIGNED_S3, S3_WITH_VENDED_KEYS = "local files", "S3, signed by the server", "S3, keys from the server"
STORAGES = (LOCAL_FILES, SIGNED_S3, S3_WITH_VENDED_KEYS)


@dataclass(frozen=True)
class StorageLake:
    """A server on one kind of storage, and the settings that a client needs besides its URI."""

    server: Seamark
    storage: str
    client_properties: dict[str, str]


@pytest.fixture(scope="module", params=STORAGES)
def lake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageLake]:
    home = tmp_path_factory.mktemp("lake")
    warehouse, env = "", {}
    properties: dict[str, str] = {}
    if request.param != LOCAL_FILES:
        s3: S3 = request.getfixturevalue("s3")
        warehouse = f"s3://{s3.create_bucket()}/warehouse"
        access = "signing" if request.param == SIGNED_S3 else "static"
        delegation = "remote-signing" if access == "signing" else "vended-credentials"
        env = {**s3.build_seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": access}
        properties = {"header.X-Iceberg-Access-Delegation": delegation}
    with Seamark(home, warehouse=warehouse, env=env) as server:
        yield StorageLake(server, request.param, properties)


TESTS_WITH_VENDED_KEYS = {
    "test_spark_creates_inserts_and_creates_tables_as_select",
    "test_pyiceberg_creates_appends_scans_deletes_and_overwrites",
}
"""The fast tests over S3 with vended keys."""
TESTS_ON_LOCAL_FILES_ONLY = {
    "test_spark_creates_inserts_and_creates_tables_as_select",
    "test_sparks_maintenance_procedures_rewrite_and_expire",
    "test_spark_renames_and_drops_a_table_that_is_then_restored_and_purged",
    "test_spark_reads_rows_of_evolved_schemas",
    "test_spark_reads_rows_of_evolved_partition_specs",
    "test_spark_reads_branches_tags_and_earlier_snapshots",
    "test_spark_creates_replaces_renames_and_drops_views",
    "test_metadata_table_without_its_namespace_is_not_found",
    "test_scan_and_commit_reports_of_spark_are_stored",
    "test_pyiceberg_evolves_schema_and_partitions",
    "test_pyiceberg_reads_earlier_snapshots_branches_and_tags",
    "test_conflicting_commit_of_pyiceberg_is_retried_or_fails_without_retries",
    "test_pyiceberg_replaces_and_inserts_rows_by_upsert",
    "test_pyiceberg_lists_renames_and_drops_in_nested_namespaces",
}
"""Tests that are fast only over local files."""
SIGNED_MERGE = {"version": 3, "mode": "merge-on-read"}
"""The MERGE case over signed S3, where the test also creates and fills the table.

If two cases have the same access to storage or differ only in the format version, one of them is a slow twin.
"""


CLIENT_WARNINGS = ("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
"""Filters of the warnings about sockets that clients leave open, and of the warnings of their libraries."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of clients in this folder, mark tests of Spark, and mark some tests as slow.

    If two tests differ only in the kind of storage, and both access it in the same way, one of them is slow.
    """
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.filterwarnings(*CLIENT_WARNINGS))
            if "spark" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.spark)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _is_covered_by_another_test(item):
            item.add_marker(pytest.mark.slow)


def _is_covered_by_another_test(item: pytest.Function) -> bool:
    """Return whether another test accesses storage in the same way, so that this test can be slow."""
    parameters, name = item.callspec.params, item.originalname
    if parameters.get("lake") == S3_WITH_VENDED_KEYS:
        return name not in TESTS_WITH_VENDED_KEYS and not name.startswith("test_plan_table")
    if parameters.get("lake") == SIGNED_S3:
        return name in TESTS_ON_LOCAL_FILES_ONLY or (
            name == "test_spark_merges_updates_and_deletes" and not SIGNED_MERGE.items() <= parameters.items()
        )
    # Other tests in Spark change rows of tables on local files.
    return parameters.get("lake") == LOCAL_FILES and name == "test_spark_merges_updates_and_deletes"


def collect_rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]
