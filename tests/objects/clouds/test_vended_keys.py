"""Tests of answers with keys that a cloud checks, and that no server can revoke."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import requests

from tests.connector.server_thread import ServerThread
from tests.services.clouds.azurite import ACCOUNT_KEY, HOST, Azurite
from tests.warehouses.world import SCHEMA


@contextmanager
def run_sas_server(azurite: Azurite, home: Path, warehouse: str) -> Iterator[str]:
    """Run a server that vends a SAS to clients, and yield the URL of its tables."""
    server = ServerThread(home, warehouse=warehouse, azure_client_access="sas", **azurite.make_settings())
    server.start()
    try:
        requests.post(f"{server.url}/v1/namespaces", json={"namespace": ["ns"]}, timeout=30)
        yield f"{server.url}/v1/namespaces/ns/tables"
    finally:
        server.stop()


def create_table(tables_url: str, name: str, **options: Any) -> dict[str, Any]:
    answer = requests.post(tables_url, json={"name": name, "schema": SCHEMA, **options}, timeout=30)
    answer.raise_for_status()
    assert ACCOUNT_KEY not in answer.text
    loaded_table: dict[str, Any] = answer.json()
    return loaded_table


def write_file(azurite: Azurite, location: str, document: dict[str, Any]) -> None:
    container, _, path = location.removeprefix("abfss://").partition(f"@{HOST}/")
    with azurite.make_client() as client:
        client.get_blob_client(container, path).upload_blob(json.dumps(document), overwrite=True)


def test_answers_have_a_sas_only_for_their_own_table(azurite: Azurite, tmp_path: Path) -> None:
    warehouse = f"{azurite.create_container()}/lake"
    with run_sas_server(azurite, tmp_path, warehouse) as tables_url:
        first_table, second_table = create_table(tables_url, "first"), create_table(tables_url, "second")
        location = first_table["metadata"]["location"]
        [credential] = first_table["storage-credentials"]
        assert credential["prefix"] == f"{location}/"
        sas = parse_qs(credential["config"][f"adls.sas-token.{HOST}"])
        # The signature is for a directory at depth 3.
        assert (sas["sr"], sas["sdd"]) == (["d"], ["3"])
        assert sas["sig"] != parse_qs(second_table["config"]["adls.sas-token"])["sig"]
        loaded_answer = requests.get(f"{tables_url}/first", timeout=30)
        headers_without_keys = {
            "X-Iceberg-Access-Delegation": "remote-signing",
            "If-None-Match": loaded_answer.headers["ETag"],
        }
        answer = requests.get(f"{tables_url}/first", headers=headers_without_keys, timeout=30)
        assert (answer.status_code, "storage-credentials" in answer.json()) == (200, False)
        refreshed_keys = requests.get(f"{tables_url}/first/credentials", timeout=30).json()
        assert refreshed_keys["storage-credentials"][0]["prefix"] == f"{location}/"
        assert f"adls.sas-token.{HOST}" in refreshed_keys["storage-credentials"][0]["config"]

        staged_table = create_table(tables_url, "staged", **{"stage-create": True})
        assert "adls.sas-token" in staged_table["config"]
        # Until the staged table is created, another table could be created below this location.
        placed_table = create_table(tables_url, "chosen", location=f"{warehouse}/later", **{"stage-create": True})
        assert "sas" not in json.dumps(placed_table)

        folder = f"{warehouse}/ns/registered"
        metadata = {**first_table["metadata"], "location": folder, "table-uuid": str(uuid.uuid4())}
        write_file(azurite, f"{folder}/metadata/own.metadata.json", metadata)
        body = {"name": "registered", "metadata-location": f"{folder}/metadata/own.metadata.json"}
        registered_answer = requests.post(tables_url.replace("/tables", "/register"), json=body, timeout=30)
        assert registered_answer.status_code == 200, registered_answer.text

    # If the server has not written the metadata file, a writer of the table can replace it and name a foreign folder.
    forged_metadata = {**metadata, "location": second_table["metadata"]["location"]}
    write_file(azurite, f"{folder}/metadata/own.metadata.json", forged_metadata)
    with run_sas_server(azurite, tmp_path, warehouse) as tables_url:
        for path in ("registered", "registered/credentials"):
            refusal = requests.get(f"{tables_url}/{path}", timeout=30)
            assert refusal.status_code == 403
            assert "which the table has not claimed" in refusal.text
        assert requests.get(f"{tables_url}/second", timeout=30).status_code == 200
