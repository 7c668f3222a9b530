"""Writes a Parquet file of a table, and returns its ContentFile as defined by the REST specification.

A file is written row group by row group to a unique location, and is durable when its ContentFile is returned. Until a
commit adds the file, no reader uses it. A writer that dies leaves an unreferenced file.

The table's properties (`write.parquet.…`) determine the encodings, with Iceberg's defaults. A column with almost no
repeated values in a sample is written without a dictionary. Its dictionary would be as large as the column, would take
most of the writing time, and would be needed to read any page of the column.

The row groups of an encrypted file are encoded in memory, so that no unencrypted byte is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.arrow.partitions import Partition
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.assembly import FileAssembler, Pick
from seamark.connector.parquet.copy.protection import (
    FileProtection,
    SourceCheck,
    read_protection,
    require_same_scheme,
)
from seamark.connector.parquet.copy.sinks import open_sink
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys
from seamark.connector.parquet.metrics import LeafColumn, Metrics, Mode, list_leaves, list_modes
from seamark.connector.read.tables import ScanTask
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.files.footer import END_BYTES, MAGIC
from seamark.formats.iceberg.metadata.properties import parse_bool, parse_int
from seamark.formats.iceberg.types.schema import Schema

ROW_GROUP_BYTES = "write.parquet.row-group-size-bytes"
ROW_GROUP_BYTES_DEFAULT = 128 << 20
_CODEC, _LEVEL = "write.parquet.compression-codec", "write.parquet.compression-level"
_CODECS = {"zstd": "ZSTD", "gzip": "GZIP", "snappy": "SNAPPY", "lz4": "LZ4", "brotli": "BROTLI", "uncompressed": "NONE"}
_PAGE_BYTES, _PAGE_ROWS = "write.parquet.page-size-bytes", "write.parquet.page-row-limit"
_DICTIONARY_BYTES = "write.parquet.dict-size-bytes"
_BLOOM, _BLOOM_FPP = "write.parquet.bloom-filter-enabled.column.", "write.parquet.bloom-filter-fpp.column."
_BLOOM_BYTES = "write.parquet.bloom-filter-max-bytes"
_FALSE_POSITIVE_PROBABILITY_DEFAULT = 0.01
_SAMPLE_ROWS, _STRETCH_ROWS = 16_384, 1_024
"""The number of rows of a sample, and of each slice of consecutive rows in the sample."""
_DICTIONARY_DISTINCT_MAX_FRACTION = 0.9
"""The maximum fraction of distinct values in a sample of a column that is written with a dictionary."""


@dataclass(frozen=True)
class NewFile:
    """A Parquet file to write.

    Attributes:
        arrow: The Arrow schema of all rows, with field ids.
        properties: The properties of the table.
        modes: The metrics mode of each column, by field id.
        key_values: The key-value metadata of the footer.
    """

    location: str
    storage: Storage
    schema: Schema
    arrow: pa.Schema
    properties: Mapping[str, str]
    modes: Mapping[int, Mode]
    key_values: Mapping[str, str] = field(default_factory=dict)


class FileWriter:
    """Writes one Parquet file. Each call of `write` creates a row group."""

    def __init__(self, new: NewFile) -> None:
        self.location = new.location
        self.rows = 0
        self._target = new
        self._leaves = list_leaves(new.schema)
        self._bloom_fpps = _select_bloom_columns(new.schema, new.properties, self._leaves)
        self._metrics = Metrics(self._leaves, new.modes)
        self._stream: Any = None
        self._writer: pq.ParquetWriter | None = None

    @property
    def size_bytes(self) -> int:
        """The number of bytes written so far."""
        return int(self._stream.tell()) if self._stream is not None else 0

    def write(self, rows: pa.Table) -> None:
        """Write a row group.

        Raises:
            Unwritable: A property of the table is invalid.
        """
        self._metrics.add(rows)
        self._open_writer(rows).write_table(rows, row_group_size=max(1, rows.num_rows))
        self.rows += rows.num_rows

    def _open_writer(self, first_rows: pa.Table | None) -> pq.ParquetWriter:
        """Return the Parquet writer. Open it at the first call.

        Args:
            first_rows: The rows of the first row group, from which the encodings are chosen, or None if there are no
                rows.
        """
        if self._writer is None:
            options = _choose_options(first_rows, self._leaves, self._bloom_fpps, self._target.properties)
            self._stream = self._target.storage.open_output_stream(self.location)
            self._writer = pq.ParquetWriter(self._stream, self._target.arrow, **options)
            if self._target.key_values:
                self._writer.add_key_value_metadata(dict(self._target.key_values))
        return self._writer

    def close(self) -> dict[str, Any]:
        """Close the file durably. Return its format, sizes, counts and metrics as fields of a ContentFile."""
        writer = self._open_writer(None)
        writer.close()
        footer = writer.writer.metadata
        size_bytes = self.size_bytes
        self._stream.close()
        local = self._target.storage.find_local_path(self.location)
        if local is not None:
            local.sync()
        return {
            "file-path": self.location,
            "file-format": "PARQUET",
            "file-size-in-bytes": size_bytes,
            "record-count": footer.num_rows,
            **self._metrics.collect(footer),
            "split-offsets": [_get_start_offset(footer.row_group(group)) for group in range(footer.num_row_groups)],
        }

    def abort(self) -> None:
        """Close and delete the file.

        The method never raises, because the file is unreferenced.
        """
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with suppress(Exception):
            if self._stream is not None:
                self._stream.close()
                self._target.storage.delete(self.location)


class EncryptedFileWriter(FileWriter):
    """Writes one encrypted Parquet file. Its ContentFile has no metrics of encrypted columns."""

    def __init__(self, new: NewFile, protection: FileProtection) -> None:
        """Open the file.

        Args:
            new: The file to write.
            protection: The encryption of the columns of the schema.

        Raises:
            Unreadable: A key service fails.
        """
        super().__init__(new)
        self._protection = protection
        empty_file = make_empty_file(new.arrow, new.schema)
        encryption = protection.create_encryption(new.location)
        self._assembler = FileAssembler(open_sink(new.location, new.storage), empty_file.footer, encryption)

    @property
    def size_bytes(self) -> int:
        return self._assembler.size_bytes

    def write(self, rows: pa.Table) -> None:
        self._metrics.add(rows)
        group = SourceFile("rows in memory", None, encode_row_group(rows, self._target.schema, self._target.properties))
        columns = range(len(self._assembler.leaves))
        self._assembler.add([Pick(group, 0, columns, columns)])
        self.rows += rows.num_rows

    def close(self) -> dict[str, Any]:
        footer = parse_footer(self._assembler.close())
        return {
            "file-path": self.location,
            "file-format": "PARQUET",
            "file-size-in-bytes": self.size_bytes,
            "record-count": footer.num_rows,
            **self._metrics.collect(footer, secret=self._protection.secret_ids),
            "split-offsets": self._assembler.split_offsets,
        }

    def abort(self) -> None:
        self._assembler.abort()


def parse_footer(footer: bytes) -> pq.FileMetaData:
    """Decode a footer with pyarrow, which reads only whole files: the footer, its length, and the magic number."""
    return pq.read_metadata(
        pa.BufferReader(MAGIC + footer + len(footer).to_bytes(END_BYTES - len(MAGIC), "little") + MAGIC)
    )


def divide_by_protection(
    tasks: Iterable[ScanTask], target: WriteTarget, keys: ParquetKeys | None
) -> list[tuple[FileProtection | None, list[ScanTask]]]:
    """Group the files by their encryption. A new file with rows of a group has the encryption of the group.

    Without keys, all files are in one group, and an encrypted file causes an error when it is read.

    Raises:
        Unreadable: A file cannot be read.
    """
    if keys is None:
        return [(None, list(tasks))]
    empty_file = make_empty_file(target.arrow, target.schema)
    by_scheme: dict[EncryptionScheme | None, tuple[FileProtection | None, list[ScanTask]]] = {}
    for task in tasks:
        protection = read_protection(task.path, target.storage, empty_file.leaves, keys)
        scheme = None if protection is None else protection.scheme
        by_scheme.setdefault(scheme, (protection, []))[1].append(task)
    return list(by_scheme.values())


def require_unchanged_scheme(
    scheme: EncryptionScheme | None, target: WriteTarget, keys: ParquetKeys | None
) -> SourceCheck | None:
    """Return a check that refuses a file whose encryption has changed since `divide_by_protection`.

    Return None if there are no keys, because encrypted files are then always refused.
    """
    if keys is None:
        return None
    return require_same_scheme(lambda _: scheme, make_empty_file(target.arrow, target.schema).leaves, keys)


def make_empty_file(arrow: pa.Schema, schema: Schema) -> SourceFile:
    """Return a Parquet file in memory that has the columns and no rows."""
    rows = pa.Table.from_batches([], arrow)  # `empty_table()` fails for a uuid inside a struct, list or map.
    return SourceFile("a file without rows", None, encode_row_group(rows, schema, {}))


def encode_row_group(rows: pa.Table, schema: Schema, properties: Mapping[str, str]) -> bytes:
    """Return a Parquet file in memory with the rows as its only row group. Without rows, the file has no row group.

    Raises:
        Unwritable: A property is invalid.
    """
    leaves = list_leaves(schema)
    options = _choose_options(rows, leaves, _select_bloom_columns(schema, properties, leaves), properties)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **options) as writer:
        if rows.num_rows:
            writer.write_table(rows, row_group_size=rows.num_rows)
    return bytes(sink.getvalue())


def _choose_options(
    rows: pa.Table | None, leaves: list[LeafColumn], bloom_fpps: Mapping[str, float], properties: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of the Parquet writer.

    Args:
        rows: The rows of the first row group, or None if there are no rows.
    """
    options = build_writer_options(properties)
    limit_bytes = options["dictionary_pagesize_limit"]
    options["use_dictionary"] = [
        leaf.path for leaf in leaves if rows is None or _uses_dictionary(rows, leaf, limit_bytes)
    ]
    if bloom_fpps:
        options["bloom_filter_options"] = _choose_bloom_options(
            bloom_fpps, properties, 0 if rows is None else rows.num_rows
        )
    return options


