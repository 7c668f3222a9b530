"""Where data files of a table lie, and under which names: as Iceberg's writers lay them out.

`<location>/data/<partition>/<file>`, or below `write.data.path`; with `write.object-storage.enabled` behind folders of
entropy, which spread requests over an object store. Readers go by manifests, never by these names. The rule kept: a
name is used once, so that a file is never another's.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus, unquote

from seamark.metaserver.iceberg.metadata.properties import as_bool
from seamark.metaserver.iceberg.types.murmur3 import murmur3
from seamark.metaserver.iceberg.types.transforms import IDENTITY, VOID, name_of
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import encode_json, iso_date

DATA_PATH = "write.data.path"
_OLDER_PATHS = ("write.object-storage.path", "write.folder-storage.path")
OBJECT_STORAGE = "write.object-storage.enabled"
PARTITIONED_PATHS = "write.object-storage.partitioned-paths"
_ENTROPY_BITS, _FOLDER_BITS, _FOLDERS = 20, 4, 3
_EPOCH_YEAR = 1970
_UNSAFE, _SEPARATOR = re.compile(r"[\x00/\\%]"), re.compile(r"[/\\]")
_DECODED_TIMES = 3


def data_folder(location: str, properties: Mapping[str, str]) -> str:
    """Below which all data files of the table are written."""
    entropy = as_bool(properties, OBJECT_STORAGE, False)
    named = (DATA_PATH, *(_OLDER_PATHS if entropy else _OLDER_PATHS[1:]))
    given = next((properties[name] for name in named if properties.get(name)), f"{location.rstrip('/')}/data")
    return given.rstrip("/")


def data_location(location: str, properties: Mapping[str, str], partition: str, name: str) -> str:
    """Of one file; `partition` is its `partition_path`, empty where the table is not partitioned."""
    folder = data_folder(location, properties)
    within = f"{partition}/{name}" if partition else name
    if not as_bool(properties, OBJECT_STORAGE, False):
        return f"{folder}/{within}"
    partitioned = as_bool(properties, PARTITIONED_PATHS, True)
    within = within if partitioned else name
    entropy = _entropy(within)
    if not f"{folder}/".startswith(f"{location.rstrip('/')}/"):  # many tables may share the folder
        table = "/".join(location.rstrip("/").split("/")[-2:])
        return f"{folder}/{entropy}/{table}/{within}"
    return f"{folder}/{entropy}/{within}" if partitioned else f"{folder}/{entropy}-{within}"


def _entropy(name: str) -> str:
    bits = f"{murmur3(name.encode()):032b}"[-_ENTROPY_BITS:]
    folders = [bits[start : start + _FOLDER_BITS] for start in range(0, _FOLDERS * _FOLDER_BITS, _FOLDER_BITS)]
    return "/".join([*folders, bits[_FOLDERS * _FOLDER_BITS :]])


def partition_path(names: Sequence[str], transforms: Sequence[str], kinds: Sequence[str], values: Sequence[Any]) -> str:
    """`day=2024-01-31/id_bucket=7`, escaped; `kinds` are types of the transforms' results. Empty for no fields."""
    parts = zip(names, transforms, kinds, values, strict=True)
    return "/".join(
        f"{_escaped(name)}={_escaped(_shown(transform, kind, value))}" for name, transform, kind, value in parts
    )


def _escaped(text: str) -> str:
    return quote_plus(text if _is_plain(text) else _UNSAFE.sub("_", text), safe="*").replace("~", "%7E")


def _is_plain(text: str) -> bool:
    """Whether no path comes of it, however often somebody decodes it: servers and stores refuse locations with a NUL or
    a segment `..` in them. The folder is for people; what the partition is, manifests say."""
    decoded = text
    for _ in range(_DECODED_TIMES):
        if "\0" in decoded or any(part in (".", "..") for part in _SEPARATOR.split(decoded)):
            return False
        before, decoded = decoded, unquote(decoded)
        if decoded == before:
            return True
    return False


def _shown(transform: str, kind: str, value: Any) -> str:
    name = name_of(transform)
    if value is None or name == VOID:
        return "null"
    if name == "year":
        return f"{_EPOCH_YEAR + value:04d}"
    if name == "month":
        return f"{_EPOCH_YEAR + value // 12:04d}-{value % 12 + 1:02d}"
    if name == "day":
        return iso_date(value)
    if name == "hour":
        return f"{iso_date(value // 24)}-{value % 24:02d}"
    if base_name(kind) in ("binary", "fixed"):
        return base64.b64encode(value).decode()
    if name != IDENTITY and base_name(kind) in ("int", "long"):
        return str(value)
    shown = encode_json(kind, value)
    return str(shown).lower() if isinstance(shown, bool) else str(shown)
