"""Tests of local files: the contract, the order of syncs, full disks, symbolic links."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import (
    BadRequest,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    RetryLater,
    StorageError,
)
from seamark.metaserver.objects.local import TEMPORARY_PREFIX, LocalObjects
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects, prepare_warehouse_root
from seamark.metaserver.settings.settings import Settings
from tests.objects.contract import ObjectStoreContract


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    async with open_objects(Settings(home=tmp_path), SystemClock()) as objects:
        yield objects


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"file://{tmp_path}/warehouse/corner"


class TestLocalContract(ObjectStoreContract):
    """The contract's tests. The server's router opens the store by the scheme of the location, as in production."""


async def test_hadoops_spelling_names_the_same_file(store: ObjectStore, base: str) -> None:
    await store.create(base.replace("file:///", "file:/") + "/x", b"x")
    assert await store.read(base + "/x") == b"x"


async def test_bytes_are_synced_before_the_name_and_the_name_before_the_return(
    store: ObjectStore, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}" if folder else "sync bytes")
        real_fsync(descriptor)

    def link(source: str, target: str, **options: Any) -> None:
        steps.append("link")
        real_link(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    await store.create(f"{base}/t/metadata/1.json", b"{}")
    folder = f"{tmp_path}/warehouse/corner/t/metadata"
    assert steps[-3:] == ["sync bytes", "link", f"sync {folder}"]
    parent_syncs = {f"sync {tmp_path}/warehouse/corner{tail}" for tail in ("", "/t")} | {f"sync {tmp_path}/warehouse"}
    assert parent_syncs <= set(steps[:-3]), "the name of a new folder was not synced"
    steps.clear()
    await store.create(f"{base}/t/metadata/2.json", b"{}")
    assert steps == ["sync bytes", "link", f"sync {folder}"], "folders that were synced before are synced again"


async def test_hadoops_checksums_are_deleted_only_with_their_file(
    store: ObjectStore, base: str, tmp_path: Path
) -> None:
    """Hadoop stores the checksums of the file `x` in `.x.crc`.

    If they stayed, Spark would refuse to read a later file with the same name. The server deletes no file that only
    has such a name: a file of another format, a link, or a folder.
    """
    folder = tmp_path / "warehouse" / "corner"
    # For the longest name, the name of the checksum file `.….crc` is too long.
    names = (
        "a.parquet",
        "b.parquet",
        "c.parquet",
        "d.parquet",
        "x" * 251,
    )
    for name in names:
        await store.create(f"{base}/{name}", b"x")
    (folder / ".a.parquet.crc").write_bytes(b"crc\0" + bytes(12))
    (folder / ".b.parquet.crc").write_bytes(b"a file of somebody")
    (tmp_path / "elsewhere").write_bytes(b"crc\0" + bytes(12))
    (folder / ".c.parquet.crc").symlink_to(tmp_path / "elsewhere")
    (folder / ".d.parquet.crc").mkdir()
    for name in names:
        await store.delete(f"{base}/{name}")
    assert {path.name for path in folder.iterdir()} == {".b.parquet.crc", ".c.parquet.crc", ".d.parquet.crc"}
    assert (tmp_path / "elsewhere").exists()


async def test_recreated_folder_is_synced_again(
    store: ObjectStore, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(f"{base}/t/1", b"")
    (tmp_path / "warehouse/corner/t/1").unlink()
    (tmp_path / "warehouse/corner/t").rename(tmp_path / "aside")
    synced_inodes: list[int] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        synced_inodes.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    await store.create(f"{base}/t/2", b"")
    assert (tmp_path / "warehouse/corner").stat().st_ino in synced_inodes


async def test_file_that_need_not_be_durable_is_complete_but_not_synced(
    store: ObjectStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(f"{base}/t/1", b"first")
    synced_descriptors: list[int] = []
    monkeypatch.setattr(os, "fsync", synced_descriptors.append)
    await store.create(f"{base}/t/2", b"second", durable=False)
    assert not synced_descriptors
    assert await store.read(f"{base}/t/2") == b"second"
    with pytest.raises(ObjectExists):
        await store.create(f"{base}/t/2", b"third", durable=False)


@pytest.mark.parametrize("step", ["write", "fsync", "link"])
async def test_failed_create_leaves_no_file(
    store: ObjectStore, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    # The folders exist before the fault, so only the step of the new file fails.
    await store.create(f"{base}/warm", b"")

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patches:
        patches.setattr(os, step, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            await store.create(f"{base}/x", b"x")
    assert sorted(path.name for path in (tmp_path / "warehouse/corner").iterdir()) == ["warm"]
    await store.create(f"{base}/x", b"x")


async def test_process_killed_between_sync_and_link_leaves_no_object(tmp_path: Path) -> None:
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.objects.router import prepare_warehouse_root, open_objects
from seamark.metaserver.settings.settings import Settings
os.link = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
async def main():
    settings = Settings(home=Path(sys.argv[1]))
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(settings.make_warehouse_uri() + "/t/x", b"half")
asyncio.run(main())
"""
    killed_process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2], check=False
    )
    assert killed_process.returncode == -signal.SIGKILL
    settings = Settings(home=tmp_path)
    async with open_objects(settings, SystemClock()) as objects:
        location = settings.make_warehouse_uri() + "/t/x"
        assert not await objects.exists(location)
        assert [info async for info in objects.list(settings.make_warehouse_uri())] == []
        await objects.create(location, b"whole")
        assert await objects.read(location) == b"whole"
    leftovers = [path.name for path in (tmp_path / "warehouse/t").iterdir() if path.name != "x"]
    assert all(name.startswith(TEMPORARY_PREFIX) for name in leftovers)


