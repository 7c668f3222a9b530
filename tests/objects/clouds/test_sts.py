"""Tests of temporary keys of AWS. A server records the requests, and answers as AWS documents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from seamark.formats.runtime.errors import ConfigError, RetryLater, StorageError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.clouds.aws_sts import assume_role, make_policy
from seamark.metaserver.objects.s3_storage import S3Storage
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import resolve_settings

ROLE = "arn:aws:iam::123456789012:role/tables"
TABLE = parse_location("s3://lake/wh/db/t-1")
_ANSWER = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIA1</AccessKeyId><SecretAccessKey>temporary</SecretAccessKey><SessionToken>token</SessionToken>
<Expiration>2126-11-29T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"""
_ERROR = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type><Code>{code}</Code>
<Message>a secret detail</Message></Error></ErrorResponse>"""


class Sts(HTTPServer):
    """A server that answers `AssumeRole` requests as AWS STS does, or with the error `error_code` if it is set."""

    error_code = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, str]] = []

    def make_settings(self) -> Settings:
        return Settings(
            s3_access_key_id="AKID",
            s3_secret_access_key="SECRET",
            s3_client_access="sts",
            s3_sts_role=ROLE,
            s3_sts_external_id="external",
            s3_sts_endpoint=f"http://127.0.0.1:{self.server_port}",
            storage_retries=0,
        )


class _Handler(BaseHTTPRequestHandler):
    server: Sts

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.requests.append({name: values[0] for name, values in parse_qs(body).items()})
        code = self.server.error_code
        data = (_ERROR.format(code=code) if code else _ANSWER).encode()
        self.send_response(403 if code else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def sts() -> Iterator[Sts]:
    with Sts() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="sts")
        thread.start()
        yield server
        server.shutdown()
        thread.join(30)


async def test_clients_get_keys_of_a_session_that_is_limited_to_the_table(sts: Sts) -> None:
    storage, settings = S3Storage(), sts.make_settings()
    config, credentials = await storage.grant_client_access(
        settings, TABLE, delegation=None, sign_path="s", refresh_path="v1/credentials"
    )
    assert credentials == [{"prefix": "s3://lake/wh/db/t-1/", "config": config}]
    assert (config["s3.access-key-id"], config["s3.secret-access-key"]) == ("ASIA1", "temporary")
    assert (config["s3.session-token"], config["client.refresh-credentials-endpoint"]) == ("token", "v1/credentials")
    year_2096_ms = 4_000_000_000_000
    assert int(config["s3.session-token-expires-at-ms"]) > year_2096_ms, "the answer of STS names the year 2126"
    assert "SECRET" not in json.dumps(config)
    assert "external" not in json.dumps(config)
    [request] = sts.requests
    assert (request["Action"], request["RoleArn"], request["ExternalId"]) == ("AssumeRole", ROLE, "external")
    assert request["DurationSeconds"] == "3600"
    assert json.loads(request["Policy"])["Statement"] == [
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": "arn:aws:s3:::lake/wh/db/t-1/*"},
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": "arn:aws:s3:::lake",
            "Condition": {"StringLike": {"s3:prefix": "wh/db/t-1/*"}},
        },
    ]
    await storage.grant_client_access(settings, TABLE, delegation="vended-credentials", sign_path="s")
    assert len(sts.requests) == 1
    await storage.grant_client_access(settings, TABLE, delegation=None, sign_path="s", may_write=lambda: True)
    allowed_actions = json.loads(sts.requests[-1]["Policy"])["Statement"][0]["Action"]
    assert {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"} < set(allowed_actions)
    config, credentials = await storage.grant_client_access(settings, TABLE, delegation="remote-signing", sign_path="s")
    assert not credentials
    assert "s3.access-key-id" not in config


def test_wildcards_in_a_location_open_no_other_folder() -> None:
    policy = make_policy("arn:aws-cn:iam::123456789012:role/r", parse_location("s3://lake/wh/t*$"), writable=False)
    statement = json.loads(policy)["Statement"][0]
    assert statement["Resource"] == "arn:aws-cn:s3:::lake/wh/t${*}${$}/*"
    with pytest.raises(StorageError, match=r"too long for a session policy .* s3_client_access = gateway"):
        make_policy(ROLE, parse_location("s3://lake/" + "d" * 1000), writable=True)


def test_refusals_of_sts_name_what_to_correct(sts: Sts) -> None:
    settings = sts.make_settings()
    for code, error, message in (
        ("AccessDenied", StorageError, "s3_sts_external_id is the external id of this policy"),
        ("ExpiredToken", StorageError, "they have expired or are wrong"),
        ("Throttling", RetryLater, "try again later"),
        ("MalformedPolicyDocument", StorageError, "with the code 'MalformedPolicyDocument'"),
    ):
        sts.error_code = code
        with pytest.raises(error, match=message) as refusal:
            assume_role(settings, TABLE, writable=False)
        assert "SECRET" not in str(refusal.value)
        assert "a secret detail" not in str(refusal.value)


def test_sts_needs_the_arn_of_a_role() -> None:
    for settings in ({"s3_client_access": "sts"}, {"s3_client_access": "sts", "s3_sts_role": "tables"}):
        with pytest.raises(ConfigError, match="s3_sts_role"):
            resolve_settings(settings, {})
