"""Access to files below a folder, without symbolic links.

Tenants with their own accounts can write to a local warehouse, and replace a file or folder by a symbolic
link at any moment. Checking a path is not enough, because the path may lead to another place when it is
used. Therefore every access names a root, which the operator chooses, and a path below it, and the kernel
refuses a symbolic link in that path:

- Linux 5.6 and later: one openat2(2) with RESOLVE_NO_SYMLINKS, from the root's path without links.
- Otherwise, for example if a container forbids openat2: one openat(2) with O_NOFOLLOW for each component.

Files are then created, renamed and deleted by their names in the descriptor of their folder. The
descriptor stays the same folder even if another folder gets its name. A path has no `..`, so that it
cannot leave the root.

The root itself, or a folder above it, may be a symbolic link, because operators move warehouses in this
way. The link is resolved once, when the object is created. Bind mounts below the root are followed: only the
operator can create them.

A hard link to another tenant's file is not refused. Linux lets an account link only files that the
account owns, or can both read and write (fs.protected_hardlinks). Object stores create files by link(2)
themselves, so that a file may have two names for a moment. `docs/explanation/security.md` describes what
operators must set.
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
"""The flags for reading a file that a tenant may replace.

Without O_NONBLOCK, opening a named pipe would wait until another process opens the pipe for writing.
"""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY

_OPENAT2 = 437
"""The number of the system call openat2, which is the same on all architectures."""
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04
_HOW = struct.Struct("=QQQ")
"""The layout of the argument `open_how` of openat2: flags, mode and resolve."""
_NO_OPENAT2_ERRORS = frozenset((errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG))
"""The errors of openat2 for the folder `/` if the kernel lacks openat2, or a container forbids it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)


class SymbolicLinkError(OSError):
    """A path below a root contains a symbolic link.

    Attributes:
        is_last: Whether the link is the last component of the path, not a folder above it.
    """

    def __init__(self, path: str, *, is_last: bool) -> None:
        super().__init__(errno.ELOOP, "a symbolic link is in the path", path)
        self.is_last = is_last


