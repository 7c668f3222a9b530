"""Tests of the cache in a real server with a real store: two workers, TLS, metrics, and S3 clients."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from seamark.metaserver.server import serve_gateway
from tests.gateway.rig import SCHEMA, GatewayRig, open_rig, read_keys
from tests.server.rig import run_server
from tests.server.test_processes import wait_until
from tests.services.authority import Authority
from tests.services.process import choose_free_port
from tests.services.s3 import S3


def _create_name(extension: str = "parquet") -> str:
    return f"data/00000-0-{uuid.uuid4()}.{extension}"


def _read_metrics(rig: GatewayRig) -> str:
    with urllib.request.urlopen(f"{rig.seamark.base_url}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_two_workers_serve_the_last_write_from_their_shared_cache(tmp_path: Path, s3: S3) -> None:
    with open_rig(tmp_path, s3, SEAMARK_WORKERS="2") as rig:
        keys = rig.create_table("t")
        object_key: dict[str, Any] = {"Bucket": keys.bucket, "Key": keys.prefix + _create_name()}
        for round_number in range(12):
            data = bytes([round_number]) * (300_000 + round_number)
            with closing(keys.make_client()) as client:  # Any of the workers may accept a new connection.
                client.put_object(**object_key, Body=data)
            for _ in range(4):  # With four connections, both workers probably answer.
                with closing(keys.make_client()) as client:
                    assert client.get_object(**object_key)["Body"].read() == data
                    assert client.get_object(**object_key, Range="bytes=299990-")["Body"].read() == data[299_990:]
        with closing(keys.make_client()) as client:
            client.delete_objects(Bucket=keys.bucket, Delete={"Objects": [{"Key": object_key["Key"]}]})
        for _ in range(4):
            with closing(keys.make_client()) as client, pytest.raises(ClientError, match="NoSuchKey"):
                client.get_object(**object_key)
        for series in ('served_bytes{source="memory"}', 'disk_bytes{tier="blocks"}'):
            # A worker publishes its metrics for the other workers once a second.
            wait_until(lambda series=series: f"seamark_gateway_cache_{series}" in _read_metrics(rig))  # type: ignore[misc]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("extension", ["parquet", "avro"])
def test_cached_answer_equals_the_answer_of_the_store(store_rig: GatewayRig, extension: str) -> None:
    """Send the same requests for two objects with equal bytes: the gateway caches only one of them.

    The gateway passes requests for the other object to the store.
    """
    keys = store_rig.create_table(f"same_{extension}")
    cached_key, plain_key = (keys.prefix + name for name in (_create_name(extension), f"data/plain.{extension}"))
    data = bytes(range(256)) * 3000
    with closing(keys.make_client()) as client:
        for key in (cached_key, plain_key):
            client.put_object(Bucket=keys.bucket, Key=key, Body=data, ContentType="a/b", Metadata={"m": "1"})
        tag = client.head_object(Bucket=keys.bucket, Key=plain_key)["ETag"]

        def call_and_describe(key: str, call: str, **arguments: Any) -> Any:
            try:
                answer = getattr(client, call)(Bucket=keys.bucket, Key=key, **arguments)
            except ClientError as error:
                return error.response["Error"]["Code"]
            body = answer["Body"].read() if call == "get_object" else None
            header_names = ("ContentLength", "ETag", "ContentType", "Metadata", "ContentRange", "AcceptRanges")
            return body, {name: answer.get(name) for name in header_names}

        for _ in range(2):  # The first round fills the cache, and the second round reads from it.
            for arguments in (
                *({"Range": text} for text in ("bytes=0-0", "bytes=-5", "bytes=100-", "bytes=767999-900000")),
                *({"Range": text} for text in ("bytes=768000-", "bytes=9-1", "bytes=0-1,5-6", "bytes=-0", "lines=1-2")),
                *({"IfMatch": etag} for etag in (tag, '"other"')),
                *({"IfNoneMatch": etag} for etag in (tag, '"other"', "*")),
                {"PartNumber": 1},
                {},
            ):
                for call in ("get_object", "head_object"):
                    cached_outcome = call_and_describe(cached_key, call, **arguments)
                    assert cached_outcome == call_and_describe(plain_key, call, **arguments), (call, arguments)


async def test_boto3_reads_through_the_gateway_over_tls(tmp_path: Path, s3: S3) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    settings: dict[str, Any] = {
        "warehouse": f"s3://{s3.create_bucket()}/wh",
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        "tls_cert": str(authority.certificate),
        "tls_key": str(authority.key),
        "s3_endpoint": s3.endpoint,
        "s3_region": s3.region,
        "s3_access_key_id": s3.access_key,
        "s3_secret_access_key": s3.secret_key,
    }
    context = ssl.create_default_context(cafile=str(authority.file))
    async with run_server(tmp_path / "home", **settings) as server, serve_gateway(server.components):
        url = server.url.replace("http://", "https://")
        await server.http.post(f"{url}/v1/namespaces", json={"namespace": ["db"]}, ssl=context)
        async with server.http.post(
            f"{url}/v1/namespaces/db/tables", json={"name": "t", "schema": SCHEMA}, ssl=context
        ) as answer:
            keys = read_keys(await answer.json())
        assert keys.endpoint.startswith("https://")

        def read_and_write() -> None:
            data = bytes(range(256)) * 4000
            object_key = {"Bucket": keys.bucket, "Key": keys.prefix + _create_name()}
            with closing(keys.make_client(verify=str(authority.file))) as client:
                client.put_object(**object_key, Body=data)
                for _ in range(2):
                    assert client.get_object(**object_key)["Body"].read() == data

        await asyncio.to_thread(read_and_write)
