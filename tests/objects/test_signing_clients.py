"""Tests of clients that use remote signing without keys on a real store: Iceberg's S3FileIO and PyIceberg's signer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import botocore.config
import botocore.session
import pyspark
import pytest
from aiohttp import web
from botocore import UNSIGNED
from botocore.exceptions import ClientError
from pyiceberg.exceptions import SignError
from pyiceberg.io.fsspec import S3V4RestSigner

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.signing import choose_cache_control, sign_s3_request
from seamark.metaserver.objects.vending import build_storage_config
from seamark.metaserver.settings.settings import Settings
from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE
from tests.services.s3 import S3

SIGN_PATH = "v1/namespaces/n/tables/t/sign"


@dataclass
class Signer:
    """An endpoint that only signs requests.

    `signed_methods` has the methods of signed requests, and `refusals` the error messages of rejected requests.
    """

    uri: str
    settings: Settings
    table: str
    signed_methods: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def build_client_properties(self) -> dict[str, str]:
        """Return the properties that a loaded table would have for its client."""
        table = parse_location(self.table)
        config, _ = build_storage_config(self.settings, table, delegation="remote-signing", sign_path=SIGN_PATH)
        return {**config, "uri": self.uri}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            answer = sign_s3_request(
                body,
                table_location=self.table,
                writable=True,
                settings=self.settings,
                now_ms=SystemClock().now_ms(),
            )
        except SeamarkError as error:
            self.refusals.append(error.message)
            error_document = {"error": {"message": error.message, "type": error.type, "code": error.code}}
            return web.json_response(error_document, status=error.code)
        self.signed_methods.append(body["method"])
        return web.json_response(answer, headers={"Cache-Control": choose_cache_control(body)})


@pytest.fixture
async def signer(s3: S3, s3_bucket: str) -> AsyncIterator[Signer]:
    """Serve signatures for the table `t-0`. The bucket also contains the object `secret` of the table `t-1`."""
    settings = Settings(
        s3_endpoint=s3.endpoint,
        s3_region=s3.region,
        s3_access_key_id=s3.access_key,
        s3_secret_access_key=s3.secret_key,
        s3_client_access="signing",
    )
    signer = Signer("", settings, f"s3://{s3_bucket}/wh/t-0")
    app = web.Application()
    app.router.add_post(f"/{SIGN_PATH}", signer.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    signer.uri = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = s3.client()
    client.put_object(Bucket=s3_bucket, Key="wh/t-1/secret", Body=b"theirs")
    client.close()
    yield signer
    await runner.cleanup()


@pytest.mark.slow
@pytest.mark.spark
async def test_icebergs_java_client_can_access_only_its_table(signer: Signer) -> None:
    jars = [*(CACHE / "jars").glob("iceberg-*.jar"), *_find_slf4j()]
    if len(jars) < 3:
        pytest.fail("Iceberg's jars are missing: run `make jars`")
    properties = {**signer.build_client_properties(), "s3.multipart.part-size-bytes": str(5 << 20)}
    argv = [
        *(find_java_17(), "-Xmx512m", *SHORT_LIVED, "-cp", ":".join(map(str, jars))),
        str(Path(__file__).with_name("SignedFiles.java")),
        *(signer.table, signer.table.replace("t-0", "t-1") + "/secret"),
        *(f"{name}={value}" for name, value in properties.items()),
    ]
    java_process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=_drop_aws_keys()
    )
    try:
        output, _ = await asyncio.wait_for(java_process.communicate(), 120)
    finally:
        if java_process.returncode is None:
            java_process.kill()
            await java_process.wait()
    assert b"ALL DONE" in output, f"{output.decode()[-4000:]}\nrefused: {signer.refusals}"
    assert {"GET", "HEAD", "PUT", "POST", "DELETE"} <= set(signer.signed_methods)
    assert len(signer.refusals) == 1, signer.refusals
    assert "t-1/secret" in signer.refusals[0]


async def test_pyicebergs_signer_can_access_only_its_table(signer: Signer, s3_bucket: str) -> None:
    await asyncio.to_thread(_check_client_with_signer, signer, s3_bucket)
    assert len(signer.refusals) == 2, signer.refusals
    assert "t-1/secret" in signer.refusals[0]
    assert "send it in `body`" in signer.refusals[1]


def _check_client_with_signer(signer: Signer, bucket: str) -> None:
    """Check that a botocore client without keys can use the objects of its table `t-0`, and no other objects.

    The client calls the server's signer before each request, as PyIceberg's fsspec FileIO does.
    """
    properties = signer.build_client_properties()
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=properties["s3.endpoint"],
        region_name=properties["client.region"],
        config=botocore.config.Config(signature_version=UNSIGNED, retries={"max_attempts": 1}),
    )
    remote_signer = S3V4RestSigner(properties)
    client.meta.events.register_last("before-sign.s3", remote_signer)
    try:
        key = "wh/t-0/data/dt=2026-01-01/x y+ü.parquet"
        client.put_object(Bucket=bucket, Key=key, Body=b"rows")
        assert client.get_object(Bucket=bucket, Key=key, Range="bytes=1-2")["Body"].read() == b"ow"
        assert client.head_object(Bucket=bucket, Key=key)["ContentLength"] == 4
        listing = client.list_objects_v2(Bucket=bucket, Prefix="wh/t-0/", Delimiter="/")
        assert [prefix["Prefix"] for prefix in listing["CommonPrefixes"]] == ["wh/t-0/data/"]
        client.delete_object(Bucket=bucket, Key=key)
        with pytest.raises(ClientError, match="404"):
            client.head_object(Bucket=bucket, Key=key)
        with pytest.raises(SignError):
            client.get_object(Bucket=bucket, Key="wh/t-1/secret")
        with pytest.raises(SignError):
            client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]})
    finally:
        remote_signer._session.close()
        client.close()


def _find_slf4j() -> list[Path]:

    return list((Path(pyspark.__file__).parent / "jars").glob("slf4j-api-*.jar"))


def _drop_aws_keys() -> dict[str, str]:

    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
