"""Opens objects for readers, writers and jobs with pyarrow's file systems and a catalog's settings.

As in Iceberg's FileIO, locations are not decoded: `%20` is three characters of a name. An object is written completely
to a new location, and never changes. A storage can be pickled, and each process opens its own file systems.

Local files are opened below a root, without following symbolic links (`formats/runtime/root_folder.py`). pyarrow
receives the path of an open file descriptor instead of the path of the file. Otherwise, after the check, a tenant could
replace the file by a symbolic link before pyarrow opens it by name.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from seamark.connector.client.file_systems import find_client_storage, list_schemes
from seamark.formats.runtime.root_folder import RootFolder, SymbolicLinkError, make_descriptor_path


@dataclass(frozen=True)
class _ConfinedFolder:
    """A folder to which `confine` restricts this process: the path `below` in `root`."""

    root: RootFolder
    below: str


_fallback_keys: Mapping[str, str] = {}
"""The keys that `use_keys` has set."""
_confined_to: tuple[_ConfinedFolder, ...] | None = None
"""The folders that `confine` has set, or None if all folders are allowed."""


def confine(folders: Iterable[str], roots: Iterable[str] | None = None) -> None:
    """Restrict this process to local files below these folders, without symbolic links.

    A process calls it if it works for other principals with its own rights.

    Args:
        folders: Absolute paths. A folder that is not below a root is left out.
        roots: The folders of the operator, whose paths may contain symbolic links. None means `folders`.
    """
    global _confined_to
    normalized_folders = [os.path.normpath(folder) for folder in folders]
    root_paths = normalized_folders if roots is None else [os.path.normpath(root) for root in roots]
    operator_roots = [RootFolder(root) for root in sorted(root_paths, key=len, reverse=True)]
    confined_folders = []
    for folder in normalized_folders:
        for root in operator_roots:
            relative_path = root.find_path_below(folder)
            if relative_path is not None:
                confined_folders.append(_ConfinedFolder(root, relative_path))
                break
    _confined_to = tuple(confined_folders)


def use_keys(properties: Mapping[str, str]) -> None:
    """Set the keys that this process uses if the settings of a table have no keys.

    Only processes of the server call it, because they have the server's keys. These keys may be secret from clients.

    Args:
        properties: The keys, as in `Storage`. If it is empty, AWS's default credential chain is used.
    """
    global _fallback_keys
    _fallback_keys = dict(properties)


@contextmanager
def open_confined_folders() -> Iterator[list[str]]:
    """Yield the folders to which `confine` restricts this process, as paths of open file descriptors.

    With an open descriptor, the folder cannot be replaced by another folder.
    A folder that is missing or is a symbolic link is left out.
    """
    with ExitStack() as stack:
        paths = []
        for folder in _confined_to or ():
            with suppress(OSError):
                descriptor = folder.root.open(folder.below, os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                paths.append(make_descriptor_path(descriptor))
        yield paths


@lru_cache(maxsize=256)
def _parse_root(path: str) -> RootFolder:
    return RootFolder(path)


@dataclass(frozen=True)
class LocalPath:
    """A path on this machine.

    Attributes:
        root: The folder below which no symbolic link is followed. If it is None, symbolic links are followed.
        below: The path below the root.
    """

    path: str
    root: RootFolder | None
    below: str = ""

    def open(self, flags: int) -> int:
        """Open the path, and return its descriptor.

        Raises:
            PermissionError: There is a symbolic link below the root.
        """
        if self.root is None:
            return os.open(self.path, flags | os.O_CLOEXEC, 0o666)
        with self._explain_links():
            return self.root.open(self.below, flags)

    def open_file(self) -> int:
        """Open the file for reading, and return its descriptor.

        Raises:
            OSError: The path is not a regular file.
        """
        if self.root is None:
            return self.open(os.O_RDONLY)
        with self._explain_links():
            return self.root.open_file(self.below)

    def create(self) -> int:
        """Create a new file and, if it is missing, its folder. Return the descriptor of the file.

        Raises:
            FileExistsError: The file already exists.
        """
        self.make_folder()
        return self.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def make_folder(self) -> None:
        """Create the folder of the path and its parents if they are missing."""
        if self.root is None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            return
        with self._explain_links():
            self.root.make_folders(self.below.rpartition("/")[0])

    def delete(self) -> None:
        with suppress(FileNotFoundError):
            if self.root is None:
                os.unlink(self.path)
            else:
                with self._explain_links():
                    self.root.delete_file(self.below)

    def sync(self) -> None:
        """Write the file and the entries of its folder durably to the disk (fsync)."""
        for path in (self, self.folder):
            descriptor = path.open(os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @property
    def folder(self) -> LocalPath:
        return LocalPath(os.path.dirname(self.path) or ".", self.root, self.below.rpartition("/")[0])

    def make_sibling(self, name: str) -> LocalPath:
        """Return the path of a file with this name in the same folder."""
        path = os.path.join(os.path.dirname(self.path), name)
        return LocalPath(path, self.root, f"{self.folder.below}/{name}".lstrip("/"))

    @contextmanager
    def _explain_links(self) -> Iterator[None]:
        try:
            yield
        except SymbolicLinkError:
            raise _make_outside_error(self.path) from None


def _make_outside_error(path: str) -> PermissionError:
    return PermissionError(f"{path!r} is outside the warehouse, or a symbolic link leads to it")


def _confine_path(path: str, local_root: str) -> LocalPath:
    """Return the path below a folder of `confine`. Without such folders, return the path below `local_root`.

    A path with `..` is refused if there is any restriction, because it may lead out of the folder.

    Args:
        path: The absolute path of a file.
        local_root: The folder below which no symbolic link is followed, or "". If `confine` was not called, a path
            outside this folder is accepted, and symbolic links in it are followed.

    Raises:
        PermissionError: `confine` excludes the path, or the path contains `..`.
    """
    normalized_path = re.sub("/{2,}", "/", path)
    if ".." in normalized_path.split("/"):
        if _confined_to is not None or local_root:
            raise _make_outside_error(path)
    elif _confined_to is not None:
        for folder in _confined_to:
            relative_path = folder.root.find_path_below(normalized_path)
            if relative_path is not None and (not folder.below or relative_path.startswith(f"{folder.below}/")):
                return LocalPath(path, folder.root, relative_path)
    elif local_root:
        root = _parse_root(local_root)
        relative_path = root.find_path_below(normalized_path)
        if relative_path is not None:
            return LocalPath(path, root, relative_path)
    if _confined_to is not None:
        raise _make_outside_error(path)
    return LocalPath(path, None)


def _find_local_path(location: str) -> str | None:
    """Return the path of a local file, or None for another storage."""
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        return location
    if scheme != "file":
        return None
    path = path[2:] if path.startswith("//") else path
    return path if path.startswith("/") else "/" + path.partition("/")[2]


@dataclass(frozen=True)
class Storage:
    """Opens, reads and writes objects with the settings of a table.

    If `properties` has no keys, the keys of `use_keys` are used, or AWS's default credential chain.

    Attributes:
        properties: The settings in the form of a LoadTableResult: `s3.endpoint`, `s3.access-key-id`, …
        local_root: A folder on this machine. No symbolic link below it is followed.
    """

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    local_root: str = ""

    @staticmethod
    def of_table(properties: Mapping[str, str], location: str) -> Storage:
        """Return the storage of a table.

        No symbolic link below the parent of the table's folder is followed. Otherwise a writer of a local table could
        replace folders of the table by symbolic links to files of other tables.
        """
        path = _find_local_path(location)
        return Storage(properties, "" if path is None else os.path.dirname(path.rstrip("/")).rstrip("/"))

    def open(self, location: str) -> tuple[fs.FileSystem, str]:
        """Return the file system of a location, and the path on it.

        Raises:
            ValueError: The scheme is unknown.
            PermissionError: `confine` excludes the file.
        """
        path = _find_local_path(location)
        if path is not None:
            return fs.LocalFileSystem(), self._require_local(path).path
        storage, remote_path = find_client_storage(location), location.partition(":")[2]
        if storage is not None and remote_path.startswith("//"):
            return storage.create_file_system(self.properties, _fallback_keys), storage.make_path(remote_path[2:])
        raise ValueError(
            f"{location!r} is in an unsupported storage; the supported schemes are file, {', '.join(list_schemes())}"
        )

    def is_local(self, location: str) -> bool:
        """Return whether the location is a local file.

        Raises:
            ValueError: The scheme is unknown.
        """
        return isinstance(self.open(location)[0], fs.LocalFileSystem)

    def open_input_file(self, location: str) -> pa.NativeFile:
        """Open an object for reading at any position.

        Raises:
            PermissionError: The path contains a symbolic link.
        """
        local = self.find_local_path(location)
        if local is not None and local.root is not None:
            with _close_after(local.open_file()) as descriptor:
                return fs.LocalFileSystem().open_input_file(make_descriptor_path(descriptor))
        filesystem, path = self.open(location)
        return filesystem.open_input_file(path)

    def open_output_stream(self, location: str) -> pa.NativeFile:
        """Create an object, and open it for writing.

        Raises:
            PermissionError: The path contains a symbolic link.
        """
        local = self.find_local_path(location)
        if local is not None:
            with _close_after(local.create()) as descriptor:
                return fs.LocalFileSystem().open_output_stream(make_descriptor_path(descriptor))
        filesystem, path = self.open(location)
        return filesystem.open_output_stream(path)

    def find_local_path(self, location: str) -> LocalPath | None:
        """Return the path of a local file, or None for another storage."""
        path = _find_local_path(location)
        return None if path is None else self._require_local(path)

    def _require_local(self, path: str) -> LocalPath:
        return _confine_path(path, self.local_root)

    def read(self, location: str) -> memoryview:
        """Return the content of an object. A local file is mapped into memory, so it is read on demand."""
        local = self.find_local_path(location)
        if local is not None:
            with (
                _close_after(local.open_file()) as descriptor,
                pa.memory_map(make_descriptor_path(descriptor)) as memory_map,
            ):
                return memoryview(memory_map.read_buffer())
        with self.open_input_file(location) as file:
            return memoryview(file.read_buffer())

    def write(self, location: str, parts: Iterable[bytes | bytearray | memoryview]) -> int:
        """Write an object, and return its size in bytes.

        A local file becomes visible only when it is complete and durable.
        """
        local = self.find_local_path(location)
        if local is not None:
            return _write_local(local, parts)
        size = 0
        with self.open_output_stream(location) as stream:
            for part in parts:
                stream.write(part)
                size += memoryview(part).nbytes
        return size

    def delete(self, location: str) -> None:
        """Delete an object if it exists."""
        local = self.find_local_path(location)
        if local is not None:
            local.delete()
            return
        filesystem, path = self.open(location)
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_file(path)


@contextmanager
def _close_after(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_local(path: LocalPath, parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Write a local file durably to a temporary name, link it to its final name, and return its size in bytes.

    Raises:
        FileExistsError: A file with the final name exists.
    """
    name = os.path.basename(path.path)
    temporary_path = path.make_sibling(f".{name}.{uuid.uuid4().hex}")
    try:
        with open(temporary_path.create(), "wb") as file:
            size = sum(file.write(part) for part in parts)
            file.flush()
            os.fsync(file.fileno())
        with _close_after(path.folder.open(os.O_RDONLY | os.O_DIRECTORY)) as folder:
            # Unlike a rename, a link never replaces an existing file.
            os.link(
                os.path.basename(temporary_path.path), name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
            )
            os.fsync(folder)
    finally:
        with suppress(PermissionError):
            temporary_path.delete()
    return size
