"""An object store in HDFS, through the library hdfs-native, which needs neither Java nor libhdfs.

In HDFS, a file is visible while it is written. So `create` writes a temporary file in the same folder, and renames it
without the option to overwrite. The NameNode checks and renames under its lock, so a reader sees the complete object or
none, and two writers never both succeed. If the reply to the rename is lost, the temporary file shows what happened:
only its own writer moves it.

The blocking client runs in threads (`threads.py`). The asynchronous client of the library panics when it resolves the
name of a host, because it does not enter the runtime of the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    ObjectExists,
    ObjectMissing,
    RetryLater,
    SeamarkError,
    StorageError,
    StorageFull,
    TooLarge,
)
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.objects.hdfs.threads import ClientThreads
from seamark.metaserver.objects.port import ObjectInfo, Upload, check_range, yield_no_uploads
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    import hdfs_native
else:
    hdfs_native = LazyModule("hdfs_native")

TEMPORARY_PREFIX = ".seamark-tmp-"
"""The prefix of incomplete files, which are never listed."""
_FILES_PER_BATCH = 1000
_SHOWN_CHARACTERS_MAX = 200
_FAILED = (OSError, RuntimeError, ValueError)
"""The errors of the library. Most errors of Hadoop are a RuntimeError with the name of Hadoop's class in its text."""
_FULL = ("QuotaExceededException", "could only be written to 0")
_REFUSED = ("AccessControlException", "Permission denied", "SaslException", "AuthorizationException", "GSSAPI")
_WRONG_PATH = ("ParentNotDirectoryException", "must both be directories", "InvalidPathException", "IllegalArgument")

T = TypeVar("T")


def open_client(authority: str, settings: Settings) -> hdfs_native.Client:
    """Return a client of a nameservice, or of a NameNode with its port. It does not connect.

    Raises:
        RuntimeError: The nameservice is in no configuration file.
        ImportError: The library is not installed.
    """
    return hdfs_native.Client(f"hdfs://{authority}", config_dir=settings.hdfs_config_folder or None)


