"""Tests of S3 with a real server process, with path-style and virtual-host addresses, and of lost replies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ObjectExists, RetryLater, StorageError
from seamark.metaserver.objects.port import ObjectStore, Upload
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.objects.s3 import WRITE_ID, get_bucket_endpoint
from seamark.metaserver.settings.settings import Settings
from tests.objects.contract import ObjectStoreContract
from tests.objects.s3_proxy import Misbehaviour, run_misbehaving_proxy
from tests.services.process import ManagedProcess, choose_free_port, is_http_ok
from tests.services.s3 import CONFIG, S3, find_versitygw, read_env_file


def build_settings(s3: S3, bucket: str, **changes: Any) -> Settings:
    return dataclasses.replace(
        Settings(
            warehouse=f"s3://{bucket}/warehouse",
            s3_endpoint=s3.endpoint,
            s3_region=s3.region,
            s3_access_key_id=s3.access_key,
            s3_secret_access_key=s3.secret_key,
            storage_timeout_s=5.0,
            storage_retries=0,
        ),
        **changes,
    )


class TestPathStyleContract(ObjectStoreContract):
    @pytest.fixture
    async def store(self, s3: S3, s3_bucket: str) -> AsyncIterator[ObjectStore]:
        async with open_objects(build_settings(s3, s3_bucket), SystemClock()) as objects:
            yield objects

    @pytest.fixture
    def base(self, s3_bucket: str) -> str:
        return f"s3://{s3_bucket}/warehouse/corner"


@pytest.fixture(scope="module")
def virtual_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Start a server that reads the bucket from the host name, `bucket.localhost`."""
    binary = find_versitygw()
    if binary is None:
        pytest.skip("virtual hosts need versitygw: run `make services`")
    folder = tmp_path_factory.mktemp("virtual-s3")
    (folder / "objects").mkdir()
    settings, port = read_env_file(CONFIG), choose_free_port()
    env = {**settings, "VGW_PORT": f"127.0.0.1:{port}", "VGW_VIRTUAL_DOMAIN": f"localhost:{port}"}
    process = ManagedProcess([binary, "posix", str(folder / "objects")], log=folder / "log", env=env, cwd=folder)
    with process:
        process.start(lambda: is_http_ok(f"http://127.0.0.1:{port}{settings['VGW_HEALTH']}"), timeout_s=60)
        keys = settings["ROOT_ACCESS_KEY"], settings["ROOT_SECRET_KEY"]
        yield S3(f"http://127.0.0.1:{port}", *keys, settings["VGW_REGION"], folder / "objects", process)


class TestVirtualHostContract(ObjectStoreContract):
    """The contract's tests with virtual hosts.

    `bucket.localhost` resolves on few machines, so the server acts as an HTTP proxy, and no name is resolved.
    """

    @pytest.fixture
    async def store(self, virtual_s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectStore]:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, virtual_s3.endpoint)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "")
        endpoint = virtual_s3.endpoint.replace("127.0.0.1", "localhost")
        settings = build_settings(virtual_s3, bucket, s3_endpoint=endpoint, s3_path_style=False)
        assert get_bucket_endpoint(bucket, settings) == endpoint.replace("://", f"://{bucket}.")
        async with open_objects(settings, SystemClock()) as objects:
            yield objects

    @pytest.fixture
    def bucket(self, virtual_s3: S3) -> str:
        return virtual_s3.create_bucket()

    @pytest.fixture
    def base(self, bucket: str) -> str:
        return f"s3://{bucket}/warehouse/corner"


@asynccontextmanager
async def open_through_proxy(
    s3: S3, bucket: str, **changes: Any
) -> AsyncIterator[tuple[ObjectStore, Misbehaviour, str]]:
    port = choose_free_port()
    settings = build_settings(s3, bucket, s3_endpoint=f"http://127.0.0.1:{port}", **changes)
    async with (
        run_misbehaving_proxy(s3.endpoint, port) as misbehaviour,
        open_objects(settings, SystemClock()) as objects,
    ):
        yield objects, misbehaviour, f"s3://{bucket}/warehouse"


async def test_write_with_a_lost_reply_is_recognised_by_its_writer(s3: S3, s3_bucket: str) -> None:
    async with open_through_proxy(s3, s3_bucket) as (objects, misbehaviour, base):
        misbehaviour.lose_replies = 1
        await objects.create(f"{base}/x", b"mine")
        assert misbehaviour.requests == ["PUT 200", "GET 200"]
        assert await objects.read(f"{base}/x") == b"mine"


