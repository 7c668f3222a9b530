"""Tests that a real server's worker maintains a table with encrypted files. It uses the key service of its settings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append
from seamark.metaserver.timeline.instants import MAINTENANCE
from tests.connector.jobs.encrypted.test_encrypted_merges import (
    ENCRYPTED_VALUES,
    encrypt,
    list_paths,
    read_protections,
    read_rows_by_id,
)
from tests.connector.jobs.test_file_merges import BY_PART, PROPERTIES, SCHEMA, build_rows
from tests.connector.parquet.encrypted import CONFIGURATION, write_key_file
from tests.services.seamark import Seamark
from tests.waits import block_until

ROOT = Path(__file__).parents[2]
KMS = {"SEAMARK_PARQUET_KMS": "tests.connector.parquet.encrypted:ConfiguredKms", "PYTHONPATH": str(ROOT)}
ENCRYPTED_COLUMNS = {("payload", "k1"), ("price", "k2"), ("place.city", "k2")}
"""(column, key) pairs that ENCRYPTED_VALUES encrypts."""


def create_encrypted_table(server: Seamark) -> IndexClient:
    """Create a table with six small encrypted files in each of two partitions. Maintenance is not enabled yet.

    Return a client of the server.
    """
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    catalog.create_table("db.t", SCHEMA, partition_spec=BY_PART, properties=PROPERTIES)
    client = IndexClient(server.base_url)
    for number in range(6):
        append(client, "db.t", build_rows(random.Random(number), range(number * 20, number * 20 + 20)))
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_VALUES)
    return client


def enable_services(server: Seamark) -> None:
    with RestCatalog("s", uri=server.base_url).load_table("db.t").transaction() as change:
        change.set_properties({"seamark.compaction.enabled": "true", "seamark.index.ids": "bitmap(id)"})


def list_errors(client: IndexClient) -> list[str]:
    runs = client.timeline("db.t", action=MAINTENANCE)
    return [str(run.summary["error"]) for run in runs if run.summary.get("service") == "compaction"]


@pytest.mark.slow  # The test starts a server and its worker twice.
def test_worker_merges_and_indexes_encrypted_files_with_the_configured_key_service(tmp_path: Path) -> None:
    """The worker gets the environment variables of the key service, whose prefix is in the settings.

    Without these variables the table stays unchanged, and the run reports the reason.
    """
    env = {**KMS, "SEAMARK_PARQUET_KEY_FILE": write_key_file(tmp_path, "db"), "SEAMARK_SERVICES_WORKERS": "1"}
    with Seamark(tmp_path / "home", env=env) as server:
        client = create_encrypted_table(server)
        rows_before, files_before = read_rows_by_id(client), list_paths(client)
        enable_services(server)
        block_until(lambda: list_errors(client))
        assert (
            "SEAMARK_PARQUET_KMS is 'tests.connector.parquet.encrypted:ConfiguredKms', not " in list_errors(client)[0]
        )
        assert sorted(list_paths(client)) == sorted(files_before)
    with Seamark(tmp_path / "home", env={**env, CONFIGURATION: "the service's address"}, port=server.port):
        block_until(lambda: len(list_paths(client)) < len(files_before))
        assert read_rows_by_id(client) == rows_before
        assert all(read_protections(path) == ENCRYPTED_COLUMNS for path in list_paths(client))
        block_until(lambda: client.index("db.t", "ids").lag_files == 0)
        assert client.explain("db.t", "id = 3").files == 1