class NotPlainFileError(OSError):
    """A path below a root is not a plain file, but a folder, a named pipe, a device or a socket."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a plain file", path)


class RootFolder:
    """A folder whose content is accessed without following symbolic links.

    Paths below the folder have no leading slash. The empty path is the root itself.

    Raises:
        SymbolicLinkError: The path contains a link. All methods can raise this error.
        ValueError: The path could leave the root. All methods can raise this error.
    """

    __slots__ = ("path", "real_path")

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self.real_path = os.path.realpath(self.path)

    def find_path_below(self, path: str) -> str | None:
        """Return the part of an absolute path below this root, or None if the path is not below it."""
        if path == self.path:
            return ""
        prefix = self.path if self.path == "/" else f"{self.path}/"
        return path[len(prefix) :] if path.startswith(prefix) else None

    def open(self, relative_path: str, flags: int, mode: int = 0o666) -> int:
        """Open a path below the root without following symbolic links, and return its descriptor, like os.open.

        The system call openat2 does this in one step. It reports a link by ELOOP, but not where the link is. If the
        folder of the path can be opened, the link is the last component. If the kernel has no openat2, each folder is
        opened separately.

        Raises:
            SymbolicLinkError: A component of the path is a symbolic link.
        """
        _check_path(relative_path)
        if not has_openat2():
            return self._open_by_components(relative_path, flags, mode)
        path = f"{self.real_path.rstrip('/')}/{relative_path}" if relative_path else self.real_path
        try:
            return _openat2(path, flags, mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise SymbolicLinkError(
            relative_path, is_last=not flags & os.O_DIRECTORY and self._has_plain_parent(relative_path)
        )

    def open_file(self, relative_path: str) -> int:
        """Open a file for reading, and return its descriptor.

        Raises:
            NotPlainFileError: The path is not a plain file.
        """
        descriptor = self.open(relative_path, READ_FLAGS)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotPlainFileError(relative_path)
        return descriptor

    def open_folder(self, relative_path: str) -> int:
        """Open a folder for reading and syncing, and return its descriptor.

        Raises:
            NotADirectoryError: The path is a file.
        """
        return self.open(relative_path, FOLDER_FLAGS)

    def is_file(self, relative_path: str) -> bool:
        """Return whether the path is a plain file.

        If the last component is a symbolic link, the path is not a plain file.

        Raises:
            SymbolicLinkError: A folder above the last component is a symbolic link.
        """
        try:
            descriptor = self.open(relative_path, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return stat.S_ISREG(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def open_parent_folder(self, relative_path: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a path, and yield its descriptor and the name of the path in it.

        The descriptor is only for operations on names (O_PATH).

        Raises:
            SymbolicLinkError: A component of the folder's path is a symbolic link.
        """
        folder, _, name = relative_path.rpartition("/")
        _check_path(relative_path)
        descriptor = self.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield descriptor, name
        finally:
            os.close(descriptor)

    def make_folders(self, relative_path: str) -> None:
        """Create a folder and the folders above it, if they are missing.

        Raises:
            SymbolicLinkError: One of the folders is a symbolic link.
        """
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open(relative_path, os.O_PATH | os.O_DIRECTORY))
            return
        os.makedirs(self.real_path, exist_ok=True)
        names = relative_path.split("/")
        for count in range(1, len(names) + 1):
            with (
                contextlib.suppress(FileExistsError),
                self.open_parent_folder("/".join(names[:count])) as (folder, name),
            ):
                os.mkdir(name, dir_fd=folder)

    def delete_file(self, relative_path: str) -> None:
        """Delete a file or a symbolic link.

        Raises:
            FileNotFoundError: The path does not exist.
        """
        with self.open_parent_folder(relative_path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def check_links(self, relative_path: str) -> None:
        """Check that the path contains no symbolic links. It may end before a missing folder.

        Raises:
            SymbolicLinkError: The path, or a folder above it, is a link.
        """
        try:
            descriptor = self.open(relative_path, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return  # If a folder above the missing part were a link, the kernel would have reported the link instead.
        try:
            if stat.S_ISLNK(os.fstat(descriptor).st_mode):
                raise SymbolicLinkError(relative_path, is_last=True)
        finally:
            os.close(descriptor)

    def _open_by_components(self, relative_path: str, flags: int, mode: int) -> int:
        """Return the descriptor that `open` returns, with a system call for each component of the path.

        It is used if the kernel has no openat2. Each folder is opened in its parent folder, without following links.

        Raises:
            SymbolicLinkError: A component of the path is a symbolic link.
        """
        if not relative_path:
            return os.open(self.real_path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        *folders, last_name = relative_path.split("/")
        folder = os.open(self.real_path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in folders:
                folder, parent = open_child(folder, name, os.O_PATH | os.O_DIRECTORY), folder
                os.close(parent)
        except SymbolicLinkError:
            os.close(folder)
            raise SymbolicLinkError(relative_path, is_last=False) from None
        except BaseException:
            os.close(folder)
            raise
        try:
            return open_child(folder, last_name, flags, mode)
        except SymbolicLinkError as error:
            raise SymbolicLinkError(relative_path, is_last=error.is_last) from None
        finally:
            os.close(folder)

    def _has_plain_parent(self, relative_path: str) -> bool:
        """Return whether the folder of a path exists and is reached without symbolic links."""
        with contextlib.suppress(OSError):
            os.close(_openat2(os.path.dirname(f"{self.real_path}/{relative_path}"), os.O_PATH | os.O_DIRECTORY, 0))
            return True
        return False


def open_child(folder: int, name: str, flags: int, mode: int = 0o666) -> int:
    """Open a name in a folder without following a symbolic link, and return its descriptor.

    Args:
        folder: The descriptor of the folder.
        name: The name.
        flags: The flags of os.open.
        mode: The permissions of a new file.

    Raises:
        SymbolicLinkError: The name is a link.
    """
    # Linux reports ELOOP for a link. With O_DIRECTORY, it reports ENOTDIR, as it does for a file.
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(folder, name)):
            raise SymbolicLinkError(name, is_last=not flags & os.O_DIRECTORY) from None
        raise


def make_descriptor_path(descriptor: int) -> str:
    """Return a path that libraries can open instead of a descriptor. It names the same file even after a rename."""
    return f"/proc/self/fd/{descriptor}"


def _is_link(folder: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _check_path(relative_path: str) -> None:
    """Check that a path cannot leave the root: it has no empty component, `.` or `..`.

    Raises:
        ValueError: The path has such a component.
    """
    # Most paths have no dot after a slash, so this check needs only two searches.
    if (
        relative_path.startswith((".", "/"))
        or "/." in relative_path
        or "//" in relative_path
        or relative_path.endswith("/")
    ):
        parts = relative_path.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(f"{relative_path!r} has an empty component, '.' or '..'")


@lru_cache(maxsize=1)
def has_openat2() -> bool:
    """Return whether the kernel has openat2 and allows this process to call it."""
    try:
        os.close(_openat2("/", os.O_PATH | os.O_DIRECTORY, 0))
    except OSError as error:
        if error.errno in _NO_OPENAT2_ERRORS:
            return False
        raise
    return True


@lru_cache(maxsize=64)
def _pack_open_how(flags: int, mode: int) -> bytes:
    return _HOW.pack(flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS)


def _openat2(path: str, flags: int, mode: int) -> int:
    """Open an absolute path without following symbolic links, and return its descriptor.

    Python has no function for this system call, so it is called through the C library. A call that a signal interrupts
    (EINTR) is repeated.

    Raises:
        OSError: The system refuses the call, by ELOOP for a symbolic link.
        ValueError: The path contains a null byte.
    """
    path_bytes = os.fsencode(path)
    if b"\x00" in path_bytes:
        raise ValueError("embedded null byte")
    while True:
        descriptor: int = _libc.syscall(_OPENAT2, _AT_FDCWD, path_bytes, _pack_open_how(flags, mode), _HOW.size)
        if descriptor >= 0:
            return descriptor
        error_number = ctypes.get_errno()
        if error_number != errno.EINTR:
            raise OSError(error_number, os.strerror(error_number), path)
