"""Tests of Parquet files with damaged bytes. pyarrow, which decodes them in the server, neither crashes nor
over-reads.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.formats.iceberg.files import thrift
from seamark.formats.iceberg.files.budget import create_decoding_budget
from seamark.formats.iceberg.files.footer import MAGIC, read_footer
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.files.parquet_reading import BoundedParquet, read_page_sizes
from seamark.formats.iceberg.files.thrift import BINARY, I32, I64, LIST, STRUCT, Fields
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from tests.bombs.peak import measure_peak

# Numbers of fields in the Thrift structures of Parquet: the row groups of the footer, and the chunks of a row group.
_ROW_GROUPS, _CHUNKS = 4, 1

ROWS = 300
KINDS = {"n": "long", "s": "string", "d": "int", "x": "fixed[8]"}
PATHS = {number: (name,) for number, name in enumerate(KINDS)}
WRITE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"compression": "none"},
    {"compression": "snappy", "row_group_size": 100, "data_page_size": 200},
    {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    {"compression": "none", "use_dictionary": False, "column_encoding": {"s": "DELTA_BYTE_ARRAY"}},
)


def build_random_rows() -> pa.Table:
    rng = np.random.default_rng(1)
    return pa.table(
        {
            "n": rng.integers(0, 50, ROWS),
            "s": [f"v{number % 37}" if number % 7 else None for number in range(ROWS)],
            "d": pa.array(range(ROWS), pa.int32()),
            "x": pa.array([bytes([number % 251] * 8) for number in range(ROWS)], pa.binary(8)),
        }
    )


def encode_rows(**options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(build_random_rows(), buffer, **options)
    return buffer.getvalue()


def read_all_ways(data: bytes) -> list[pa.ChunkedArray]:
    """Read a file in each way in which the server reads data files and delete files. Return the plain columns.

    The results of the other reads are ignored, but not their errors.
    """
    columns = BoundedParquet(pa.BufferReader(data), "p", create_decoding_budget(64 << 20)).read_columns(PATHS)
    for number, kind in enumerate(KINDS.values()):
        convert_to_keys(columns[number], kind)
    BoundedParquet(pa.BufferReader(data), "p", create_decoding_budget(64 << 20)).read_columns_at(
        PATHS, np.array([0, 5, 99])
    )
    plain_columns = BoundedParquet(pa.BufferReader(data), "p", create_decoding_budget(64 << 20)).read_plain_columns(
        PATHS
    )
    return [plain_columns[number] for number in PATHS]


def describe_outcome(path: str) -> str:
    try:
        columns = read_all_ways(Path(path).read_bytes())
    except (Unreadable, pa.ArrowException, OSError, ValueError) as error:
        return f"refused: {error}"
    return (
        "read"
        if [column.to_pylist() for column in columns] == list(build_random_rows().to_pydict().values())
        else "other rows"
    )


def find_footer(data: bytes) -> int:
    """Return the position of the footer. The last 8 bytes of the file are its length and the magic number."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def list_items(fields: Fields, number: int) -> list[Fields]:
    """Return the structures in the list that is the field `number`. The value of a field is (Thrift type, content)."""
    _, (_, items) = fields[number]
    return items


def get_structure(fields: Fields, number: int) -> Fields:
    _, structure = fields[number]
    return structure


def get_metadata(chunk: Fields) -> Fields:
    """Return the ColumnMetaData of a chunk, which is its field 3."""
    return get_structure(chunk, 3)


def change_chunks(data: bytes, change: Callable[[Fields], None]) -> bytes:
    """Return the file with changed column chunks in its footer."""
    begin = find_footer(data)
    footer, _ = thrift.read_structure(data, begin)
    for group in list_items(footer, _ROW_GROUPS):
        for chunk in list_items(group, _CHUNKS):
            change(chunk)
    encoded_footer = thrift.write_structure(footer)
    return data[:begin] + encoded_footer + len(encoded_footer).to_bytes(4, "little") + MAGIC


