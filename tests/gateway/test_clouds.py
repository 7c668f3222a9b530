"""Tests of the gateway before Azure and Google Cloud Storage: `s3://` tables, and keys for one table, without S3."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import obstore
import pyarrow as pa
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from botocore.exceptions import ClientError
from obstore.store import MemoryStore
from pyiceberg.catalog.rest import RestCatalog

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.body import Body
from seamark.metaserver.gateway.clouds import cloud_backend
from seamark.metaserver.gateway.clouds.cloud_backend import CloudBackend
from seamark.metaserver.gateway.clouds.object_stream import PUT_BYTES_MAX
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.clouds.backed import Backing, check_roots
from seamark.metaserver.objects.s3_scope import Address
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import resolve_settings
from tests.gateway.rig import GatewayRig, open_cloud_rig

PART_BYTES = 5 << 20


@pytest.fixture(scope="module", params=["azure", pytest.param("google", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    if request.param == "azure":
        cloud = request.getfixturevalue("azurite")
        bucket, _, host = cloud.create_container().removeprefix("abfss://").partition("@")
        backend = f"abfss://{host}"
    else:
        cloud = request.getfixturevalue("google_storage")
        bucket, backend = cloud.create_bucket().removeprefix("gs://"), "gs://"
    settings = {"s3_backend": backend, **cloud.make_settings()}
    with open_cloud_rig(tmp_path_factory.mktemp("gateway-cloud"), bucket, settings) as rig:
        yield rig


def test_engines_use_s3_tables_in_a_cloud_with_keys_for_one_table(rig: GatewayRig) -> None:
    catalog = RestCatalog("cloud", uri=rig.seamark.base_url)
    catalog.create_namespace_if_not_exists("engines")
    data = pa.table({"id": range(1000), "part": [f"p {number % 3}/ü" for number in range(1000)]})
    table = catalog.create_table("engines.t", schema=data.schema)
    assert table.location().startswith("s3://")
    table.append(data)
    table.append(data.slice(0, 10))
    result = catalog.load_table("engines.t").scan(row_filter="id < 5").to_arrow()
    assert sorted(result["id"].to_pylist()) == sorted([0, 1, 2, 3, 4] * 2)


def test_s3_clients_write_read_list_and_delete_objects(rig: GatewayRig) -> None:
    keys = rig.create_table("objects")
    client, bucket = keys.make_client(), keys.bucket
    names = ["a/one", "a/two", "b ü+%20", "c"]
    for name in names:
        client.put_object(Bucket=bucket, Key=keys.prefix + name, Body=name.encode(), ContentType="text/plain")
    answer = client.get_object(Bucket=bucket, Key=f"{keys.prefix}a/one")
    assert (answer["Body"].read(), answer["ContentType"], answer["ContentLength"]) == (b"a/one", "text/plain", 5)
    part = client.get_object(Bucket=bucket, Key=f"{keys.prefix}a/one", Range="bytes=2-99")
    assert (part["Body"].read(), part["ContentRange"]) == (b"one", "bytes 2-4/5")
    assert client.get_object(Bucket=bucket, Key=f"{keys.prefix}a/one", Range="bytes=-2")["Body"].read() == b"ne"
    assert client.head_object(Bucket=bucket, Key=f"{keys.prefix}a/one")["ETag"] == answer["ETag"]
    client.put_object(Bucket=bucket, Key=f"{keys.prefix}empty", Body=b"")
    assert client.get_object(Bucket=bucket, Key=f"{keys.prefix}empty")["Body"].read() == b""
    client.delete_object(Bucket=bucket, Key=f"{keys.prefix}empty")

    def read_error_code(call: Any, **arguments: Any) -> str:
        with pytest.raises(ClientError) as refusal:
            call(Bucket=bucket, **arguments)
        return str(refusal.value.response["Error"]["Code"])

    assert read_error_code(client.get_object, Key=f"{keys.prefix}missing") == "NoSuchKey"
    assert read_error_code(client.get_object, Key=f"{keys.prefix}c", Range="bytes=7-8") == "InvalidRange"
    assert read_error_code(client.get_object, Key=f"{keys.prefix}c", IfMatch='"other"') == "PreconditionFailed"
    assert read_error_code(client.put_object, Key=f"{keys.prefix}c", Body=b"", IfNoneMatch="*") == "PreconditionFailed"
    client.put_object(Bucket=bucket, Key=f"{keys.prefix}d", Body=b"new", IfNoneMatch="*")
    client.copy_object(Bucket=bucket, Key=f"{keys.prefix}e", CopySource={"Bucket": bucket, "Key": f"{keys.prefix}d"})
    assert client.get_object(Bucket=bucket, Key=f"{keys.prefix}e")["Body"].read() == b"new"

    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=keys.prefix, MaxKeys=2)
    listed_keys = [entry["Key"].removeprefix(keys.prefix) for page in pages for entry in page.get("Contents", [])]
    assert sorted(name for name in listed_keys if not name.startswith("metadata/")) == sorted([*names, "d", "e"])
    grouped_listing = client.list_objects_v2(Bucket=bucket, Prefix=keys.prefix, Delimiter="/")
    assert {"Prefix": f"{keys.prefix}a/"} in grouped_listing["CommonPrefixes"]
    assert [entry["Key"].removeprefix(keys.prefix) for entry in grouped_listing["Contents"]] == [
        "b ü+%20",
        "c",
        "d",
        "e",
    ]

    delete_answer = client.delete_objects(
        Bucket=bucket, Delete={"Objects": [{"Key": keys.prefix + name} for name in ("c", "d", "never")]}
    )
    assert len(delete_answer["Deleted"]) == 3
    client.delete_object(Bucket=bucket, Key=f"{keys.prefix}e")
    assert read_error_code(client.head_object, Key=f"{keys.prefix}e") == "404"


@pytest.mark.slow
def test_object_in_parts_appears_when_its_upload_is_completed(rig: GatewayRig) -> None:
    keys = rig.create_table("parts")
    client, address = keys.make_client(), {"Bucket": keys.bucket, "Key": f"{keys.prefix}big"}
    upload_id = client.create_multipart_upload(**address)["UploadId"]
    bodies = [b"1" * PART_BYTES, b"2" * 1000]
    etags = [
        client.upload_part(**address, UploadId=upload_id, PartNumber=number, Body=body)["ETag"]
        for number, body in enumerate(bodies, 1)
    ]
    listed_parts = client.list_parts(**address, UploadId=upload_id)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed_parts] == [(1, PART_BYTES), (2, 1000)]
    with pytest.raises(ClientError, match="404"):
        client.head_object(**address)
    other_address = {"Bucket": keys.bucket, "Key": f"{keys.prefix}other"}
    with pytest.raises(ClientError, match="NoSuchUpload"):
        client.upload_part(**other_address, UploadId=upload_id, PartNumber=1, Body=b"x")
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    with pytest.raises(ClientError, match="InvalidPart"):
        client.complete_multipart_upload(
            **address, UploadId=upload_id, MultipartUpload={"Parts": [{**parts[0], "ETag": '"x"'}]}
        )
    client.complete_multipart_upload(**address, UploadId=upload_id, MultipartUpload={"Parts": parts})
    assert client.get_object(**address)["Body"].read() == b"".join(bodies)
    for call in (client.list_parts, client.abort_multipart_upload):
        with pytest.raises(ClientError, match="NoSuchUpload"):
            call(**address, UploadId=upload_id)
    body = b"3" * (PUT_BYTES_MAX + 1000)
    client.put_object(**address, Body=body)
    assert client.get_object(**address)["Body"].read() == body
    assert client.get_object(**address, Range=f"bytes={PUT_BYTES_MAX}-")["Body"].read() == b"3" * 1000
    second_upload_id = client.create_multipart_upload(**address)["UploadId"]
    client.abort_multipart_upload(**address, UploadId=second_upload_id)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        client.upload_part(**address, UploadId=second_upload_id, PartNumber=1, Body=b"x")


def test_large_body_that_differs_from_the_signed_body_is_not_stored(rig: GatewayRig) -> None:
    keys = rig.create_table("forged")
    path, headers = keys.sign("PUT", "forged", hashlib.sha256(b"the signed body").hexdigest())
    answer = requests.put(keys.endpoint + path, headers=headers, data=b"4" * (PUT_BYTES_MAX + 1000), timeout=60)
    assert (answer.status_code, "XAmzContentSHA256Mismatch" in answer.text) == (400, True)
    with pytest.raises(ClientError, match="404"):
        keys.make_client().head_object(Bucket=keys.bucket, Key=f"{keys.prefix}forged")


def test_keys_of_one_table_open_no_object_of_another_table(rig: GatewayRig) -> None:
    own_keys, other_keys = rig.create_table("own"), rig.create_table("other")
    other_keys.make_client().put_object(Bucket=other_keys.bucket, Key=f"{other_keys.prefix}secret", Body=b"secret")
    client, foreign_object = own_keys.make_client(), {"Bucket": other_keys.bucket, "Key": f"{other_keys.prefix}secret"}

    for call, arguments in (
        (client.get_object, foreign_object),
        (client.put_object, {**foreign_object, "Body": b"x"}),
        (client.delete_object, foreign_object),
        (client.list_objects_v2, {"Bucket": other_keys.bucket, "Prefix": other_keys.prefix}),
        (client.list_objects_v2, {"Bucket": other_keys.bucket, "Prefix": ".seamark-uploads/"}),
        (
            client.copy_object,
            {"Bucket": own_keys.bucket, "Key": f"{own_keys.prefix}copy", "CopySource": foreign_object},
        ),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            call(**arguments)
    assert other_keys.make_client().get_object(**foreign_object)["Body"].read() == b"secret"


class _WaitingBody(Body):
    """A body that never arrives. `is_read` is set when the server starts to read it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.is_read = asyncio.Event()

    async def iter_pieces(self) -> AsyncIterator[bytes]:
        self.is_read.set()
        await asyncio.Event().wait()
        yield b""


