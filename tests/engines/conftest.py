"""One server per kind of storage for the whole module: starting Spark and servers is what costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.services.s3 import S3
from tests.services.seamark import Seamark

STORAGES = ("local files", "S3, signed by the server", "S3, keys from the server")


@dataclass(frozen=True)
class Lake:
    """A server over one kind of storage, and what a client needs besides its URI."""

    server: Seamark
    storage: str
    client_properties: dict[str, str]


@pytest.fixture(scope="module", params=STORAGES)
def lake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    home = tmp_path_factory.mktemp("lake")
    warehouse, env = "", {}
    properties: dict[str, str] = {}
    if request.param.startswith("S3"):
        s3: S3 = request.getfixturevalue("s3")
        warehouse = f"s3://{s3.create_bucket()}/warehouse"
        access = "signing" if "signed" in request.param else "static"
        delegation = "remote-signing" if access == "signing" else "vended-credentials"
        env = {**s3.seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": access}
        properties = {"header.X-Iceberg-Access-Delegation": delegation}
    with Seamark(home, warehouse=warehouse, env=env) as server:
        yield Lake(server, request.param, properties)


BY_VENDED_KEYS = {"test_create_insert_and_ctas", "test_create_append_scan_delete_overwrite"}
ONLY_LOCAL = {
    "test_create_insert_and_ctas",
    "test_maintenance_procedures",
    "test_rename_drop_undrop_and_purge",
    "test_schema_evolution",
    "test_partition_evolution",
    "test_branches_tags_and_time_travel",
    "test_views",
    "test_a_metadata_table_named_too_short_is_not_found_rather_than_an_error",
    "test_scan_reports_of_engines_are_kept",
    "test_evolution_of_schema_and_partitions",
    "test_time_travel_branches_and_tags",
    "test_a_commit_on_an_old_base_is_retried_by_the_client_and_fails_without_retries",
    "test_upsert",
    "test_nested_namespaces_listings_rename_and_drop",
}
SIGNED_MERGE = {"version": 3, "mode": "merge-on-read"}
"""Over signed S3, where the table is also created and filled: over local files these are twins, and so are modes that
differ by the version alone."""
LOCAL_MERGES = ({"version": 2, "mode": "copy-on-write"}, {"version": 2, "mode": "merge-on-read"})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test runs over local files; over S3 it is slow where it accesses files as another test does there."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _is_twin(item):
            item.add_marker(pytest.mark.slow)


def _is_twin(item: pytest.Function) -> bool:
    given, name = item.callspec.params, item.originalname
    if given.get("lake") == STORAGES[2]:
        return name not in BY_VENDED_KEYS and not name.startswith("test_a_plan_table")
    if given.get("lake") == STORAGES[1]:
        return name in ONLY_LOCAL or (name == "test_merge_update_delete" and not SIGNED_MERGE.items() <= given.items())
    if given.get("lake") == STORAGES[0] and name == "test_merge_update_delete":
        return not any(one.items() <= given.items() for one in LOCAL_MERGES)
    return False


@pytest.fixture
def quiet_network() -> Iterator[None]:
    """For clients that leave sockets to the garbage collector; their warnings are not ours to mend."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]