async def test_retry_after_a_successful_first_attempt_is_not_a_conflict(s3: S3, s3_bucket: str) -> None:
    async with open_through_proxy(s3, s3_bucket, storage_retries=2) as (objects, misbehaviour, base):
        misbehaviour.answer_500_after_storing = 1
        await objects.create(f"{base}/x", b"mine")
        assert misbehaviour.requests == ["PUT 200", "PUT 412", "GET 200"]


async def test_lost_reply_over_another_writers_object_is_a_conflict_even_with_equal_bytes(
    s3: S3, s3_bucket: str
) -> None:
    async with open_through_proxy(s3, s3_bucket) as (objects, misbehaviour, base):
        await objects.create(f"{base}/x", b"same")
        misbehaviour.lose_replies = 1
        with pytest.raises(ObjectExists):
            await objects.create(f"{base}/x", b"same")
        assert await objects.read(f"{base}/x") == b"same"


async def test_request_that_never_arrived_is_not_reported_as_written(s3: S3, s3_bucket: str) -> None:
    async with open_through_proxy(s3, s3_bucket) as (objects, misbehaviour, base):
        misbehaviour.drop_requests = 1
        with pytest.raises(RetryLater, match="did not answer"):
            await objects.create(f"{base}/x", b"x")
        assert not await objects.exists(f"{base}/x")
        await objects.create(f"{base}/x", b"x")


async def test_request_to_a_hanging_store_ends_at_its_time_limit(s3: S3, s3_bucket: str) -> None:
    async with open_through_proxy(s3, s3_bucket, storage_timeout_s=0.5) as (objects, misbehaviour, base):
        misbehaviour.hang = True
        async with asyncio.timeout(60):
            with pytest.raises(RetryLater):
                await objects.create(f"{base}/x", b"x")


async def test_store_without_conditional_writes_is_read_before_a_write(s3: S3, s3_bucket: str) -> None:
    async with open_through_proxy(s3, s3_bucket) as (objects, misbehaviour, base):
        misbehaviour.refuse_conditional_puts = True
        await objects.create(f"{base}/x", b"1")
        await objects.create(f"{base}/y", b"2")
        assert misbehaviour.requests == ["PUT 501", "HEAD 404", "PUT 200", "HEAD 404", "PUT 200"]
        with pytest.raises(ObjectExists):
            await objects.create(f"{base}/x", b"other")
        assert await objects.read(f"{base}/x") == b"1"


async def test_store_that_drops_metadata_is_compared_by_bytes(s3: S3, s3_bucket: str) -> None:
    client = s3.client()
    async with open_through_proxy(s3, s3_bucket) as (objects, misbehaviour, base):

        def put_as_somebody_else(body: bytes, name: str) -> Any:
            return lambda: client.put_object(Bucket=s3_bucket, Key=f"warehouse/{name}", Body=body)

        misbehaviour.before_put = put_as_somebody_else(b"mine", "x")
        await objects.create(f"{base}/x", b"mine")
        misbehaviour.before_put = put_as_somebody_else(b"theirs", "y")
        with pytest.raises(ObjectExists):
            await objects.create(f"{base}/y", b"mine")
    client.close()


async def test_written_objects_have_the_id_of_their_write(s3: S3, s3_bucket: str) -> None:
    async with open_objects(build_settings(s3, s3_bucket), SystemClock()) as objects:
        await objects.create(f"s3://{s3_bucket}/warehouse/x", b"x")
    client = s3.client()
    assert len(client.head_object(Bucket=s3_bucket, Key="warehouse/x")["Metadata"][WRITE_ID]) == 32
    client.close()


async def test_missing_bucket_and_wrong_keys_are_named_in_the_error(s3: S3, s3_bucket: str) -> None:
    async with open_objects(build_settings(s3, "no-such-bucket"), SystemClock()) as objects:
        location = "s3://no-such-bucket/warehouse/x"
        for call in (objects.read(location), objects.create(location, b""), objects.ping()):
            with pytest.raises(StorageError, match=r"bucket of .* does not exist"):
                await call
    async with open_objects(build_settings(s3, s3_bucket, s3_secret_access_key="wrong"), SystemClock()) as objects:
        location = f"s3://{s3_bucket}/warehouse/x"
        for call in (objects.read(location), objects.create(location, b""), objects.delete(location), objects.ping()):
            with pytest.raises(StorageError, match="keys") as error:
                await call
            assert "wrong" not in str(error.value)