def repeat_field(encoded_field: bytes, number: int, kind: int, value: object) -> bytes:
    """Return a structure in Thrift's compact encoding with the field `number` repeated at its end.

    Each encoded field is a header of one byte and a value, and each structure ends with a zero byte. `[1:-1]` removes
    both, so that only the value remains. The repeated field has the long header: its type and its number.
    """
    repeated_field = thrift.write_structure({1: (I64, number)})[1:-1] + thrift.write_structure({1: (kind, value)})[1:-1]
    return encoded_field[:-1] + bytes([kind]) + repeated_field + b"\0"


def add_dictionary_of_another_type(chunk: Fields) -> None:
    """Add a dictionary offset with another Thrift type. pyarrow skips it, and so begins with the data page."""
    metadata = get_metadata(chunk)
    metadata[11] = I32, 4  # Field 11 is the offset of the dictionary page, which is an I64 in valid files.
    chunk[3] = STRUCT, dict(sorted(metadata.items()))


def add_wrong_sizes(chunk: Fields) -> None:
    """Add SizeStatistics with levels that no column of the table has, which pyarrow rejects when it reads rows."""
    # Field 16 has the SizeStatistics, and their field 3 has a histogram of levels.
    get_metadata(chunk)[16] = STRUCT, {1: (I64, 5), 3: (LIST, (I64, [1, 2, 3, 4]))}


def add_key_name(chunk: Fields) -> None:
    """Add the name of an encryption key to a chunk, although the file has no encryption."""
    chunk[8] = STRUCT, {2: (STRUCT, {1: (LIST, (BINARY, [b"n"]))})}


@pytest.mark.parametrize(
    ("change", "message"),
    [(add_wrong_sizes, "refused: Definition level"), (add_key_name, "refused: p: the file has encrypted")],
)
def test_chunks_that_pyarrow_cannot_represent_do_not_end_the_process(
    tmp_path: Path, change: Callable[[Fields], None], message: str
) -> None:
    path = tmp_path / "f.parquet"
    path.write_bytes(change_chunks(encode_rows(), change))
    _, outcome = measure_peak(describe_outcome, path)
    assert message in outcome


def test_chunk_whose_dictionary_page_pyarrow_skips_is_rejected() -> None:
    data = change_chunks(encode_rows(use_dictionary=False), add_dictionary_of_another_type)
    with pytest.raises(Unreadable, match="dictionary offset is no I64"):
        read_all_ways(data)


def test_footer_with_two_lists_of_row_groups_is_rejected() -> None:
    """pyarrow reads the last list, whose memory would not be limited if we checked the first."""
    data = encode_rows(compression="none")
    begin = find_footer(data)
    fields, _ = thrift.read_structure(data, begin)
    footer = repeat_field(data[begin:-8], _ROW_GROUPS, *fields[_ROW_GROUPS])
    with pytest.raises(Unreadable, match="a field of the footer is repeated"):
        read_all_ways(data[:begin] + footer + len(footer).to_bytes(4, "little") + MAGIC)


def test_page_with_two_sizes_is_rejected() -> None:
    """pyarrow skips the second size, because it has another Thrift type than the specification."""
    data = encode_rows(compression="none", use_dictionary=False)
    page, end = thrift.read_structure(data, 4)  # The first page header follows the magic number of four bytes.
    with pytest.raises(ValueError, match="the field 2 is repeated"):
        read_page_sizes(repeat_field(thrift.write_structure(page), 2, I64, 1) + data[end:], ROWS)


def test_page_whose_number_of_values_exceeds_32_bits_is_rejected() -> None:
    """pyarrow uses only the low 32 bits and reads the following pages, whose memory would not be limited."""
    data = encode_rows(compression="none", use_dictionary=False)
    page, end = thrift.read_structure(data, 4)
    data_page_header = get_structure(page, 5)
    _, value_count = data_page_header[1]  # The first field is the number of values.
    data_page_header[1] = I32, value_count + (1 << 32)
    with pytest.raises(ValueError, match="states 4294967596 values"):
        read_page_sizes(thrift.write_structure(page) + data[end:], ROWS)