async def test_create_succeeds_if_its_temporary_name_already_exists(tmp_path: Path) -> None:
    leftover = tmp_path / (TEMPORARY_PREFIX + SimulatedClock(1).draw_bytes(12).hex())
    leftover.write_bytes(b"left by a crash of the same seed")
    local_objects = LocalObjects([str(tmp_path)], SimulatedClock(1), threads=1, timeout_s=5)
    try:
        await local_objects.create(f"file://{tmp_path}/x", b"x")
    finally:
        await local_objects.close()
    assert (tmp_path / "x").read_bytes() == b"x"


async def test_file_in_place_of_a_folder_is_named_in_the_error(store: ObjectStore, base: str) -> None:
    await store.create(f"{base}/file", b"")
    with pytest.raises(StorageError, match="is a file, not a folder") as error:
        await store.create(f"{base}/file/below/x", b"")
    assert not isinstance(error.value, ObjectMissing)


async def test_name_too_long_for_the_file_system_is_a_client_error(store: ObjectStore, base: str) -> None:
    with pytest.raises(BadRequest, match="too long"):
        await store.create(f"{base}/{'x' * 300}", b"")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
async def test_pipes_folders_and_links_are_rejected_without_waiting(
    store: ObjectStore, base: str, tmp_path: Path, kind: str
) -> None:
    await store.create(f"{base}/warm", b"secret")
    odd_path = tmp_path / "warehouse/corner/odd"
    {"pipe": lambda: os.mkfifo(odd_path), "folder": odd_path.mkdir, "link": lambda: odd_path.symlink_to("warm")}[kind]()
    with pytest.raises(ObjectMissing):
        await store.read(f"{base}/odd")
    assert not await store.exists(f"{base}/odd")
    with pytest.raises(ObjectExists):
        await store.create(f"{base}/odd", b"")


async def test_symbolic_link_does_not_lead_out_of_the_warehouse(store: ObjectStore, base: str, tmp_path: Path) -> None:
    await store.ping()
    outside_folder = tmp_path / "outside"
    outside_folder.mkdir()
    (outside_folder / "secret").write_bytes(b"secret")
    (tmp_path / "warehouse/way-out").symlink_to(outside_folder)
    link_location = f"file://{tmp_path}/warehouse/way-out"
    for call in (
        store.read(f"{link_location}/secret"),
        store.create(f"{link_location}/new", b""),
        store.delete(f"{link_location}/secret"),
    ):
        with pytest.raises(BadRequest, match="symbolic link"):
            await call
    assert sorted(path.name for path in outside_folder.iterdir()) == ["secret"]
    assert [info async for info in store.list(f"file://{tmp_path}/warehouse")] == []


async def test_warehouse_may_be_a_link_but_links_inside_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    settings = Settings(warehouse=f"file://{tmp_path}/alias")
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(f"file://{tmp_path}/alias/a/x", b"x")
        (tmp_path / "real/b").symlink_to("a")
        assert await objects.read(f"file://{tmp_path}/alias/a/x") == b"x"
        with pytest.raises(BadRequest, match="symbolic link"):
            await objects.read(f"file://{tmp_path}/alias/b/x")


