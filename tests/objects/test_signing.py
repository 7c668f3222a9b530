"""Tests of remote signing: signed requests succeed on a real S3 server, and nothing outside the table is signed."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, Forbidden, StorageError
from seamark.metaserver.objects import credentials
from seamark.metaserver.objects.signing import choose_cache_control, sign_s3_request
from seamark.metaserver.settings.settings import Settings
from tests.services.s3 import S3

NOW_MS = 1_795_000_000_000
"""The time of the signatures, 2026-11-18T11:06:40Z."""
TABLE = "s3://lake/wh/t1-abc"
LOCAL_SETTINGS = Settings(
    s3_endpoint="http://store:9000",
    s3_access_key_id="AKID",
    s3_secret_access_key="SECRET",
    s3_client_access="signing",
)
VIRTUAL_HOST_SETTINGS = Settings(
    s3_endpoint="http://store:9000",
    s3_access_key_id="AKID",
    s3_secret_access_key="SECRET",
    s3_client_access="signing",
    s3_path_style=False,
)
AWS_SETTINGS = Settings(s3_access_key_id="AKID", s3_secret_access_key="SECRET", s3_client_access="signing")


def build_sign_request(
    method: str, uri: str, headers: Mapping[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    wrapped_headers = {name: [value] for name, value in (headers or {}).items()}
    return {"method": method, "uri": uri, "region": "us-east-1", "headers": wrapped_headers, **fields}


def sign_request(
    request: dict[str, Any], *, settings: Settings = LOCAL_SETTINGS, writable: bool = True
) -> dict[str, Any]:
    return sign_s3_request(request, table_location=TABLE, writable=writable, settings=settings, now_ms=NOW_MS)


def build_delete_body(*keys: str) -> str:
    objects = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{objects}<Quiet>true</Quiet></Delete>'


def build_md5_header(body: str) -> dict[str, str]:
    """Return a header with a checksum of the body, which S3 requires for deletes of several objects."""
    return {"Content-MD5": base64.b64encode(hashlib.md5(body.encode()).digest()).decode()}


class SigningClient:
    """A client that signs through `sign`, like Iceberg's Java client, and sends the requests to the real server."""

    def __init__(self, s3: S3, bucket: str, session: aiohttp.ClientSession) -> None:
        self.base = f"{s3.endpoint}/{bucket}"
        self.session = session
        self.settings = Settings(
            s3_endpoint=s3.endpoint,
            s3_region=s3.region,
            s3_access_key_id=s3.access_key,
            s3_secret_access_key=s3.secret_key,
            s3_client_access="signing",
        )
        self.table = f"s3://{bucket}/wh/t1-abc"

    def sign(self, method: str, uri: str, headers: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        request = build_sign_request(method, uri, headers, **fields)
        now_ms = SystemClock().now_ms()
        return sign_s3_request(request, table_location=self.table, writable=True, settings=self.settings, now_ms=now_ms)

    async def send(
        self, method: str, answer: dict[str, Any], body: bytes = b"", extra_headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        headers = {name: ", ".join(values) for name, values in answer["headers"].items()}
        async with self.session.request(
            method, URL(answer["uri"], encoded=True), headers={**headers, **(extra_headers or {})}, data=body or None
        ) as response:
            return response.status, await response.read()

    async def call(
        self, method: str, tail: str, body: bytes = b"", headers: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, bytes]:
        return await self.send(method, self.sign(method, self.base + tail, headers, **options), body)


@pytest.fixture
async def client(s3: S3, s3_bucket: str) -> Any:
    async with aiohttp.ClientSession(skip_auto_headers=("Content-Type",)) as session:
        yield SigningClient(s3, s3_bucket, session)


async def test_client_without_keys_writes_reads_lists_and_deletes(client: SigningClient) -> None:
    key = "/wh/t1-abc/data/" + quote("dt=2026-01-01/p=a%2Fb/ü x.parquet", safe="/")
    headers = {"Content-Type": "application/x-parquet", "amz-sdk-invocation-id": "1", "User-Agent": "java"}
    assert (await client.call("PUT", key, b"rows", headers))[0] == 200
    assert await client.call("GET", key) == (200, b"rows")
    assert (await client.call("HEAD", key))[0] == 200
    status, listing = await client.call(
        "GET", "?list-type=2&prefix=wh%2Ft1-abc%2F&encoding-type=url&max-keys=10&delimiter="
    )
    assert status == 200
    assert b"dt=2026-01-01" in listing
    assert (await client.call("DELETE", key))[0] == 204
    assert (await client.call("GET", key))[0] == 404


async def test_signature_of_a_read_is_valid_for_every_range(client: SigningClient) -> None:
    await client.call("PUT", "/wh/t1-abc/x", b"0123456789")
    answer = client.sign("GET", client.base + "/wh/t1-abc/x", {"Range": "bytes=0-1"})
    for first_byte in (0, 4, 8):
        status, part = await client.send("GET", answer, extra_headers={"Range": f"bytes={first_byte}-{first_byte + 1}"})
        assert (status, part) == (206, b"0123456789"[first_byte : first_byte + 2])


async def test_multipart_uploads_are_signed_step_by_step(client: SigningClient) -> None:
    status, upload_xml = await client.call("POST", "/wh/t1-abc/big?uploads")
    assert status == 200
    upload_id = upload_xml.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
    part = b"x" * (5 << 20)
    answer = client.sign("PUT", f"{client.base}/wh/t1-abc/big?partNumber=1&uploadId={upload_id}")
    async with client.session.put(
        URL(answer["uri"], encoded=True), headers={k: v[0] for k, v in answer["headers"].items()}, data=io.BytesIO(part)
    ) as response:
        assert response.status == 200
        etag = response.headers["ETag"]
    complete_body = (
        f"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
    )
    assert (await client.call("POST", f"/wh/t1-abc/big?uploadId={upload_id}", complete_body.encode()))[0] == 200
    assert await client.call("GET", "/wh/t1-abc/big") == (200, part)


async def test_several_objects_are_deleted_only_with_the_signed_body(client: SigningClient) -> None:
    for name in "abc":
        await client.call("PUT", f"/wh/t1-abc/{name}", b"x")
    body = build_delete_body("wh/t1-abc/a", "wh/t1-abc/b")
    answer = client.sign("POST", client.base + "?delete", body=body)
    swapped_body = build_delete_body("wh/t1-abc/c", "wh/t1-abc/b")
    status, text = await client.send("POST", answer, swapped_body.encode(), build_md5_header(swapped_body))
    assert status in (400, 403), text
    assert b"ContentSHA256Mismatch" in text or b"SignatureDoesNotMatch" in text, (
        "the request was refused for another reason"
    )
    assert (await client.call("GET", "/wh/t1-abc/c"))[0] == 200
    status, text = await client.send("POST", answer, body.encode(), build_md5_header(body))
    assert status == 200, text
    assert [(await client.call("GET", f"/wh/t1-abc/{name}"))[0] for name in "abc"] == [404, 404, 200]


async def test_signed_request_cannot_be_changed(client: SigningClient, s3: S3) -> None:
    await client.call("PUT", "/wh/t1-abc/x", b"mine")
    direct_client = s3.client()
    direct_client.put_object(Bucket=client.base.rpartition("/")[2], Key="wh/t2/x", Body=b"theirs")
    direct_client.close()
    answer = client.sign("GET", client.base + "/wh/t1-abc/x")
    assert (await client.send("GET", answer))[0] == 200
    assert (await client.send("GET", {**answer, "uri": client.base + "/wh/t2/x"}))[0] == 403
    assert (await client.send("DELETE", answer))[0] == 403
    assert (await client.send("GET", {**answer, "uri": answer["uri"] + "?tagging"}))[0] == 403
    put_request = client.sign("PUT", client.base + "/wh/t1-abc/y")
    source = {"x-amz-copy-source": client.base.rpartition("/")[2] + "/wh/t2/x"}
    assert (await client.send("PUT", put_request, b"", source))[0] == 403
    assert (await client.call("GET", "/wh/t1-abc/y"))[0] == 404


def test_signature_equals_that_of_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"x-amz-content-sha256": hashlib.sha256(b"body").hexdigest(), "x-amz-meta-a": "1", "content-type": "t"}
    uri = "http://store:9000/lake/wh/t1-abc/a%20b%2Bc?partNumber=1&uploadId=abc"
    answer = sign_request(build_sign_request("PUT", uri, {**headers, "x-amz-date": "20261118T110640Z"}))
    botocore_request = AWSRequest("PUT", uri, headers=headers, data=b"body")
    botocore_request.context["timestamp"] = "20261118T110640Z"
    botocore_request.headers["X-Amz-Date"] = "20261118T110640Z"
    auth = S3SigV4Auth(Credentials("AKID", "SECRET"), "s3", "us-east-1")
    signature = auth.signature(
        auth.string_to_sign(botocore_request, auth.canonical_request(botocore_request)), botocore_request
    )
    assert answer["headers"]["Authorization"][0].endswith(f"Signature={signature}")


def test_answer_has_the_headers_of_the_request_and_of_the_signature() -> None:
    request_headers = {"Range": "bytes=0-9", "User-Agent": "java", "amz-sdk-retry": "1", "Authorization": "old"}
    answer = sign_request(build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x", request_headers))
    assert answer["uri"] == "http://store:9000/lake/wh/t1-abc/x"
    headers = answer["headers"]
    assert headers["Range"] == ["bytes=0-9"]
    assert headers["X-Amz-Content-SHA256"] == ["UNSIGNED-PAYLOAD"]
    assert headers["X-Amz-Date"] == ["20261118T110640Z"]
    assert headers["Authorization"][0].startswith(
        "AWS4-HMAC-SHA256 Credential=AKID/20261118/us-east-1/s3/aws4_request, "
    )
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date," in headers["Authorization"][0]
    assert "SECRET" not in str(answer)


def test_only_signatures_of_reads_may_be_cached() -> None:
    assert [choose_cache_control(build_sign_request(m, "")) for m in ("GET", "head", "PUT", "POST", "DELETE")] == [
        *("private", "private"),
        *("no-cache", "no-cache", "no-cache"),
    ]


REQUESTS_INSIDE_THE_TABLE = [
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/c=%23a%3Fb/x", {}),
    (LOCAL_SETTINGS, "GET", "http://STORE:9000/lake/wh/t1-abc/x?x-id=GetObject", {"Host": "store:9000"}),
    (LOCAL_SETTINGS, "HEAD", "http://store:9000/lake/wh/t1-abc/a%2Fb", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-acl": "private", "x-amz-tagging": "a=b"}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-copy-source": "lake/wh/t1-abc/y"}),
    (
        LOCAL_SETTINGS,
        "PUT",
        "http://store:9000/lake/wh/t1-abc/x",
        {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"},
    ),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x?tagging", {"x-amz-checksum-crc32": "AAAAAA=="}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://lake.store:9000/wh/t1-abc/x", {}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/x", {}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://lake.store:9000/?list-type=2&prefix=wh/t1-abc/data/", {}),
    (AWS_SETTINGS, "GET", "https://lake.s3.us-east-1.amazonaws.com/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://s3.us-east-1.amazonaws.com/lake/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://lake.s3.amazonaws.com/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://lake.s3.dualstack.us-east-1.amazonaws.com:443/wh/t1-abc/x", {}),
]


@pytest.mark.parametrize(("settings", "method", "uri", "headers"), REQUESTS_INSIDE_THE_TABLE)
def test_requests_inside_the_table_are_signed(
    settings: Settings, method: str, uri: str, headers: dict[str, str]
) -> None:
    assert "Authorization" in sign_request(build_sign_request(method, uri, headers), settings=settings)["headers"]


REQUESTS_OUTSIDE_THE_TABLE = [
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t2/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abcd/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/other/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/../t2/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/%2e%2e/t2/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc%2F..%2Ft2/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/%252e%252e/t2/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc//x", {}),
    (LOCAL_SETTINGS, "GET", "http://evil:9000/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store.evil.com:9000/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "https://store:9000/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9001/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://lake.store:9000/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/x", {"Host": "secrets.store:9000"}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://other.store:9000/wh/t1-abc/x", {}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://lake.evil:9000/wh/t1-abc/x", {}),
    (VIRTUAL_HOST_SETTINGS, "GET", "http://lakestore:9000/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "http://lake.s3.us-east-1.amazonaws.com/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://lake.s3.eu-west-1.amazonaws.com/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://lake.s3.us-east-1.amazonaws.com.evil.com/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "GET", "https://evil.com/lake/wh/t1-abc/x", {}),
    (AWS_SETTINGS, "POST", "https://sts.us-east-1.amazonaws.com/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake", {}),
    (LOCAL_SETTINGS, "HEAD", "http://store:9000/lake", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake", {}),
    (LOCAL_SETTINGS, "DELETE", "http://store:9000/lake", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?policy", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake?policy", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?list-type=2", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?list-type=2&prefix=", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?list-type=2&prefix=wh%2Ft1-abc", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?list-type=2&prefix=wh%2Ft2%2F", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/other?list-type=2&prefix=wh%2Ft1-abc%2F", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?prefix=wh%2Ft1-abc%2F&versions", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake?prefix=wh%2Ft1-abc%2F&uploads", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x?acl", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/x?acl", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x?%61cl", {}),
    (LOCAL_SETTINGS, "DELETE", "http://store:9000/lake/wh/t1-abc/x?versionId=1", {}),
    (LOCAL_SETTINGS, "POST", "http://store:9000/lake/wh/t1-abc/x", {}),
    (LOCAL_SETTINGS, "POST", "http://store:9000/lake/wh/t1-abc/x?restore", {}),
    (LOCAL_SETTINGS, "POST", "http://store:9000/lake/wh/t1-abc/x?select&select-type=2", {}),
    (LOCAL_SETTINGS, "GET", "http://store:9000/lake/wh/t1-abc/x?X-Amz-Expires=604800", {}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-acl": "public-read"}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"X-Amz-Grant-Read": "uri=all"}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-copy-source": "/lake/wh/t2/x"}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-copy-source": "lake/wh/t1-abc/..%2Ft2/x"}),
    (
        LOCAL_SETTINGS,
        "PUT",
        "http://store:9000/lake/wh/t1-abc/x",
        {"x-amz-copy-source": "arn:aws:s3:::lake/wh/t1-abc/x"},
    ),
    (
        LOCAL_SETTINGS,
        "PUT",
        "http://store:9000/lake/wh/t1-abc/x",
        {"x-amz-copy-source": "lake/wh/t1-abc/x?versionId=1"},
    ),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-security-token": "t"}),
    (LOCAL_SETTINGS, "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-website-redirect-location": "http://evil"}),
    (LOCAL_SETTINGS, "DELETE", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-bypass-governance-retention": "true"}),
]


@pytest.mark.parametrize(("settings", "method", "uri", "headers"), REQUESTS_OUTSIDE_THE_TABLE)
def test_requests_outside_the_table_are_not_signed(
    settings: Settings, method: str, uri: str, headers: dict[str, str]
) -> None:
    with pytest.raises(Forbidden):
        sign_request(build_sign_request(method, uri, headers), settings=settings)


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_reader_gets_no_signature_for_a_write(method: str) -> None:
    with pytest.raises(Forbidden, match="write access"):
        sign_request(build_sign_request(method, "http://store:9000/lake/wh/t1-abc/x?uploads"), writable=False)
    sign_request(build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), writable=False)


MALFORMED_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "region"),
    ({"region": "us-east-1", "uri": "http://store:9000/lake/wh/t1-abc/x", "headers": {}}, "method"),
    ({"region": "us-east-1", "method": "GET", "uri": 5, "headers": {}}, "uri"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x", region="eu-west-1"), "region"),
    (build_sign_request("PATCH", "http://store:9000/lake/wh/t1-abc/x"), "PATCH"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x", provider="gcs"), "provider"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x", body=5), "body"),
    ({**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": None}, "headers"),
    ({**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": {"a": "b"}}, "list of strings"),
    ({**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": {"a": [1]}}, "list of strings"),
    (
        {**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": {"a b": ["1"]}},
        "name of a header",
    ),
    (
        {**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": {"a": ["1\r\nx: y"]}},
        "control character",
    ),
    ({**build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"), "headers": {"a": ["1"], "A": ["2"]}}, "twice"),
    (
        {
            **build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x"),
            "headers": {f"h{n}": [] for n in range(200)},
        },
        "headers",
    ),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/a b"), "percent-encoded"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/é"), "percent-encoded"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/a+b"), "%2B"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/%ff"), "UTF-8"),
    (build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x#y"), "fragment"),
    (build_sign_request("GET", "http://user@store:9000/lake/wh/t1-abc/x"), "user information"),
    (build_sign_request("GET", "http://store:99999/lake/wh/t1-abc/x"), "malformed"),
    (build_sign_request("GET", "http://[store/lake/wh/t1-abc/x"), "malformed"),
    (build_sign_request("GET", "http://store:9000/lake%2Fwh/t1-abc/x"), "bucket"),
    (build_sign_request("GET", "http://store:9000.evil.com/lake/wh/t1-abc/x"), "malformed"),
    (build_sign_request("GET", "http://store:9000//lake/wh/t1-abc/x"), "single '/'"),
    (build_sign_request("GET", "http://store:9000/lake?prefix=wh/t1-abc/&prefix=wh/t2/"), "twice"),
    (build_sign_request("GET", "http://store:9000/lake?prefix=wh/t1-abc/;prefix=wh/t2/"), "';'"),
    (build_sign_request("PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-date": "yesterday"}), "x-amz-date"),
    (
        build_sign_request("PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-date": "20361121T060640Z"}),
        "set the clock",
    ),
    (
        build_sign_request("PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-content-sha256": "x"}),
        "x-amz-content-sha256",
    ),
    (
        build_sign_request(
            "PUT", "http://store:9000/lake/wh/t1-abc/x", {"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}
        ),
        "signed remotely",
    ),
]


@pytest.mark.parametrize(("request_", "fault"), MALFORMED_REQUESTS)
def test_error_of_a_malformed_signing_request_names_its_fault(request_: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadRequest) as error:
        sign_request(request_)
    assert fault in error.value.message


KEY = "wh/t1-abc/x"
REFUSED_DELETE_BODIES: list[tuple[str | None, type[Exception]]] = [
    (None, BadRequest),
    ("", BadRequest),
    ("no xml", BadRequest),
    ("<Delete/>", BadRequest),
    ("<Remove/>", BadRequest),
    (build_delete_body("wh/t2/x"), Forbidden),
    (build_delete_body(KEY, "wh/t2/x"), Forbidden),
    (build_delete_body("wh/t1-abc/../t2/x"), Forbidden),
    (build_delete_body("wh/t1-abc"), Forbidden),
    (build_delete_body(" " + KEY), Forbidden),
    (build_delete_body("&#47;" + KEY), Forbidden),
    (build_delete_body("wh/t1-abc/&#46;&#46;/t2/x"), Forbidden),
    (f"<Delete><Object><Key>{KEY}</Key><Key>wh/t2/x</Key></Object></Delete>", BadRequest),
    (f"<Delete><Object><Key>{KEY}<b/></Key></Object></Delete>", BadRequest),
    (f"<Delete><Object><Key>{KEY}</Key><VersionId>1</VersionId></Object></Delete>", BadRequest),
    (f"<Delete><Object><key>{KEY}</key></Object></Delete>", BadRequest),
    ("<Delete><Object><Key/></Object></Delete>", BadRequest),
    (f"<Delete><Object><Key a='b'>{KEY}</Key></Object></Delete>", BadRequest),
    (f"<Delete><Object xmlns='urn:x'><Key>{KEY}</Key></Object></Delete>", BadRequest),
    (f"<Delete><!-- --><Object><Key>{KEY}</Key></Object></Delete>", BadRequest),
    (f"<Delete><Object><Key><![CDATA[{KEY}]]></Key></Object></Delete>", BadRequest),
    (f"<!DOCTYPE d [<!ENTITY e 'wh/t2/x'>]><Delete><Object><Key>&e;</Key></Object></Delete>{KEY}", BadRequest),
    (f"<?xml version='1.0' encoding='utf-7'?>{build_delete_body(KEY)}", BadRequest),
    (f"<?other?>{build_delete_body(KEY)}", BadRequest),
    (build_delete_body(*(f"{KEY}{number}" for number in range(1001))), BadRequest),
    (build_delete_body(KEY + "\ud800"), BadRequest),
    ("<Delete>" + "<Object>" * 50_000, BadRequest),
    ("x" * (9 << 20), BadRequest),
]


@pytest.mark.parametrize(("body", "error"), REFUSED_DELETE_BODIES, ids=range(len(REFUSED_DELETE_BODIES)))
def test_delete_body_with_objects_outside_the_table_is_not_signed(body: str | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        sign_request(build_sign_request("POST", "http://store:9000/lake?delete", body=body))


@pytest.mark.parametrize(
    "body",
    [
        build_delete_body(KEY),
        '<?xml version="1.0" encoding="UTF-8"?>\n' + build_delete_body(KEY),
        build_delete_body("wh/t1-abc/a&amp;b"),
    ],
)
def test_delete_inside_the_table_is_signed_with_the_hash_of_its_body(body: str) -> None:
    answer = sign_request(build_sign_request("POST", "http://store:9000/lake?delete", {"Content-MD5": "x"}, body=body))
    assert answer["headers"]["X-Amz-Content-SHA256"] == [hashlib.sha256(body.encode()).hexdigest()]
    assert "content-md5;host" in answer["headers"]["Authorization"][0]
    with pytest.raises(Forbidden, match="hash"):
        sign_request(
            build_sign_request(
                "POST", "http://store:9000/lake?delete", {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, body=body
            )
        )


def test_nothing_is_signed_for_local_tables_or_when_signing_is_disabled() -> None:
    request = build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x")
    with pytest.raises(BadRequest, match="not on S3"):
        sign_s3_request(request, table_location="file:///wh/t", writable=True, settings=LOCAL_SETTINGS, now_ms=NOW_MS)
    with pytest.raises(Forbidden, match="s3_client_access"):
        sign_request(request, settings=Settings(s3_endpoint="http://store:9000"))


def test_keys_come_from_the_environment_if_the_settings_have_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(s3_endpoint="http://store:9000", s3_client_access="signing")
    request = build_sign_request("GET", "http://store:9000/lake/wh/t1-abc/x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-token")
    credentials._make_chain.cache_clear()
    headers = sign_request(request, settings=settings)["headers"]
    assert "Credential=FROM-ENV/" in headers["Authorization"][0]
    assert "x-amz-security-token" in headers["Authorization"][0]
    assert headers["X-Amz-Security-Token"] == ["the-token"]
    monkeypatch.setattr(credentials, "_make_chain", lambda: None)
    with pytest.raises(StorageError, match="s3_access_key_id"):
        sign_request(request, settings=settings)


def test_repr_of_credentials_contains_no_secret() -> None:
    assert "SECRET" not in repr(credentials.load_server_keys(LOCAL_SETTINGS))


_PREFIX_OF_TABLE = "prefix=wh%2Ft1-abc%2F"
_LISTING_URL = "http://store:9000/lake?list-type=2&"
_UPLOAD_URL = "http://store:9000/lake/wh/t1-abc/x?partNumber=1&uploadId="


@pytest.mark.parametrize(
    "uri",
    [
        *(
            f"{_LISTING_URL}prefix={prefix}"
            for prefix in (
                *("wh/t1-abc/../", "wh/t1-abc/..", "wh/t1-abc/../t2/", "wh/t1-abc/./", "wh/t1-abc/data/../../t2/"),
                *("wh%2Ft1-abc%2F..%2F", "wh/t1-abc/%2e%2e/", "wh/t1-abc/%252e%252e/t2/", "wh/t1-abc/%25252e%25252e/"),
                *("wh/t1-abc/..%5Ct2", "wh/t1-abc/%5C..%5Ct2", "wh/t1-abc/%255C..%255Ct2", "wh/t1-abc/..%252Ft2"),
                *("wh/t1-abc/%00", "wh/t1-abc/a%0A", "wh/t1-abc//../t2", "wh/t1-abc/x/%2E./%2E%2E/t2"),
            )
        ),
        f"http://store:9000/lake?{_PREFIX_OF_TABLE}..%2Ft2%2F",
        f"http://store:9000/lake?{_PREFIX_OF_TABLE}&marker=wh/t2/",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&start-after=wh/t1-abc/../t2/",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&start-after=wh/t2/a",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&continuation-token=../t2/x",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&continuation-token=%252e%252e%252Ft2",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&delimiter=..",
        f"{_LISTING_URL}{_PREFIX_OF_TABLE}&encoding-type=../x",
        f"{_UPLOAD_URL}..%2F..%2Ft2",
        f"{_UPLOAD_URL}%252e%252e%252Ft2",
        "http://store:9000/lake/wh/t1-abc/x?versionId=../../t2/y",
    ],
)
def test_no_spelling_of_a_dot_segment_is_signed(uri: str) -> None:
    method = "PUT" if "uploadId" in uri else "GET"
    with pytest.raises((Forbidden, BadRequest)):
        sign_request(build_sign_request(method, uri))


@pytest.mark.parametrize(
    "query",
    [
        *("&delimiter=/", "&delimiter=", "&start-after=wh/t1-abc/data/a.parquet", "&max-keys=1000&fetch-owner=true"),
        *("&continuation-token=1a%2F%2Fb%2BQ%3D%3D", "&encoding-type=url", "&start-after="),
    ],
)
def test_continued_listings_inside_the_table_are_signed(query: str) -> None:
    assert (
        "Authorization"
        in sign_request(build_sign_request("GET", f"{_LISTING_URL}{_PREFIX_OF_TABLE}{query}"))["headers"]
    )
    assert (
        "Authorization"
        in sign_request(build_sign_request("GET", f"{_LISTING_URL}prefix=wh/t1-abc/data/dt%3D2026..{query}"))["headers"]
    )


@pytest.mark.parametrize("max_keys", ["blah", "-1", "1.5", ""])
def test_listing_with_an_invalid_number_of_keys_is_a_bad_request(max_keys: str) -> None:
    with pytest.raises(BadRequest, match="not a number of keys"):
        sign_request(build_sign_request("GET", f"{_LISTING_URL}{_PREFIX_OF_TABLE}&max-keys={max_keys}"))


def test_copy_sources_and_deletes_with_dot_segments_are_not_signed() -> None:
    target = "http://store:9000/lake/wh/t1-abc/x"
    for source in ("/lake/wh/t1-abc/../t2/y", "lake/wh/t1-abc/%2e%2e/t2/y", "lake/wh/t1-abc/%252e%252e/t2/y"):
        with pytest.raises(Forbidden):
            sign_request(build_sign_request("PUT", target, {"x-amz-copy-source": source}))
    for key in ("wh/t1-abc/../t2/y", "wh/t1-abc/%2e%2e/t2/y", "wh/t1-abc/..&#47;t2/y", "wh/t1-abc/&#46;&#46;/t2/y"):
        with pytest.raises(Forbidden):
            sign_request(build_sign_request("POST", "http://store:9000/lake?delete", body=build_delete_body(key)))
