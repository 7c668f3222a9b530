"""Tests that clients get the same bytes and errors through the gateway as from the store itself."""

from __future__ import annotations

import base64
import io
import itertools
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from tests.gateway.rig import GatewayRig, Keys
from tests.seeds import first_seed

_numbers = itertools.count()


@pytest.fixture
def keys(rig: GatewayRig) -> Keys:
    return rig.create_table(f"t{next(_numbers)}")


@pytest.fixture
def client(keys: Keys) -> Iterator[Any]:
    client = keys.make_client()
    yield client
    client.close()


def _get_outcome(call: Callable[..., Any], **arguments: Any) -> tuple[Any, ...]:
    """Return the outcome of a call.

    It is (error code, status) of an error, and otherwise (status, size, range, bytes).
    """
    try:
        answer = call(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
    body = answer["Body"].read() if "Body" in answer else b""
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    return status, answer.get("ContentLength"), answer.get("ContentRange"), body


RANGES = [
    *(None, "bytes=0-0", "bytes=5-9", "bytes=5-", "bytes=-7", "bytes=990-2000", "bytes=0-", "bytes=-5000"),
    *("bytes=1000-", "bytes=1000-1001", "bytes=99999999999-", "bytes=-0", "bytes=9-5", "bytes=x", "bytes=0-1,4-5"),
]


def test_every_form_of_range_gives_the_bytes_and_errors_of_the_store(
    store_rig: GatewayRig, folder_rig: GatewayRig
) -> None:
    data = bytes(range(250)) * 4
    outcomes = {}
    for rig in (store_rig, folder_rig):
        keys = rig.create_table(f"t{next(_numbers)}")
        with closing(keys.make_client()) as client:
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + "o", Body=data)
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + "empty", Body=b"")
            outcomes[rig.gateway] = _read_ranges(client, keys)
        if rig.direct_store is not None:
            with closing(rig.direct_store.client()) as direct_client:
                outcomes["direct"] = _read_ranges(direct_client, keys)
    assert outcomes[store_rig.gateway] == outcomes["direct"]
    assert outcomes[folder_rig.gateway] == outcomes["direct"]
    assert outcomes["direct"]["o", "bytes=5-9"] == (206, 5, "bytes 5-9/1000", data[5:10])


def _read_ranges(client: Any, keys: Keys) -> dict[tuple[str, str | None], tuple[Any, ...]]:
    outcomes = {}
    for name, range_text in itertools.product(("o", "empty"), RANGES):
        options = {} if range_text is None else {"Range": range_text}
        outcomes[name, range_text] = _get_outcome(
            client.get_object, Bucket=keys.bucket, Key=keys.prefix + name, **options
        )
        if outcomes[name, range_text][0] != "InvalidRange":
            head = _get_outcome(client.head_object, Bucket=keys.bucket, Key=keys.prefix + name, **options)
            assert head[:2] == outcomes[name, range_text][:2], (name, range_text)
    return outcomes


def test_conditional_reads_and_writes_behave_as_on_the_store(rig: GatewayRig, keys: Keys, client: Any) -> None:
    object_key = {"Bucket": keys.bucket, "Key": keys.prefix + "o"}
    etag = client.put_object(**object_key, Body=b"one")["ETag"]
    last_modified = client.head_object(**object_key)["LastModified"]
    read_object = lambda **conditions: _get_outcome(client.get_object, **object_key, **conditions)  # noqa: E731
    assert read_object(IfMatch=etag)[0] == 200
    assert read_object(IfMatch='"other"') == ("PreconditionFailed", 412)
    assert read_object(IfNoneMatch=etag)[1] == 304
    assert read_object(IfNoneMatch='"other"')[0] == 200
    # A store may ignore a date in the future. A folder does not.
    assert (
        read_object(IfModifiedSince=last_modified.replace(year=last_modified.year + 1))[1] == 304
        or rig.direct_store is not None
    )
    assert read_object(IfModifiedSince=last_modified.replace(year=2001))[0] == 200
    assert read_object(IfUnmodifiedSince=last_modified.replace(year=last_modified.year + 1))[0] == 200
    assert read_object(IfUnmodifiedSince=last_modified.replace(year=2001)) == ("PreconditionFailed", 412)
    write = lambda **conditions: _get_outcome(client.put_object, **object_key, Body=b"two", **conditions)  # noqa: E731
    assert write(IfNoneMatch="*") == ("PreconditionFailed", 412)
    assert write(IfMatch='"other"') == ("PreconditionFailed", 412)
    assert client.get_object(**object_key)["Body"].read() == b"one"
    assert write(IfMatch=etag)[0] == 200
    assert client.get_object(**object_key)["Body"].read() == b"two"
    client.delete_object(**object_key)
    assert write(IfNoneMatch="*")[0] == 200
    client.delete_object(**object_key)
    assert _get_outcome(client.get_object, **object_key) == ("NoSuchKey", 404)
    client.delete_object(**object_key)


