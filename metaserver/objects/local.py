"""An object store in the files of this machine.

A durable `create` returns only after the bytes, the name and every new folder are on disk. The bytes are written to a
temporary file in the same folder. The file is synced, and then linked to its final name with link(2), which fails if
the name exists. So the file is created atomically, and no reader sees a partial file. Then the folder is synced.
obstore's LocalStore is not used, because it never calls fsync. After a power cut, a metadata file could be empty
although the pointer, which SQLite has synced, refers to it.

A thread pool of limited size reads and writes the files. `RootFolder` opens a location below its root without
following symbolic links. Files are created, linked and deleted relative to the descriptor of their folder.
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
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    BadRequest,
    ObjectExists,
    ObjectMissing,
    RetryLater,
    StorageError,
    StorageFull,
    TooLarge,
)
from seamark.formats.runtime.root_folder import (
    FOLDER_FLAGS,
    READ_FLAGS,
    NotPlainFileError,
    RootFolder,
    SymbolicLinkError,
    open_child,
)
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.objects.port import ObjectInfo, Upload, check_range, yield_no_uploads

TEMPORARY_PREFIX = ".seamark-tmp-"
"""The prefix of incomplete files, which are never listed.

An incomplete file remains only if the process dies in `create`.
"""

_OBJECTS_PER_BATCH = 1000
_CHECKED_IN_LOOP_MAX = 8
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_BUSY = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS))
_NOT_FILES = frozenset((errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV))
"""The errors of opening a path that is not a file: a link, a folder, a socket or pipe, a device without a driver."""
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS))

_HADOOP_MAGIC = b"crc\0"
"""The first bytes of a Hadoop checksum file (ChecksumFileSystem.CHECKSUM_VERSION)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A path below a root.

    Attributes:
        root: The folder of the warehouse or of an allowed location.
        path_below_root: The path relative to the root, or an empty text for the root itself.
        umask: The umask of new files and folders, or None for the umask of the process.
    """

    root: RootFolder
    path_below_root: str
    umask: int | None = None

    @property
    def folder(self) -> LocalPlace:
        """The place of the folder that contains this place."""
        return LocalPlace(self.root, self.path_below_root.rpartition("/")[0], self.umask)

    @property
    def name(self) -> str:
        return self.path_below_root.rpartition("/")[2]


class LocalObjects:
    """An ObjectStore for `file://` locations.

    `roots` are absolute paths that contain all files. New files and folders get their modes from
    `umasks[root]`, or from the process's umask. Call `close` after use.
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
        """Start the threads.

        Args:
            roots: The paths of the folders below which locations may be.
            clock: The clock, which gives the unique names of temporary files.
            threads: The number of threads.
            timeout_s: The time limit of each call.
            umasks: The umasks of the files below a root, by its path. Other roots use the umask of the process.
            parse: Parses the locations that `run` receives.
        """
        # Check the longest root first. An allowed location inside the warehouse may be a link that the operator
        # created. A root may be a link, but below the root of the warehouse, the link would be refused.
        self._roots = tuple(RootFolder(root) for root in sorted(roots, key=len, reverse=True))
        self._parse = parse
        self._umasks = {path.rstrip("/") or "/": umask for path, umask in (umasks or {}).items()}
        self._clock = clock
        self._timeout_s = timeout_s
        self.folders = DurableFolders(known_max=4096)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objects-local")

    async def close(self) -> None:
        """Wait for running operations. Cancel the operations that wait for a thread, and reject new operations."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        return await self.run(location, lambda place: _read_file(place, location, limit_bytes))

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return await self.run(location, lambda place: _read_range(place, start, length))

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        temporary_name = TEMPORARY_PREFIX + self._clock.draw_bytes(12).hex()

        def create(place: LocalPlace) -> None:
            try:
                self._create(place, location, data, temporary_name, durable=durable)
            except NotADirectoryError as error:
                raise StorageError(f"{location!r} is below a path that is a file, not a folder") from error
            except FileNotFoundError as error:
                check_writable(place.root.path, place.umask)
                raise RetryLater(f"The folder of {location!r} was deleted concurrently; retry") from error

        await self.run(location, create)

    async def exists(self, location: str) -> bool:
        # Do not use a thread. Opening a cached inode takes 6 µs, a thread switch takes 60 µs, and every load of a
        # table calls this method.
        place = self._find_place(parse_location(location))
        try:
            return place.root.is_file(place.path_below_root)
        except OSError as error:
            raise _explain_error(error, location) from error

    async def check_links(self, locations: Sequence[str]) -> None:
        if len(locations) <= _CHECKED_IN_LOOP_MAX:
            self._check_links(locations)
        else:
            await self.run(locations[0], lambda _: self._check_links(locations))

    async def delete(self, location: str) -> None:
        await self.run(location, _delete_file)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        walk = await self.run(prefix, _walk_folder)
        while True:
            batch = await self.run(prefix, lambda _: tuple(islice(walk, _OBJECTS_PER_BATCH)))
            for info in batch:
                yield info
            if len(batch) < _OBJECTS_PER_BATCH:
                return

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        # Incomplete files have temporary names, which `list` omits.
        return yield_no_uploads()

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return 0

    async def ping(self) -> None:
        for root in self._roots:
            await self.run(f"file://{root.path}", lambda place: check_writable(place.root.path, place.umask))

    async def run(self, location: str, work: Callable[[LocalPlace], T]) -> T:
        """Call `work` with the place of the location in a thread, and return its result.

        The method translates errors of the operating system to errors that the interface `ObjectStore` documents. A
        slow file system does not block the event loop.

        Raises:
            RetryLater: The thread did not end in time. It may still run.
        """
        place = self._find_place(self._parse(location))

        def run_work() -> T:
            try:
                return work(place)
            except OSError as error:
                raise _explain_error(error, location) from error

        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, run_work)
        except TimeoutError:
            raise RetryLater(
                f"The disk did not answer for {location!r} within {self._timeout_s:g} s; try again later"
            ) from None

    def _find_place(self, location: Location) -> LocalPlace:
        path = _check_local(location).file_path
        for root in self._roots:
            relative_path = root.find_path_below(path)
            if relative_path is not None:
                return LocalPlace(root, relative_path, self._umasks.get(root.path))
        raise BadRequest(f"The location {str(location)!r} is outside the warehouse and the allowed locations")

    def _check_links(self, locations: Iterable[str]) -> None:
        """Check that no location is a symbolic link or behind a link. A location that does not exist is accepted.

        Each folder is opened once, because most locations are files of the same folder.

        Raises:
            SeamarkError: A location is a link or behind a link, or cannot be checked.
        """
        names_by_folder: dict[str, list[str]] = {}
        for location in locations:
            folder, _, name = location.rpartition("/")
            names_by_folder.setdefault(folder, []).append(name)
        for folder, names_in_folder in names_by_folder.items():
            first_location = f"{folder}/{names_in_folder[0]}"
            try:
                if len(names_in_folder) == 1:
                    place = self._find_place(parse_location(first_location))
                    place.root.check_links(place.path_below_root)
                else:
                    self._check_names(folder, names_in_folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise _explain_error(error, first_location, is_folder=True) from error

    def _check_names(self, folder: str, names: Iterable[str]) -> None:
        place = self._find_place(parse_location(folder))
        descriptor = place.root.open(place.path_below_root, os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                        raise SymbolicLinkError(f"{place.path_below_root}/{name}", is_last=True)
        finally:
            os.close(descriptor)

    def _create(self, place: LocalPlace, location: str, data: bytes, temporary_name: str, *, durable: bool) -> None:
        folder = self.folders.open(place.folder)
        try:
            new_name, descriptor = _open_new(folder, temporary_name)
            try:
                _write_file(descriptor, data, place.umask, durable=durable)
                try:
                    os.link(new_name, place.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                except FileExistsError:
                    raise ObjectExists(f"An object already exists at {location!r}") from None
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        raise StorageError(
                            f"The file system of {location!r} has no hard links, which put-if-absent requires; "
                            "move the warehouse to a file system with hard links (ext4, xfs, btrfs, zfs)"
                        ) from error
                    raise
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new_name, dir_fd=folder)
            if durable:
                os.fsync(folder)
        finally:
            os.close(folder)


class DurableFolders:
    """Creates folders, and ensures once for each folder that its whole path below the root is on disk.

    Existing folders are also synced, because an engine may have created them without a sync. The list of synced folders
    identifies them by inode, so a folder that was deleted and created again is synced again. If the list loses a
    folder, the folder is only synced again.
    """

    def __init__(self, known_max: int) -> None:
        self._known_max = known_max
        self._folder_identities: dict[tuple[str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def open(self, place: LocalPlace) -> int:
        """Return the descriptor of the folder, which the caller must close.

        Raises:
            SymbolicLinkError: The path of the folder contains a link.
        """
        key = (place.root.path, place.path_below_root)
        # A folder with a known identity is on disk, because this process has synced it before.
        with contextlib.suppress(FileNotFoundError):
            folder = place.root.open_folder(place.path_below_root)
            if self._folder_identities.get(key) == _identify_folder(folder):
                return folder
            os.close(folder)
        if not os.path.isdir(place.root.real_path):
            _make_root_folder(place.root.real_path, place.umask)
            _sync_folder(os.path.dirname(place.root.real_path))
        folder = place.root.open("", os.O_PATH | os.O_DIRECTORY)
        try:
            for name in place.path_below_root.split("/") if place.path_below_root else ():
                with contextlib.suppress(FileExistsError):
                    _make_folder(name, place.umask, folder)
                # A folder without read permission cannot be opened for a sync. Usually, this process may not create
                # files in such a folder either, so another process has created the subfolder.
                with contextlib.suppress(PermissionError):
                    _sync_folder(".", folder)
                folder, parent = open_child(folder, name, os.O_PATH | os.O_DIRECTORY), folder
                os.close(parent)
            opened_folder = os.open(".", FOLDER_FLAGS | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        with self._lock:
            while len(self._folder_identities) >= self._known_max:
                self._folder_identities.pop(next(iter(self._folder_identities)))
            self._folder_identities[key] = _identify_folder(opened_folder)
        return opened_folder


def _make_root_folder(folder: str, umask: int | None) -> None:
    """Create a root folder with its parents. Its path may contain links, because the operator has chosen it."""
    if not os.path.isdir(folder):
        _make_root_folder(os.path.dirname(folder), umask)
        with contextlib.suppress(FileExistsError):
            _make_folder(folder, umask)


def _make_folder(name: str, umask: int | None, parent: int | None = None) -> None:
    """Create a folder. With `umask`, set its mode, but keep the set-group-id bit that it inherits from its parent."""
    os.mkdir(name, dir_fd=parent)
    if umask is None:
        return
    # Even if another program has replaced the new folder by a link, the descriptor refers to a folder.
    descriptor = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        inherited_mode = os.fstat(descriptor).st_mode & stat.S_ISGID
        os.fchmod(descriptor, 0o777 & ~umask | inherited_mode)
    finally:
        os.close(descriptor)


def _identify_folder(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _check_local(location: Location) -> Location:
    if location.scheme != "file":
        raise BadRequest(f"{str(location)!r} is not a local file")
    return location


def _explain_error(error: OSError, location: str, *, is_folder: bool = False) -> Exception:
    reason = error.strerror or str(error)
    if isinstance(error, SymbolicLinkError) and (is_folder or not error.is_last):
        return BadRequest(
            f"The path of {location!r} contains a symbolic link. Links below the warehouse are not followed: "
            "use the folder to which the link refers, or ask the operator to add this folder to allowed_locations"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ObjectMissing(f"Nothing is stored at {location!r}")
    if error.errno in _FULL:
        return StorageFull(f"The disk that holds {location!r} is full ({reason}); nothing was committed: free space")
    if error.errno in _BUSY:
        return RetryLater(f"This machine is out of resources for {location!r} ({reason}); try again later")
    if isinstance(error, NotPlainFileError) or error.errno in _NOT_FILES:
        return ObjectMissing(f"{location!r} is not a plain file")
    if error.errno == errno.ENAMETOOLONG:
        return BadRequest(f"The location {location!r} is too long for the file system")
    return StorageError(f"The file system refused {location!r}: {reason}")


def _read_file(place: LocalPlace, location: str, limit_bytes: int | None) -> bytes:
    with open(place.root.open_file(place.path_below_root), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit_bytes is not None and size > limit_bytes:
            raise TooLarge(f"{location!r} has {size} bytes; at most {limit_bytes} are read")
        return file.read()


def _read_range(place: LocalPlace, start: int, length: int) -> bytes:
    with open(place.root.open_file(place.path_below_root), "rb") as file:
        file.seek(start)
        return file.read(length)


def _open_new(folder: int, name: str) -> tuple[str, int]:
    """Create a file with the random name `name`, and return a tuple (name, descriptor).

    A file with this name can exist only after a crash, if the random numbers repeat. The new name then ends with
    hyphens.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with contextlib.suppress(FileExistsError):
            return name, os.open(name, flags, 0o666, dir_fd=folder)
        name += "-"


