"""Samples of rows, from which the advisor simulates layouts.

A sample has all columns that the recorded statements compare, so that layouts by several columns can be simulated. It
is read from a few files of the snapshot. The numbers of files, rows and bytes, and the time, are limited. The sample
includes deleted rows, because they also widen the bounds of a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import read_name_mapping
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.advice.column_samples import DECODED_BYTES, READ_BYTES
from seamark.metaserver.planner.joins.dimensions import ListedFile
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.runtime.gathering import gather

FILES_MAX, ROWS_MAX, LAYOUT_ROWS_MAX = 48, 2_000_000, 60_000
"""The maximum numbers of files and rows that are read, and of rows from which layouts are simulated."""
SAMPLE_S = 8.0
_CONCURRENT_FILES_MAX = 4
_INTEGERS = frozenset({"int", "long", "date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
_FLOATS = frozenset({"float", "double"})
_TEXTS = frozenset({"string", "binary", "uuid", "fixed"})
_DECIMAL_DIGITS_MAX = 18
"""The maximum precision of decimals whose unscaled values fit into int64."""
_IDENTITY_VALUES_MAX = 200
"""The maximum number of distinct values of a column that is proposed as a partition column."""
_DAY_UNITS = {"date": 1, "timestamp": 86_400_000_000, "timestamptz": 86_400_000_000}
"""The number of units of Iceberg's bounds in a day, by type."""

Values = npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.object_]


@dataclass(frozen=True)
class SampledColumn:
    """One column of the sampled rows.

    Attributes:
        column_id: The field id.
        kind: The Iceberg type.
        values: The distinct values in ascending order, in the units of Iceberg's bounds; strings as UTF-8.
        codes: int32[rows]: the code of each row's value. The code of null is 0, and the code of `values[i]` is i + 1.
        file_counts: int64[values + 1]: the number of sampled files in which each code occurs.
    """

    column_id: int
    kind: str
    values: Values
    codes: npt.NDArray[np.int32]
    file_counts: Longs

    def with_values(self, added_values: Values) -> SampledColumn:
        """Return a copy of the column with further values that occur in no sampled row.

        The code of a value is its position in the sorted values plus 1, so the codes change.
        """
        values: Values = np.unique(np.concatenate([self.values, added_values]))
        places = np.searchsorted(values, self.values) + 1
        new_codes = np.concatenate([[0], places]).astype(np.int32)
        counts = np.zeros(len(values) + 1, dtype=np.int64)
        counts[new_codes] = self.file_counts
        return SampledColumn(self.column_id, self.kind, values, new_codes[self.codes], counts)

    @property
    def is_numeric(self) -> bool:
        return self.values.dtype != np.dtype(object)

    def compute_ranks(self, bits: int) -> npt.NDArray[np.uint64]:
        """Return the rank of each row's value, uint64[rows], less than 2**bits. Equal values have equal ranks.

        The rank of a value is the middle position of its rows in the sorted column, scaled to `bits` bits.
        """
        counts = np.bincount(self.codes, minlength=len(self.values) + 1)
        ends = np.cumsum(counts)
        # Twice the middle position, `2 * (end - count / 2)`, so that the computation needs no fractions.
        middles = (2 * ends - counts) << bits
        ranks: npt.NDArray[np.uint64] = np.minimum(middles // max(1, 2 * len(self.codes)), (1 << bits) - 1).astype(
            np.uint64
        )
        return ranks[self.codes]


@dataclass(frozen=True)
class RowSample:
    """Sampled rows.

    Attributes:
        columns: The columns by id. Columns whose type has no order or is not supported are missing.
        files: The number of sampled files.
        rows: The number of sampled rows. Each column has a value for each of them.
    """

    columns: dict[int, SampledColumn]
    files: int
    rows: int


def is_type_sampled(kind: str) -> bool:
    """Return whether columns of an Iceberg type can be sampled."""
    name = get_base_name(kind)
    if name == "decimal":
        return get_decimal_precision(kind) <= _DECIMAL_DIGITS_MAX
    return name in _INTEGERS or name in _FLOATS or name in _TEXTS


