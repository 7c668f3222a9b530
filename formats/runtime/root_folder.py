"""Access to files below a folder, without symbolic links.

Tenants with their own accounts can write to a local warehouse, and replace a file or folder by a symbolic link at any
moment. A check of a path does not help, because the path may lead elsewhere when it is used. So every access names a
root, which the operator chooses, and a path below it, and the kernel refuses a symbolic link in that path:

- Linux 5.6 and later: one openat2(2) with RESOLVE_NO_SYMLINKS, from the root's path without links.
- Otherwise, also where a container forbids openat2: one openat(2) with O_NOFOLLOW for each component.

Files are then created, renamed and deleted by their names in the descriptor of their folder, which stays the same
folder even if another takes its name. A path has no `..`, so that it cannot leave the root.

The root itself may be a symbolic link, or be behind one, because operators move warehouses in this way. It is resolved
once, when the object is made. Bind mounts below the root are followed: only the operator can make them.

A hard link to another tenant's file is not refused. Linux lets an account link only files that it owns or can both read
and write (fs.protected_hardlinks), and object stores create files by link(2) themselves, so that a file may have two
names for a moment. `docs/explanation/security.md` describes what operators must set.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from functools import lru_cache

READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
"""A file that a tenant may replace: without O_NONBLOCK, opening a named pipe waits for its writer."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY

_OPENAT2 = 437
"""The same number on all architectures."""
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04
_HOW = struct.Struct("=QQQ")
_ABSENT = frozenset((errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG))
"""Errors of openat2 for the folder `/`: a kernel without it, or a container that forbids it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)


class SymbolicLinkError(OSError):
    """A path below a root leads through a symbolic link.

    `is_last`: a link is in the place of the file, not of a folder on the way to it.
    """

    def __init__(self, path: str, *, is_last: bool) -> None:
        super().__init__(errno.ELOOP, "a symbolic link is in the path", path)
        self.is_last = is_last


class NotPlainFileError(OSError):
    """A path below a root is a folder, a named pipe, a device or a socket."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a plain file", path)


class RootFolder:
    """A folder whose content is accessed without symbolic links.

    Paths below it have no leading slash; the empty path is the root itself. Every method raises SymbolicLinkError for a
    link in the path, and ValueError for a path that could leave the root.
    """

    __slots__ = ("path", "real_path")

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self.real_path = os.path.realpath(self.path)

    def path_below(self, path: str) -> str | None:
        """Return the part of an absolute path below this root; None for a path elsewhere."""
        if path == self.path:
            return ""
        prefix = self.path if self.path == "/" else f"{self.path}/"
        return path[len(prefix) :] if path.startswith(prefix) else None

    def open(self, below: str, flags: int, mode: int = 0o666) -> int:
        """Return a descriptor, as os.open returns it."""
        _check(below)
        if not has_openat2():
            return self._open_each(below, flags, mode)
        path = f"{self.real_path.rstrip('/')}/{below}" if below else self.real_path
        try:
            return _openat2(path, flags, mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise SymbolicLinkError(below, is_last=not flags & os.O_DIRECTORY and self._has_plain_parent(below))

    def open_file(self, below: str) -> int:
        """Return a descriptor for reading.

        Raises:
            NotPlainFileError: For anything but a plain file.
        """
        descriptor = self.open(below, READ_FLAGS)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotPlainFileError(below)
        return descriptor

    def open_folder(self, below: str) -> int:
        """Return a descriptor for reading and syncing; NotADirectoryError for a file."""
        return self.open(below, FOLDER_FLAGS)

    def is_file(self, below: str) -> bool:
        """Return whether a plain file is there.

        False for a symbolic link as the last component.
        """
        try:
            descriptor = self.open(below, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return stat.S_ISREG(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def folder_of(self, below: str) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder of a path, and the name in it.

        The descriptor is for names only (O_PATH).
        """
        folder, _, name = below.rpartition("/")
        _check(below)
        descriptor = self.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield descriptor, name
        finally:
            os.close(descriptor)

    def make_folders(self, below: str) -> None:
        """Create a folder and those that contain it, if they are missing."""
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open(below, os.O_PATH | os.O_DIRECTORY))
            return
        os.makedirs(self.real_path, exist_ok=True)
        names = below.split("/")
        for count in range(1, len(names) + 1):
            with contextlib.suppress(FileExistsError), self.folder_of("/".join(names[:count])) as (folder, name):
                os.mkdir(name, dir_fd=folder)

    def delete_file(self, below: str) -> None:
        """Delete a file or a symbolic link.

        Raises:
            FileNotFoundError: If there is none.
        """
        with self.folder_of(below) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def check_links(self, below: str) -> None:
        """SymbolicLinkError for a link at the path or on the way to it.

        The path may end before a missing folder.
        """
        try:
            descriptor = self.open(below, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return  # a link on the way would have been reported
        try:
            if stat.S_ISLNK(os.fstat(descriptor).st_mode):
                raise SymbolicLinkError(below, is_last=True)
        finally:
            os.close(descriptor)

    def _open_each(self, below: str, flags: int, mode: int) -> int:
        """Return the same as `open`, by one call for each component."""
        if not below:
            return os.open(self.real_path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        *folders, last = below.split("/")
        folder = os.open(self.real_path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in folders:
                folder, parent = open_child(folder, name, os.O_PATH | os.O_DIRECTORY), folder
                os.close(parent)
        except SymbolicLinkError:
            os.close(folder)
            raise SymbolicLinkError(below, is_last=False) from None
        except BaseException:
            os.close(folder)
            raise
        try:
            return open_child(folder, last, flags, mode)
        except SymbolicLinkError as error:
            raise SymbolicLinkError(below, is_last=error.is_last) from None
        finally:
            os.close(folder)

    def _has_plain_parent(self, below: str) -> bool:
        with contextlib.suppress(OSError):
            os.close(_openat2(os.path.dirname(f"{self.real_path}/{below}"), os.O_PATH | os.O_DIRECTORY, 0))
            return True
        return False


def open_child(folder: int, name: str, flags: int, mode: int = 0o666) -> int:
    """Open a name in a folder.

    Raises:
        SymbolicLinkError: For a link, also with O_DIRECTORY, for which Linux says ENOTDIR.
    """
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(folder, name)):
            raise SymbolicLinkError(name, is_last=not flags & os.O_DIRECTORY) from None
        raise


def descriptor_path(descriptor: int) -> str:
    """Return a path that libraries can open in the place of a descriptor: it names the same file, also after a
    rename.
    """
    return f"/proc/self/fd/{descriptor}"


def _is_link(folder: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _check(below: str) -> None:
    # Most paths have no dot after a slash, so that this is two searches.
    if below.startswith((".", "/")) or "/." in below or "//" in below or below.endswith("/"):
        parts = below.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(f"{below!r} has an empty component, '.' or '..'")


@lru_cache(maxsize=1)
def has_openat2() -> bool:
    """Return whether the kernel has openat2 and lets this process call it."""
    try:
        os.close(_openat2("/", os.O_PATH | os.O_DIRECTORY, 0))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    return True


@lru_cache(maxsize=64)
def _how(flags: int, mode: int) -> bytes:
    return _HOW.pack(flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS)


def _openat2(path: str, flags: int, mode: int) -> int:
    encoded = os.fsencode(path)
    if b"\x00" in encoded:
        raise ValueError("embedded null byte")
    while True:
        descriptor: int = _libc.syscall(_OPENAT2, _AT_FDCWD, encoded, _how(flags, mode), _HOW.size)
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)