@pytest.mark.few_cases(1)
def test_multipart_uploads_are_complete_or_absent(rig: GatewayRig, keys: Keys, client: Any) -> None:
    object_key = {"Bucket": keys.bucket, "Key": keys.prefix + "data/large"}
    data = os.urandom(13 << 20)
    upload_id = client.create_multipart_upload(**object_key, ContentType="x/y", Metadata={"a": "b"})["UploadId"]
    sizes = [5 << 20, 5 << 20, 3 << 20]
    parts, start = [], 0
    for number, size in enumerate(sizes, 1):
        part = client.upload_part(**object_key, UploadId=upload_id, PartNumber=number, Body=data[start : start + size])
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
        start += size
    listed_parts = client.list_parts(**object_key, UploadId=upload_id)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed_parts] == list(enumerate(sizes, 1))
    assert _get_outcome(client.head_object, **object_key)[1] == 404
    complete = lambda parts: _get_outcome(  # noqa: E731
        client.complete_multipart_upload, **object_key, UploadId=upload_id, MultipartUpload={"Parts": parts}
    )
    assert complete([parts[1], parts[0]])[0] == "InvalidPartOrder"
    assert complete([{"PartNumber": 1, "ETag": '"0123456789abcdef0123456789abcdef"'}])[0] == "InvalidPart"
    assert complete(parts)[0] == 200
    actual_object = client.get_object(**object_key)
    assert (actual_object["Body"].read(), actual_object["ContentType"], actual_object["Metadata"]) == (
        data,
        "x/y",
        {"a": "b"},
    )
    assert _get_outcome(client.list_parts, **object_key, UploadId=upload_id)[0] == "NoSuchUpload"
    small_upload_id = client.create_multipart_upload(**object_key)["UploadId"]
    etags = [
        client.upload_part(**object_key, UploadId=small_upload_id, PartNumber=n, Body=b"x")["ETag"] for n in (1, 2)
    ]
    parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]
    error = _get_outcome(
        client.complete_multipart_upload, **object_key, UploadId=small_upload_id, MultipartUpload={"Parts": parts}
    )
    assert error[0] == "EntityTooSmall"
    client.abort_multipart_upload(**object_key, UploadId=small_upload_id)
    assert (
        _get_outcome(client.upload_part, **object_key, UploadId=small_upload_id, PartNumber=1, Body=b"x")[0]
        == "NoSuchUpload"
    )


def test_objects_and_parts_can_be_copied(keys: Keys, client: Any) -> None:
    source = {"Bucket": keys.bucket, "Key": keys.prefix + "data/a b+ü"}
    data = os.urandom(6 << 20)
    client.put_object(**source, Body=data, Metadata={"kept": "yes"})
    target = {"Bucket": keys.bucket, "Key": keys.prefix + "copy"}
    client.copy_object(**target, CopySource=source)
    actual_object = client.get_object(**target)
    assert (actual_object["Body"].read(), actual_object["Metadata"]) == (data, {"kept": "yes"})
    upload_id = client.create_multipart_upload(**target)["UploadId"]
    part = client.upload_part_copy(
        **target, UploadId=upload_id, PartNumber=1, CopySource=source, CopySourceRange="bytes=10-99"
    )
    parts = [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}]
    client.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload={"Parts": parts})
    assert client.get_object(**target)["Body"].read() == data[10:100]


