"""Local files as object storage.

`create` returns only after the bytes, the name and every new folder are on disk. The bytes are written to a temporary
file in the same folder, which is synced and then linked to its final name with link(2), which fails if the name exists:
so put-if-absent is atomic and no reader sees a partial file. Then the folder is synced. obstore's LocalStore is not
used because it never calls fsync: after a power cut a metadata file may be empty while the pointer, which SQLite did
sync, refers to it.

Files are processed in a bounded thread pool. A location is rejected if its real path, with symbolic links resolved, is
outside the roots; the last path component is opened without following links. An attacker who can replace a folder by a
link between the two steps already has write access to the warehouse.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import (
    BadRequest,
    ObjectExists,
    ObjectMissing,
    RetryLater,
    StorageError,
    StorageFull,
    TooLarge,
)
from seamark.metaserver.objects.locations import Location, parse_location
from seamark.metaserver.objects.port import ObjectInfo, Upload, check_range, no_uploads

TEMPORARY_PREFIX = ".seamark-tmp-"
"""The suffix of incomplete files, which are never listed. One remains only if the process dies inside `create`."""

_LIST_BATCH = 1000
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_BUSY = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS))
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS))

_HADOOP_MAGIC = b"crc\0"
"""What a file of Hadoop's checksums begins with (ChecksumFileSystem.CHECKSUM_VERSION)."""

T = TypeVar("T")


