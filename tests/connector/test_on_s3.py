"""Writers, commits and rebased appends where everything lies in an S3 store: the same rows, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append, overwrite
from seamark.connector.write.upserts import delete, upsert
from tests.connector.write.test_upserts import BY_ID, MODES, create, held, rows
from tests.services.s3 import S3
from tests.services.seamark import Seamark


@dataclass(frozen=True)
class Lake:
    s3: S3
    bucket: str
    server: Seamark
    client: IndexClient

    def files(self, ending: str) -> set[str]:
        pages = self.s3.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return {f"s3://{self.bucket}/{key}" for key in keys if key.endswith(ending)}

    def catalog(self) -> RestCatalog:
        access = {
            "s3.endpoint": self.s3.endpoint,
            "s3.path-style-access": "true",
            "s3.access-key-id": self.s3.access_key,
            "s3.secret-access-key": self.s3.secret_key,
            "s3.region": self.s3.region,
        }
        return RestCatalog("sea", uri=self.server.base_url, **access)


@pytest.fixture(scope="module")
def lake(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    bucket = s3.create_bucket()
    env = {**s3.seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": "static"}
    home: Path = tmp_path_factory.mktemp("s3")
    with (
        Seamark(home, warehouse=f"s3://{bucket}/lake", env=env) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        client._request("POST", "/v1/namespaces", {}, b'{"namespace": ["db"]}')
        yield Lake(s3, bucket, server, client)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_rows_are_written_changed_and_read(lake: Lake, mode: str, version: int) -> None:
    table = f"t{version}{mode[:1]}"
    client, name = lake.client, f"db.{table}"
    create(client, table, version=version, properties=BY_ID)
    append(client, name, rows((1, "de", 1), (2, "fr", 1), (3, None, 1), (4, "it", 1)))
    report = upsert(client, name, rows((2, "es", 2), (9, "at", 2)), keys=["id"], mode=mode)
    assert (report.inserted, report.updated) == (1, 1)
    assert delete(client, name, keys=pa.table({"id": [3, 77]}), mode=mode).deleted == 1
    assert delete(client, name, where="land = 'it'", mode=mode).deleted == 1
    assert held(client, name) == [(1, "de", 1, None), (2, "es", 2, None), (9, "at", 2, None)]
    overwrite(client, name, rows((5, "ch", 5)), where="ts >= 1")
    wanted = [(5, "ch", 5, None)]
    assert held(client, name) == wanted
    if version == 2:  # whose deletes PyIceberg applies, too
        with lake.catalog() as catalog:
            read = catalog.load_table(name).scan().to_arrow().sort_by("id").to_pylist()
        assert [tuple(one.values()) for one in read] == wanted


def test_of_two_stock_appends_to_one_parent_both_are_there_and_no_file_too_many(lake: Lake) -> None:
    create(lake.client, "stock", version=2, properties={"seamark.commit.rebase": "append"})
    append(lake.client, "db.stock", rows((0, "de", 0)))
    with lake.catalog() as catalog:
        handles = [catalog.load_table("db.stock") for _ in range(3)]
        for number, handle in enumerate(handles, start=1):  # each on what stood before any of them
            handle.append(rows((number, "fr", number)).cast(handle.schema().as_arrow()))
        table = catalog.load_table("db.stock")
        found = table.scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == [0, 1, 2, 3]
        assert len(table.history()) == 4
        named = {one["file_path"] for one in table.inspect.files().to_pylist()}
        lists = {one.manifest_list for one in table.snapshots()}
    there = {one for one in lake.files(".parquet") if "/stock-" in one}
    assert there == named
    assert lists <= lake.files(".avro")
    assert scan(lake.client, "db.stock", ["id"]).to_arrow().num_rows == 4
