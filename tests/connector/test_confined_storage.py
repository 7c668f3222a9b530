"""Tests of `confine`: a process that works for several users opens no file behind a symbolic link of a user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seamark.connector.client import storage
from seamark.connector.client.storage import Storage, confine, open_confined_folders
from seamark.connector.parquet.copy.source import SourceFile
from seamark.formats.iceberg.files.parquet import Unreadable


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a warehouse that operators reach through a symbolic link. A secret file is next to the warehouse."""
    (tmp_path / "disk" / "t").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("secret")
    (tmp_path / "disk" / "t" / "f").write_text("own")
    (tmp_path / "disk" / "t2").mkdir()
    (tmp_path / "disk" / "t2" / "f").write_text("another table's")
    (tmp_path / "warehouse").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(storage, "_confined_to", None)  # After the test, pytest restores the value before `confine`.
    confine([f"{tmp_path}/warehouse/"])
    return tmp_path / "warehouse"


def test_files_of_the_table_are_read_and_written(warehouse: Path) -> None:
    for location in (f"file://{warehouse}/t/f", f"{warehouse}/t/f", f"file:{warehouse}/t//f"):
        assert bytes(Storage().read(location)) == b"own"
    Storage().write(f"file://{warehouse}/t/deep/new", [b"x"])
    assert (warehouse / "t" / "deep" / "new").read_bytes() == b"x"


@pytest.mark.parametrize(
    "place",
    ["t/link", "t/folder/f", "t/table/f", "../secret/f", "t/../../secret/f", "t/folder/../f"],
)
def test_links_and_files_outside_the_folder_are_refused(warehouse: Path, place: str) -> None:
    secret_path = warehouse.parent / "secret"
    (warehouse / "t" / "link").symlink_to(secret_path / "f")
    (warehouse / "t" / "folder").symlink_to(secret_path)
    (warehouse / "t" / "table").symlink_to(warehouse / "t2")
    with pytest.raises(PermissionError, match="outside the warehouse"):
        Storage().read(f"file://{warehouse}/{place}")
    if place == "t/link":
        # This deletes the link itself, which is in the table's own folder, and not its target.
        Storage().delete(f"file://{warehouse}/{place}")
        assert not os.path.lexists(warehouse / place)
    else:
        with pytest.raises(PermissionError, match="outside the warehouse"):
            Storage().delete(f"file://{warehouse}/{place}")
    assert (secret_path / "f").read_text() == "secret"


def test_processes_without_confinement_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_confined_to", None)
    (tmp_path / "f").write_text("own")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert bytes(Storage().read(f"file://{tmp_path}/link")) == b"own"


def test_table_folder_that_is_replaced_by_a_link_gives_no_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of statements is confined to table folders, which writers of the tables can replace."""
    monkeypatch.setattr(storage, "_confined_to", None)  # After the test, pytest removes the confinement.
    (tmp_path / "disk/d/t").mkdir(parents=True)
    (tmp_path / "disk/d/t/f").write_text("another table's")
    (tmp_path / "disk/c").mkdir()
    (tmp_path / "disk/c/t").symlink_to(tmp_path / "disk/d/t")
    (tmp_path / "warehouse").symlink_to("disk")
    root = f"{tmp_path}/warehouse"
    confine([f"{root}/c/t"], [root])
    with open_confined_folders() as folders:
        assert folders == []
    for call in (Storage().read, Storage().delete, Storage().open_input_file, Storage().open_output_stream):
        with pytest.raises(PermissionError, match="symbolic link"):
            call(f"file://{root}/c/t/f")
    with pytest.raises(Unreadable, match="symbolic link"):
        SourceFile(f"file://{root}/c/t/f", Storage())
    with pytest.raises(PermissionError, match="outside the warehouse"):
        Storage().read(f"file://{root}/d/t/f")
    (tmp_path / "disk/c/t").unlink()
    (tmp_path / "disk/c/t").mkdir()
    (tmp_path / "disk/c/t/f").write_text("own")
    assert bytes(Storage().read(f"file://{root}/c/t/f")) == b"own"
    with open_confined_folders() as folders:
        assert os.listdir(folders[0]) == ["f"]


def test_open_file_stays_readable_after_it_is_replaced_by_a_link(warehouse: Path) -> None:
    with Storage().open_input_file(f"file://{warehouse}/t/f") as file:
        (warehouse / "t/f").unlink()
        (warehouse / "t/f").symlink_to(warehouse.parent / "secret/f")
        assert file.read() == b"own"


def test_pipe_in_the_place_of_a_file_does_not_block(warehouse: Path) -> None:
    (warehouse / "t/f").unlink()
    os.mkfifo(warehouse / "t/f")
    for call in (Storage().read, Storage().open_input_file):
        with pytest.raises(OSError, match="not a plain file"):
            call(f"file://{warehouse}/t/f")


def test_write_replaces_no_file_and_leaves_no_file_if_it_fails(warehouse: Path) -> None:
    storage = Storage()
    with pytest.raises(FileExistsError):
        storage.write(f"file://{warehouse}/t/f", [b"other"])
    with pytest.raises(FileExistsError):
        storage.open_output_stream(f"file://{warehouse}/t/f")
    with storage.open_output_stream(f"file://{warehouse}/new/deep/file") as stream:
        stream.write(b"streamed")
    (warehouse / "new/link").symlink_to(warehouse.parent / "secret")
    for call in (storage.open_output_stream, lambda location: storage.write(location, [b"x"])):
        with pytest.raises(PermissionError, match="symbolic link"):
            call(f"file://{warehouse}/new/link/deep/file")
    assert (warehouse / "new/deep/file").read_bytes() == b"streamed"
    assert os.listdir(warehouse.parent / "secret") == ["f"]
    assert sorted(os.listdir(warehouse / "t")) == ["f"]


def test_client_follows_no_link_in_the_folder_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link above the folders of namespaces is followed, because only the operator can create it.

    A table's folder must not be a link or contain a link, because a tenant may have created it. The test does not call
    `confine`.
    """
    monkeypatch.setattr(storage, "_confined_to", None)
    (tmp_path / "disk/ns/t/data").mkdir(parents=True)
    (tmp_path / "disk/ns/t/data/f").write_text("own")
    (tmp_path / "disk/ns/u").mkdir()
    (tmp_path / "disk/ns/u/f").write_text("another table's")
    (tmp_path / "warehouse").symlink_to("disk")
    (tmp_path / "disk/ns/t/link").symlink_to("../u")
    (tmp_path / "disk/ns/v").symlink_to("u")
    table_storage = Storage.of_table({}, f"file://{tmp_path}/warehouse/ns/t/")
    assert bytes(table_storage.read(f"file:{tmp_path}/warehouse/ns/t/data/f")) == b"own"
    for path in ("t/link/f", "t/../t/link/f"):
        with pytest.raises(PermissionError, match="symbolic link"):
            table_storage.read(f"file://{tmp_path}/warehouse/ns/{path}")
    replaced_storage = Storage.of_table({}, f"{tmp_path}/warehouse/ns/v")
    with pytest.raises(PermissionError, match="symbolic link"):
        replaced_storage.read(f"{tmp_path}/warehouse/ns/v/f")
    assert Storage.of_table({}, "s3://bucket/t").local_root == ""
