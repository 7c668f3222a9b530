"""`confine`: a process that works for others opens no file that one of them makes it reach by a symbolic link."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamark.connector.client import storage
from seamark.connector.client.storage import Storage, confine


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A warehouse that a symbolic link leads to, as operators have it, and a secret beside it."""
    (tmp_path / "disk" / "t").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("secret")
    (tmp_path / "disk" / "t" / "f").write_text("own")
    (tmp_path / "disk" / "t2").mkdir()
    (tmp_path / "disk" / "t2" / "f").write_text("another table's")
    (tmp_path / "warehouse").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(storage, "_confined_to", None)
    confine([f"{tmp_path}/warehouse/"])
    return tmp_path / "warehouse"


def test_own_files_are_read_and_written(warehouse: Path) -> None:
    for location in (f"file://{warehouse}/t/f", f"{warehouse}/t/f", f"file:{warehouse}/t//f"):
        assert bytes(Storage().read(location)) == b"own"
    Storage().write(f"file://{warehouse}/t/deep/new", [b"x"])
    assert (warehouse / "t" / "deep" / "new").read_bytes() == b"x"


@pytest.mark.parametrize(
    "place",
    ["t/link", "t/folder/f", "t/table/f", "../secret/f", "t/../../secret/f", "t/folder/../f"],
)
def test_links_and_files_elsewhere_are_refused(warehouse: Path, place: str) -> None:
    secret = warehouse.parent / "secret"
    (warehouse / "t" / "link").symlink_to(secret / "f")
    (warehouse / "t" / "folder").symlink_to(secret)
    (warehouse / "t" / "table").symlink_to(warehouse / "t2")
    with pytest.raises(PermissionError, match="outside the warehouse"):
        Storage().read(f"file://{warehouse}/{place}")
    with pytest.raises(PermissionError, match="outside the warehouse"):
        Storage().delete(f"file://{warehouse}/{place}")
    assert (secret / "f").read_text() == "secret"


def test_other_processes_are_not_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_confined_to", None)
    (tmp_path / "f").write_text("own")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert bytes(Storage().read(f"file://{tmp_path}/link")) == b"own"
