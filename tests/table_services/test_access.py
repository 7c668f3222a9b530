"""Tests of the access of worker processes: credentials for the storage, and a server that they can verify."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from seamark.commands import spark_driver
from seamark.commands.programs import JOB_WORKER
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Unreachable
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.appends import append
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.objects import credentials
from seamark.metaserver.services.launching.access_probe import find_storage_problem
from seamark.metaserver.services.launching.launchers import JobAnswer, JobRequest
from seamark.metaserver.services.launching.spark_submit import ANSWER, REQUEST
from seamark.metaserver.settings.settings import Settings
from tests.server.rig import run_server
from tests.services.authority import Authority
from tests.services.process import choose_free_port
from tests.services.s3 import S3


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Remove the machine's credentials, and credentials that an earlier test has loaded."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    credentials._make_chain.cache_clear()
    yield
    credentials._make_chain.cache_clear()


def build_settings(s3: S3, bucket: str, tmp_path: Path, **options: Any) -> Settings:
    return Settings(
        home=tmp_path, warehouse=f"s3://{bucket}/lake", s3_endpoint=s3.endpoint, s3_region=s3.region, **options
    )


def build_key_settings(s3: S3) -> dict[str, str]:
    return {"s3_access_key_id": s3.access_key, "s3_secret_access_key": s3.secret_key}


async def test_workers_use_the_keys_of_the_settings(s3: S3, s3_bucket: str, tmp_path: Path) -> None:
    server_settings = build_settings(s3, s3_bucket, tmp_path, s3_client_access="signing", **build_key_settings(s3))
    assert await find_storage_problem(server_settings, SystemClock(), JOB_WORKER) == ""
    client = s3.client()
    try:
        remaining_keys = [
            listed_object["Key"] for listed_object in client.list_objects_v2(Bucket=s3_bucket).get("Contents", ())
        ]
    finally:
        client.close()
    assert not [key for key in remaining_keys if not key.endswith("/")]


@pytest.mark.slow
async def test_workers_use_the_keys_of_the_servers_aws_profile(
    s3: S3, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile runs a program that prints the keys, like a profile for a role.

    The worker does not need a profile.
    """
    credentials_json = f'{{"Version": 1, "AccessKeyId": "{s3.access_key}", "SecretAccessKey": "{s3.secret_key}"}}'
    (tmp_path / "keys.json").write_text(credentials_json)
    (tmp_path / "config").write_text(f"[profile lake]\ncredential_process = cat {tmp_path}/keys.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    assert await find_storage_problem(build_settings(s3, s3_bucket, tmp_path), SystemClock(), JOB_WORKER) == ""


async def test_missing_and_wrong_keys_are_reported(
    s3: S3, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    assert "The server has no S3 keys" in await find_storage_problem(
        build_settings(s3, s3_bucket, tmp_path), clock, JOB_WORKER
    )
    wrong_settings = build_settings(
        s3, s3_bucket, tmp_path, s3_access_key_id=s3.access_key, s3_secret_access_key="wrong"
    )
    problem = await find_storage_problem(wrong_settings, clock, JOB_WORKER)
    assert f"cannot write and read an object in s3://{s3_bucket}/lake" in problem
    monkeypatch.setenv("AWS_PROFILE", "missing")
    credentials._make_chain.cache_clear()
    assert "missing" in await find_storage_problem(build_settings(s3, s3_bucket, tmp_path), clock, JOB_WORKER)


@pytest.mark.slow
async def test_gateway_that_does_not_answer_is_reported(s3: S3, s3_bucket: str, tmp_path: Path) -> None:
    """Jobs get keys for one table from the gateway, so the server lends them no keys."""
    url = f"http://127.0.0.1:{choose_free_port()}"
    server_settings = build_settings(
        s3, s3_bucket, tmp_path, s3_client_access="gateway", gateway_url=url, **build_key_settings(s3)
    )
    assert f"cannot reach the objects gateway at {url}" in await find_storage_problem(
        server_settings, SystemClock(), JOB_WORKER
    )


async def test_renewed_certificate_and_its_predecessor_are_both_accepted(tmp_path: Path) -> None:
    """The workers of a server load a renewed certificate one after another."""
    authority = Authority(tmp_path, ("seamark.example",))
    authority.issue("first")
    certificate = Certificate(authority.certificate, authority.key)
    old_certificate = authority.certificate.read_text().strip()
    authority.issue("second")
    new_certificate = authority.certificate.read_text().strip()
    assert [text in certificate.leaves() for text in (old_certificate, new_certificate)] == [True, True], (
        "both certificates must be accepted after the renewal"
    )
    await certificate.reload()
    assert [text in certificate.leaves() for text in (old_certificate, new_certificate)] == [True, True]
    authority.issue("third")
    await certificate.reload()
    assert old_certificate not in certificate.leaves()


async def test_worker_accepts_only_the_certificate_of_its_server(tmp_path: Path) -> None:
    """The worker rejects all other certificates, even with the same names and from the same authority."""
    authority = Authority(tmp_path, ("seamark.example",))
    authority.issue("server")
    tls_settings = {"tls_cert": str(authority.certificate), "tls_key": str(authority.key)}
    async with run_server(tmp_path / "home", **tls_settings) as server:
        server_certificates = Certificate(authority.certificate, authority.key).leaves()
        authority.issue("another")
        other_certificate = authority.certificate.read_text()
        await asyncio.to_thread(SeamarkClient(server.url, certificates=server_certificates).ping)
        for wrong_certificates in (other_certificate, ""):
            client = SeamarkClient(server.url, certificates=wrong_certificates, retries=0)
            with pytest.raises(Unreachable, match=r"issuer certificate|self-signed"):
                await asyncio.to_thread(client.ping)
        with pytest.raises(ValueError, match="cannot be read"):
            SeamarkClient(server.url, certificates="none").ping()


async def test_statement_with_a_join_accepts_the_certificate_of_its_server(tmp_path: Path) -> None:
    """A join requests plan tables, over other connections than those for tables. They also need the certificate."""
    authority = Authority(tmp_path, ("seamark.example",))
    authority.issue("server")
    tls_settings = {"tls_cert": str(authority.certificate), "tls_key": str(authority.key)}
    # The client accepts only these certificates, which are those of the server itself.
    server_certificates = Certificate(authority.certificate, authority.key).leaves()

    def run_join(url: str) -> tuple[tuple[str, int], ...]:
        """Create two tables, and return the joins that the plan of a query over both of them used."""
        fields = [
            {"id": 1, "name": "id", "required": False, "type": "long"},
            {"id": 2, "name": "name", "required": False, "type": "string"},
        ]
        with (
            closing(SeamarkClient(url, certificates=server_certificates)) as client,
            SqlSession(url, certificates=server_certificates) as session,
        ):
            for name in ("small", "large"):
                body = {"name": name, "schema": {"type": "struct", "fields": fields}}
                client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())
            for number in range(4):
                append(client, ("db", "large"), pa.table({"id": [number], "name": ["x"]}))
            append(client, ("db", "small"), pa.table({"id": [1], "name": ["y"]}))
            join_query = "SELECT count(*) FROM db.large a JOIN db.small b ON a.id = b.id WHERE b.name = 'y'"
            return session.explain(join_query).tables[0].joins

    async with run_server(tmp_path / "home", **tls_settings) as server:
        assert await asyncio.to_thread(run_join, server.url) == (("id", 1),)


def test_driver_of_a_spark_job_leaves_no_keys_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server is killed, the folder of the job stays."""
    request = JobRequest(
        "compaction",
        ("db",),
        "t",
        "http://127.0.0.1",
        token=None,
        folders=(),
        umask=0o022,
        storage={"s3.secret": "key"},
    )
    (tmp_path / REQUEST).write_bytes(msgspec.json.encode(request))
    job_requests: list[JobRequest] = []

    def run(job_request: JobRequest, *_: Any) -> JobAnswer:
        job_requests.append(job_request)
        assert not any(b"key" in path.read_bytes() for path in tmp_path.iterdir())
        return JobAnswer(totals={"files": 1})

    monkeypatch.setattr(spark_driver, "run", run)
    monkeypatch.setattr(spark_driver, "_end_with_server", lambda pipe: None)
    rewrites = SimpleNamespace(open_session_runner=lambda *_: nullcontext())
    monkeypatch.setattr(importlib, "import_module", lambda name: rewrites)
    monkeypatch.setattr(sys, "argv", ["driver", str(tmp_path)])
    spark_driver.main()
    assert job_requests == [request]
    assert msgspec.json.decode((tmp_path / ANSWER).read_bytes(), type=JobAnswer).totals == {"files": 1}