async def sample_rows(
    objects: ObjectStore, metadata: TableMetadata, files: Sequence[ListedFile], columns: dict[int, str]
) -> RowSample | str:
    """Read a sample of rows from the data files of a snapshot.

    Args:
        objects: The storage.
        metadata: The metadata of the table.
        files: The data files of the snapshot.
        columns: The types of the columns to read, by id.

    Returns:
        The sample, or a text that says why there is no sample.
    """
    sample_files = _choose_files(files)
    if not sample_files:
        return "no Parquet file of the table has rows, but few enough for a sample"
    mapping = read_name_mapping(metadata.properties)
    rows = DataRows(objects, asyncio.get_running_loop(), mapping, READ_BYTES, DECODED_BYTES)

    async def read(file: ListedFile) -> dict[int, pa.Array]:
        return await asyncio.to_thread(_read_file, rows, file, list(columns))

    try:
        async with asyncio.timeout(SAMPLE_S):
            parts = await gather([partial(read, file) for file in sample_files], _CONCURRENT_FILES_MAX)
        return await asyncio.to_thread(_combine_files, parts, columns)
    except TimeoutError:
        return f"the rows could not be read within {SAMPLE_S:g} s"
    except Unreadable as error:
        return f"a data file cannot be read: {error}"
    except (SeamarkError, pa.ArrowException) as error:
        return f"a data file cannot be read: {str(error)[:200]}"


def _choose_files(files: Sequence[ListedFile]) -> list[ListedFile]:
    """Choose Parquet files at random, so that a periodic order of the files does not bias the sample.

    The seed is the number of files, so the same files always give the same choice. At most `FILES_MAX` files are drawn.
    Once a file is chosen, the choice ends before the drawn files together exceed `ROWS_MAX` rows. The result is empty
    if no drawn file is a Parquet file with 1 to `ROWS_MAX` rows.
    """
    drawn_numbers = np.random.default_rng(len(files)).permutation(len(files))[:FILES_MAX].tolist()
    sample_files: list[ListedFile] = []
    rows = 0
    for number in drawn_numbers:
        rows += max(0, files[number].records)
        if rows > ROWS_MAX and sample_files:
            break
        if files[number].format == "parquet" and 0 < files[number].records <= ROWS_MAX:
            sample_files.append(files[number])
    return sample_files


def _read_file(rows: DataRows, file: ListedFile, column_ids: Sequence[int]) -> dict[int, pa.Array]:
    with rows.read_all(file.path, file.size, file.records, column_ids) as arrays:
        return {column_id: _to_array(arrays.get(column_id), file.records) for column_id in column_ids}


def _to_array(column: pa.ChunkedArray | None, rows: int) -> pa.Array:
    """Return the column as one array, without a dictionary. The array has nulls if the file lacks the column."""
    if column is None:  # The column was added after the file was written.
        return pa.nulls(rows)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    joined_column = column.combine_chunks()
    return joined_column.chunk(0) if isinstance(joined_column, pa.ChunkedArray) else joined_column


def _combine_files(parts: Sequence[dict[int, pa.Array]], columns: dict[int, str]) -> RowSample:
    """Combine the columns of the files, and keep at most `LAYOUT_ROWS_MAX` rows, which are chosen at random.

    The random numbers depend only on the number of rows, so the same files give the same sample. The number of files
    with each value is counted before rows are left out.

    Args:
        parts: The columns of each sampled file, by column id.
        columns: The types of the columns, by id.
    """
    lengths = [len(next(iter(part.values()))) for part in parts]
    file_numbers = np.repeat(np.arange(len(parts)), lengths)
    total = int(sum(lengths))
    kept_rows = np.arange(total)
    if total > LAYOUT_ROWS_MAX:
        kept_rows = np.sort(np.random.default_rng(total).choice(total, LAYOUT_ROWS_MAX, replace=False))
    sampled_columns = {}
    for column_id, kind in columns.items():
        encoded_column = _encode_column([part[column_id] for part in parts], kind)
        if encoded_column is not None:
            values, codes = encoded_column
            # Each distinct pair of a file and a code is one number. The remainders are the codes.
            pairs = np.unique(file_numbers.astype(np.int64) * (len(values) + 1) + codes)
            counts = np.bincount(pairs % (len(values) + 1), minlength=len(values) + 1)
            sampled_columns[column_id] = _drop_unused_values(
                SampledColumn(column_id, kind, values, codes[kept_rows], counts)
            )
    return RowSample(sampled_columns, len(parts), len(kept_rows))


