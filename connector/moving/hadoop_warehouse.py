"""Finds the tables of a Hadoop warehouse, which is a folder tree without a catalog, for an import.

A folder with metadata files is a table, and the folders above it are its namespace. In a table of Iceberg's Hadoop
catalog the files are `v1.metadata.json`, `v2.metadata.json` and so on, and `version-hint.text` has a recent number.
Other catalogs write `00001-<uuid>.metadata.json`. The folder does not state which of these files is committed, so the
file with the highest number is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyarrow import ArrowException
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.io.pyarrow import PyArrowFileIO

from seamark.connector.moving.source import (
    CatalogRefusal,
    CatalogUnavailable,
    EntryMissing,
    FoundTables,
    Levels,
    find_each,
)

_LEVELS_MAX = 32
"""The maximum number of levels of a namespace."""
_HINT_FILE = "version-hint.text"
_HINT_BYTES_MAX = 64
_METADATA = "metadata"
_METADATA_FILE_NAME = re.compile(
    r"(?:v(?P<version>\d{1,9})|(?P<number>\d{1,9})-.+)(?:\.gz)?\.metadata\.json(?:\.gz)?\Z"
)
_METADATA_FILE_ENDS = (".metadata.json", ".metadata.json.gz")


class _MetadataFile(NamedTuple):
    """The name of a metadata file, and the number in it."""

    number: int
    is_hadoop: bool
    """Whether Iceberg's Hadoop catalog has written the file."""
    name: str


class HadoopSource:
    """The source of an import from a folder tree with tables.

    Args:
        root: The URI of the folder, or the path of a local folder.
        properties: The properties of PyIceberg's FileIO, such as `s3.endpoint`.

    Raises:
        CatalogRefusal: The URI or a property is invalid.
    """

    def __init__(self, root: str, properties: Mapping[str, str]) -> None:
        self._root = (root if "://" in root else Path(root).absolute().as_uri()).rstrip("/")
        with _translate_errors(self._root):
            scheme, bucket, self._path = PyArrowFileIO.parse_location(self._root)
            self._files: FileSystem = PyArrowFileIO(dict(properties)).fs_by_scheme(scheme, bucket or None)
        self._tables: dict[Levels, list[str]] = {}
        """The names of the tables by namespace, which `list_namespaces` fills."""

    def list_namespaces(self) -> Iterator[Levels]:
        parents: list[Levels] = [()]
        while parents:
            namespace = parents.pop()
            if len(namespace) > _LEVELS_MAX:
                raise CatalogRefusal(
                    f"{self._locate(namespace)} is more than {_LEVELS_MAX} folders below the warehouse"
                )
            children = [info.base_name for info in self._list(namespace) if _is_visible_folder(info)]
            tables = [name for name in children if self._is_table((*namespace, name))]
            self._tables[namespace] = tables
            if namespace or tables:
                yield namespace
            parents += [(*namespace, name) for name in children if name not in set(tables)]

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        return {}

    def list_tables(self, namespace: Levels) -> list[str]:
        return self._tables.get(namespace, [])

    def list_views(self, namespace: Levels) -> list[str]:
        return []

    def find_tables(self, namespace: Levels, names: Sequence[str]) -> FoundTables:
        return find_each(self._find_table, namespace, names)

    def _find_table(self, namespace: Levels, name: str) -> str:
        folder = (*namespace, name, _METADATA)
        infos = self._list(folder)
        files = [file for info in infos if (file := _parse_file(info)) is not None]
        if not files:
            raise EntryMissing(f"{self._locate(folder)} has no metadata files")
        hint = self._read_hint(folder) if any(info.base_name == _HINT_FILE for info in infos) else None
        return f"{self._locate(folder)}/{_choose_newest(files, hint).name}"

    def find_view(self, namespace: Levels, name: str) -> str:
        raise EntryMissing("A Hadoop warehouse has no views")

    def close(self) -> None:
        """Do nothing: a file system has no connections that can be closed."""

    def _locate(self, levels: Levels) -> str:
        return "/".join((self._root, *levels))

    def _list(self, levels: Levels) -> list[FileInfo]:
        with _translate_errors(self._locate(levels)):
            return list(self._files.get_file_info(FileSelector("/".join((self._path, *levels)))))

    def _is_table(self, levels: Levels) -> bool:
        folders = [info.base_name for info in self._list(levels) if info.type is FileType.Directory]
        if _METADATA not in folders:
            return False
        return any(
            info.base_name.endswith((*_METADATA_FILE_ENDS, _HINT_FILE)) for info in self._list((*levels, _METADATA))
        )

    def _read_hint(self, folder: Levels) -> int:
        location = f"{self._locate(folder)}/{_HINT_FILE}"
        with (
            _translate_errors(location),
            self._files.open_input_stream("/".join((self._path, *folder, _HINT_FILE))) as file,
        ):
            text = file.read(_HINT_BYTES_MAX).decode(errors="replace").strip()
        if not (text.isascii() and text.isdecimal()):
            raise CatalogRefusal(f"{location} contains {text!r} instead of a version number")
        return int(text)