def _write_file(descriptor: int, data: bytes, umask: int | None, *, durable: bool) -> None:
    """Write the data, and sync them if `durable` is set. The function always closes the descriptor."""
    try:
        if umask is not None:
            os.fchmod(descriptor, 0o666 & ~umask)
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(name: str, parent: int | None = None) -> None:
    descriptor = os.open(name, FOLDER_FLAGS | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_file(place: LocalPlace) -> None:
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        place.root.open_parent_folder(place.path_below_root) as (folder, name),
    ):
        drop_checksums(folder, name)
        os.unlink(name, dir_fd=folder)


def drop_checksums(folder: int, name: str) -> None:
    """Delete Hadoop's checksums of a file.

    Hadoop's local file system, which Spark uses for `file:` locations, writes the checksums to the file
    `.<name>.crc` in the same folder. Hadoop refuses to read a file with wrong checksums, but reads a file without
    checksums. No other program deletes the checksums, so delete them before the file is deleted or replaced.
    """
    checksums = f".{name}.crc"
    with contextlib.suppress(OSError):
        descriptor = open_child(folder, checksums, READ_FLAGS)
        try:
            is_hadoop = os.read(descriptor, len(_HADOOP_MAGIC)) == _HADOOP_MAGIC
        finally:
            os.close(descriptor)
        if is_hadoop:
            os.unlink(checksums, dir_fd=folder)


