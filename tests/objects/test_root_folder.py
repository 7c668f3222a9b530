"""Tests of `RootFolder`: no access below a root follows a symbolic link, with openat2 and without it."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from seamark.formats.runtime import root_folder
from seamark.formats.runtime.root_folder import (
    FOLDER_FLAGS,
    NotPlainFileError,
    RootFolder,
    SymbolicLinkError,
    has_openat2,
)
from tests.seeds import examples, first_seed


@pytest.fixture(params=["openat2", "each component"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RootFolder]:
    """Return a root folder whose path is a symbolic link, as operators may have it.

    The root contains the file `t/f`, and the file `secret/f` is outside of it. Each test runs twice: with the system
    call `openat2`, and with the fallback that opens each component of a path. No descriptor may stay open.
    """
    if request.param == "openat2":
        assert has_openat2(), "this kernel has no openat2, so only the fallback is tested"
    else:
        monkeypatch.setattr(root_folder, "has_openat2", lambda: False)
    (tmp_path / "disk/t/deep").mkdir(parents=True)
    (tmp_path / "disk/t/f").write_bytes(b"own")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/f").write_bytes(b"secret")
    (tmp_path / "warehouse").symlink_to("disk")
    descriptors_before = _count_descriptors()
    yield RootFolder(f"{tmp_path}/warehouse/")
    assert _count_descriptors() == descriptors_before


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def test_files_of_the_warehouse_are_opened(root: RootFolder) -> None:
    assert _read(root.open_file("t/f")) == b"own"
    assert root.is_file("t/f")
    assert not root.is_file("t/missing")
    assert not root.is_file("t/f/below")
    assert not root.is_file("t")
    os.close(root.open_folder(""))
    os.close(root.open_folder("t/deep"))
    root.check_links("t/f")
    root.check_links("t/missing/below")
    with root.open_parent_folder("t/new") as (folder, name):
        os.mkdir(name, dir_fd=folder)
    root.delete_file("t/f")
    assert not root.is_file("t/f")
    with pytest.raises(FileNotFoundError):
        root.delete_file("t/f")
    Path(root.path, "t/file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        root.open_folder("t/file")


@pytest.mark.parametrize("target", ["../secret", "{secret}", "deep", "/", "/proc/self/root", "."])
def test_links_to_any_target_are_rejected(root: RootFolder, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "disk/t"
    (folder / "link").symlink_to(target.format(secret=tmp_path / "secret"))
    (folder / "file").symlink_to("f")
    calls: tuple[Callable[[], object], ...] = (
        lambda: root.open_file("t/link/f"),
        lambda: root.open_folder("t/link"),
        lambda: root.open("t/link/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        lambda: root.delete_file("t/link/f"),
        lambda: root.is_file("t/link/f"),
        lambda: root.check_links("t/link"),
        lambda: root.check_links("t/link/f"),
        lambda: root.check_links("t/file"),
    )
    for call in calls:
        with pytest.raises(SymbolicLinkError) as error:
            call()
        assert error.value.errno == errno.ELOOP
    with pytest.raises(SymbolicLinkError) as error:
        root.open_file("t/link/f")
    assert not error.value.is_last
    with pytest.raises(SymbolicLinkError) as error:
        root.open_file("t/file")
    assert error.value.is_last
    assert not root.is_file("t/file")
    root.delete_file("t/file")  # This deletes the link itself.
    assert sorted(os.listdir(folder)) == ["deep", "f", "link"]
    assert os.listdir(tmp_path / "secret") == ["f"]


@pytest.mark.parametrize("path", ["..", "../secret/f", "t/../../secret/f", "t//f", "/t/f", "t/", "./t", "t/.", "t/.."])
def test_path_that_could_leave_the_root_is_rejected(root: RootFolder, path: str) -> None:
    for call in (root.open_file, root.open_folder, root.delete_file, root.is_file, root.check_links):
        with pytest.raises(ValueError, match="component"):
            call(path)


def test_names_with_dots_are_ordinary_names(root: RootFolder, tmp_path: Path) -> None:
    for name in (".f.crc", "..f", "f..", "..."):
        (tmp_path / "disk/t" / name).write_bytes(b"own")
        assert _read(root.open_file(f"t/{name}")) == b"own"


def test_pipes_and_folders_are_not_opened_and_do_not_block(root: RootFolder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "disk/t/pipe")
    for name in ("t/pipe", "t/deep"):
        with pytest.raises(NotPlainFileError):
            root.open_file(name)
        assert not root.is_file(name)
    with suppress(PermissionError):
        # A character device, as /dev/zero.
        os.mknod(tmp_path / "disk/t/zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        with pytest.raises(NotPlainFileError):
            root.open_file("t/zero")


def test_paths_below_a_root_are_recognised() -> None:
    root = RootFolder("/srv/wh/")
    assert [root.find_path_below(path) for path in ("/srv/wh", "/srv/wh/a/b", "/srv/wh-2/a", "/srv", "/etc")] == [
        "",
        "a/b",
        None,
        None,
        None,
    ]
    assert RootFolder("/").find_path_below("/etc/passwd") == "etc/passwd"


def test_folder_replaced_by_a_link_at_any_moment_reveals_nothing(root: RootFolder, tmp_path: Path) -> None:
    """A writer constantly exchanges a folder and a link to a secret.

    Every access opens the writer's own file or fails.
    """
    folder = tmp_path / "disk/t"
    (folder / "own").mkdir()
    (folder / "own/f").write_bytes(b"own")
    (folder / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret/secret.txt").write_bytes(b"secret")
    ending = threading.Event()

    def exchange() -> None:
        while not ending.is_set():
            for _ in range(2):  # The second exchange restores the names.
                for old_name, new_name in (("own", "x"), ("link", "own"), ("x", "link")):
                    os.rename(folder / old_name, folder / new_name)

    rng = random.Random(first_seed())
    thread = threading.Thread(target=exchange)
    thread.start()
    outcomes = set()
    try:
        for number in range(examples(4000, 400)):
            with suppress(FileNotFoundError, NotADirectoryError, SymbolicLinkError):
                action = rng.randrange(3)
                if action == 0:
                    data = _read(root.open_file("t/own/f"))
                    assert data == b"own"
                    outcomes.add(data)
                elif action == 1:
                    with root.open_parent_folder(f"t/own/{number}") as (parent, name):
                        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                        os.close(os.open(name, flags, dir_fd=parent))
                        os.unlink(name, dir_fd=parent)
                else:
                    listing = root.open("t/own", FOLDER_FLAGS)
                    try:
                        assert "secret.txt" not in os.listdir(listing)
                    finally:
                        os.close(listing)
    finally:
        ending.set()
        thread.join()
    assert sorted(os.listdir(tmp_path / "secret")) == ["f", "secret.txt"]
    assert (tmp_path / "secret/f").read_bytes() == b"secret"
    assert outcomes <= {b"own"}
    assert _read(root.open_file("t/own/f")) == b"own"