@pytest.mark.few_cases(1)
def test_keys_with_uri_characters_are_written_listed_copied_and_deleted(keys: Keys, client: Any) -> None:
    """`#` and `?` are valid in a key, and writers put partition values into keys."""
    names = [f"{keys.prefix}data/{name}" for name in ("c=#1/x", "c=what?/x", "a#b?c=d&e%23%3F", "?", "#")]
    for name in names:
        client.put_object(Bucket=keys.bucket, Key=name, Body=name.encode())
        assert client.get_object(Bucket=keys.bucket, Key=name)["Body"].read() == name.encode()
    listing = client.list_objects_v2(Bucket=keys.bucket, Prefix=f"{keys.prefix}data/")["Contents"]
    assert [item["Key"] for item in listing] == sorted(names)
    for name in names:
        page = client.list_objects_v2(Bucket=keys.bucket, Prefix=name)
        assert [item["Key"] for item in page["Contents"]] == [name]
        copy = {"Bucket": keys.bucket, "Key": f"{name}?copy#"}
        client.copy_object(**copy, CopySource={"Bucket": keys.bucket, "Key": name})
        assert client.get_object(**copy)["Body"].read() == name.encode()
        upload_id = client.create_multipart_upload(**copy)["UploadId"]
        part = client.upload_part(**copy, UploadId=upload_id, PartNumber=1, Body=b"parts")
        parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
        client.complete_multipart_upload(**copy, UploadId=upload_id, MultipartUpload={"Parts": parts})
        assert client.get_object(**copy)["Body"].read() == b"parts"
        url = client.generate_presigned_url("get_object", Params=copy)
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"parts"
        client.delete_object(Bucket=keys.bucket, Key=name)
        assert _get_outcome(client.get_object, Bucket=keys.bucket, Key=name) == ("NoSuchKey", 404)
    objects = [{"Key": f"{name}?copy#"} for name in names]
    client.delete_objects(Bucket=keys.bucket, Delete={"Objects": objects})
    assert "Contents" not in client.list_objects_v2(Bucket=keys.bucket, Prefix=f"{keys.prefix}data/")


KEYS = ["a", "a-b", "a/b", "a/c/d", "a/c/e", "a0", "aa/ü", "b/100%25", "b/ %2F", "b/~!$'()*,;=:@&", "z/a+b"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", [first_seed(), first_seed() + 1])
def test_paged_listings_have_every_key(keys: Keys, client: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # If the store is a folder, it cannot have the key `a` and keys below `a/`.
    object_names = [f"data/{key}" for key in KEYS if key != "a"]
    for key in object_names:
        client.put_object(Bucket=keys.bucket, Key=keys.prefix + key, Body=key.encode())
    for _ in range(20):
        prefix = f"data/{rng.choice(['', 'a', 'a/', 'a/c', 'a/c/', 'b/', 'b/1', 'none'])}"
        delimiter, start_after = str(rng.choice(["", "/"])), str(rng.choice(["", *object_names]))
        # Stores treat `StartAfter` differently if it is outside of the prefix or if there is a delimiter.
        start_after = start_after if start_after.startswith(prefix) and not delimiter else ""
        listed_names: list[str] = []
        token: dict[str, str] = {}
        while True:
            page = client.list_objects_v2(
                Bucket=keys.bucket,
                Prefix=keys.prefix + prefix,
                MaxKeys=int(rng.integers(1, 5)),
                **({"Delimiter": delimiter} if delimiter else {}),
                **({"StartAfter": keys.prefix + start_after} if start_after and not token else {}),
                **token,
            )
            names = [item["Key"] for item in page.get("Contents", [])]
            names += [item["Prefix"] for item in page.get("CommonPrefixes", [])]
            listed_names += sorted(name.removeprefix(keys.prefix) for name in names)
            if not page["IsTruncated"]:
                break
            token = {"ContinuationToken": page["NextContinuationToken"]}
        expected = set()
        for key in (key for key in object_names if key.startswith(prefix) and key > start_after):
            remaining_key = key[len(prefix) :]
            expected.add(prefix + remaining_key.partition("/")[0] + "/" if delimiter and "/" in remaining_key else key)
        assert listed_names == sorted(expected, key=str.encode), (prefix, delimiter, start_after)


def test_many_objects_are_deleted_in_one_request(keys: Keys, client: Any) -> None:
    names = [keys.prefix + f"data/{number} & <ü>" for number in range(20)]
    for name in names:
        client.put_object(Bucket=keys.bucket, Key=name, Body=b"x")
    objects = [{"Key": name} for name in [*names, keys.prefix + "missing"]]
    answer = client.delete_objects(Bucket=keys.bucket, Delete={"Objects": objects})
    assert {item["Key"] for item in answer["Deleted"]} == {item["Key"] for item in objects}
    assert "Errors" not in answer
    listed_objects = client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix + "data/")
    assert listed_objects["KeyCount"] == 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_checksums_of_clients_are_verified(keys: Keys, client: Any, algorithm: str) -> None:
    object_key = {"Bucket": keys.bucket, "Key": keys.prefix + "o"}
    data = os.urandom(300_000)
    client.put_object(
        **object_key, Body=io.BytesIO(data), ChecksumAlgorithm=algorithm
    )  # boto3 sends chunks with a trailer.
    assert client.get_object(**object_key)["Body"].read() == data
    size = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8, "SHA1": 20, "SHA256": 32}[algorithm]
    wrong_checksum = base64.b64encode(bytes(size)).decode()
    outcome = _get_outcome(client.put_object, **object_key, Body=b"other", **{f"Checksum{algorithm}": wrong_checksum})
    assert outcome[0] in ("BadDigest", "InvalidRequest")
    assert client.get_object(**object_key)["Body"].read() == data


