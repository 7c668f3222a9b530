"""Generates locations of data files in the layout of Iceberg's writers.

The location of a file is `<table location>/data/<partition>/<file>`, or a path below `write.data.path`. With
`write.object-storage.enabled`, folders with hashes follow the data folder, to spread requests over an object store.
Readers use the locations in manifests and never derive them. File names are unique, so no file is overwritten.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus, unquote

import mmh3

from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.iceberg.types.transforms import IDENTITY, VOID, get_transform_name
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import encode_json, format_iso_date

DATA_PATH = "write.data.path"
_OLDER_PATHS = ("write.object-storage.path", "write.folder-storage.path")
OBJECT_STORAGE = "write.object-storage.enabled"
PARTITIONED_PATHS = "write.object-storage.partitioned-paths"
_ENTROPY_BITS, _FOLDER_BITS, _FOLDERS = 20, 4, 3
"""The number of used bits of the hash. 3 folders are named by 4 bits each, and a fourth folder by the other bits."""
_EPOCH_YEAR = 1970
_UNSAFE, _SEPARATOR = re.compile(r"[\x00/\\%]"), re.compile(r"[/\\]")
_DECODINGS_MAX = 3


def get_data_folder(location: str, properties: Mapping[str, str]) -> str:
    """Return the folder that contains all data files of the table.

    The property for the data path takes precedence over its older names. One of the older names is used only if the
    table uses object storage paths.
    """
    uses_object_storage_paths = parse_bool(properties, OBJECT_STORAGE, False)
    path_properties = (DATA_PATH, *(_OLDER_PATHS if uses_object_storage_paths else _OLDER_PATHS[1:]))
    folder = next(
        (properties[name] for name in path_properties if properties.get(name)), f"{location.rstrip('/')}/data"
    )
    return folder.rstrip("/")


def make_data_location(location: str, properties: Mapping[str, str], partition: str, name: str) -> str:
    """Return the location of a file.

    With object storage paths, the location contains a hash, which distributes the files over many prefixes of the
    object store.

    Args:
        partition: The result of `format_partition_path`. It is empty for an unpartitioned table.
    """
    folder = get_data_folder(location, properties)
    relative_path = f"{partition}/{name}" if partition else name
    if not parse_bool(properties, OBJECT_STORAGE, False):
        return f"{folder}/{relative_path}"
    has_partition_path = parse_bool(properties, PARTITIONED_PATHS, True)
    relative_path = relative_path if has_partition_path else name
    hash_folders = _make_hash_folders(relative_path)
    if not f"{folder}/".startswith(f"{location.rstrip('/')}/"):  # Several tables may use the same data folder.
        table = "/".join(location.rstrip("/").split("/")[-2:])
        return f"{folder}/{hash_folders}/{table}/{relative_path}"
    return (
        f"{folder}/{hash_folders}/{relative_path}" if has_partition_path else f"{folder}/{hash_folders}-{relative_path}"
    )


def _make_hash_folders(name: str) -> str:
    bits = f"{mmh3.hash(name.encode(), signed=False):032b}"[-_ENTROPY_BITS:]
    folders = [bits[start : start + _FOLDER_BITS] for start in range(0, _FOLDERS * _FOLDER_BITS, _FOLDER_BITS)]
    return "/".join([*folders, bits[_FOLDERS * _FOLDER_BITS :]])


def format_partition_path(
    names: Sequence[str], transforms: Sequence[str], kinds: Sequence[str], values: Sequence[Any]
) -> str:
    """Return the escaped path of a partition, such as `day=2024-01-31/id_bucket=7`. It is empty if there are no fields.

    Args:
        kinds: The result types of the transforms.
    """
    fields = zip(names, transforms, kinds, values, strict=True)
    return "/".join(
        f"{_escape(name)}={_escape(_format_value(transform, kind, value))}" for name, transform, kind, value in fields
    )


def _escape(text: str) -> str:
    return quote_plus(text if _is_plain(text) else _UNSAFE.sub("_", text), safe="*").replace("~", "%7E")


def _is_plain(text: str) -> bool:
    """Return whether the text is safe in a location: it has no NUL, and no segment `.` or `..`, which stores refuse.

    The text must also be safe after each of up to three URL-decodings. The result is False if the third decoding still
    changes the text. Unsafe texts can be replaced, because readers take partition values from manifests.
    """
    decoded_text = text
    for _ in range(_DECODINGS_MAX):
        if "\0" in decoded_text or any(segment in (".", "..") for segment in _SEPARATOR.split(decoded_text)):
            return False
        previous, decoded_text = decoded_text, unquote(decoded_text)
        if decoded_text == previous:
            return True
    return False


def _format_value(transform: str, kind: str, value: Any) -> str:
    """Return a partition value as text for the path of a file.

    Values of the time transforms are numbers of units since 1970. A result of `bucket` or `truncate` is a plain number.
    """
    name = get_transform_name(transform)
    if value is None or name == VOID:
        return "null"
    if name == "year":
        return f"{_EPOCH_YEAR + value:04d}"
    if name == "month":
        return f"{_EPOCH_YEAR + value // 12:04d}-{value % 12 + 1:02d}"
    if name == "day":
        return format_iso_date(value)
    if name == "hour":
        return f"{format_iso_date(value // 24)}-{value % 24:02d}"
    if get_base_name(kind) in ("binary", "fixed"):
        return base64.b64encode(value).decode()
    if name != IDENTITY and get_base_name(kind) in ("int", "long"):
        return str(value)
    text = encode_json(kind, value)
    return str(text).lower() if isinstance(text, bool) else str(text)