def _is_visible_folder(info: FileInfo) -> bool:
    """Return whether an entry is a folder that neither Hadoop nor Spark hides."""
    return info.type is FileType.Directory and not info.base_name.startswith((".", "_"))


def _parse_file(info: FileInfo) -> _MetadataFile | None:
    """Return the parts of a file's name, or None if the file is not a metadata file."""
    match = _METADATA_FILE_NAME.fullmatch(info.base_name) if info.type is FileType.File else None
    if match is None:
        return None
    # A file system catalog names a file v3.metadata.json, and other catalogs name it 00003-<uuid>.metadata.json.
    return _MetadataFile(int(match["version"] or match["number"]), match["version"] is not None, info.base_name)


def _choose_newest(files: Sequence[_MetadataFile], hint: int | None) -> _MetadataFile:
    """Return the current metadata file of a table.

    It is the file with the largest number. In a Hadoop catalog with a hint, the search begins with the number of the
    hint, and ends before the first missing number.

    Args:
        files: The metadata files of one folder.
        hint: The number in `version-hint.text`, or None. Later versions may exist, because the Hadoop catalog writes
            the hint after the commit.

    Raises:
        CatalogRefusal: Several files may be the current one, or the version of the hint is missing.
    """
    if len({file.is_hadoop for file in files}) > 1:
        raise CatalogRefusal(
            "The folder has metadata files of a Hadoop catalog and of another catalog; import the table from the "
            "catalog that has it"
        )
    by_number: dict[int, list[_MetadataFile]] = {}
    for file in files:
        by_number.setdefault(file.number, []).append(file)
    number = max(by_number)
    if hint is not None and files[0].is_hadoop:
        if hint not in by_number:
            raise CatalogRefusal(f"The version {hint} of {_HINT_FILE} has no metadata file")
        number = hint
        while number + 1 in by_number:
            number += 1
    if len(by_number[number]) > 1:
        names = ", ".join(sorted(file.name for file in by_number[number]))
        raise CatalogRefusal(f"Several metadata files may be the newest: {names}; import the table from its catalog")
    return by_number[number][0]


@contextmanager
def _translate_errors(location: str) -> Iterator[None]:
    """Convert the errors of the file system in a block to exceptions of imports.

    A wrong location or a missing library (ValueError, ImportError) affects one entry. Other errors end the import.
    """
    try:
        yield
    except FileNotFoundError:
        raise EntryMissing(f"{location} does not exist") from None
    except (ValueError, ImportError) as error:
        raise CatalogRefusal(f"{location}: {error}") from None
    except (OSError, ArrowException) as error:
        raise CatalogUnavailable(f"{location} cannot be read: {error}") from None
