"""Tests of hostile clients: XML in other encodings, headers that are not text, and symbolic links."""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
import threading
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from botocore.exceptions import ClientError

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.gateway.aws_chunked import SIGNED_TRAILER, UNSIGNED_TRAILER, ChunkDecoder, ChunkSigner
from seamark.metaserver.gateway.caching.records import ObjectRecord
from seamark.metaserver.gateway.conditions import check_read
from seamark.metaserver.gateway.folder_uploads import parse_complete_multipart_upload
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.gateway.sigv4 import SignatureClaim, derive_signing_key
from seamark.metaserver.objects.s3_scope import UNSIGNED_PAYLOAD, parse_delete_body
from tests.gateway.rig import GatewayRig, Keys
from tests.gateway.test_isolation import send_raw
from tests.seeds import examples

_numbers = itertools.count()
_ENTITIES = """<?xml version="1.0" encoding="utf-16"?>
<!DOCTYPE CompleteMultipartUpload [<!ENTITY a "0123456789"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>&b;&b;</ETag></Part></CompleteMultipartUpload>"""


@pytest.fixture
def keys(rig: GatewayRig) -> Keys:
    return rig.create_table(f"hostile{next(_numbers)}")


def test_xml_entities_are_rejected_in_every_encoding(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table(f"hostile{next(_numbers)}")
    with closing(keys.make_client()) as client:
        upload_id = client.create_multipart_upload(Bucket=keys.bucket, Key=keys.prefix + "data/o")["UploadId"]
    target = f"/{keys.bucket}/{keys.prefix}data/o?uploadId={upload_id}"
    for encoding in ("utf-16", "utf-16-le", "utf-8"):
        text = _ENTITIES.replace("utf-16", encoding)
        status, answer = send_raw(keys, "POST", target, body=text.encode(encoding))
        assert (status, b"MalformedXML" in answer) == (400, True), (encoding, answer)


def test_xml_with_many_elements_is_rejected_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_texts: list[str] = []

    def parse(text: str) -> Element:
        parsed_texts.append(text)
        return Element("other")

    monkeypatch.setattr(ElementTree, "fromstring", parse)
    for document in ("<a/>" * 900_000, "<a>" * 500_000):
        with pytest.raises(S3Error, match="elements"):
            parse_complete_multipart_upload(document.encode())
        with pytest.raises(BadRequest, match="tags; at most 8,000"):
            parse_delete_body(document)
    assert not parsed_texts
    checksums = "<ChecksumCRC32>AAAAAA==</ChecksumCRC32><ChecksumSHA256>A</ChecksumSHA256>"
    part = f"<Part><PartNumber>1</PartNumber><ETag>a</ETag>{checksums}</Part>"
    monkeypatch.undo()
    part_elements = "".join(part.replace("1", str(number), 1) for number in range(1, 10_001))
    document = f"<CompleteMultipartUpload>{part_elements}</CompleteMultipartUpload>"
    assert len(parse_complete_multipart_upload(document.encode())) == 10_000
    keys = "".join(f"<Object><Key>{number}</Key></Object>" for number in range(1000))
    assert len(parse_delete_body(f"<Delete><Quiet>true</Quiet>{keys}</Delete>")) == 1000


@pytest.mark.parametrize("value", [b"\xff", b"\xed\xa0\x80", b"a\xc2\xa0b"])
@pytest.mark.parametrize("name", ["x-amz-meta-a", "content-type"])
def test_headers_that_are_not_text_are_a_client_error(keys: Keys, name: str, value: bytes) -> None:
    text = value.decode("utf-8", "surrogateescape")
    target, signed_headers = keys.sign("PUT", "data/o", UNSIGNED_PAYLOAD, **{name: text})
    with closing(http.client.HTTPConnection(urlsplit(keys.endpoint).netloc, timeout=30)) as connection:
        connection.putrequest("PUT", target, skip_host=True, skip_accept_encoding=True)
        for header, header_value in {**signed_headers, "content-length": "1"}.items():
            connection.putheader(header, header_value.encode("utf-8", "surrogateescape"))
        connection.endheaders(b"x")
        answer = connection.getresponse()
        assert (answer.status, b"InvalidArgument" in answer.read()) == (400, True)


@pytest.mark.parametrize("part_number", ["000000001" + "9" * 4_400, "0000000010001", "10001", "0", "\u0663"])
def test_part_number_out_of_range_is_rejected_in_any_spelling(folder_rig: GatewayRig, part_number: str) -> None:
    keys = folder_rig.create_table(f"hostile{next(_numbers)}")
    with closing(keys.make_client()) as client:
        upload_id = client.create_multipart_upload(Bucket=keys.bucket, Key=keys.prefix + "data/o")["UploadId"]
        target = f"/{keys.bucket}/{keys.prefix}data/o?partNumber={quote(part_number)}&uploadId={upload_id}"
        status, answer = send_raw(keys, "PUT", target, body=b"x")
        assert (status, b"InvalidArgument" in answer) == (400, True), answer
        parts = client.list_parts(Bucket=keys.bucket, Key=keys.prefix + "data/o", UploadId=upload_id)
    assert "Parts" not in parts


@pytest.mark.parametrize("name", ["If-Modified-Since", "If-Unmodified-Since"])
@pytest.mark.parametrize(
    "date",
    [
        "Thu, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Thu, 99999999999999999999 Jan 2001 00:00:00 GMT",
        "Thu, 01 Jan 2020 00:00:00 +99999999999999",
        "-99999999999 Jan 2020 00:00:00 +0000",
    ],
)
def test_impossible_date_is_ignored(name: str, date: str) -> None:
    check_read({name.lower(): date}, '"etag"', 1_700_000_000)
    record = ObjectRecord("o", '"etag"', 1, date, {}, 1, 0, "o")
    assert record.modified_s == 0


@pytest.mark.parametrize("signature", [b"\xff" * 64, "٣".encode() * 32, b"", b"0" * 64])
def test_trailer_signature_with_any_bytes_is_compared_without_an_error(signature: bytes) -> None:
    claim = SignatureClaim("a", "t", "20261125T000000Z", "us-east-1", ("host",), "0" * 64, SIGNED_TRAILER)
    signer = ChunkSigner("secret", claim.timestamp, claim.region, SIGNED_TRAILER, claim.signature)
    body = signer.sign_chunk(b"hello") + signer.end("x-amz-checksum-crc32", "NhCmhg==")
    decoder = ChunkDecoder(claim, derive_signing_key("secret", claim.scope), 5)
    assert b"".join(decoder.feed(body)) == b"hello"
    assert decoder.finish() == {"x-amz-checksum-crc32": "NhCmhg=="}
    signature_header = b"x-amz-trailer-signature:"
    forged_decoder = ChunkDecoder(claim, derive_signing_key("secret", claim.scope), 5)
    forged_decoder.feed(body.partition(signature_header)[0] + signature_header + signature + b"\r\n\r\n")
    with pytest.raises(S3Error, match="does not match"):
        forged_decoder.finish()


def test_errors_contain_no_path_of_the_server(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table(f"paths{next(_numbers)}")
    prefix_folder = folder_rig.folder / keys.bucket / keys.prefix
    with closing(keys.make_client()) as client:
        client.put_object(Bucket=keys.bucket, Key=keys.prefix + "data/o", Body=b"x")
    os.symlink("/", prefix_folder / "out")
    for method, name in itertools.product(
        ("GET", "PUT", "DELETE", "HEAD"), ("data", "x" * 300, "out", "out/etc/passwd", "data/o/below", "data/o")
    ):
        if (method, name) == ("PUT", "out"):
            continue
        status, answer = send_raw(keys, method, f"/{keys.bucket}/{keys.prefix}{name}", body=b"x" * (method == "PUT"))
        assert status < 500, (method, name, answer)
        assert str(folder_rig.folder).encode() not in answer, (method, name, answer)
    object_elements = "".join(f"<Object><Key>{keys.prefix}{name}</Key></Object>" for name in ("x" * 300, "data"))
    body = f"<Delete>{object_elements}</Delete>"
    status, answer = send_raw(keys, "POST", f"/{keys.bucket}/?delete=", body=body.encode())
    assert (status, f"<Deleted><Key>{keys.prefix}data</Key>".encode() in answer) == (200, True)
    assert str(folder_rig.folder).encode() not in answer


def test_written_object_has_no_checksums_of_an_older_file(folder_rig: GatewayRig) -> None:
    """A write or a deletion through the gateway also deletes the checksum file of the object.

    Spark writes a checksum file for each file that it stores without the gateway. With the checksum of the older file,
    Spark would refuse to read the new object.
    """
    keys = folder_rig.create_table(f"checksums{next(_numbers)}")
    data_folder = folder_rig.folder / keys.bucket / keys.prefix / "data"
    data_folder.mkdir(parents=True, exist_ok=True)
    client = keys.make_client()
    try:
        for name in ("replaced", "deleted"):
            (data_folder / name).write_bytes(b"old")
            (data_folder / f".{name}.crc").write_bytes(b"crc\0" + bytes(8))
        client.put_object(Bucket=keys.bucket, Key=f"{keys.prefix}data/replaced", Body=b"new")
        client.delete_object(Bucket=keys.bucket, Key=f"{keys.prefix}data/deleted")
    finally:
        client.close()
    assert {path.name: path.read_bytes() for path in data_folder.iterdir()} == {"replaced": b"new"}


def test_no_object_is_hidden_from_listings(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table(f"hidden{next(_numbers)}")
    for name in (".seamark-tmp-a", "data/.seamark-tmp-a", "data/.seamark-tmp-a/b"):
        for target in (name, f"{name}?uploads="):
            method = "POST" if "?" in target else "PUT"
            status, answer = send_raw(
                keys, method, f"/{keys.bucket}/{keys.prefix}{target}", body=b"x" * (method == "PUT")
            )
            assert (status, b"InvalidArgument" in answer) == (400, True), (target, answer)


KEY_BYTES_MAX = 1024
"""The longest key that S3 allows."""


def test_deep_keys_are_listed_and_keys_longer_than_on_s3_are_rejected(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table(f"deep{next(_numbers)}")
    deep_key = keys.prefix + "d/" * ((KEY_BYTES_MAX - 1 - len(keys.prefix)) // 2) + "x"
    with closing(keys.make_client()) as client:
        with pytest.raises(ClientError, match="KeyTooLong"):
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + "d/" * KEY_BYTES_MAX + "x", Body=b"")
        client.put_object(Bucket=keys.bucket, Key=deep_key, Body=b"")
        objects = client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix)["Contents"]
    assert deep_key in [item["Key"] for item in objects]


def test_listing_has_no_keys_with_empty_names(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table(f"empty{next(_numbers)}")
    with closing(keys.make_client()) as client:
        client.put_object(Bucket=keys.bucket, Key=keys.prefix + "data/o", Body=b"x")
        for name in ("/", "data//", "data/o/", "data/o//"):
            objects = client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix + name)
            assert objects["KeyCount"] == 0, name


def test_folder_replaced_by_a_link_at_any_moment_reveals_nothing(folder_rig: GatewayRig, tmp_path: Path) -> None:
    """During requests, a program with access to one table's folder replaces it by a link to another table's folder."""
    keys = folder_rig.create_table(f"swaps{next(_numbers)}")
    prefix_folder = folder_rig.folder / keys.bucket / keys.prefix
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    with closing(keys.make_client()) as client:
        for number in range(4):
            client.put_object(Bucket=keys.bucket, Key=f"{keys.prefix}data/{number}", Body=b"own")
            (other_folder / str(number)).write_bytes(b"secret")
        (other_folder / "only-here").write_bytes(b"secret")
        files_before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in other_folder.iterdir()}
        ending = threading.Event()

        def swap_repeatedly() -> None:
            while not ending.wait(0.0005):
                (prefix_folder / "data-link").symlink_to(other_folder)
                (prefix_folder / "data").rename(prefix_folder / "data-away")
                try:
                    (prefix_folder / "data-link").rename(prefix_folder / "data")
                except OSError:  # A request has created the folder again.
                    (prefix_folder / "data-link").unlink()
                    shutil.rmtree(prefix_folder / "data-away")
                    continue
                ending.wait(0.0005)
                (prefix_folder / "data").unlink()
                try:
                    (prefix_folder / "data-away").rename(prefix_folder / "data")
                except OSError:  # A request has created the folder again.
                    shutil.rmtree(prefix_folder / "data-away")

        thread = threading.Thread(target=swap_repeatedly)
        thread.start()
        answers: set[bytes] = set()
        try:
            for number in range(examples(400, 30)):
                key = f"{keys.prefix}data/{number % 4}"
                with suppress(ClientError):
                    answers.add(client.get_object(Bucket=keys.bucket, Key=key)["Body"].read())
                    client.delete_object(Bucket=keys.bucket, Key=key)
                with suppress(ClientError):
                    client.put_object(Bucket=keys.bucket, Key=key, Body=b"own")
                with suppress(ClientError):
                    objects = client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix)
                    assert "only-here" not in str(objects.get("Contents"))
        finally:
            ending.set()
            thread.join()
    assert answers <= {b"own"}
    assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in other_folder.iterdir()} == files_before