async def test_allowed_location_may_be_a_link_inside_the_warehouse(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "warehouse").mkdir()
    (tmp_path / "warehouse/big").symlink_to(tmp_path / "disk")
    settings = Settings(
        warehouse=f"file://{tmp_path}/warehouse", allowed_locations=(f"file://{tmp_path}/warehouse/big",)
    )
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(f"file://{tmp_path}/warehouse/big/t/x", b"x")
        assert (tmp_path / "disk/t/x").read_bytes() == b"x"
        assert await objects.exists(f"file://{tmp_path}/warehouse/big/t/x")


async def test_files_outside_the_warehouse_are_never_read_or_changed(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "near").write_bytes(b"secret")
    for location in (
        f"file://{tmp_path}/near",
        "file:///etc/passwd",
        f"file://{tmp_path}/warehouse-2/x",
        "s3://other/x",
    ):
        for call in (store.read(location), store.create(location, b""), store.delete(location), store.exists(location)):
            with pytest.raises(BadRequest, match="outside the warehouse"):
                await call
    assert (tmp_path / "near").read_bytes() == b"secret"


async def test_call_on_a_hanging_disk_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()
    local_objects = LocalObjects([str(tmp_path)], SystemClock(), threads=2, timeout_s=0.2)
    try:
        with monkeypatch.context() as patches:
            patches.setattr(os, "fsync", lambda _: is_released.wait(30))
            with pytest.raises(RetryLater, match="did not answer"):
                await local_objects.create(f"file://{tmp_path}/x", b"x")
            is_released.set()
    finally:
        await local_objects.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate file system of one megabyte. Skip the test if the process may not mount."""
    mount_path = tmp_path / "disk"
    mount_path.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_path)], capture_output=True, check=False
    )
    if result.returncode:
        pytest.skip(f"mounting is not permitted here: {result.stderr.decode().strip()}")
    try:
        yield mount_path
    finally:
        subprocess.run(["umount", "-l", str(mount_path)], check=True)


async def test_full_disk_commits_nothing_and_is_named_in_the_error(small_disk: Path) -> None:
    settings = Settings(warehouse=f"file://{small_disk}/wh")
    async with open_objects(settings, SystemClock()) as objects:
        await objects.create(f"file://{small_disk}/wh/small", b"x" * 1000)
        with pytest.raises(RetryLater, match=rf"disk that holds 'file://{small_disk}/wh/big' is full"):
            await objects.create(f"file://{small_disk}/wh/big", b"x" * (2 << 20))
        assert not await objects.exists(f"file://{small_disk}/wh/big")
        assert sorted(path.name for path in (small_disk / "wh").iterdir()) == ["small"]
        await objects.create(f"file://{small_disk}/wh/big", b"x" * 1000)
        assert await objects.read(f"file://{small_disk}/wh/small") == b"x" * 1000


async def test_warehouse_that_cannot_be_created_is_named_with_the_reason() -> None:
    async with open_objects(Settings(warehouse="file:///proc/nope"), SystemClock()) as objects:
        for call in (objects.create("file:///proc/nope/t/x", b"x"), objects.ping()):
            with pytest.raises(StorageError, match=r"Cannot create the folder /proc/nope: No such file"):
                await call


async def test_unwritable_folder_is_named_in_the_error(small_disk: Path) -> None:
    # A read-only mount also prevents writes of the superuser.
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    settings = Settings(warehouse=f"file://{small_disk}")
    with pytest.raises(ConfigError, match=f"may not create files in the folder {small_disk}; choose another"):
        prepare_warehouse_root(settings)
    async with open_objects(settings, SystemClock()) as objects:
        with pytest.raises(StorageError, match="may not create files"):
            await objects.ping()


async def test_fifty_cycles_leak_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    async def cycle(number: int) -> None:
        async with open_objects(Settings(home=tmp_path), SystemClock()) as objects:
            await objects.create(f"file://{tmp_path}/warehouse/{number}", b"x")
            await objects.read(f"file://{tmp_path}/warehouse/{number}")
            with contextlib.suppress(ObjectMissing):
                await objects.read(f"file://{tmp_path}/warehouse/none")

    await cycle(-1)
    descriptors_before, threads_before = len(os.listdir("/proc/self/fd")), threading.active_count()
    cycles = 50
    for number in range(cycles):
        await cycle(number)
    # A leak grows in each cycle. The executor of the event loop may also start threads up to its limit.
    assert len(os.listdir("/proc/self/fd")) < descriptors_before + cycles // 2
    assert threading.active_count() < threads_before + cycles // 2
