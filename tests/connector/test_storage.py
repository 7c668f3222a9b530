"""The storage that jobs read and write; the S3 part against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from seamark.connector.client.storage import Storage
from tests.services.s3 import S3


def test_all_spellings_of_a_local_location_name_one_file(tmp_path: Path) -> None:
    name = "100%20 a#b.bin"
    path = f"{tmp_path}/{name}"
    assert Storage().write(f"file://{path}", [b"ab", memoryview(b"cd")]) == 4
    for location in (path, f"file:{path}", f"file://{path}", f"file://localhost{path}"):
        filesystem, path_in_storage = Storage().open(location)
        assert filesystem.open_input_file(path_in_storage).read() == b"abcd"
        assert Storage().read(location) == b"abcd"


def test_write_overwrites_no_file_and_leaves_no_file_if_it_fails(tmp_path: Path) -> None:
    location = f"file://{tmp_path}/folder/x"
    Storage().write(location, [b"first"])
    with pytest.raises(FileExistsError):
        Storage().write(location, [b"second"])
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x"]
    assert (tmp_path / "folder" / "x").read_bytes() == b"first"


def test_file_can_be_deleted_twice(tmp_path: Path) -> None:
    location = f"file://{tmp_path}/x"
    Storage().write(location, [b"first"])
    Storage().delete(location)
    Storage().delete(location)
    assert list(tmp_path.iterdir()) == []


def test_error_of_an_unknown_storage_names_the_location() -> None:
    with pytest.raises(ValueError, match="oss://x/y"):
        Storage().open("oss://x/y")


def test_s3_is_accessed_with_the_properties_of_the_catalog(s3: S3, s3_bucket: str) -> None:
    storage = Storage(
        {
            "s3.endpoint": s3.endpoint,
            "s3.region": s3.region,
            "s3.access-key-id": s3.access_key,
            "s3.secret-access-key": s3.secret_key,
            "s3.path-style-access": "true",
        }
    )
    location = f"s3://{s3_bucket}/folder/a%20b"
    assert storage.write(location, [b"ab", b"cd"]) == 4
    assert s3.client().get_object(Bucket=s3_bucket, Key="folder/a%20b")["Body"].read() == b"abcd"
    filesystem, path_in_storage = storage.open(location)
    assert isinstance(filesystem, fs.S3FileSystem)
    assert filesystem.open_input_file(path_in_storage).read() == b"abcd"
    assert storage.read(location) == b"abcd"
    storage.delete(location)
    storage.delete(location)
    assert filesystem.get_file_info(path_in_storage).type == fs.FileType.NotFound