def test_listing_follows_no_symbolic_link(folder_rig: GatewayRig, tmp_path: Path) -> None:
    keys = folder_rig.create_table(f"links{next(_numbers)}")
    prefix_folder = folder_rig.folder / keys.bucket / keys.prefix
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/secret").write_text("secret")
    os.symlink(tmp_path, prefix_folder / "out")
    with closing(keys.make_client()) as client:
        for name in ("", "out", "out/", "out/sub/", "out/s"):
            try:
                objects = client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix + name)
            except ClientError:
                continue
            assert "secret" not in str(objects.get("Contents")), name


def test_listing_that_starts_after_a_folders_name_has_the_keys_in_it(rig: GatewayRig) -> None:
    keys = rig.create_table(f"after{next(_numbers)}")
    names = ["data/a/1", "data/a/2", "data/b/1"]
    with closing(keys.make_client()) as client:
        for name in names:
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + name, Body=b"x")
        list_arguments = {"Bucket": keys.bucket, "Prefix": keys.prefix + "data/", "StartAfter": keys.prefix + "data/a/"}
        objects = client.list_objects_v2(**list_arguments)["Contents"]
        grouped_listing = client.list_objects_v2(**list_arguments, Delimiter="/")["CommonPrefixes"]
    assert [item["Key"].removeprefix(keys.prefix) for item in objects] == names
    assert [item["Prefix"].removeprefix(keys.prefix) for item in grouped_listing] == ["data/b/"]


@pytest.mark.parametrize("value", ["\xff" * 8, "AA\nBBBB="])
def test_trailer_that_would_change_the_length_of_the_body_is_rejected(value: str) -> None:
    signer = ChunkSigner("secret", "20261125T000000Z", "us-east-1", UNSIGNED_TRAILER, "0" * 64)
    with pytest.raises(S3Error, match="malformed"):
        signer.end("x-amz-checksum-crc32", value)
