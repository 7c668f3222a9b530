"""Tests that each write, copy and delete through the gateway is visible to the next read, even if objects are cached.

The calls are the same as in `test_conformance.py`, where the names of the objects are not cached.
"""

from __future__ import annotations

import itertools
import os
import uuid
from contextlib import closing
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError

from tests.gateway.rig import GatewayRig, Keys

_numbers = itertools.count()


@pytest.fixture
def keys(store_rig: GatewayRig) -> Keys:
    return store_rig.create_table(f"cached{next(_numbers)}")


def _create_name(extension: str = "parquet") -> str:
    return f"data/00000-0-{uuid.uuid4()}.{extension}"


def test_boto3_reads_each_kind_of_write(keys: Keys, store_rig: GatewayRig) -> None:
    assert store_rig.direct_store is not None
    source, target = ({"Bucket": keys.bucket, "Key": keys.prefix + _create_name()} for _ in range(2))
    with closing(keys.make_client()) as client, closing(store_rig.direct_store.client()) as direct_client:

        def read_twice(object_address: dict[str, str], **options: Any) -> Any:
            """Return the answer of the gateway. Check that a second answer and the answer of the store are equal."""
            results = []
            for s3_client in (client, client, direct_client):
                try:
                    answer = s3_client.get_object(**object_address, **options)
                    header_names = ("ContentLength", "ContentRange", "ETag", "Metadata", "ContentType")
                    results.append((answer["Body"].read(), *(answer.get(name) for name in header_names)))
                except ClientError as error:
                    results.append((error.response["Error"]["Code"],))
            assert results[0] == results[1] == results[2]
            return results[0][0]

        assert read_twice(source) == "NoSuchKey"
        first_data, second_data = os.urandom(700_000), os.urandom(6 << 20)
        tag = client.put_object(**source, Body=first_data, Metadata={"a": "b"})["ETag"]
        assert read_twice(source) == first_data
        assert read_twice(source, Range="bytes=300000-") == first_data[300_000:]
        client.put_object(**target, Body=b"before")
        assert read_twice(target) == b"before"
        client.copy_object(**target, CopySource=source, CopySourceIfMatch=tag)
        assert read_twice(target) == first_data
        upload_id = client.create_multipart_upload(**target, ContentType="x/y")["UploadId"]
        parts = [
            {"PartNumber": number, "ETag": part["ETag"]}
            for number, data in ((1, second_data), (2, first_data))
            for part in [client.upload_part(**target, UploadId=upload_id, PartNumber=number, Body=data)]
        ]
        assert read_twice(target) == first_data
        client.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload={"Parts": parts})
        assert read_twice(target) == second_data + first_data
        assert read_twice(target, Range="bytes=-5") == first_data[-5:]
        assert read_twice(target, IfMatch=tag) == "PreconditionFailed"
        assert read_twice(source, IfNoneMatch=tag) == "304"
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(**source, Body=b"refused", IfNoneMatch="*")
        assert read_twice(source) == first_data
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=keys.bucket, Prefix=keys.prefix, PaginationConfig={"PageSize": 1}
        )
        listing = [item["Key"] for page in pages for item in page.get("Contents", []) if "/data/" in item["Key"]]
        assert listing == sorted((source["Key"], target["Key"]))
        objects = [{"Key": object_key["Key"]} for object_key in (source, target)]
        delete_answer = client.delete_objects(Bucket=keys.bucket, Delete={"Objects": objects})
        assert len(delete_answer["Deleted"]) == 2
        assert read_twice(source) == read_twice(target, Range="bytes=0-9") == "NoSuchKey"


@pytest.mark.slow
def test_pyarrow_rereads_parquet_from_the_cache(keys: Keys) -> None:
    files = keys.open_pyarrow()
    path = f"{keys.bucket}/{keys.prefix}{_create_name()}"
    for seed in (1, 2):  # The second object replaces the first under the same name.
        table = pa.table({"id": np.arange(500_000), "x": np.random.default_rng(seed).random(500_000)})
        pq.write_table(table, path, filesystem=files, row_group_size=100_000)
        for _ in range(2):  # The second read is from the cache.
            assert pq.read_table(path, filesystem=files, columns=["x"]) == table.select(["x"])
            assert pq.ParquetFile(path, filesystem=files).read_row_group(3) == table.slice(300_000, 100_000)
    files.delete_file(path)
    assert files.get_file_info(path).type == pa.fs.FileType.NotFound


@pytest.mark.slow
def test_obstore_and_s3fs_share_the_cache(keys: Keys) -> None:
    store = keys.open_obstore()
    files = keys.open_s3fs()
    name = _create_name("orc")
    path = f"{keys.bucket}/{keys.prefix}{name}"
    for size in (6 << 20, 1 << 20):
        data = os.urandom(size)
        obstore.put(store, name, data, use_multipart=size > 5 << 20)
        start_bytes, end_bytes = [0, 300_000, size - 7], [10, 900_000, size]
        ranges = obstore.get_ranges(store, name, starts=start_bytes, ends=end_bytes)
        assert [bytes(item) for item in ranges] == [
            data[start:end] for start, end in zip(start_bytes, end_bytes, strict=True)
        ]
        assert files.cat_file(path) == data
        assert files.cat_file(path, start=-100) == data[-100:]
        assert bytes(obstore.get(store, name).bytes()) == data
    other_name = _create_name("orc")
    obstore.rename(store, name, other_name)
    with pytest.raises(FileNotFoundError):
        files.cat_file(path)
    assert files.cat_file(f"{keys.bucket}/{keys.prefix}{other_name}") == data
    files.rm(f"{keys.bucket}/{keys.prefix}{other_name}")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, other_name)
