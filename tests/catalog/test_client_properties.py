"""Tests that no property of a table, view, namespace or function redirects clients or makes them load code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.metadata.properties import configures_client
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.catalog.values import CreateTable, CreateView, TableChange
from tests.catalog.rig import (
    CALLER,
    SCHEMA,
    CatalogRig,
    build_creation_updates,
    open_rig,
    use_metadata_file_without_digest,
)
from tests.catalog.test_confinement import VERSION

CLIENT_PROPERTIES = (
    *("s3.signer.uri", "s3.signer", "s3.endpoint", "s3.access-key-id", "s3.proxy-uri", "s3.retry-strategy-impl"),
    *("py-io-impl", "io-impl", "catalog-impl", "py-catalog-impl", "metrics-reporter-impl", "lock-impl"),
    *("write.location-provider.impl", "write.py-location-provider.impl", "encryption.kms-impl", "encryption.kms-type"),
    *("client.factory", "client.region", "client.credentials-provider", "http-client.proxy-endpoint", "ssl.cabundle"),
    *(
        "token",
        "credential",
        "header.Authorization",
        "oauth2-server-uri",
        "token-exchange-enabled",
        "scope",
        "resource",
    ),
    *("rest.auth.type", "rest.sigv4-enabled", "rest-metrics-reporting-enabled", "auth.manager", "auth", "signer.uri"),
    *("uri", "warehouse", "prefix", "jdbc.user", "hive.metastore.uris", "glue.endpoint", "dynamodb.endpoint"),
    *("gcs.service.host", "gcs.oauth2.token", "adls.account-host", "adls.sas-token.x", "hf.endpoint", "hdfs.host"),
    *("oss.endpoint", "kms.endpoint", "azure.keyvault.url", "gcp.bigquery.project-id", "fs.s3a.endpoint"),
    *("parquet.crypto.factory.class", "parquet.encryption.kms.instance.url", "parquet.encryption.kms.client.class"),
    *("orc.key.provider", "adlfs.connection-string"),
    *("S3.Signer.URI", " s3.signer.uri", "s3.signer.uri ", "\ts3.endpoint", "PY-IO-IMPL", "\uff53\uff13.endpoint"),
)
ORDINARY = (
    *("write.format.default", "write.parquet.compression-codec", "write.metadata.compression-codec", "read.split.size"),
    *("commit.retry.num-retries", "history.expire.max-snapshot-age-ms", "schema.name-mapping.default", "gc.enabled"),
    *("owner", "comment", "team", "presto_query_id", "spark.sql.partitionProvider", "trino.x", "engine.hive.enabled"),
    *("encryption.key-id", "write.object-storage.enabled", "write.metadata.metrics.column.s3.endpoint", "format"),
    *("write.parquet.bloom-filter-enabled.column.x-impl", "write.update.mode", "seamark.commit.rebase", "provider"),
    *(
        "nessie.commit.id",
        "polaris.config.x",
        "option.header",
        "created-at",
        "client_name",
        "description",
        "transient_lastDdlTime",
        "flink.max-committed",
    ),
)


@pytest.mark.parametrize("name", CLIENT_PROPERTIES)
def test_properties_with_hosts_secrets_or_code_for_clients_are_recognised(name: str) -> None:
    assert configures_client(name)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_properties_of_engines_and_users_are_allowed(name: str) -> None:
    assert not configures_client(name)


async def _create_objects(rig: CatalogRig) -> None:
    await rig.create_table()
    await rig.catalog.views.create(CALLER, ("db",), CreateView(name="v", schema=SCHEMA, view_version=VERSION))


@pytest.mark.parametrize("name", ["s3.signer.uri", " PY-IO-IMPL ", "token"])
async def test_every_operation_rejects_properties_that_steer_clients(tmp_path: Path, name: str) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_objects(rig)
        catalog, bad_properties = rig.catalog, {"team": "x", name: "http://127.0.0.1:9/steal"}
        update = {"action": "set-properties", "updates": bad_properties}
        create = CreateTable(name="x", schema=SCHEMA, properties=bad_properties)
        view = CreateView(name="w", schema=SCHEMA, view_version=VERSION, properties=bad_properties)
        staged_table = (await catalog.tables.stage(CALLER, ("db",), CreateTable(name="y", schema=SCHEMA))).metadata
        creation = [
            *build_creation_updates(staged_table.table_uuid, SCHEMA),
            {"action": "set-location", "location": staged_table.location},
            update,
        ]
        create_change = TableChange(
            namespace=("db",), name="y", requirements=[{"type": "assert-create"}], updates=creation
        )
        document = _build_function()
        document["properties"] = bad_properties
        attempts: dict[str, Any] = {
            "create": catalog.tables.create(CALLER, ("db",), create),
            "stage": catalog.tables.stage(CALLER, ("db",), create),
            "commit": rig.commits.commit_table(CALLER, ("db",), "t", [], [update]),
            "commit of a staged table": rig.commits.commit_table(CALLER, ("db",), "y", *_to_commit(create_change)),
            "transaction": rig.commits.commit_transaction(
                CALLER, [TableChange(namespace=("db",), name="t", requirements=[], updates=[update])]
            ),
            "create view": catalog.views.create(CALLER, ("db",), view),
            "replace view": catalog.views.replace(CALLER, ("db",), "v", [], [update]),
            "namespace": catalog.namespaces.create(CALLER, ("n",), bad_properties),
            "namespace properties": catalog.namespaces.update_properties(CALLER, ("db",), [], bad_properties),
            "function": catalog.functions.put(CALLER, ("db",), "f", document),
        }
        for description, attempt in attempts.items():
            with pytest.raises(BadRequest) as error:
                await attempt
            assert repr(name) in error.value.message, description


def _to_commit(change: TableChange) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return change.requirements, change.updates


def _build_function() -> dict[str, Any]:
    """Return the metadata of a valid function without parameters."""
    return {
        "function-uuid": "7f1f6a0e-29c8-4f5c-9d7f-1c9d1d0b6c11",
        "format-version": 1,
        "definitions": [
            {
                "definition-id": "()",
                "parameters": [],
                "return-type": "int",
                "versions": [{"version-id": 1}],
                "current-version-id": 1,
                "function-type": "udf",
            }
        ],
        "definition-log": [],
    }


def _add_properties(location: str, **properties: str) -> str:
    """Replace the current metadata file by a copy with added properties, and return the location of the copy."""
    path = use_metadata_file_without_digest(location)
    document = json.loads(path.read_text())
    document["properties"].update(properties)
    path.write_text(json.dumps(document))
    return f"file://{path}"


async def test_registered_metadata_with_a_property_that_redirects_clients_is_rejected(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_objects(rig)
        table = await rig.catalog.tables.unregister(CALLER, ("db",), "t")
        view = (await rig.catalog.views.load(("db",), "v")).entry
        assert table.entry is not None
        table_location, view_location = (
            _add_properties(entry.metadata_location, **{"s3.signer.uri": "http://127.0.0.1:9"})
            for entry in (table.entry, view)
        )
        with pytest.raises(BadRequest, match=r"s3\.signer\.uri"):
            await rig.catalog.tables.register(CALLER, ("db",), "r", table_location, overwrite=False)
        with pytest.raises(BadRequest, match=r"s3\.signer\.uri"):
            await rig.catalog.views.register(CALLER, ("db",), "s", view_location)


async def test_stored_properties_that_steer_clients_are_neither_served_nor_written_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_objects(rig)
        entries = [
            (await rig.catalog.tables.load(("db",), "t")).entry,
            (await rig.catalog.views.load(("db",), "v")).entry,
        ]
    for entry in entries:
        assert entry is not None
        _add_properties(
            entry.metadata_location, **{"s3.signer.uri": "http://127.0.0.1:9", "py-io-impl": "evil.IO", "a": "b"}
        )
    async with open_rig(tmp_path) as rig:
        table = await rig.catalog.tables.load(("db",), "t")
        view = await rig.catalog.views.load(("db",), "v")
        assert table.entry is not None
        for properties in (table.metadata.properties, view.metadata.properties):
            assert properties["a"] == "b"
            assert not any(map(configures_client, properties))
        document = await rig.catalog.documents.render_document(table.entry.metadata_location, "all")
        assert b"signer" not in document
        update = {"action": "set-properties", "updates": {"c": "d"}}
        loaded_table = await rig.commits.commit_table(CALLER, ("db",), "t", [], [update])
        assert loaded_table.entry is not None
        assert b"signer" not in await rig.objects.read(loaded_table.entry.metadata_location)