async def test_unavailable_server_is_a_retryable_error(s3: S3, s3_bucket: str) -> None:
    settings = build_settings(s3, s3_bucket, s3_endpoint=f"http://127.0.0.1:{choose_free_port()}")
    async with open_objects(settings, SystemClock()) as objects:
        location = f"s3://{s3_bucket}/warehouse/x"
        for call in (
            objects.read(location),
            objects.exists(location),
            objects.create(location, b""),
            objects.delete(location),
            objects.ping(),
        ):
            with pytest.raises(RetryLater) as error:
                await call
            assert "\n" not in str(error.value), "the message contains a dump of Rust structures"


async def test_environment_variables_do_not_mix_with_the_settings(
    s3: S3, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-account")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    async with open_objects(build_settings(s3, s3_bucket), SystemClock()) as objects:
        await objects.create(f"s3://{s3_bucket}/warehouse/x", b"x")


async def test_one_server_reads_local_files_and_buckets(s3: S3, s3_bucket: str, tmp_path: Path) -> None:
    settings = build_settings(
        s3, s3_bucket, warehouse=f"file://{tmp_path}/wh", allowed_locations=(f"s3a://{s3_bucket}/shared/",)
    )
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(f"file://{tmp_path}/wh/x", b"file")
        await objects.create(f"s3://{s3_bucket}/shared/x", b"bucket")
        assert await objects.read(f"s3a://{s3_bucket}/shared/x") == b"bucket"
        assert await objects.read(f"file:{tmp_path}/wh/x") == b"file"
        await objects.ping()
        for outside_location in (f"s3://{s3_bucket}/x", f"s3://{s3_bucket}/shared2/x", f"s3://{s3_bucket}/shared"):
            with pytest.raises(BadRequest):
                await objects.read(outside_location)
    assert os.listdir(tmp_path / "wh") == ["x"]


async def test_unfinished_uploads_are_listed_by_pages_and_aborted(
    s3: S3, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has only the uploads of one folder. A missing upload is not a failure."""
    monkeypatch.setattr("seamark.metaserver.objects.s3_uploads._UPLOADS_PER_PAGE", 2)  # Five uploads need three pages.
    with closing(s3.client()) as client:
        for key in (*(f"warehouse/t/{number}/é .parquet" for number in range(5)), "warehouse/tt/x.parquet"):
            client.create_multipart_upload(Bucket=s3_bucket, Key=key)
    async with open_objects(build_settings(s3, s3_bucket), SystemClock()) as store:
        folder = f"s3://{s3_bucket}/warehouse/t"
        uploads = [upload async for upload in store.list_uploads(folder)]
        assert {upload.location for upload in uploads} == {f"{folder}/{number}/é .parquet" for number in range(5)}
        assert len(uploads) == 5
        assert await store.abort_uploads(uploads) == 5
        assert [upload async for upload in store.list_uploads(folder)] == []
        assert await store.abort_uploads(uploads[:1]) == 1
        assert [upload.location async for upload in store.list_uploads(f"s3://{s3_bucket}/warehouse")] == [
            f"{folder}t/x.parquet"
        ]
        outside_location = Upload(f"s3://{s3_bucket}/elsewhere/x.parquet", "id", begun_ms=0)
        with pytest.raises(BadRequest):
            await store.abort_uploads([outside_location])


async def test_refused_listing_of_uploads_is_an_error_with_the_reason(s3: S3, s3_bucket: str) -> None:
    wrong_settings = build_settings(s3, s3_bucket, s3_secret_access_key="wrong")
    async with open_objects(wrong_settings, SystemClock()) as store:
        with pytest.raises(StorageError, match="SignatureDoesNotMatch"):
            [upload async for upload in store.list_uploads(f"s3://{s3_bucket}/warehouse")]


def make_settings_without_store() -> Settings:
    return Settings(
        warehouse="s3://bucket/warehouse",
        s3_endpoint=f"http://127.0.0.1:{choose_free_port()}",
        s3_access_key_id="access",
        s3_secret_access_key="secret",
        storage_timeout_s=5.0,
        storage_retries=0,
    )


async def test_abort_of_uploads_stops_if_the_store_does_not_answer() -> None:
    async with open_objects(make_settings_without_store(), SystemClock()) as store:
        uploads = [Upload(f"s3://bucket/warehouse/t/{number}.parquet", "id", 0) for number in range(3)]
        with structlog.testing.capture_logs() as log_events:
            assert await store.abort_uploads(uploads) == 0
    assert [item["location"] for item in log_events if item["event"] == "upload not aborted"] == [uploads[0].location]


async def test_environment_that_the_upload_client_rejects_is_a_storage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    async with open_objects(make_settings_without_store(), SystemClock()) as store:
        with pytest.raises(StorageError, match="missing"):
            [upload async for upload in store.list_uploads("s3://bucket/warehouse")]
