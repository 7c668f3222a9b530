"""Stages, publishes and describes objects that are files. The functions block, and are called in threads.

An object is written to a staged file next to the buckets, synced, and then renamed to its name, so that no reader sees
a partial object. Renaming takes a lock on the folder, so that a conditional write of any worker sees the object that it
replaces. Content type and metadata are stored in an extended attribute of the file.

An ETag consists of the file's inode, modification time and size. It is different for each write, and needs no hash of
the content. Like the ETag of a multipart upload in S3, it is not an MD5.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from awscrt import checksums

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.root_folder import FOLDER_FLAGS, RootFolder
from seamark.metaserver.gateway.conditions import check_write
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.folder import UPLOADS
from seamark.metaserver.objects.local import DurableFolders, LocalPlace, drop_checksums

ATTRIBUTE = "user.seamark-s3"
METADATA_BYTES_MAX = 2048
"""The maximum size of user metadata, as in S3."""
_KEPT = ("content-type", "content-encoding", "content-language", "content-disposition", "cache-control", "expires")


class _Checksum(NamedTuple):
    """A checksum of a given length.

    Attributes:
        add: Returns the checksum of all data, from the next data and the checksum of the earlier data.
    """

    add: Callable[[bytes, int], int]
    size_bytes: int


_SUMS = {
    "x-amz-checksum-crc32": _Checksum(checksums.crc32, 4),
    "x-amz-checksum-crc32c": _Checksum(checksums.crc32c, 4),
    "x-amz-checksum-crc64nvme": _Checksum(checksums.crc64nvme, 8),
}
"""The checksums, by header."""
_KERNEL_COPY_BYTES, _MEMORY_COPY_BYTES = 1 << 30, 1 << 20
"""The maximum numbers of bytes of one copy in the kernel, and of one copy through the memory of the process."""
_HASHES = {"x-amz-checksum-sha1": "sha1", "x-amz-checksum-sha256": "sha256"}
_NO_ATTRIBUTE_ERRORS = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG))


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The size, the modification time, the ETag and the stored headers of an object, which is a file in the folder."""

    size: int
    modified_ns: int
    etag: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def modified_s(self) -> int:
        return self.modified_ns // 1_000_000_000


def make_etag(status: os.stat_result) -> str:
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def read_file_info(descriptor: int) -> FileInfo:
    status = os.fstat(descriptor)
    try:
        headers = convert_json(os.getxattr(descriptor, ATTRIBUTE), dict[str, str])
    except (OSError, msgspec.MsgspecError):
        headers = {}
    return FileInfo(status.st_size, status.st_mtime_ns, make_etag(status), headers)


