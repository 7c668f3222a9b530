"""Tests of the keys for one table that Azure and Google issue.

Azurite issues user-delegation keys, but has no SAS for folders. The emulator of Google Cloud Storage checks no tokens.
For these reasons, the tests compare the content of requests and keys with the documentation of the clouds.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from azure.core.credentials import AccessToken
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import ConfigError, RetryLater, StorageError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.clouds import azure_sas
from seamark.metaserver.objects.clouds.azure_sas import SasIssuer, compute_expiry_ms
from seamark.metaserver.objects.clouds.azure_storage import AzureStorage
from seamark.metaserver.objects.clouds.gcs_access import check_key, restrict_token
from seamark.metaserver.objects.clouds.gcs_storage import GoogleStorage
from seamark.metaserver.objects.clouds.issued_keys import IssuedKeys, KeyCache
from seamark.metaserver.objects.storages import compute_access_stamp, compute_keys_stamp
from seamark.metaserver.settings.settings import Settings
from tests.services.authority import Authority
from tests.services.clouds.azurite import ACCOUNT_KEY, HOST, run_azurite

TABLE = parse_location("abfss://data@account.dfs.core.windows.net/lake/db/t-1")
GOOGLE_TABLE = parse_location("gs://bucket/lake/db/it's t-1")


def test_sas_of_azure_opens_only_the_folder_of_the_table() -> None:
    clock = SimulatedClock(1)
    key = base64.b64encode(b"the key of the account").decode()
    settings = Settings(azure_account_key=key)
    for writable, permissions in ((False, "rl"), (True, "racwdl")):
        issued_sas = SasIssuer(clock).issue(settings, TABLE, writable=writable)
        sas = issued_sas.properties["adls.sas-token.account.dfs.core.windows.net"]
        assert issued_sas.properties["adls.sas-token"] == sas
        assert issued_sas.properties["adls.sas-token-expires-at-ms.account.dfs.core.windows.net"] == str(
            issued_sas.expires_ms
        )
        fields = parse_sas(sas)
        assert (fields["sr"], fields["sdd"], fields["sp"], fields["spr"]) == ("d", "3", permissions, "https")
        # A signature is valid for between half an hour and an hour.
        assert clock.now_ms() + 1800_000 <= issued_sas.expires_ms <= clock.now_ms() + 3600_000
        # The page "Create a service SAS" of Azure's documentation states the order of these fields.
        signed_fields = [
            *(fields["sp"], fields["st"], fields["se"], "/blob/account/data/lake/db/t-1", "", "", fields["spr"]),
            *(fields["sv"], "d", "", "", "", "", "", "", ""),
        ]
        assert fields["sig"] == sign_fields(key, signed_fields)
        assert key not in sas + repr(issued_sas)


def test_user_delegation_sas_of_azure_is_signed_with_the_key_that_azure_issued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    authority.issue("azurite")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    azurite_options = "--cert", str(authority.certificate), "--key", str(authority.key), "--oauth", "basic"
    with run_azurite(tmp_path, *azurite_options, scheme="https") as azurite:
        monkeypatch.setattr(azure_sas, "open_credential", lambda settings: _Login())
        issuer = SasIssuer(SystemClock())
        settings = Settings(azure_endpoint=azurite.endpoint, azure_client_id="application", storage_retries=0)
        table = parse_location(f"abfss://data@{HOST}/lake/t")
        sas = issuer.issue(settings, table, writable=False).properties[f"adls.sas-token.{HOST}"]
        fields = parse_sas(sas)
        # It covers the directory lake/t, whose depth is 2, allows to read and list, and is signed for blobs.
        assert (fields["sr"], fields["sdd"], fields["sp"], fields["sks"]) == ("d", "2", "rl", "b")
        assert (fields["skoid"], fields["sktid"]) == (_Login.OBJECT, _Login.TENANT)
        assert fields["se"] <= fields["ske"], "the signature must expire before its key"
        azurite.process.stop()
        # The key is valid for a day, so a further table needs no request.
        other_sas = issuer.issue(settings, parse_location(f"abfss://data@{HOST}/lake/u"), writable=True)
        assert parse_sas(other_sas.properties["adls.sas-token"])["sp"] == "racwdl"
        with pytest.raises(RetryLater, match="Azure did not answer for the account 'devstoreaccount1'"):
            SasIssuer(SystemClock()).issue(settings, table, writable=False)


async def test_clients_get_a_sas_unless_they_request_another_kind_of_access() -> None:
    storage, settings = AzureStorage(SimulatedClock(1)), Settings(azure_account_key=ACCOUNT_KEY)
    config, credentials = await storage.grant_client_access(settings, TABLE, delegation=None, sign_path="s")
    assert (config, credentials) == ({"adls.account-name": "account"}, [])
    settings = Settings(azure_account_key=ACCOUNT_KEY, azure_client_access="sas")
    config, credentials = await storage.grant_client_access(
        settings, TABLE, delegation="remote-signing", sign_path="s", refresh_path="v1/credentials"
    )
    assert (config, credentials) == ({"adls.account-name": "account"}, [])
    config, credentials = await storage.grant_client_access(
        settings, TABLE, delegation="vended-credentials", sign_path="s", refresh_path="v1/credentials"
    )
    assert credentials == [{"prefix": f"{TABLE}/", "config": config}]
    assert config["adls.refresh-credentials-endpoint"] == "v1/credentials"
    assert parse_sas(config["adls.sas-token"])["sp"] == "rl"
    assert ACCOUNT_KEY not in json.dumps(config)
    writer_config, _ = await storage.grant_client_access(
        settings, TABLE, delegation=None, sign_path="s", may_write=lambda: True
    )
    assert parse_sas(writer_config["adls.sas-token"])["sp"] == "racwdl"


def test_thread_waits_for_the_delegation_key_of_another_thread_for_a_limited_time() -> None:
    issuer, settings = SasIssuer(SimulatedClock(1)), Settings(azure_client_id="application", storage_timeout_s=0.01)
    with issuer._lock, pytest.raises(RetryLater, match="still waits for a user-delegation key"):
        issuer.issue(settings, TABLE, writable=False)


async def test_concurrent_answers_share_one_request_for_keys() -> None:
    cache, may_answer, requests = KeyCache(SimulatedClock(1)), threading.Event(), []

    def issue() -> IssuedKeys:
        requests.append(threading.current_thread().name)
        assert may_answer.wait(30)
        return IssuedKeys({"key": "a"}, expires_ms=1 << 50)  # In the distant future

    with cache.hold():
        answers = [asyncio.ensure_future(cache.get(("table",), issue)) for _ in range(3)]
        await asyncio.sleep(0)
        answers[0].cancel()
        may_answer.set()
        assert [keys.properties for keys in await asyncio.gather(*answers[1:])] == [{"key": "a"}] * 2
        assert await cache.get(("table",), issue)

        def refuse() -> IssuedKeys:
            raise StorageError("refused")

        with pytest.raises(StorageError, match="refused"):
            await cache.get(("other",), refuse)
        # A refusal is not stored.
        assert await cache.get(("other",), issue)
    assert len(requests) == 2
    assert all(name.startswith("cloud-keys") for name in requests)


def test_sas_issued_within_half_of_a_lifetime_expire_at_the_same_time() -> None:
    settings = Settings(cloud_keys_s=3600)
    assert {compute_expiry_ms(settings, now_ms) for now_ms in (0, 1, 1_799_999)} == {3_600_000}
    assert compute_expiry_ms(settings, 1_800_000) == 5_400_000


def test_client_loads_a_table_again_before_its_keys_end() -> None:
    assert compute_keys_stamp(Settings(), 0) == ""
    # Answers contain the same SAS for half of its lifetime of 3600 s, so it is always valid for the other half.
    sas_settings = Settings(azure_client_access="sas", cloud_keys_s=3600)
    assert (
        compute_keys_stamp(sas_settings, 0)
        == compute_keys_stamp(sas_settings, 1_799_999)
        != compute_keys_stamp(sas_settings, 1_800_000)
    )
    # A client may reuse an answer with a token for 60 s (`REUSE_MS`).
    token_settings = Settings(gcs_client_access="token")
    assert (
        compute_keys_stamp(token_settings, 0)
        == compute_keys_stamp(token_settings, 59_999)
        != compute_keys_stamp(token_settings, 60_000)
    )


@pytest.mark.parametrize("settings", [Settings(azure_client_access="sas"), Settings(gcs_client_access="token")])
def test_access_stamps_of_answers_with_and_without_keys_differ(settings: Settings) -> None:
    stamp_with_keys = compute_access_stamp(settings, None)
    assert stamp_with_keys == compute_access_stamp(settings, "remote-signing, vended-credentials")
    assert stamp_with_keys != compute_access_stamp(settings, "remote-signing")
    assert (
        stamp_with_keys != compute_access_stamp(Settings(), None) == compute_access_stamp(Settings(), "remote-signing")
    )


@pytest.mark.parametrize(
    "setting",
    [
        *("azure_endpoint", "azure_account_key", "azure_client_id", "gcs_endpoint", "gcs_service_account_key"),
        *("s3_sts_role", "s3_sts_external_id", "s3_sts_endpoint"),
    ],
)
def test_access_stamp_changes_with_the_credentials_of_the_server(setting: str) -> None:
    changes: dict[str, Any] = {setting: "other"}
    assert compute_access_stamp(Settings(**changes), None) != compute_access_stamp(Settings(), None)


def test_token_of_google_is_restricted_to_the_folder_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with _run_google() as google:
        settings = google.make_settings(monkeypatch)
        for writable, role in ((False, "objectViewer"), (True, "objectUser")):
            restricted_token = restrict_token(settings, GOOGLE_TABLE, writable=writable)
            assert restricted_token.properties["gcs.oauth2.token"] == "restricted"
            assert int(restricted_token.properties["gcs.oauth2.token-expires-at"]) == restricted_token.expires_ms
            exchange = google.requests[-1]
            assert exchange["subject_token"] == "the server's token"
            assert exchange["grant_type"] == "urn:ietf:params:oauth:grant-type:token-exchange"
            assert json.loads(unquote(exchange["options"])) == {
                "accessBoundary": {
                    "accessBoundaryRules": [
                        {
                            "availableResource": "//storage.googleapis.com/projects/_/buckets/bucket",
                            "availablePermissions": [f"inRole:roles/storage.{role}"],
                            "availabilityCondition": {
                                "expression": (
                                    'resource.name.startsWith("projects/_/buckets/bucket/objects/lake/db/it\'s t-1/") '
                                    "|| api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
                                    '.startsWith("lake/db/it\'s t-1/")'
                                )
                            },
                        }
                    ]
                }
            }


async def test_tokens_of_google_are_reused_for_a_table_and_a_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with _run_google() as google:
        settings, storage = google.make_settings(monkeypatch), GoogleStorage()
        config, credentials = await storage.grant_client_access(
            settings, GOOGLE_TABLE, delegation=None, sign_path="s", refresh_path="v1/credentials"
        )
        assert credentials == [{"prefix": f"{GOOGLE_TABLE}/", "config": config}]
        assert config["gcs.oauth2.refresh-credentials-endpoint"] == "v1/credentials"
        request_count = len(google.requests)
        await storage.grant_client_access(settings, GOOGLE_TABLE, delegation=None, sign_path="s")
        assert len(google.requests) == request_count
        await storage.grant_client_access(
            settings, GOOGLE_TABLE, delegation=None, sign_path="s", may_write=lambda: True
        )
        assert len(google.requests) > request_count


def test_refusals_of_google_do_not_show_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    with _run_google() as google:
        settings = google.make_settings(monkeypatch)
        google.status = 400
        with pytest.raises(StorageError, match="check the server's service account") as refusal:
            restrict_token(settings, GOOGLE_TABLE, writable=False)
        assert "PRIVATE" not in str(refusal.value)
        assert "secret answer" not in str(refusal.value)
    with pytest.raises(RetryLater, match="Google did not answer"):
        restrict_token(settings, GOOGLE_TABLE, writable=False)
    with pytest.raises(StorageError, match="no usable credentials of Google"):
        restrict_token(Settings(gcs_service_account_key='{"type": "service_account"}'), GOOGLE_TABLE, writable=False)
    settings = Settings(gcs_service_account_key='{"private_key": "a secret')
    with pytest.raises(ConfigError, match="gcs_service_account_key is not a JSON object") as config_error:
        check_key(settings)
    assert "a secret" not in str(config_error.value)


class _Login:
    """A login at Azure. Azurite accepts its token without a check of the signature."""

    OBJECT, TENANT = "23657296-5cd5-45b0-a809-d972a7f4dfe1", "dd0d0df1-06c3-436c-8034-4b9a153097ce"

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        now_s = SystemClock().now_ms() // 1000
        claims = {
            "aud": "https://storage.azure.com",
            "iss": f"https://sts.windows.net/{self.TENANT}/",
            "oid": self.OBJECT,
            "tid": self.TENANT,
            "iat": now_s,
            "nbf": now_s - 60,
            "exp": now_s + 3600,
        }
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        token = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        return AccessToken(f"{token}.signature", now_s + 3600)


class _Google(HTTPServer):
    """Google's endpoints that issue and exchange tokens of a service account.

    Attributes:
        status: The status of every answer.
        requests: The received forms.
    """

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _GoogleHandler)
        self.requests: list[dict[str, str]] = []

    def make_settings(self, monkeypatch: pytest.MonkeyPatch) -> Settings:
        """Return the settings of a server whose service account uses these endpoints."""
        url = f"http://127.0.0.1:{self.server_port}"
        monkeypatch.setattr("google.auth.downscoped._STS_TOKEN_URL_PATTERN", url + "/exchange/{}")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {
            "type": "service_account",
            "client_email": "server@project.iam.gserviceaccount.com",
            "private_key": pem.decode(),
            "token_uri": f"{url}/token",
        }
        return Settings(gcs_service_account_key=json.dumps(account), gcs_client_access="token")


class _GoogleHandler(BaseHTTPRequestHandler):
    server: _Google

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.requests.append({name: values[0] for name, values in parse_qs(body).items()})
        token = "restricted" if self.path.startswith("/exchange/") else "the server's token"
        answer: dict[str, object] = {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}
        if self.server.status != 200:
            answer = {"error": "invalid_grant", "error_description": "secret answer"}
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def _run_google() -> Iterator[_Google]:
    with _Google() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="google")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)


def parse_sas(sas: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(sas).items()}


def sign_fields(key: str, fields: list[str]) -> str:
    digest = hmac.digest(base64.b64decode(key), "\n".join(fields).encode(), hashlib.sha256)
    return base64.b64encode(digest).decode()
