"""Tests of multipart uploads to a folder: limits per principal, removal of abandoned uploads, and early refusals."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from seamark.formats.runtime.errors import RetryLater, TooManyRequests
from seamark.formats.runtime.root_folder import RootFolder
from seamark.metaserver.gateway.folder_files import Staging
from seamark.metaserver.gateway.folder_uploads import Uploads
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.local import DurableFolders
from tests.gateway.rig import GatewayRig

LOCATION = "s3://b/t/o"


def _build_uploads(folder: Path, limit: int = 4, abandoned_s: float = 100, warehouse_name: str = "") -> Uploads:
    staging = Staging(RootFolder(str(folder)), DurableFolders(known_max=16))
    return Uploads(staging, limit=limit, abandoned_s=abandoned_s, warehouse_name=warehouse_name)


def _create_upload(uploads: Uploads, principal: str, *, limit: int) -> str:
    """Start an upload, and return its id. The principal may have `limit` unfinished uploads."""
    return uploads.create(LOCATION, os.urandom(16), principal, limit, {})


def test_uploads_are_limited_for_each_principal_and_in_total(tmp_path: Path) -> None:
    uploads = _build_uploads(tmp_path)
    ids = [_create_upload(uploads, "ann", limit=2) for _ in range(2)]
    with pytest.raises(TooManyRequests, match="ann has 2 unfinished uploads"):
        _create_upload(uploads, "ann", limit=2)
    _create_upload(uploads, "bob", limit=2)
    _create_upload(uploads, "cat", limit=2)
    with pytest.raises(RetryLater, match="4 unfinished uploads"):
        _create_upload(uploads, "dan", limit=2)
    uploads.abort(LOCATION, ids[0])
    _create_upload(uploads, "ann", limit=2)
    with pytest.raises(S3Error, match="does not exist"):
        uploads.check(LOCATION, ids[0])
    uploads.check(LOCATION, ids[1])
    for invalid_id in ("", "..", ids[1][:-1], ids[1].upper() + "0"):
        with pytest.raises(S3Error, match="does not exist"):
            uploads.check(LOCATION, invalid_id)
    with pytest.raises(S3Error, match="does not exist"):
        uploads.check(LOCATION + "2", ids[1])


def test_each_warehouse_has_its_own_limit_of_uploads(tmp_path: Path) -> None:
    uploads_of_warehouses = [_build_uploads(tmp_path, limit=2, warehouse_name=name) for name in ("", "sales", "stock")]
    ids = []
    for uploads in uploads_of_warehouses:
        for name in ("ann", "bob"):
            ids.append(_create_upload(uploads, name, limit=2))
            with pytest.raises((TooManyRequests, RetryLater)):
                _create_upload(uploads, name, limit=2)
    for number, upload_id in enumerate(ids):
        for uploads in uploads_of_warehouses:
            if uploads is uploads_of_warehouses[number // 2]:  # Each warehouse has two uploads.
                uploads.check(LOCATION, upload_id)
            else:
                with pytest.raises(S3Error, match="does not exist"):
                    uploads.check(LOCATION, upload_id)


def test_uploads_without_changes_are_deleted(tmp_path: Path) -> None:
    uploads = _build_uploads(tmp_path)
    old_upload, new_upload = (_create_upload(uploads, "ann", limit=1) for _ in range(2))
    root = next(path for path in tmp_path.rglob(f"*{old_upload}"))
    now_s = root.stat().st_mtime
    os.utime(root, (now_s - 101, now_s - 101))
    uploads.delete_abandoned(now_s)
    with pytest.raises(S3Error, match="does not exist"):
        uploads.check(LOCATION, old_upload)
    uploads.check(LOCATION, new_upload)


def test_part_of_an_unknown_upload_is_rejected_before_its_body(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table("early_part")
    query = f"partNumber=1&uploadId={'0' * 48}"
    target, signed_headers = keys.sign("PUT", "o", query=query)
    endpoint = urlsplit(keys.endpoint)
    for expect_header in ("Expect: 100-continue\r\n", ""):
        with socket.create_connection((endpoint.hostname, endpoint.port), timeout=30) as raw:
            head = "".join(f"{name}: {value}\r\n" for name, value in signed_headers.items())
            raw.sendall(
                f"PUT {target}?{query} HTTP/1.1\r\n{head}{expect_header}Content-Length: 50000000\r\n\r\n".encode()
            )
            answer = raw.recv(65536)  # The client has sent no byte of the announced body of 50 MB.
            assert answer.startswith(b"HTTP/1.1 404"), answer[:200]


def test_upload_is_completed_only_with_its_own_parts(folder_rig: GatewayRig) -> None:
    keys = folder_rig.create_table("upload")
    with closing(keys.make_client()) as client:
        object_address: dict[str, Any] = {"Bucket": keys.bucket, "Key": keys.prefix + "o"}
        upload = {"UploadId": client.create_multipart_upload(**object_address)["UploadId"]}
        tag = client.upload_part(**object_address, **upload, PartNumber=1, Body=b"x" * 1000)["ETag"]
        client.complete_multipart_upload(
            **object_address, **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}]}
        )
        assert client.get_object(**object_address)["Body"].read() == b"x" * 1000
        with pytest.raises(ClientError, match="NoSuchUpload"):
            client.upload_part(**object_address, **upload, PartNumber=1, Body=b"x")