def _drop_unused_values(column: SampledColumn) -> SampledColumn:
    """Return the column without the values that occur in no kept row. So there are at most as many values as rows.

    The code 0, null, is added before the codes are numbered again, so that it stays 0 if no row is null.
    """
    occurring_codes, codes = np.unique(np.append(column.codes, 0), return_inverse=True)
    return SampledColumn(
        column.column_id,
        column.kind,
        column.values[occurring_codes[1:] - 1],
        codes[:-1].astype(np.int32),
        column.file_counts[occurring_codes],
    )


def _encode_column(arrays: Sequence[pa.Array], kind: str) -> tuple[Values, npt.NDArray[np.int32]] | None:
    """Return the sorted distinct values of all arrays, and the code of each row. None if no array has a value.

    The code of a value is its position plus 1, and the code of null is 0. Files from before a type promotion have
    narrower types, so all arrays are converted to the widest type.
    """
    types = [array.type for array in arrays if not pa.types.is_null(array.type)]
    if not types:
        return None
    widest = max(types, key=lambda type: getattr(type, "bit_width", 0) if pa.types.is_primitive(type) else 0)
    dictionary_array = pa.concat_arrays([array.cast(widest) for array in arrays]).dictionary_encode()
    values = _convert_values(dictionary_array.dictionary, kind)
    order = np.argsort(values, kind="stable")
    new_codes = np.empty(len(values) + 1, dtype=np.int32)
    new_codes[order] = np.arange(1, len(values) + 1)
    new_codes[len(values)] = 0
    indices = pc.fill_null(dictionary_array.indices, len(values)).to_numpy(zero_copy_only=False)
    return values[order], new_codes[indices]


def _convert_values(values: pa.Array, kind: str) -> Values:
    """Convert values to the units of Iceberg's bounds, as a NumPy array that can be sorted.

    Decimals become unscaled integers, and dates and times become integers. Strings become bytes, whose order is that
    of bounds.
    """
    name = get_base_name(kind)
    if name == "decimal":
        scale = get_decimal_scale(kind)
        return np.array([int(value.scaleb(scale)) for value in values.to_pylist()], dtype=np.int64)
    if name.startswith("timestamp"):
        unit, zone = ("ns" if name.endswith("_ns") else "us"), values.type.tz
        values = values.cast(pa.timestamp(unit, zone), safe=False)
    if name in _INTEGERS:
        if pa.types.is_temporal(values.type):
            values = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
        integers: npt.NDArray[np.int64] = values.to_numpy(zero_copy_only=False).astype(np.int64)
        return integers
    if name in _FLOATS:
        floats: npt.NDArray[np.float64] = values.to_numpy(zero_copy_only=False).astype(np.float64)
        return floats
    texts = np.empty(len(values), dtype=object)
    texts[:] = [value.encode() if isinstance(value, str) else bytes(value) for value in values.to_pylist()]
    return texts


def compute_partition_codes(column: SampledColumn) -> tuple[str, npt.NDArray[np.int64]] | None:
    """Return a partition transform of the column, and the partition number of each distinct value, int64[values].

    The transform is `day` for dates and timestamps, and `identity` for other columns with few values.

    Returns:
        None if no transform gives a useful number of partitions.
    """
    if column.kind in _DAY_UNITS:
        return "day", np.asarray(column.values, dtype=np.int64) // _DAY_UNITS[column.kind]
    if len(column.values) <= _IDENTITY_VALUES_MAX:
        return "identity", np.arange(len(column.values), dtype=np.int64)
    return None
