"""Tests of index files: they are self-describing and mapped, and damaged files are rejected by name."""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import struct
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from isal import isal_zlib
from pyiceberg.table.puffin import PuffinFile

from seamark.formats.iceberg.files.puffin import Blob, read_footer, read_footer_size, write_puffin
from seamark.formats.index.index_file import (
    FilesTable,
    assemble_index_file,
    open_index_file,
    read_files,
    read_header,
)
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.runtime.errors import Corrupt

UUID = "8b0b4b5e-6f2d-4f6a-9a55-5c4d7a8e2f10"
DEFINITION = '{"kind":"record","terms":["#3","lower(#7)"]}'
BLOB = [b"the kind's ", memoryview(b"own bytes")]


def build_files_table(files: int, seed: int = 1) -> FilesTable:
    rng = random.Random(seed)
    paths = [f"s3://bücket/db/t/data/day={rng.randrange(9)}/{number:05d}-é.parquet" for number in range(files)]
    sizes = np.array([rng.randrange(1 << 40) for _ in paths], np.uint64)
    records = np.array([rng.randrange(1 << 33) for _ in paths], np.uint64)
    return FilesTable.from_columns(compute_file_ids(paths, sizes, records), records, sizes, paths)


def write_index_file(files: FilesTable) -> bytes:
    return b"".join(assemble_index_file(DEFINITION, "record", files, BLOB, table_uuid=UUID, field_ids=[3, 7], level=2))


def list_contents(table: FilesTable) -> tuple[object, ...]:
    return table.ids.tolist(), table.records.tolist(), table.sizes.tolist(), table.paths


def read_everything(raw: bytes | bytearray) -> tuple[object, ...]:
    index_file = open_index_file(raw, "a.puffin")
    return index_file.header, *list_contents(index_file.files)


@pytest.mark.parametrize("files", [0, 1, 2, 500])
def test_assembled_file_can_be_opened(files: int) -> None:
    table = build_files_table(files)
    raw = write_index_file(table)
    index_file = open_index_file(raw, "a.puffin")
    header = index_file.header
    assert (header.kind, header.table_uuid, header.definition, header.level) == ("record", UUID, DEFINITION, 2)
    assert (header.field_ids, header.files, header.rows) == ((3, 7), files, int(table.records.sum()))
    assert (header.size_bytes, header.location) == (len(raw), "a.puffin")
    assert list_contents(index_file.files) == list_contents(table)
    assert bytes(index_file.blob) == raw[header.offset : header.offset + header.length] == b"the kind's own bytes"
    assert len(index_file.files) == files
    assert index_file.files.rows == header.rows


@pytest.mark.parametrize(("kind", "alignment"), [("bloom", 64), ("bitmap", 64), ("record", 4096)])
def test_blob_of_a_kind_is_aligned_for_mapping(kind: str, alignment: int) -> None:
    for files in range(5):
        parts = assemble_index_file(DEFINITION, kind, build_files_table(files), BLOB, table_uuid=UUID, field_ids=[3])
        assert open_index_file(b"".join(parts), "a").header.offset % alignment == 0


def test_header_is_read_from_the_end_of_a_file_and_the_file_table_from_the_first_blob() -> None:
    raw = write_index_file(build_files_table(30))
    header = read_header(raw[-read_footer_size(raw[-12:], "a") :], len(raw), "a")
    stored_raw = raw[header.files_offset : header.files_offset + header.files_length]
    assert list_contents(read_files(stored_raw, header)) == list_contents(build_files_table(30))


def test_index_file_is_a_valid_puffin_file() -> None:
    puffin_file = PuffinFile(write_index_file(build_files_table(2)))
    assert [(blob.type, blob.fields) for blob in puffin_file.footer.blobs] == [
        ("seamark-files-v1", [3, 7]),
        ("seamark-record-v1", [3, 7]),
    ]
    assert puffin_file.get_blob_payload(puffin_file.footer.blobs[1]) == b"the kind's own bytes"
    assert puffin_file.footer.properties["seamark.definition"] == DEFINITION
    assert puffin_file.footer.properties["seamark.files"] == "2"


def test_mapped_file_is_read_without_copying(tmp_path: Path) -> None:
    (tmp_path / "index.puffin").write_bytes(write_index_file(build_files_table(40)))
    with (tmp_path / "index.puffin").open("rb") as file:
        mapped_bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index_file = open_index_file(memoryview(mapped_bytes), "a")
    assert list_contents(index_file.files) == list_contents(build_files_table(40))
    with pytest.raises(BufferError):  # Blob and arrays are views of the mapping, so it cannot be closed.
        mapped_bytes.close()


