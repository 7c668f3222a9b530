"""Tests that the keys of one table reach no object of another table, with any operation, spelling or forgery."""

from __future__ import annotations

import http.client
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.gateway.rig import GatewayRig, Keys

SECRET = b"bytes of another table"
_numbers = itertools.count()


@pytest.fixture
def victim_keys(rig: GatewayRig) -> Keys:
    keys = rig.create_table(f"victim{next(_numbers)}")
    client = keys.make_client()
    client.put_object(Bucket=keys.bucket, Key=keys.prefix + "data/secret", Body=SECRET)
    client.close()
    return keys


@pytest.fixture
def own_keys(rig: GatewayRig) -> Keys:
    return rig.create_table(f"own{next(_numbers)}")


@pytest.fixture
def client(own_keys: Keys) -> Iterator[Any]:
    client = own_keys.make_client()
    client.put_object(Bucket=own_keys.bucket, Key=own_keys.prefix + "data/o", Body=b"own")
    yield client
    client.close()


def _call_and_describe(call: Any, **arguments: Any) -> str:
    """Return the error code of a call, or OK and the bytes that the call returns."""
    try:
        answer = call(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return "OK" if "Body" not in answer else f"OK {answer['Body'].read()!r}"


def send_raw(
    keys: Keys, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, bytes]:
    """Send a request whose target is not normalised, and return (status, body) of the answer.

    The request has a valid signature of exactly this target.
    """
    request = AWSRequest(method, keys.endpoint + target, data=body, headers=headers or {})
    request.headers["Host"] = urlsplit(keys.endpoint).netloc
    S3SigV4Auth(Credentials(keys.access_key, keys.secret, keys.token), "s3", keys.region).add_auth(request)
    connection = http.client.HTTPConnection(urlsplit(keys.endpoint).netloc, timeout=30)
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_no_operation_reaches_another_table(rig: GatewayRig, victim_keys: Keys, own_keys: Keys, client: Any) -> None:
    victim_object = {"Bucket": victim_keys.bucket, "Key": victim_keys.prefix + "data/secret"}
    own_object = {"Bucket": own_keys.bucket, "Key": own_keys.prefix + "data/o"}
    upload_id = client.create_multipart_upload(**own_object)["UploadId"]
    victim_client = victim_keys.make_client()
    victim_upload_id = victim_client.create_multipart_upload(**victim_object)["UploadId"]
    copy_source = {"CopySource": {"Bucket": victim_object["Bucket"], "Key": victim_object["Key"]}}
    delete_request = {"Objects": [{"Key": victim_object["Key"]}]}
    codes = {
        "get": _call_and_describe(client.get_object, **victim_object),
        "put": _call_and_describe(client.put_object, **victim_object, Body=b"x"),
        "delete": _call_and_describe(client.delete_object, **victim_object),
        "delete many": _call_and_describe(client.delete_objects, Bucket=victim_object["Bucket"], Delete=delete_request),
        "copy from": _call_and_describe(client.copy_object, **own_object, **copy_source),
        "copy to": _call_and_describe(client.copy_object, **victim_object, CopySource=own_object),
        "part copy": _call_and_describe(
            client.upload_part_copy, **own_object, UploadId=upload_id, PartNumber=1, **copy_source
        ),
        "upload": _call_and_describe(client.create_multipart_upload, **victim_object),
        "list": _call_and_describe(client.list_objects_v2, Bucket=victim_keys.bucket, Prefix=victim_keys.prefix),
        "list all": _call_and_describe(client.list_objects_v2, Bucket=victim_keys.bucket),
        "list above": _call_and_describe(
            client.list_objects_v2, Bucket=victim_keys.bucket, Prefix=own_keys.prefix.rstrip("/")
        ),
        "buckets": _call_and_describe(client.list_buckets),
        "uploads": _call_and_describe(client.list_multipart_uploads, Bucket=victim_keys.bucket),
        "policy": _call_and_describe(client.get_bucket_policy, Bucket=victim_keys.bucket),
        "bucket": _call_and_describe(client.delete_bucket, Bucket=victim_keys.bucket),
        "acl": _call_and_describe(client.put_object_acl, **own_object, ACL="public-read"),
        "parts of another": _call_and_describe(client.list_parts, **victim_object, UploadId=victim_upload_id),
    }
    assert set(codes.values()) == {"AccessDenied"}, codes
    # The upload id of another table is rejected for the caller's own key.
    assert (
        _call_and_describe(client.upload_part, **own_object, UploadId=victim_upload_id, PartNumber=1, Body=b"x")
        == "NoSuchUpload"
    )
    assert _call_and_describe(client.list_parts, **own_object, UploadId=victim_upload_id) == "NoSuchUpload"
    assert victim_client.get_object(**victim_object)["Body"].read() == SECRET
    victim_client.close()


def _list_spellings(own_prefix: str, victim_prefix: str) -> list[str]:
    """Return encoded keys that a server might decode to the key of the victim's object."""
    parent_path = "../" * own_prefix.count("/")
    relative_key = f"{parent_path}{victim_prefix}data/secret"
    return [
        own_prefix + relative_key,
        own_prefix + quote(relative_key, safe=""),
        own_prefix + quote(quote(relative_key, safe=""), safe=""),
        own_prefix + relative_key.replace("..", "%2e%2e"),
        own_prefix + relative_key.replace("..", ".%2E"),
        own_prefix + relative_key.replace("/", "%5C"),
        own_prefix + relative_key.replace("/", "%2F"),
        own_prefix + "x/../" + relative_key,
        own_prefix + "./" + relative_key,
        own_prefix + relative_key.replace("../", "..%00/"),
        own_prefix.rstrip("/") + "/../" + victim_prefix.rsplit("/", 2)[1] + "/data/secret",
        own_prefix + "/" + victim_prefix + "data/secret",
        "/" + victim_prefix + "data/secret",
        victim_prefix.replace("/", "//") + "data/secret",
        victim_prefix + "data/secret",
        victim_prefix + "data%2Fsecret",
        victim_prefix.upper() + "data/secret",
        own_prefix.rstrip("/") + "x/" + "data/secret",
        own_prefix + "%ff%fe/secret",
        own_prefix + "%c0%ae%c0%ae/" * 4 + victim_prefix + "data/secret",
        own_prefix + "\uff0e\uff0e/".encode().hex("%"),
    ]


def test_no_spelling_of_a_key_reaches_another_table(victim_keys: Keys, own_keys: Keys, client: Any) -> None:
    for key in _list_spellings(own_keys.prefix, victim_keys.prefix):
        queries = ("", "?uploadId=..%2F..", "?partNumber=1&uploadId=x")
        for method, query in itertools.product(("GET", "PUT", "DELETE"), queries):
            status, body = send_raw(
                own_keys, method, f"/{own_keys.bucket}/{key}{query}", body=b"forged" if method == "PUT" else b""
            )
            assert SECRET not in body, (method, key)
            assert status != 500, (method, key, query, body)
            if method != "DELETE" and not key.startswith(own_keys.prefix):
                assert status in (400, 403), (method, key, query, body)
        listing = f"/{own_keys.bucket}?list-type=2&prefix={quote(key.replace('data/secret', ''), safe='/%')}"
        status, body = send_raw(own_keys, "GET", listing)
        assert b"secret" not in body.partition(b"<Contents>")[2], (listing, body)
        source = {"x-amz-copy-source": f"/{own_keys.bucket}/{key}"}
        status, body = send_raw(own_keys, "PUT", f"/{own_keys.bucket}/{own_keys.prefix}copied", source)
        assert status >= 400, (key, body)
    victim_client = victim_keys.make_client()
    objects = victim_client.list_objects_v2(Bucket=victim_keys.bucket, Prefix=victim_keys.prefix + "data/")
    assert [item["Key"] for item in objects["Contents"]] == [victim_keys.prefix + "data/secret"]
    assert (
        victim_client.get_object(Bucket=victim_keys.bucket, Key=victim_keys.prefix + "data/secret")["Body"].read()
        == SECRET
    )
    victim_client.close()


def test_very_long_key_is_rejected(own_keys: Keys) -> None:
    for key in (own_keys.prefix + "a" * 5000, own_keys.prefix + "a/" * 3000 + "b", own_keys.prefix + "%2541" * 1200):
        status, body = send_raw(own_keys, "GET", f"/{own_keys.bucket}/{key}")
        assert status in (400, 403, 404, 431), body[:200]


def test_forged_and_mixed_credentials_are_rejected(victim_keys: Keys, own_keys: Keys, client: Any) -> None:
    victim_object = {"Bucket": victim_keys.bucket, "Key": victim_keys.prefix + "data/secret"}
    position = 40  # Any character inside of the token.
    letter = "B" if victim_keys.token[position] == "A" else "A"
    forged_keys = {
        "secret": replace(victim_keys, secret=own_keys.secret),
        "token of another": replace(victim_keys, token=own_keys.token),
        "own access key": replace(own_keys, token=victim_keys.token),
        "changed token": replace(
            victim_keys, token=victim_keys.token[:position] + letter + victim_keys.token[position + 1 :]
        ),
        "short token": replace(victim_keys, token=victim_keys.token[:-4]),
        "long token": replace(victim_keys, token="A" * 8000),
    }
    for name, keys in forged_keys.items():
        client_with_forged_keys = keys.make_client()
        assert _call_and_describe(client_with_forged_keys.get_object, **victim_object) in (
            "AccessDenied",
            "SignatureDoesNotMatch",
        ), name
        client_with_forged_keys.close()
    tokenless_client = replace(victim_keys, token="").make_client()
    assert _call_and_describe(tokenless_client.get_object, **victim_object) == "AccessDenied"
    tokenless_client.close()


def test_request_changed_after_its_signature_is_rejected(own_keys: Keys, client: Any) -> None:
    """The test changes one part of a signed request at a time: method, path, query, a header or the body."""
    target = f"/{own_keys.bucket}/{own_keys.prefix}data/o"
    request = AWSRequest(
        "PUT", own_keys.endpoint + target, data=b"signed", headers={"Host": urlsplit(own_keys.endpoint).netloc}
    )
    S3SigV4Auth(Credentials(own_keys.access_key, own_keys.secret, own_keys.token), "s3", own_keys.region).add_auth(
        request
    )
    signed_headers = dict(request.headers.items())
    other_seconds = "01Z" if signed_headers["X-Amz-Date"].endswith("00Z") else "00Z"
    changed_requests = {
        "method": ("DELETE", target, signed_headers, b""),
        "path": ("PUT", target + "2", signed_headers, b"signed"),
        "query": ("PUT", target + "?tagging", signed_headers, b"signed"),
        "added header": ("PUT", target, signed_headers | {"x-amz-copy-source": target}, b"signed"),
        "date": (
            "PUT",
            target,
            signed_headers | {"X-Amz-Date": signed_headers["X-Amz-Date"][:-3] + other_seconds},
            b"signed",
        ),
        "payload": ("PUT", target, signed_headers | {"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}, b"forged"),
        "body": ("PUT", target, signed_headers, b"forged"),
    }
    for name, (method, path, headers, body) in changed_requests.items():
        connection = http.client.HTTPConnection(urlsplit(own_keys.endpoint).netloc, timeout=30)
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status in (400, 403), (name, answer.status, text)
        assert client.get_object(Bucket=own_keys.bucket, Key=own_keys.prefix + "data/o")["Body"].read() == b"own", name