class HdfsObjects:
    """An ObjectStore for `hdfs://` locations. Call `close` after use."""

    def __init__(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> None:
        self._roots = tuple(roots)
        self._settings = settings
        self._clock = clock
        self._threads_by_authority: dict[str, ClientThreads[hdfs_native.Client]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Reject new requests. Requests in progress end in their threads, because a NameNode may not answer."""
        self._is_closed = True

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        def read(client: hdfs_native.Client, path: str) -> bytes:
            reader = client.read(path)
            size = len(reader)
            if limit_bytes is not None and size > limit_bytes:
                raise TooLarge(f"{location!r} has {size} bytes; at most {limit_bytes} are read")
            return reader.read_range(0, size) if size else b""

        return await self._run(location, read)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        check_range(start, length)

        def read(client: hdfs_native.Client, path: str) -> bytes:
            reader = client.read(path)
            # The library aborts a read behind the end.
            end = min(start + length, len(reader))
            return reader.read_range(start, end - start) if start < end else b""

        return await self._run(location, read)

    async def exists(self, location: str) -> bool:
        try:
            return not await self._run(location, lambda client, path: client.get_file_info(path).isdir)
        except ObjectMissing:
            return False

    async def check_links(self, locations: Sequence[str]) -> None:
        """Do nothing, because HDFS has no symbolic links unless an operator enables them."""

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        name = TEMPORARY_PREFIX + self._clock.draw_bytes(12).hex()
        await self._run(location, partial(_create_file, location=location, name=name, data=data, durable=durable))

    async def delete(self, location: str) -> None:
        def delete(client: hdfs_native.Client, path: str) -> None:
            if not client.get_file_info(path).isdir:
                client.delete(path, False)

        with contextlib.suppress(ObjectMissing):
            await self._run(location, delete)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        try:
            if not await self._run(prefix, lambda client, path: client.get_file_info(path).isdir):
                return
        except ObjectMissing:
            return
        files = await self._run(prefix, lambda client, path: _iter_files(client, path, parse_location(prefix)))
        while True:
            try:
                batch = await self._run(prefix, lambda client, path: tuple(islice(files, _FILES_PER_BATCH)))
            except ObjectMissing:
                raise RetryLater(f"A folder below {prefix!r} was deleted during its listing; try again") from None
            for info in batch:
                yield info
            if len(batch) < _FILES_PER_BATCH:
                return

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return yield_no_uploads()

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return 0

    async def ping(self) -> None:
        for authority in {root.bucket for root in self._roots}:
            await self._run(f"hdfs://{authority}/", lambda client, path: client.get_file_info("/"))

    async def _run(self, location: str, work: Callable[[hdfs_native.Client, str], T]) -> T:
        """Call `work` with the client and the path of the location in a thread, and return its result.

        Raises:
            StorageError: The location is not in HDFS, the connections are closed, or HDFS refuses the request.
            RetryLater: HDFS did not answer in time.
        """
        parsed = parse_location(location)
        if parsed.scheme != "hdfs":
            raise StorageError(f"{location!r} is not in HDFS")
        if self._is_closed:
            raise StorageError("The connections to HDFS are closed, because the server stops")
        authority = parsed.bucket
        threads = self._threads_by_authority.get(authority)
        if threads is None:
            open_authority = partial(open_client, authority, self._settings)
            threads = self._threads_by_authority[authority] = ClientThreads(authority, open_authority, self._clock)

        def run_work(get_client: Callable[[], hdfs_native.Client]) -> T:
            try:
                return work(get_client(), f"/{parsed.path}")
            except _FAILED as error:
                raise explain_error(error, location) from error

        timeout_s = self._settings.storage_timeout_s
        try:
            return await threads.run(run_work, timeout_s)
        except TimeoutError:
            raise RetryLater(f"HDFS did not answer for {location!r} within {timeout_s:g} s; try again later") from None


def _create_file(
    client: hdfs_native.Client, path: str, *, location: str, name: str, data: bytes, durable: bool
) -> None:
    """Write a temporary file with this name, and rename it to `path`.

    After an error, the files show whether the rename has succeeded. If it has not, the temporary file is deleted.

    Args:
        client: The client of HDFS.
        path: The path of the new file.
        location: The location of the new file, for messages.
        name: The name of the temporary file, in the same folder.
        data: The content.
        durable: Whether the content must be on the disks of the DataNodes before the rename.

    Raises:
        ObjectExists: The path already has a file.
        RetryLater: The outcome is not known, or another client has deleted the folder.
    """
    temporary = f"{path.rpartition('/')[0]}/{name}"
    is_written = False
    try:
        options = hdfs_native.WriteOptions(overwrite=False, create_parent=True)
        with client.create(temporary, options) as writer:
            if data:
                writer.write(data)
                if durable:
                    # DataNodes otherwise answer before the bytes are on their disks.
                    writer.hsync()
        is_written = True
        client.rename(temporary, path, overwrite=False)
    except _FAILED as error:
        try:
            # Without a complete temporary file, the file at `path` is that of another writer.
            if is_written and not _is_file(client, temporary) and _is_file(client, path):
                return  # The reply was lost: the file was renamed.
            client.delete(temporary, False)
        except _FAILED:
            if isinstance(error, FileExistsError | FileNotFoundError):
                raise RetryLater(f"HDFS did not confirm the write of {location!r}; try again later") from error
            raise error from None
        if isinstance(error, FileExistsError):
            raise ObjectExists(f"An object already exists at {location!r}") from error
        if isinstance(error, FileNotFoundError):
            raise RetryLater(f"The folder of {location!r} was deleted concurrently; try again") from error
        raise


def _is_file(client: hdfs_native.Client, path: str) -> bool:
    try:
        return not client.get_file_info(path).isdir
    except FileNotFoundError:
        return False


def _iter_files(client: hdfs_native.Client, path: str, folder: Location) -> Iterator[ObjectInfo]:
    for status in client.list_status(path, recursive=True):
        if not status.isdir and not status.path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
            yield ObjectInfo(f"{folder.root()}{status.path}", status.length, status.modification_time)


def explain_error(error: Exception, location: str) -> SeamarkError:
    """Translate an error of the library. The text of such an error has a stack trace, which the result leaves out."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"There is no object at {location!r}")
    if any(name in text for name in _FULL):
        return StorageFull(f"HDFS has no space or quota for {location!r}: free space, or raise the quota of the folder")
    if isinstance(error, PermissionError) or any(name in text for name in _REFUSED):
        return StorageError(
            f"HDFS refused access to {location!r}: check the user of the server (HADOOP_USER_NAME, or the Kerberos "
            "ticket) and the permissions of the folder"
        )
    if any(name in text for name in _WRONG_PATH):
        return StorageError(f"HDFS refused the path {location!r}: a part of it is a file, or is not a valid name")
    if "No NameNode hosts found" in text:
        return StorageError(
            f"No configuration file names the NameNodes of {location!r}: set hdfs_config_folder, or write "
            "hdfs://namenode:8020/path"
        )
    first_line = text.partition("\n")[0]
    return RetryLater(f"HDFS did not answer for {location!r}: {first_line[:_SHOWN_CHARACTERS_MAX]}; try again later")