async def test_conditional_writes_share_a_limit_of_memory() -> None:
    service_account_key = '{"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
    settings = Settings(s3_backend="gs://", gcs_service_account_key=service_account_key)
    limits = WorkerLimits(requests=1, watchers=1, body_bytes=1500, has_logins=False)
    backends = itertools.cycle(CloudBackend(settings, SystemClock(), limits.gateway_writes) for _ in range(2))
    request = make_mocked_request("PUT", "/bucket/wh/t/key")

    def start_put(body: Body) -> Awaitable[web.StreamResponse]:
        address, headers = Address("bucket", "wh/t/key", {}), {"if-none-match": "*"}
        return next(backends).answer(S3Call("PUT", address, headers, "id", "principal", False, request, body, None))

    # The gateway holds the body of a conditional write in memory. A body of 1,000 bytes leaves 500 bytes of the limit.
    body = _WaitingBody(1000)
    write = asyncio.ensure_future(start_put(body))
    await asyncio.wait_for(body.is_read.wait(), timeout=30)
    with pytest.raises(S3Error, match="limit of 1,500 bytes of conditional writes") as refusal:
        await asyncio.wait_for(start_put(_WaitingBody(1000)), timeout=30)
    assert (refusal.value.code, refusal.value.status) == ("SlowDown", 503)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    with pytest.raises(S3Error, match="at most 1500 bytes"):
        await start_put(_WaitingBody(1501))
    # The cancelled write has released its memory: a body of the whole limit is accepted, and waits for its bytes.
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(start_put(_WaitingBody(1500)), timeout=0.01)