def open_data_file_writer(target: WriteTarget, location: str, protection: FileProtection | None = None) -> FileWriter:
    modes = list_modes(target.schema, target.properties, target.sort_order)
    new = NewFile(location, target.storage, target.schema, target.arrow, target.properties, modes)
    return FileWriter(new) if protection is None else EncryptedFileWriter(new, protection)


def finish_data_file(writer: FileWriter, target: WriteTarget, partition: Partition) -> dict[str, Any]:
    """Close the writer and return the ContentFile.

    If the table has a sort order, the caller must have written the rows in the order of this sort order.
    """
    return {
        "content": "data",
        **writer.close(),
        "spec-id": target.spec.spec_id,
        "partition": target.partitioner.convert_to_json(partition),
        "sort-order-id": target.sort_order.order_id if target.ordering is not None else 0,
    }


def build_writer_options(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of pyarrow's ParquetWriter for the properties of a table.

    Missing properties have Iceberg's defaults: zstd, pages of at most 1 MiB and 20,000 rows, and dictionaries of at
    most 2 MiB.

    Raises:
        Unwritable: The codec is not supported.
        InvalidRequest: The value of another property is not a number.
    """
    codec = properties.get(_CODEC, "zstd").lower()
    if codec not in _CODECS:
        raise Unwritable(f"The table's {_CODEC} is {codec!r}; the supported codecs are {', '.join(_CODECS)}")
    level = parse_int(properties, _LEVEL, 0) if properties.get(_LEVEL) else None
    return {
        "compression": _CODECS[codec],
        "compression_level": level if codec in ("zstd", "gzip", "brotli") else None,
        "data_page_size": parse_int(properties, _PAGE_BYTES, 1 << 20),
        "max_rows_per_page": parse_int(properties, _PAGE_ROWS, 20_000),
        "dictionary_pagesize_limit": parse_int(properties, _DICTIONARY_BYTES, 2 << 20),
        "store_decimal_as_integer": True,
        "store_schema": False,
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _uses_dictionary(rows: pa.Table, leaf: LeafColumn, limit_bytes: int) -> bool:
    """Return whether a column is written with a dictionary of at most `limit_bytes`.

    This is the case if values are repeated often enough, or if they cannot be counted: nested values, and types that
    pyarrow cannot count. A small column is counted as a whole, and a large column by a sample.
    """
    if len(leaf.positions) > 1 or leaf.repeated:
        return True
    column = rows.column(leaf.positions[0])
    if rows.num_rows < _SAMPLE_ROWS:
        return not _overflows(column, limit_bytes) and _is_dictionary_smaller(column)
    # The sample consists of slices of consecutive rows from all parts of the column, so that it includes runs of equal
    # values.
    starts = np.linspace(0, rows.num_rows - _STRETCH_ROWS, _SAMPLE_ROWS // _STRETCH_ROWS).astype(np.int64)
    positions = pa.array((starts[:, None] + np.arange(_STRETCH_ROWS)).ravel())
    sample = column.take(positions)
    try:
        distinct = pc.count_distinct(sample).as_py()  # A dictionary contains no nulls.
    except pa.ArrowNotImplementedError:
        return True
    if distinct > _DICTIONARY_DISTINCT_MAX_FRACTION * (len(sample) - sample.null_count):
        return False
    # Checked last: to count the distinct values of a large column takes longer than to write them.
    return not _overflows(column, limit_bytes)


def _overflows(column: pa.ChunkedArray, limit_bytes: int) -> bool:
    """Return whether the first values of a column fill a dictionary, so that pyarrow stores the others without it.

    Only few values are counted if they are long, because to count all of them can take as long as to compress them. The
    result is False for a type whose values pyarrow cannot count.
    """
    fitting_count = max(1, int(limit_bytes * len(column) / max(1, column.nbytes)))
    if len(column) <= 2 * fitting_count:
        return False
    try:
        # The dictionary has room for `fitting_count` values of mean size. It overflows if the first values, twice as
        # many, have more distinct values than this.
        return bool(pc.count_distinct(column.slice(0, 2 * fitting_count)).as_py() > fitting_count)
    except pa.ArrowNotImplementedError:
        return False


def _is_dictionary_smaller(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary and its indices take fewer bytes than the values, before compression.

    Iceberg's Java writer makes the same decision. pyarrow would keep any dictionary that fits into its limit.

    The result is also True for a column with only nulls, and for a type whose values pyarrow cannot count.
    """
    values = len(column) - column.null_count
    if not values:
        return True
    try:
        distinct = pc.count_distinct(column).as_py()
    except pa.ArrowNotImplementedError:
        return True
    value_bytes = column.nbytes / len(column)
    return bool(distinct * value_bytes + values * max(1, distinct - 1).bit_length() / 8 < values * value_bytes)


def _select_bloom_columns(schema: Schema, properties: Mapping[str, str], leaves: list[LeafColumn]) -> dict[str, float]:
    """Return the false-positive rates of the columns with a Bloom filter in the file, by the path of the column.

    Raises:
        Unwritable: A rate is invalid.
    """
    paths = {leaf.id: leaf.path for leaf in leaves if leaf.kind != "boolean"}
    fpps: dict[str, float] = {}
    for name in properties:
        if not name.startswith(_BLOOM) or not parse_bool(properties, name, False):
            continue
        column = name.removeprefix(_BLOOM)
        field = schema.find_column_by_name(column)
        if field is None or field.id not in paths:
            continue
        text = properties.get(_BLOOM_FPP + column, str(_FALSE_POSITIVE_PROBABILITY_DEFAULT))
        try:
            fpp = float(text)
        except ValueError:
            fpp = math.nan
        if not 0 < fpp < 1:
            raise Unwritable(f"The table's {_BLOOM_FPP}{column} is {text!r}, which is not a number between 0 and 1")
        fpps[paths[field.id]] = fpp
    return fpps


def _choose_bloom_options(columns: Mapping[str, float], properties: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Return the Bloom filter options for row groups of `rows` rows, within the table's maximum size of a filter.

    If a filter for all rows is larger than the maximum, it is made for fewer values (`ndv`) at the same rate. Without
    the property of the maximum, it is 1 MiB.
    """
    bits = parse_int(properties, _BLOOM_BYTES, 1 << 20) * 8
    # A split-block filter sets 8 bits for each value: fpp = (1 - exp(-8 n / bits)) ** 8.
    distinct_values_max = {path: int(-bits / 8 * math.log(1 - fpp ** (1 / 8))) for path, fpp in columns.items()}
    return {path: {"ndv": max(1, min(rows, distinct_values_max[path])), "fpp": fpp} for path, fpp in columns.items()}


def _get_start_offset(group: Any) -> int:
    first_column = group.column(0)
    return int(
        first_column.dictionary_page_offset if first_column.has_dictionary_page else first_column.data_page_offset
    )
