"""The server's home folder, which is private to the server's account, and used by one server at a time.

The home contains secrets: the database, the key that protects the signing keys, and caches with values of rows. So the
folder has mode 0700 and its files 0600 from their creation, and `prepare_home` corrects wider modes. Some states cannot
be corrected and are refused: a folder or file of another account, or a symbolic link instead of a file of the server.
The owner of either could read or replace the server's data.

A warehouse inside the home is not checked, because the home's mode protects it, and it may have millions of files.
Engines of other users therefore need a warehouse outside the home.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.settings.settings import Settings

PRIVATE_UMASK = 0o077
_GROUP_AND_OTHERS_MODE = 0o077
_PID_BYTES_MAX = 32
"""The maximum size of the process id in the lock's file."""
LOCK_NAME = "server.lock"
SERVER_FILE_NAME = "server.json"
_SERVER_FOLDERS = frozenset(("cache", "metrics", "logs"))
"""The folders of the home that contain only files of the server."""
_SECRET_SUFFIXES = (".db", ".db-wal", ".db-shm", ".db-journal", ".key", ".json", ".lock")
"""The suffixes of names directly in the home that must not be symbolic links."""
_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")


def prepare_home(settings: Settings) -> list[Path]:
    """Create the home folder, and make it and the server's files private.

    The files include a SQLite database and cache folders outside the home folder.

    Returns:
        The paths that were not private.

    Raises:
        ConfigError: The folder cannot be created or made private.
    """
    home = settings.home
    try:
        home.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"Cannot create the home folder {home}: {error.strerror}; choose another folder with --home"
        ) from None
    return make_private(settings)


def make_private(settings: Settings) -> list[Path]:
    """Make the home folder and the server's files private, and return the paths that were not private.

    The function works like `prepare_home`, but creates nothing. In a new home folder, which contains no data yet, paths
    are made private, but not returned.

    Raises:
        ConfigError: A path cannot be made private, or is a link that may not be used.
    """
    repaired_paths: list[Path] = []
    try:
        if os.path.lexists(settings.home):
            _check_home(settings.home)
            is_used = _is_used(settings.home)
            repaired_paths += _make_path_private(settings.home)
            repaired_paths += _make_contents_private(settings.home)
            if not is_used:
                repaired_paths.clear()  # The server has never run with this new folder, so it contained no data.
        database = find_sqlite_file(settings)
        if database is not None:
            for suffix in _SQLITE_SUFFIXES:
                repaired_paths += _make_file_private(database.with_name(database.name + suffix))
        for folder in (settings.plan_disk_folder, settings.index_disk_folder):
            if folder and Path(folder).is_dir():
                repaired_paths += _make_path_private(Path(folder))
    except OSError as error:
        raise ConfigError(f"Cannot make {error.filename or settings.home} private: {error.strerror}") from None
    return repaired_paths


def _check_home(home: Path) -> None:
    """Check that the home is a folder of this account, and is not shared or a link. Raise ConfigError if it is not."""
    status = home.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"The home folder {home} is a symbolic link, whose owner can change its target; use the folder itself: "
            f"--home {os.path.realpath(home)}"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"Cannot create the home folder {home}, because a file has this name; choose another folder with --home"
        )
    # Shared folders such as /tmp have the sticky bit.
    if status.st_mode & stat.S_ISVTX or home.resolve() == Path("/"):
        raise ConfigError(
            f"The home folder {home} is shared with other programs; choose a folder inside it with --home"
        )
    _check_owner(home, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to {_describe_account(status.st_uid)}, but this process runs as "
            f"{_describe_account(os.geteuid())}. The owner could read and replace the server's data there. Run the "
            "server as the owner, or change the owner with chown"
        )


def _describe_account(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _is_used(home: Path) -> bool:
    """Return whether a server has used the home folder, which then has secret files or folders of the server."""
    return any(name.endswith(_SECRET_SUFFIXES) or name in _SERVER_FOLDERS for name in os.listdir(home))


def _make_contents_private(home: Path) -> list[Path]:
    """Make the files and folders in the home folder private, and return those that were not.

    A link is refused if it has the name of a secret file, or if another account could change its target. Other links
    are left unchanged.

    Raises:
        ConfigError: A link is refused, or a file belongs to another account.
    """
    repaired_paths: list[Path] = []
    for name in sorted(os.listdir(home)):
        path = home / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            # Another process has already removed its temporary file.
            continue
        if stat.S_ISLNK(status.st_mode):
            if name.endswith(_SECRET_SUFFIXES) or status.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path} is a symbolic link; remove it, and move the file to which it refers here")
            continue
        if name in _SERVER_FOLDERS and stat.S_ISDIR(status.st_mode):
            repaired_paths += _make_tree_private(path)
        else:
            if stat.S_ISREG(status.st_mode):
                _check_owner(path, status)
            repaired_paths += _make_path_private(path)
    return repaired_paths