async def test_folder_is_listed_in_pages_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    store, thread_ids = MemoryStore(), set()
    names = ["a/1", "a/2", "b", "b/1", "ä", "z"]
    for name in names:
        obstore.put(store, f"wh/t/{name}", b"x")

    def list_folder(store: MemoryStore, prefix: str) -> Any:
        thread_ids.add(threading.get_ident())
        return obstore.list_with_delimiter(store, prefix)

    monkeypatch.setattr(cloud_backend, "obstore", SimpleNamespace(list_with_delimiter=list_folder))
    monkeypatch.setattr(CloudBackend, "_open_bucket", lambda backend, bucket: store)
    limits = WorkerLimits(requests=1, watchers=1, body_bytes=1500, has_logins=False)
    backend = CloudBackend(Settings(s3_backend="gs://"), SystemClock(), limits.gateway_writes)
    query = {"list-type": "2", "prefix": "wh/t/", "delimiter": "/", "max-keys": "2"}
    listed_keys, token = [], ""
    for _ in names:
        address = Address("bucket", "", {**query, **({"continuation-token": token} if token else {})})
        request = make_mocked_request("GET", "/bucket")
        answer = await backend.answer(S3Call("GET", address, {}, "id", "principal", False, request, None, None))
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        page = answer.body.decode()
        listed_keys += re.findall("<(?:Key|Prefix)>wh/t/([^<]+)<", page)
        token = "".join(re.findall("<NextContinuationToken>(.*)</NextContinuationToken>", page))
        if not token:
            break
    await backend.close()
    assert sorted(listed_keys) == ["a/", "b", "b/", "z", "ä"]
    assert len(thread_ids) > 0
    assert threading.get_ident() not in thread_ids


def test_invalid_s3_backend_is_refused() -> None:
    for backend in (
        "gs://bucket",
        "abfss://",
        "abfss://container@account.dfs.core.windows.net",
        "abfss://evil.example",
    ):
        with pytest.raises(ConfigError, match="s3_backend must be gs:// or abfss://account"):
            Backing(backend)
    for further_settings in ({"s3_endpoint": "http://store"}, {"s3_client_access": "signing"}, {"s3_folder": "/srv"}):
        with pytest.raises(ConfigError, match="s3_backend"):
            resolve_settings({"s3_backend": "gs://", **further_settings}, {})
    for root in ("s3://bucket", "s3://bucket/.seamark-uploads"):
        with pytest.raises(ConfigError, match="a warehouse is a folder of a bucket"):
            check_roots([parse_location(root)])