def test_paths_are_decompressed_only_on_request() -> None:
    table = open_index_file(write_index_file(build_files_table(100)), "a").files
    assert len(table.stored_paths) < table.paths_bytes / 4
    with mock.patch("pyarrow.Codec", side_effect=AssertionError):
        assert table.ids.shape == (100, 2)


def test_merged_file_tables_have_the_kept_files_in_order() -> None:
    first_table, other_table = build_files_table(3, seed=1), build_files_table(4, seed=2)
    keep, keep_other = np.array([True, False, True]), np.array([False, True, True, False])
    merged_table = FilesTable.merge([(first_table, keep), (other_table, keep_other)])
    assert merged_table.paths == [
        first_table.paths[0],
        first_table.paths[2],
        other_table.paths[1],
        other_table.paths[2],
    ]
    assert merged_table.ids.tolist() == [*first_table.ids[keep].tolist(), *other_table.ids[keep_other].tolist()]
    assert list_contents(FilesTable.merge([])) == ([], [], [], [])


def test_file_table_with_columns_of_different_lengths_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"1 ids, 1 record counts, 1 sizes and 2 paths"):
        FilesTable.from_columns(*(np.zeros(shape, np.uint64) for shape in ((1, 2), 1, 1)), ["a", "b"])  # type: ignore[call-arg]


@pytest.mark.parametrize("files", [0, 3])
def test_damage_at_any_byte_outside_the_kinds_blob_is_detected(files: int) -> None:
    parts = assemble_index_file(
        DEFINITION, "bloom", build_files_table(files), BLOB, table_uuid=UUID, field_ids=[3, 7], level=2
    )
    raw = b"".join(parts)
    expected, actual_header = read_everything(raw), open_index_file(raw, "a.puffin").header
    for offset in range(len(raw)):
        if actual_header.offset <= offset < actual_header.offset + actual_header.length:
            continue
        for bit in range(8):
            damaged_bytes = bytearray(raw)
            damaged_bytes[offset] ^= 1 << bit
            try:
                assert read_everything(damaged_bytes) == expected, f"bit {bit} of byte {offset}"
            except (Corrupt, UnknownVersion) as error:
                if "a.puffin" not in str(error):
                    raise
    for size in range(len(raw)):
        with pytest.raises(Corrupt):
            read_everything(raw[:size])


def replace_footer(raw: bytes, change: Callable[[list[Blob], dict[str, str]], None]) -> bytes:
    """Return the file with a changed footer.

    `change` modifies the blobs and the properties in place. The checksum in the properties becomes invalid, unless
    `change` also replaces it.
    """
    footer = read_footer(raw, len(raw), "a")
    blobs = [Blob(blob.type, [raw[blob.offset : blob.offset + blob.length]], blob.fields) for blob in footer.blobs]
    properties = dict(footer.properties)
    change(blobs, properties)
    return b"".join(write_puffin(blobs, properties))


def rename_path(blobs: list[Blob], blob_number: int, name: str) -> None:
    blobs[blob_number] = Blob(name, blobs[blob_number].parts, blobs[blob_number].fields)


@pytest.mark.parametrize("name", ["seamark-record-v2", "seamark-bloom-v17", "seamark-bitmap-v0"])
def test_unknown_version_is_reported_and_is_no_damage(name: str) -> None:
    raw = replace_footer(write_index_file(build_files_table(2)), lambda blobs, _: rename_path(blobs, 1, name))
    with pytest.raises(UnknownVersion, match=rf"a\.puffin: '{name}' has version \d+; this server reads version 1"):
        open_index_file(raw, "a.puffin")
    raw = replace_footer(
        write_index_file(build_files_table(2)), lambda blobs, _: rename_path(blobs, 0, "seamark-files-v2")
    )
    with pytest.raises(UnknownVersion, match="seamark-files-v2"):
        open_index_file(raw, "a.puffin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blobs, _: blobs.pop(), "two blobs, not 1"),
        (lambda blobs, _: blobs.append(blobs[1]), "two blobs, not 3"),
        (lambda blobs, _: blobs.reverse(), "does not belong in an index file"),
        (lambda blobs, _: rename_path(blobs, 1, "deletion-vector-v1"), "'deletion-vector-v1' does not belong"),
        (lambda blobs, _: rename_path(blobs, 1, "seamark-files-v1"), "'seamark-files-v1' does not belong"),
        (lambda blobs, _: rename_path(blobs, 1, "seamark-bitmap-v1"), "does not match its checksum"),
        (lambda _, properties: properties.update({"seamark.level": "3"}), "does not match its checksum"),
        (lambda _, properties: properties.update({"more": "than there was"}), "does not match its checksum"),
        (lambda _, properties: properties.pop("seamark.checksum"), "does not match its checksum"),
        (lambda _, properties: properties.pop("seamark.rows"), r"lacks seamark\.rows"),
        (
            lambda blobs, _: blobs.__setitem__(1, Blob(blobs[1].type, blobs[1].parts, (3,))),
            r"have the fields \(3, 7\) and \(3,\)",
        ),
        (lambda blobs, _: blobs.__setitem__(1, Blob(blobs[1].type, blobs[1].parts, (3, 7), "zstd")), "compressed"),
    ],
)
def test_footer_with_wrong_contents_is_rejected(
    change: Callable[[list[Blob], dict[str, str]], None], message: str
) -> None:
    with pytest.raises(Corrupt, match=rf"a\.puffin: .*{message}"):
        open_index_file(replace_footer(write_index_file(build_files_table(2)), change), "a.puffin")