def _make_tree_private(folder: Path) -> list[Path]:
    """Make a folder and everything in it private, and return the paths that were not."""
    repaired_paths = _make_path_private(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            repaired_paths += _make_path_private(Path(parent, name))
    return repaired_paths


def _make_file_private(path: Path) -> list[Path]:
    """Make a database file private, and return it in a list if it was not. A missing file is ignored.

    Raises:
        ConfigError: The file is a symbolic link, or belongs to another account.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return []
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"The database file {path} is a symbolic link; use {os.path.realpath(path)} itself")
    _check_owner(path, status)
    return _make_path_private(path)


def _make_path_private(path: Path) -> list[Path]:
    """Remove all permissions of group and others from a file or folder.

    Returns:
        The path in a list if it had such permissions. Otherwise, or for a symbolic link, an empty list.
    """
    # Use a path, not a descriptor, because closing a descriptor of a database would release SQLite's locks in this
    # process.
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) or not mode & _GROUP_AND_OTHERS_MODE:
            return []
        path.chmod(stat.S_IMODE(mode) & 0o700)
    except FileNotFoundError:
        return []
    return [path]


def find_sqlite_file(settings: Settings) -> Path | None:
    """Return the file of the SQLite database in the settings, or None for another database."""
    parts = urlsplit(settings.make_database_url())
    path = Path("/" + unquote(parts.path).lstrip("/"))
    return path if parts.scheme == "sqlite" and not parts.netloc and path.name else None


def is_in_home(settings: Settings, path: str) -> bool:
    """Return whether `path`, with symbolic links resolved, is inside the home."""
    home = os.path.realpath(settings.home)
    return os.path.realpath(path).startswith(home.rstrip("/") + "/")


def create_private(path: Path, data: bytes) -> None:
    """Create a file with mode 0600. It is on the disk when the function returns.

    Raises:
        FileExistsError: The file exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def write_server_file(settings: Settings, url: str, port: int) -> Path:
    """Write the address of the running server to `<home>/server.json`, and return the path of this file.

    Scripts read it if the server has port 0, for which the system chooses the port.
    """
    path = settings.home / SERVER_FILE_NAME
    # Write a file with another name first, and rename it. So a script never reads an incomplete file.
    new_path = path.with_name(f".server-{os.getpid()}.json")
    new_path.unlink(missing_ok=True)
    create_private(new_path, encode_json({"port": port, "pid": os.getpid(), "url": url, "auth": settings.auth}))
    new_path.replace(path)
    return path


def is_running_without_authentication(settings: Settings) -> bool:
    """Return whether a server without authentication runs from the home folder. Such a server checks no rights."""
    try:
        document = convert_json((settings.home / SERVER_FILE_NAME).read_bytes(), dict[str, str | int])
    except (OSError, msgspec.DecodeError):
        return False
    return document.get("auth") == "none"


@contextmanager
def lock_home(settings: Settings, command: str | None = None) -> Iterator[None]:
    """Hold the exclusive lock of the home while the context is active.

    When a server is killed, the kernel releases the lock (flock).

    Args:
        settings: The settings with the home.
        command: The command that needs the home, or None for a server.

    Raises:
        ConfigError: Another process holds the lock, or the file cannot be opened or locked. If a server holds the lock,
            the message contains its address.
    """
    path = settings.home / LOCK_NAME
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"Cannot open {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # Some network disks have no locks.
                raise ConfigError(f"Cannot lock {path}: {error.strerror}; keep the home on a local disk") from None
            holder = f"from the home {settings.home}: {_describe_server(settings, lock)}"
            raise ConfigError(
                f"Another server runs {holder}. Stop it first, or start this server with another --home"
                if command is None
                else f"A server or another command runs {holder}. Stop it before you run {command}"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(lock)


def _describe_server(settings: Settings, lock: int) -> str:
    """Return the process id and URL of the server that holds the lock, if the server has written them."""
    pid = os.pread(lock, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip()
    url = "still starting"
    with suppress(OSError, msgspec.DecodeError):
        server = convert_json((settings.home / SERVER_FILE_NAME).read_bytes(), dict[str, str | int])
        if str(server.get("pid")) == pid:
            url = f"at {server.get('url')}"
    return f"process {pid or 'unknown'}, {url}"