def test_field_whose_id_exceeds_16_bits_is_rejected() -> None:
    """pyarrow uses only the low 16 bits of the field id."""
    with pytest.raises(ValueError, match="exceeds 16 bits"):
        thrift.read_structure(repeat_field(thrift.write_structure({1: (I32, 5)}), (1 << 16) + 1, I32, 6))


def change_item_type(fields: Fields, number: int, kind: int) -> None:
    """Set the field `number` to a list with one item, which is 0, and with this item type in its header."""
    fields[number] = LIST, (kind, [0])


# The numbers are those of the fields in parquet.thrift.
FOOTER_CHANGES: dict[str, Callable[[Fields], None]] = {
    "schema": lambda footer: change_item_type(footer, 2, I64),
    "key-value pairs": lambda footer: change_item_type(footer, 5, I64),
    "column orders": lambda footer: change_item_type(footer, 7, I64),
    "sorting": lambda footer: change_item_type(get_group(footer), 4, I64),
    "encodings": lambda footer: change_item_type(get_metadata(get_chunk(footer)), 2, I64),
    "path": lambda footer: change_item_type(get_metadata(get_chunk(footer)), 3, I32),
    "pairs of a chunk": lambda footer: change_item_type(get_metadata(get_chunk(footer)), 8, I32),
    "encoding statistics": lambda footer: change_item_type(get_metadata(get_chunk(footer)), 13, I32),
    "size statistics": lambda footer: change_item_type(add_field(get_metadata(get_chunk(footer)), 16), 2, I32),
    "geospatial statistics": lambda footer: change_item_type(add_field(get_metadata(get_chunk(footer)), 17), 2, I64),
    "path for a key": lambda footer: change_item_type(add_field(add_field(get_chunk(footer), 8), 2), 1, I32),
}


def get_group(footer: Fields) -> Fields:
    """Return the first row group."""
    return list_items(footer, _ROW_GROUPS)[0]


def get_chunk(footer: Fields) -> Fields:
    """Return the first column chunk."""
    return list_items(get_group(footer), _CHUNKS)[0]


def add_field(fields: Fields, number: int) -> Fields:
    structure: Fields = {}
    fields[number] = STRUCT, structure
    return structure


@pytest.mark.parametrize("name", FOOTER_CHANGES)
def test_list_with_a_wrong_item_type_is_rejected(name: str) -> None:
    """pyarrow ignores the stated item type, and would read the following fields as items."""
    data = encode_rows()
    footer, _ = thrift.read_structure(data, find_footer(data))
    FOOTER_CHANGES[name](footer)
    with pytest.raises(ValueError, match=r"items of another type|does not contain structures"):
        read_footer(thrift.write_structure(sort_fields(footer)))


def sort_fields(value: Any) -> Any:
    """Return the structure with its fields in ascending order of their ids."""
    if isinstance(value, dict):
        return {number: sort_fields(value[number]) for number in sorted(value)}
    return type(value)(map(sort_fields, value)) if isinstance(value, tuple | list) else value


def list_unexpected_outcomes(seed: str) -> str:
    """Read 250 randomly damaged files, and return the errors that the server does not expect, as text.

    Each file has one to three changed bytes. About half of the changes are in the last 1,200 bytes, which have the
    footer.
    """
    rng, unexpected_errors = random.Random(seed), []
    files = [encode_rows(**options) for options in WRITE_OPTIONS]
    for _ in range(250):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 1, 2, 3))):
            offset = rng.randrange(len(data)) if rng.random() < 0.6 else len(data) - 1 - rng.randrange(1200)
            data[offset] = rng.choice((rng.randrange(256), data[offset] ^ 1 << rng.randrange(8), 0, 255, 127))
        try:
            read_all_ways(bytes(data))
        except (Unreadable, pa.ArrowException, OSError, ValueError):
            pass
        except Exception as error:  # noqa: BLE001  an error that the server does not expect
            unexpected_errors.append(repr(error))
    return str(unexpected_errors)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_damaged_files_are_read_or_rejected_with_expected_errors(seed: str) -> None:
    _, unexpected_outcomes = measure_peak(list_unexpected_outcomes, seed)
    assert unexpected_outcomes == "[]"