def select_kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a write that a later read must return.

    Raises:
        S3Error: The metadata exceed S3's limit.
    """
    returned_headers = {name: headers[name] for name in _KEPT if headers.get(name)}
    # The coding `aws-chunked` describes only the body of the upload, so it is not kept.
    codings = [part.strip() for part in returned_headers.get("content-encoding", "").split(",")]
    returned_headers["content-encoding"] = ",".join(part for part in codings if part and part != "aws-chunked")
    metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
    if sum(len(name) + len(value) for name, value in metadata.items()) > METADATA_BYTES_MAX:
        raise S3Error("InvalidArgument", f"The metadata has more than {METADATA_BYTES_MAX} bytes")
    return {name: value for name, value in (returned_headers | metadata).items() if value}


class Checksums:
    """Computes the hashes of a body, and compares them with the hashes that the sender states."""

    def __init__(self, names: set[str], *, md5: bool) -> None:
        """Prepare the hashes.

        Args:
            names: The names of the headers or trailers with hashes (`x-amz-checksum-…`).
            md5: Whether to compute the MD5 as well.

        Raises:
            S3Error: InvalidRequest if an algorithm is unknown.
        """
        self._sums = dict.fromkeys(names & _SUMS.keys(), 0)
        self._hashes = {"content-md5": hashlib.md5(usedforsecurity=False)} if md5 else {}
        for name in names - _SUMS.keys():
            if name not in _HASHES:
                raise S3Error("InvalidRequest", f"{name[:100]} is not one of {[*_SUMS, *_HASHES]}")
            self._hashes[name] = hashlib.new(_HASHES[name], usedforsecurity=False)

    def update(self, data: bytes) -> None:
        for name, old_sum in self._sums.items():
            self._sums[name] = _SUMS[name].add(data, old_sum)
        for hasher in self._hashes.values():
            hasher.update(data)

    def check(self, stated_checksums: Mapping[str, str]) -> None:
        """Compare the hashes with the headers and trailers in `stated_checksums`.

        Raises:
            S3Error: BadDigest if they differ.
        """
        digests = {name: hasher.digest() for name, hasher in self._hashes.items()}
        digests |= {name: value.to_bytes(_SUMS[name].size_bytes, "big") for name, value in self._sums.items()}
        for name, digest in digests.items():
            if stated_checksums.get(name) != base64.b64encode(digest).decode():
                raise S3Error("BadDigest", f"{name} does not match the body that was received")


class Staging:
    """The staged files in the folder .seamark-uploads of `root`, which become objects when they are published."""

    def __init__(self, root: RootFolder, folders: DurableFolders) -> None:
        self.root = root
        self._folders = folders

    def open_new(self, name: str) -> int:
        """Create a staged file, and return its descriptor."""
        self.make_folder()
        return self.root.open(f"{UPLOADS}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def make_folder(self, name: str = "") -> None:
        """Create the folder of staged files, and a folder `name` in it if `name` is not empty."""
        os.makedirs(self.root.real_path, exist_ok=True)
        for relative_path in (UPLOADS, f"{UPLOADS}/{name}") if name else (UPLOADS,):
            with contextlib.suppress(FileExistsError), self.root.open_parent_folder(relative_path) as (folder, last):
                os.mkdir(last, mode=0o700, dir_fd=folder)

    def discard(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.root.delete_file(f"{UPLOADS}/{name}")

    def store_headers_and_sync(self, descriptor: int, headers: Mapping[str, str]) -> None:
        """Store the headers with the file as an extended attribute, and sync the file.

        If the file system has no extended attributes, the headers are not stored.

        Raises:
            S3Error: NotImplemented if the headers contain metadata (`x-amz-meta-…`), and cannot be stored.
        """
        if headers:
            try:
                os.setxattr(descriptor, ATTRIBUTE, msgspec.json.encode(headers))
            except OSError as error:
                if error.errno not in _NO_ATTRIBUTE_ERRORS:
                    raise
                if any(name.startswith("x-amz-meta-") for name in headers):
                    raise S3Error(
                        "NotImplemented", "The file system has no extended attributes, which metadata needs"
                    ) from None
        os.fsync(descriptor)

    def publish(self, name: str, place: LocalPlace, conditions: Mapping[str, str]) -> FileInfo:
        """Make the staged file the object at `place`.

        Raises:
            S3Error: PreconditionFailed if a condition of the write is false. InvalidRequest if the key is a folder of
                other keys, or another key is a folder in its path.
        """
        try:
            folder = self._folders.open(place.folder)
            try:
                with self._hold_lock() as uploads:
                    check_write(conditions, _read_etag_at(folder, place.name))
                    drop_checksums(folder, place.name)
                    os.rename(name, place.name, src_dir_fd=uploads, dst_dir_fd=folder)
                    status = os.stat(place.name, dir_fd=folder, follow_symlinks=False)
                os.fsync(folder)
            finally:
                os.close(folder)
        except (NotADirectoryError, IsADirectoryError, FileExistsError):
            raise S3Error("InvalidRequest", "A key and keys below it cannot be stored together on this store") from None
        return FileInfo(status.st_size, status.st_mtime_ns, make_etag(status))

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[int]:
        """Lock the folder of staged files, and yield its descriptor. No other process can publish meanwhile."""
        uploads = self.root.open(UPLOADS, FOLDER_FLAGS)
        try:
            with self._lock():
                yield uploads
        finally:
            os.close(uploads)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = self.root.open(f"{UPLOADS}/lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_etag_at(folder: int, name: str) -> str | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    return make_etag(status) if stat.S_ISREG(status.st_mode) else None


def copy_bytes(source: int, target: int, start: int, length: int) -> None:
    """Append bytes of one file to another. If possible, the kernel copies them.

    Raises:
        S3Error: InvalidRequest if the source has fewer bytes.
    """
    offset, left = start, length
    while left:
        try:
            copied_bytes = os.copy_file_range(source, target, min(left, _KERNEL_COPY_BYTES), offset_src=offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            copied_bytes = os.write(target, os.pread(source, min(left, _MEMORY_COPY_BYTES), offset))
        if not copied_bytes:
            raise S3Error("InvalidRequest", "The source became shorter while it was copied")
        offset += copied_bytes
        left -= copied_bytes