class LocalObjects:
    """An ObjectStore over `file://`; `roots` are absolute paths that contain all files. Close it after use.

    New files and folders get their modes from `umasks[root]`, or from the process's umask.
    """

    def __init__(
        self,
        roots: Iterable[str],
        clock: Clock,
        *,
        threads: int,
        timeout_s: float,
        umasks: Mapping[str, int] | None = None,
        parse: Callable[[str], Location] = parse_location,
    ) -> None:
        """`parse`: reads the locations that `run` gets."""
        self._roots = tuple(roots)
        self._parse = parse
        self._umasks = umasks or {}
        self._clock = clock
        self._timeout_s = timeout_s
        self.folders = DurableFolders(known_max=4096)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objects-local")

    async def close(self) -> None:
        """Waits for running writes and rejects new writes."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        return await self.run(location, lambda path, _: _read(path, location, limit_bytes))

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return await self.run(location, lambda path, _: _read_range(path, location, start, length))

    async def create(self, location: str, data: bytes) -> None:
        temporary = TEMPORARY_PREFIX + self._clock.random_bytes(12).hex()

        def create(path: str, root: str) -> None:
            try:
                self._create(path, root, location, data, temporary)
            except NotADirectoryError as error:
                raise StorageError(f"{location!r} is below a path that is a file, not a folder") from error
            except FileNotFoundError as error:
                check_writable(root, self._umasks.get(root))
                raise RetryLater(f"The folder of {location!r} was deleted concurrently; retry") from error

        await self.run(location, create)

    async def exists(self, location: str) -> bool:
        # Not in a thread: a stat of a cached inode takes 2 µs, a thread hop 60 µs, and every table load calls this.
        at = _local(parse_location(location))
        try:
            return stat.S_ISREG(os.lstat(at.file_path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _explain(error, location) from error

    async def delete(self, location: str) -> None:
        await self.run(location, lambda path, _: _delete(path))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        walk = await self.run(prefix, lambda path, _: _walk(path))
        while True:
            found = await self.run(prefix, lambda *_: tuple(islice(walk, _LIST_BATCH)))
            for info in found:
                yield info
            if len(found) < _LIST_BATCH:
                return

    def uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return no_uploads()  # files are written under temporary names, which `list` leaves out

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return 0

    async def ping(self) -> None:
        for root in self._roots:
            await self.run(f"file://{root}", lambda path, _: check_writable(path, self._umasks.get(path)))

    async def run(self, location: str, work: Callable[[str, str], T]) -> T:
        """Runs `work` with the checked path and its root in a thread, so that a hanging file system does not block the
        loop. Errors of the operating system become those of the port.
        """
        parsed = self._parse(location)

        def checked() -> T:
            path, root = self._inside(parsed)
            try:
                return work(path, root)
            except OSError as error:
                raise _explain(error, location) from error

        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, checked)
        except TimeoutError:
            raise RetryLater(
                f"The disk did not answer for {location!r} within {self._timeout_s:g} s; try again later"
            ) from None

    def _inside(self, location: Location) -> tuple[str, str]:
        path = _local(location).file_path
        real = os.path.realpath(path)
        for root in self._roots:
            real_root = os.path.realpath(root).rstrip("/")
            if real == real_root or real.startswith(real_root + "/"):
                return path, root
        raise BadRequest(f"The location {str(location)!r} leads outside the warehouse through a symbolic link")

    def _create(self, path: str, root: str, location: str, data: bytes, temporary_name: str) -> None:
        folder = os.path.dirname(path)
        umask = self._umasks.get(root)
        self.folders.make(folder, root, umask)
        temporary, descriptor = _open_new(os.path.join(folder, temporary_name))
        try:
            _write_synced(descriptor, data, umask)
            try:
                os.link(temporary, path, follow_symlinks=False)
            except FileExistsError:
                raise ObjectExists(f"Something is already stored at {location!r}") from None
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StorageError(
                        f"The file system of {location!r} has no hard links, which put-if-absent needs; "
                        "keep the warehouse on one that has (ext4, xfs, btrfs, zfs)"
                    ) from error
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_folder(folder)


class DurableFolders:
    """Creates folders, and ensures once per folder that its whole path below the root is on disk.

    Existing folders are synced too, because an engine may have created them without a sync. Known folders are
    identified by inode, so that a folder that is deleted and recreated is synced again; a forgotten folder costs a few
    syncs.
    """

    def __init__(self, known_max: int) -> None:
        self._known_max = known_max
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def make(self, folder: str, root: str, umask: int | None) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._known.get(folder) == _identity(folder):
                return
        chain = [folder]
        while chain[-1] != root and (chain[-1] + "/").startswith(root.rstrip("/") + "/"):
            chain.append(os.path.dirname(chain[-1]))
        if not os.path.isdir(chain[-1]):
            _make_parents(chain[-1], umask)
            chain.append(os.path.dirname(chain[-1]))
        for child in reversed(chain[:-1]):
            with contextlib.suppress(FileExistsError):
                _make_folder(child, umask)
        for parent in chain[1:]:
            # A folder that cannot be opened is not one that this process has just written to.
            with contextlib.suppress(PermissionError):
                sync_folder(parent)
        with self._lock:
            while len(self._known) >= self._known_max:
                self._known.pop(next(iter(self._known)))
            self._known[folder] = _identity(folder)


def _make_parents(folder: str, umask: int | None) -> None:
    if not os.path.isdir(folder):
        _make_parents(os.path.dirname(folder), umask)
        with contextlib.suppress(FileExistsError):
            _make_folder(folder, umask)


def _make_folder(folder: str, umask: int | None) -> None:
    os.mkdir(folder)
    if umask is not None:
        inherited = os.stat(folder).st_mode & stat.S_ISGID
        os.chmod(folder, 0o777 & ~umask | inherited)


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _local(location: Location) -> Location:
    if location.scheme != "file":
        raise BadRequest(f"{str(location)!r} is not on local files")
    return location


def _explain(error: OSError, location: str) -> Exception:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ObjectMissing(f"Nothing is stored at {location!r}")
    if error.errno in _FULL:
        return StorageFull(f"The disk that holds {location!r} is full ({reason}); nothing was committed: free space")
    if error.errno in _BUSY:
        return RetryLater(f"This machine is out of resources for {location!r} ({reason}); try again later")
    if error.errno in (errno.ELOOP, errno.EISDIR):
        return ObjectMissing(f"What is stored at {location!r} is not a plain file")
    if error.errno == errno.ENAMETOOLONG:
        return BadRequest(f"The location {location!r} is too long for the file system")
    return StorageError(f"The file system refused {location!r}: {reason}")


def _read(path: str, location: str, limit_bytes: int | None) -> bytes:
    with plain_file(path, location) as descriptor:
        size = os.fstat(descriptor).st_size
        if limit_bytes is not None and size > limit_bytes:
            raise TooLarge(f"{location!r} has {size} bytes; at most {limit_bytes} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()


def _read_range(path: str, location: str, start: int, length: int) -> bytes:
    with plain_file(path, location) as descriptor, open(descriptor, "rb", closefd=False) as file:
        file.seek(start)
        return file.read(length)


@contextlib.contextmanager
def plain_file(path: str, location: str) -> Iterator[int]:
    """A descriptor for reading. ObjectMissing if the path is not a plain file."""
    # O_NONBLOCK: opening a named pipe would otherwise block the thread until a writer opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ObjectMissing(f"What is stored at {location!r} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _open_new(path: str) -> tuple[str, int]:
    """(path, descriptor) of a new file. The name exists only after a crash when randomness is replayed."""
    while True:
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        path += "-"


def _write_synced(descriptor: int, data: bytes, umask: int | None) -> None:
    """Closes the descriptor in every case."""
    try:
        if umask is not None:
            os.fchmod(descriptor, 0o666 & ~umask)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: str) -> None:
    drop_checksums(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def drop_checksums(path: str) -> None:
    """Deletes the file `.<name>.crc` that Hadoop's local file system, as Spark uses it for `file:` locations, writes
    beside a file. Hadoop refuses to read other bytes under the same name, and nothing else deletes it. Before the file
    is deleted or replaced: a file without checksums is read."""
    folder, name = os.path.split(path)
    checksums = f"{folder}/.{name}.crc"
    with contextlib.suppress(OSError):
        descriptor = os.open(checksums, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_hadoop = os.read(descriptor, len(_HADOOP_MAGIC)) == _HADOOP_MAGIC
        finally:
            os.close(descriptor)
        if is_hadoop:
            os.unlink(checksums)


def _walk(folder: str) -> Iterator[ObjectInfo]:
    pending = [folder]
    while pending:
        current = pending.pop()
        try:
            entries = os.scandir(current)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted since its parent was listed, or never existed
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY_PREFIX):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield ObjectInfo(f"file://{entry.path}", status.st_size, status.st_mtime_ns // 1_000_000)


def check_writable(root: str, umask: int | None) -> None:
    """Creates the folder if it does not exist. StorageError, with the reason, if files cannot be created in it."""
    try:
        if not os.path.isdir(root):
            _make_parents(root, umask)
        os.stat(root + "/.")  # fails for a file
    except OSError as error:
        raise StorageError(f"Cannot create the folder {root}: {error.strerror}") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise StorageError(f"This process may not create files in the folder {root}")
