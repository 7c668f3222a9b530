"""ListObjectsV2 over a folder: keys in the order of their UTF-8 bytes, with common prefixes and pages.

The functions block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from urllib.parse import quote

from seamark.formats.protocol.wire import from_base64url, to_base64url
from seamark.formats.runtime.root_folder import RootFolder, SymbolicLinkError
from seamark.metaserver.gateway.folder_files import etag_of
from seamark.metaserver.gateway.s3_errors import S3Error, xml_text
from seamark.metaserver.objects.local import TEMPORARY_PREFIX

PAGE_MAX = 1000
XML_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True)
class Listed:
    """A key, or a common prefix. A common prefix has no status."""

    key: str
    status: os.stat_result | None


def list_xml(root: RootFolder, bucket: str, query: Mapping[str, str]) -> bytes:
    """Return the answer to ListObjectsV2 of a bucket, which is a folder in `root`."""
    if query.get("list-type") != "2":
        raise S3Error("NotImplemented", "Only version 2 of listings is supported; send list-type=2")
    prefix, delimiter = query["prefix"], query.get("delimiter", "")
    limit = min(int(query.get("max-keys", PAGE_MAX)), PAGE_MAX)
    token = query.get("continuation-token")
    after = query.get("start-after", "") if token is None else _read_token(token)
    entries = list(islice(list_keys(root, bucket, prefix, delimiter, after), limit + 1)) if limit else []
    is_truncated, page = len(entries) > limit, entries[:limit]
    encode = (lambda text: quote(text, safe="/-_.~")) if query.get("encoding-type") == "url" else xml_text
    fields = [("Name", bucket), ("Prefix", encode(prefix)), ("KeyCount", str(len(page))), ("MaxKeys", str(limit))]
    fields.append(("IsTruncated", str(is_truncated).lower()))
    if delimiter:
        fields.append(("Delimiter", encode(delimiter)))
    if "encoding-type" in query:
        fields.append(("EncodingType", query["encoding-type"]))
    if token is not None:
        fields.append(("ContinuationToken", xml_text(token)))
    if query.get("start-after"):
        fields.append(("StartAfter", encode(query["start-after"])))
    if is_truncated:
        fields.append(("NextContinuationToken", _encode_token(page[-1].key)))
    text = "".join(f"<{name}>{value}</{name}>" for name, value in fields)
    text += "".join(_write_contents(one, encode(one.key)) for one in page)
    return f'{XML_HEAD}<ListBucketResult xmlns="{NAMESPACE}">{text}</ListBucketResult>'.encode()


def _write_contents(entry: Listed, key: str) -> str:
    if entry.status is None:
        return f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"
    status = entry.status
    return (
        f"<Contents><Key>{key}</Key><LastModified>{format_timestamp(status.st_mtime_ns)}</LastModified>"
        f"<ETag>{xml_text(etag_of(status))}</ETag><Size>{status.st_size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def format_timestamp(modified_ns: int) -> str:
    at = datetime.fromtimestamp(modified_ns / 1e9, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{modified_ns // 1_000_000 % 1000:03d}Z"


def list_keys(root: RootFolder, bucket: str, prefix: str, delimiter: str, after: str) -> Iterator[Listed]:
    """Return the keys that start with `prefix` and are greater than `after`, in the order of their bytes.

    Symbolic links are not listed.

    Raises:
        SymbolicLinkError: The path to the folder in which the listing starts contains a symbolic link.
    """
    if "//" in prefix:  # The file system ignores repeated slashes, but keys never have them.
        return iter(())
    folder = prefix.rpartition("/")[0]
    start = f"{folder}/" if folder else ""
    at = f"{bucket}/{folder}".rstrip("/")
    root.check_links(at)
    return _walk(root, at, start, prefix, after, grouped=delimiter == "/")


def _walk(root: RootFolder, path: str, start: str, prefix: str, after: str, *, grouped: bool) -> Iterator[Listed]:
    """Yield the objects below the folder `path` in `root`, whose keys begin with `start`."""
    floor = _encode_key(after)
    for key, is_folder in _list_children(root, path, start):
        if not key.startswith(prefix):
            continue
        name = path + "/" + key[len(start) :].rstrip("/")
        if is_folder:
            # The keys in a folder are greater than the folder's key, but a common prefix is not greater than itself.
            if _encode_key(key) <= floor and (not after.startswith(key) or (grouped and after == key)):
                continue
            if not grouped:
                yield from _walk(root, name, key, prefix, after, grouped=False)
            elif next(_walk(root, name, key, key, after, grouped=False), None) is not None:
                yield Listed(key, None)
        elif _encode_key(key) > floor:
            try:
                with root.folder_of(name) as (folder, last):
                    status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, SymbolicLinkError):
                # The file was deleted or replaced after its folder was listed.
                continue
            if stat.S_ISREG(status.st_mode):
                yield Listed(key, status)


def _list_children(root: RootFolder, path: str, start: str) -> list[tuple[str, bool]]:
    """Return (key, whether it is a folder) in the order of the keys. The key of a folder ends with a slash."""
    keys = []
    try:
        folder = root.open_folder(path)
    except (FileNotFoundError, NotADirectoryError, SymbolicLinkError):
        return []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY_PREFIX):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    keys.append(f"{start}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    keys.append(start + entry.name)
    finally:
        os.close(folder)
    return [(key, key.endswith("/")) for key in sorted(keys, key=_encode_key)]


def _encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _encode_token(key: str) -> str:
    return to_base64url(_encode_key(key))


def _read_token(token: str) -> str:
    try:
        raw = from_base64url(token)
        return raw.decode("utf-8", "surrogateescape")
    except ValueError:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from None
