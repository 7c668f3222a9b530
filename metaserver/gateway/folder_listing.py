"""Lists the keys of a folder for ListObjectsV2, in the order of their UTF-8 bytes, with common prefixes.

The functions block, and are called in threads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from seamark.formats.runtime.root_folder import RootFolder, SymbolicLinkError
from seamark.metaserver.gateway.folder_files import make_etag
from seamark.metaserver.gateway.listing import Listed, encode_key
from seamark.metaserver.objects.local import TEMPORARY_PREFIX


def list_keys(root: RootFolder, bucket: str, prefix: str, delimiter: str, after: str) -> Iterator[Listed]:
    """Yield the keys that start with `prefix` and are greater than `after`, in the order of their bytes.

    With the delimiter "/", the keys below a folder are listed as one common prefix. Other delimiters have no effect.
    Symbolic links are not listed.

    Raises:
        SymbolicLinkError: The path of the folder that is listed first contains a symbolic link.
    """
    if "//" in prefix:  # No key contains repeated slashes, but the file system would ignore them.
        return iter(())
    folder = prefix.rpartition("/")[0]
    key_prefix = f"{folder}/" if folder else ""
    folder_path = f"{bucket}/{folder}".rstrip("/")
    root.check_links(folder_path)
    return _list_folder(root, folder_path, key_prefix, prefix, after, grouped=delimiter == "/")


def _list_folder(
    root: RootFolder, path: str, key_prefix: str, prefix: str, after: str, *, grouped: bool
) -> Iterator[Listed]:
    """Yield the objects below the folder `path` of `root`. Their keys begin with `key_prefix`.

    Args:
        root: The folder of all objects.
        path: The folder to list, relative to `root`.
        key_prefix: The key of this folder, with a slash, or an empty text for the whole bucket.
        prefix: The text with which the listed keys must begin.
        after: The key after which the listing starts.
        grouped: Whether to list subfolders as common prefixes instead of the objects in them.
    """
    encoded_after = encode_key(after)
    for key, is_folder in _list_children(root, path, key_prefix):
        if not key.startswith(prefix):
            continue
        child_path = path + "/" + key[len(key_prefix) :].rstrip("/")
        if is_folder:
            # A folder may contain keys greater than `after` even if its own key is not greater. A common prefix must
            # not be listed a second time.
            if encode_key(key) <= encoded_after and (not after.startswith(key) or (grouped and after == key)):
                continue
            if not grouped:
                yield from _list_folder(root, child_path, key, prefix, after, grouped=False)
            # S3 has no empty folders, so list a common prefix only if there is an object below it.
            elif next(_list_folder(root, child_path, key, key, after, grouped=False), None) is not None:
                yield Listed(key)
        elif encode_key(key) > encoded_after:
            try:
                with root.open_parent_folder(child_path) as (folder, last):
                    status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, SymbolicLinkError):
                # Skip a file that was deleted or replaced after its folder was listed.
                continue
            if stat.S_ISREG(status.st_mode):
                yield Listed(key, status.st_size, status.st_mtime_ns, make_etag(status))


def _list_children(root: RootFolder, path: str, key_prefix: str) -> list[tuple[str, bool]]:
    """Return the sorted keys in a folder, each with whether it is a folder. Keys of folders end with a slash.

    The result is empty if the path is not a folder, or has a symbolic link.
    """
    keys = []
    try:
        folder = root.open_folder(path)
    except (FileNotFoundError, NotADirectoryError, SymbolicLinkError):
        return []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY_PREFIX):
                    continue  # The file is not complete yet, or the folder contains staged files.
                if entry.is_dir(follow_symlinks=False):
                    keys.append(f"{key_prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    keys.append(key_prefix + entry.name)
    finally:
        os.close(folder)
    return [(key, key.endswith("/")) for key in sorted(keys, key=encode_key)]
