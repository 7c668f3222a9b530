"""Object storage for jobs: pyarrow's file systems, with the settings that a catalog gives to clients.

Locations are not decoded, as in Iceberg's FileIO: `%20` is three characters of a name. An object is written completely,
under a new name, and never changed. Picklable: each process opens its file systems.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from seamark.metaserver.tls import authorities_file

S3_SCHEMES = ("s3", "s3a", "s3n")


_lent_keys: Mapping[str, str] = {}
"""The keys of `use_keys`."""
_confined_to: tuple[str, ...] | None = None
"""The folders of `confine`; None: all."""


def confine(folders: Iterable[str]) -> None:
    """Restricts this process to local files below these folders, without symbolic links. For a process that works for
    other accounts with its own rights."""
    global _confined_to
    _confined_to = tuple(os.path.normpath(folder) for folder in folders)


def use_keys(properties: Mapping[str, str]) -> None:
    """Make this process access S3 with these keys where a table comes without keys.

    For a process of the server: the server has keys, and hands out none to clients in most of its modes.
    `properties` are as in `Storage`; empty for AWS's chain.
    """
    global _lent_keys
    _lent_keys = dict(properties)


def _local_path(path: str) -> str:
    """The path. PermissionError if `confine` excludes it."""
    if _confined_to is None:
        return path
    plain = os.path.normpath(path)
    for folder in _confined_to:
        if plain.startswith(folder + "/") and os.path.realpath(path) == os.path.realpath(folder) + plain[len(folder) :]:
            return path
    raise PermissionError(f"{path!r} is outside the warehouse, or a symbolic link leads to it")


@dataclass(frozen=True)
class Storage:
    """`properties` as in a LoadTableResult: `s3.endpoint`, `s3.access-key-id`, … Without keys those of `use_keys`
    count, or else AWS's chain decides."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    def open(self, location: str) -> tuple[fs.FileSystem, str]:
        """The file system of a location and the path on it. ValueError for a scheme that is not known.
        PermissionError for a file that `confine` excludes."""
        scheme, colon, rest = location.partition(":")
        if not colon or "/" in scheme:
            return fs.LocalFileSystem(), _local_path(location)
        if scheme == "file":
            path = rest[2:] if rest.startswith("//") else rest
            return fs.LocalFileSystem(), _local_path(path if path.startswith("/") else "/" + path.partition("/")[2])
        if scheme in S3_SCHEMES and rest.startswith("//"):
            return self._s3(), rest[2:]
        raise ValueError(
            f"{location!r} is in an unsupported storage: supported schemes are file, {', '.join(S3_SCHEMES)}"
        )

    def is_local(self, location: str) -> bool:
        """Whether it is a file of this machine. ValueError for a scheme that is not known."""
        return isinstance(self.open(location)[0], fs.LocalFileSystem)

    def _s3(self) -> fs.FileSystem:
        given = self.properties
        keys = given if given.get("s3.access-key-id") else {**given, **_lent_keys}
        endpoint = urlsplit(given["s3.endpoint"]) if given.get("s3.endpoint") else None
        return fs.S3FileSystem(
            access_key=keys.get("s3.access-key-id"),
            secret_key=keys.get("s3.secret-access-key"),
            session_token=keys.get("s3.session-token"),
            region=given.get("s3.region") or given.get("client.region"),
            scheme=endpoint.scheme if endpoint else "https",
            endpoint_override=endpoint.netloc if endpoint else None,
            force_virtual_addressing=given.get("s3.path-style-access", "true").lower() == "false",
            tls_ca_file_path=authorities_file(),
        )

    def read(self, location: str) -> memoryview:
        """The whole object; a local file is mapped, not read."""
        filesystem, path = self.open(location)
        if isinstance(filesystem, fs.LocalFileSystem):
            with pa.memory_map(path) as mapped:
                return memoryview(mapped.read_buffer())
        with filesystem.open_input_file(path) as file:
            return memoryview(file.read_buffer())

    def write(self, location: str, parts: Iterable[bytes | bytearray | memoryview]) -> int:
        """Its size in bytes. A local file appears whole or not at all, and survives a power cut."""
        filesystem, path = self.open(location)
        if isinstance(filesystem, fs.LocalFileSystem):
            return _write_local(Path(path), parts)
        size = 0
        with filesystem.open_output_stream(path) as stream:
            for part in parts:
                stream.write(part)
                size += memoryview(part).nbytes
        return size

    def delete(self, location: str) -> None:
        """What is not there is no error."""
        filesystem, path = self.open(location)
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_file(path)


def _write_local(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            size = sum(file.write(part) for part in parts)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it never takes another's place
    finally:
        temporary.unlink(missing_ok=True)
    sync_to_disk(path.parent)
    return size


def sync_to_disk(path: str | Path) -> None:
    """Synchronises a local file, or the entries of a folder, with the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