def test_presigned_requests_are_served_until_they_expire(keys: Keys, client: Any) -> None:
    object_key = {"Bucket": keys.bucket, "Key": keys.prefix + "data/o ü"}
    put_url = client.generate_presigned_url("put_object", Params=object_key, ExpiresIn=60)
    with urllib.request.urlopen(urllib.request.Request(put_url, method="PUT", data=b"presigned")) as answer:
        assert answer.status == 200
    url = client.generate_presigned_url("get_object", Params=object_key, ExpiresIn=60)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"presigned"
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url.replace("data/o%20%C3%BC", "data/p"))
    assert error.value.code == 403
    error.value.close()
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url, data=b"a body makes it a POST")
    error.value.close()


@pytest.mark.few_cases(1)
def test_pyarrow_reads_and_writes_parquet_through_the_gateway(keys: Keys) -> None:
    files = keys.open_pyarrow()
    path = f"{keys.bucket}/{keys.prefix}data/p.parquet"
    table = pa.table({"id": np.arange(2_000_000), "x": np.random.default_rng(1).random(2_000_000)})
    pq.write_table(table, path, filesystem=files, row_group_size=100_000)
    assert pq.read_table(path, filesystem=files, columns=["id"]) == table.select(["id"])
    assert files.get_file_info(path).size > 10 << 20
    selector = pa.fs.FileSelector(f"{keys.bucket}/{keys.prefix}data", recursive=True)
    assert [info.base_name for info in files.get_file_info(selector) if info.is_file] == ["p.parquet"]
    files.delete_file(path)
    assert files.get_file_info(path).type == pa.fs.FileType.NotFound


@pytest.mark.few_cases(1)
def test_obstore_reads_and_writes_through_the_gateway(keys: Keys) -> None:
    store = keys.open_obstore()
    data = os.urandom(12 << 20)
    obstore.put(store, "data/ü x", data, use_multipart=True)
    assert bytes(obstore.get_range(store, "data/ü x", start=1 << 20, length=100)) == data[1 << 20 :][:100]
    assert bytes(obstore.get(store, "data/ü x").bytes()) == data
    obstore.put(store, "data/once", b"1", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "data/once", b"2", mode="create")
    obstore.copy(store, "data/once", "data/twice")
    assert sorted(item["path"] for item in obstore.list(store, "data").collect()) == [
        "data/once",
        "data/twice",
        "data/ü x",
    ]
    obstore.delete(store, ["data/once", "data/twice", "data/ü x"])
    assert obstore.list(store, "data").collect() == []


@pytest.mark.few_cases(1)
def test_s3fs_reads_and_writes_through_the_gateway(keys: Keys) -> None:
    files = keys.open_s3fs()
    path = f"{keys.bucket}/{keys.prefix}data/f"
    data = os.urandom(11 << 20)
    with files.open(path, "wb") as file:
        file.write(data)
    with files.open(path, "rb") as file:
        file.seek(-100, 2)
        assert file.read() == data[-100:]
    assert files.cat_file(path) == data
    assert files.find(f"{keys.bucket}/{keys.prefix}data") == [path]
    files.rm(path)
    assert not files.exists(path)


@pytest.mark.few_cases(1)
def test_transfer_in_many_concurrent_parts_is_complete(
    rig: GatewayRig, keys: Keys, client: Any, tmp_path: Path
) -> None:
    data = os.urandom(40 << 20)
    config = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, max_concurrency=8)
    client.upload_fileobj(io.BytesIO(data), keys.bucket, keys.prefix + "data/many", Config=config)
    client.download_file(keys.bucket, keys.prefix + "data/many", str(tmp_path / "many"), Config=config)
    assert (tmp_path / "many").read_bytes() == data
    assert (rig.folder / keys.bucket / keys.prefix / "data/many").stat().st_size == len(data)