def _walk_folder(place: LocalPlace) -> Iterator[ObjectInfo]:
    """Yield all files below a folder without following links. Temporary files are left out.

    Raises:
        SymbolicLinkError: The path of the folder itself contains a link.
    """
    root, prefix = place.root, "" if place.root.path == "/" else place.root.path
    pending = [place.path_below_root]
    while pending:
        current = pending.pop()
        try:
            folder = root.open_folder(current)
        except (FileNotFoundError, NotADirectoryError):
            continue  # The folder was deleted after its parent was listed, or never existed.
        except SymbolicLinkError:
            if current == place.path_below_root:
                raise
            continue  # The folder was replaced by a link after its parent was listed.
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    relative_path = f"{current}/{entry.name}" if current else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(relative_path)
                    elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY_PREFIX):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield ObjectInfo(
                                f"file://{prefix}/{relative_path}", status.st_size, status.st_mtime_ns // 1_000_000
                            )
        finally:
            os.close(folder)


def check_writable(root: str, umask: int | None) -> None:
    """Create the folder if it does not exist, and check that files can be created in it.

    Raises:
        StorageError: Files cannot be created in the folder. The message contains the reason.
    """
    try:
        if not os.path.isdir(root):
            _make_root_folder(root, umask)
        # The call fails if the path is a file.
        os.stat(root + "/.")
    except OSError as error:
        raise StorageError(f"Cannot create the folder {root}: {error.strerror}") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise StorageError(f"This process may not create files in the folder {root}")