@pytest.mark.parametrize("name", ["seamark.level", "seamark.rows", "seamark.files"])
@pytest.mark.parametrize("text", ["", "-1", "01", "1.0", "1e3", "²", "9" * 30])
def test_invalid_number_is_rejected_despite_a_valid_checksum(name: str, text: str) -> None:
    def set_number_and_recompute_checksum(blobs: list[Blob], properties: dict[str, str]) -> None:
        properties[name] = text
        lines = [f"{key}={properties[key]}" for key in sorted(properties) if key != "seamark.checksum"]
        sealed_text = "\n".join([*lines, "seamark-record-v1", "3,7"]).encode()
        properties["seamark.checksum"] = f"{isal_zlib.crc32(sealed_text):08x}"

    with pytest.raises(Corrupt, match=f"{name} is not a number"):
        open_index_file(replace_footer(write_index_file(build_files_table(2)), set_number_and_recompute_checksum), "a")


def test_file_table_that_disagrees_with_the_footer_is_rejected() -> None:
    short_file, long_file = write_index_file(build_files_table(2)), write_index_file(build_files_table(3))
    header = open_index_file(long_file, "a.puffin").header
    other_header = open_index_file(short_file, "a.puffin").header
    with pytest.raises(Corrupt, match=r"a\.puffin: the files table has 2 files"):
        read_files(
            short_file[other_header.files_offset : other_header.files_offset + other_header.files_length], header
        )


def test_paths_that_inflate_to_a_wrong_size_are_rejected() -> None:
    """The checksums are valid, as those of a malicious file can be."""
    header, raw = (
        open_index_file(write_index_file(build_files_table(3)), "a").header,
        bytearray(write_index_file(build_files_table(3))),
    )
    # The header of the files table has 60 bytes: byte 16 begins the size of the paths, byte 56 the checksum.
    files_header = memoryview(raw)[header.files_offset : header.files_offset + 60]
    # The sizes are too small, or too large: the greatest size that readers accept (1 GiB), more, and much more.
    for claimed_bytes in (0, 10, 1 << 30, (1 << 30) + 1, 1 << 62):
        struct.pack_into("<Q", files_header, 16, claimed_bytes)
        struct.pack_into("<I", files_header, 56, isal_zlib.crc32(files_header[:56]))
        with pytest.raises(Corrupt, match=r"a\.puffin"):
            read_everything(raw)


def test_bytes_of_an_index_file_never_change() -> None:
    """Index files are still in use after upgrades of the server that wrote them.

    If this test fails, increase the version of the format. Do not adapt the test.

    The test compares paths separately, because their compressed bytes depend on the version of zstd.
    """
    raw = write_index_file(build_files_table(3))
    header = open_index_file(raw, "a").header
    # The arrays follow the header of the files table, which has 60 bytes, and have 32 bytes for each file.
    arrays = raw[header.files_offset + 60 : header.files_offset + 60 + 32 * 3]
    assert hashlib.sha256(arrays).hexdigest() == "364572702b54093612b62a6eca051c77145a819c8e83b96b9b820e4c0235d414"
    footer = json.loads(raw[-read_footer_size(raw, "a") + 4 : -12])
    assert footer["properties"] == {
        "created-by": "Seamark 0.1.0",
        "seamark.table-uuid": UUID,
        "seamark.definition": DEFINITION,
        "seamark.level": "2",
        "seamark.rows": str(header.rows),
        "seamark.files": "3",
        "seamark.checksum": "e67108f1",
    }
