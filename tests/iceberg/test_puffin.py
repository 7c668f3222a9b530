"""Tests of Puffin files: PyIceberg and Iceberg Java read ours, we read theirs, and damaged files are rejected."""

from __future__ import annotations

import json
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import lz4.frame
import pyspark
import pytest
import zstandard
from pyiceberg.table.puffin import PuffinFile
from pyroaring import BitMap64

from seamark.formats.iceberg.files.puffin import (
    FOOTER_LIMIT_BYTES,
    MAGIC,
    NO_SNAPSHOT,
    TAIL_BYTES,
    Blob,
    Footer,
    read_footer,
    read_footer_size,
    write_puffin,
)
from seamark.formats.runtime.errors import Corrupt
from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE

TEXT = "words that repeat, and repeat, and repeat — " * 50


DECOMPRESSORS: dict[str | None, Any] = {None: bytes, "lz4": lz4.frame.decompress, "zstd": zstandard.decompress}


def write_sample() -> bytes:
    blobs = [
        Blob("plain-v1", [b"one ", memoryview(b"and two"), b""], (3, 1)),
        Blob("packed-v1", [TEXT.encode()], codec="zstd", properties={"é": "ü"}),
        Blob("empty-v1", [], snapshot_id=7, sequence_number=9),
    ]
    return b"".join(write_puffin(blobs, {"created-by": "a test", "näme": "välue"}))


def read_puffin(data: bytes) -> tuple[Footer, list[bytes]]:
    footer = read_footer(data, len(data), "a.puffin")
    raw_blobs = (data[blob.offset : blob.offset + blob.length] for blob in footer.blobs)
    contents = [
        DECOMPRESSORS[blob.compression_codec](raw_blob) for blob, raw_blob in zip(footer.blobs, raw_blobs, strict=True)
    ]
    return footer, contents


def build_puffin(blobs: bytes, payload: bytes, flags: int = 0) -> bytes:
    return MAGIC + blobs + MAGIC + payload + struct.pack("<iI", len(payload), flags) + MAGIC


def test_puffin_file_is_equal_after_a_round_trip() -> None:
    footer, contents = read_puffin(write_sample())
    assert contents == [b"one and two", TEXT.encode(), b""]
    assert [(blob.type, blob.fields, blob.compression_codec) for blob in footer.blobs] == [
        ("plain-v1", (3, 1), None),
        ("packed-v1", (), "zstd"),
        ("empty-v1", (), None),
    ]
    assert [(blob.snapshot_id, blob.sequence_number) for blob in footer.blobs] == [(NO_SNAPSHOT, NO_SNAPSHOT)] * 2 + [
        (7, 9)
    ]
    assert footer.blobs[1].properties == {"é": "ü"}
    assert footer.properties == {"created-by": "a test", "näme": "välue"}


def test_footer_is_read_from_the_end_of_a_file_alone() -> None:
    data = write_sample()
    footer_bytes = read_footer_size(data[-TAIL_BYTES:], "a.puffin")
    assert read_footer(data[-footer_bytes:], len(data), "a.puffin") == read_footer(data, len(data), "a.puffin")
    with pytest.raises(Corrupt, match=r"a\.puffin: a footer of"):
        read_footer(data[1 - footer_bytes :], len(data), "a.puffin")  # The first byte of the footer is missing.


def test_uncompressed_blob_is_not_copied() -> None:
    blob_part = memoryview(bytearray(1000))
    assert any(written_part is blob_part for written_part in write_puffin([Blob("t", [blob_part])], {}))


def test_pyiceberg_reads_our_puffin_files() -> None:
    puffin_file = PuffinFile(write_sample())
    assert puffin_file.footer.properties == {"created-by": "a test", "näme": "välue"}
    assert [blob.type for blob in puffin_file.footer.blobs] == ["plain-v1", "packed-v1", "empty-v1"]
    assert [puffin_file.get_blob_payload(blob) for blob in puffin_file.footer.blobs] == [
        b"one and two",
        TEXT.encode(),
        b"",
    ]


def run_java(*args: str) -> list[str]:
    """Return the lines that Iceberg Java's reader or writer prints (PuffinPeer.java)."""
    jars = [
        *(CACHE / "jars").glob("iceberg-spark-runtime-*.jar"),
        *Path(pyspark.__file__).parent.glob("jars/slf4j-api-*"),
    ]
    peer = Path(__file__).with_name("PuffinPeer.java")
    argv = [find_java_17(), *SHORT_LIVED, "-cp", ":".join(map(str, jars)), str(peer), *args]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_iceberg_java_reads_our_puffin_files(tmp_path: Path) -> None:
    (tmp_path / "ours.puffin").write_bytes(write_sample())
    assert run_java("read", str(tmp_path / "ours.puffin"))[1:] == [
        f"plain-v1|[3, 1]|-1,-1|{{}}|{b'one and two'.hex()}",
        f"packed-v1|[]|-1,-1|{{é=ü}}|{TEXT.encode().hex()}",
        "empty-v1|[]|7,9|{}|",
    ]


def test_deletion_vector_of_iceberg_java_is_read(tmp_path: Path) -> None:
    run_java("write", str(tmp_path / "theirs.puffin"))
    footer, (vector, text) = read_puffin((tmp_path / "theirs.puffin").read_bytes())
    assert footer.properties == {"created-by": "PuffinPeer"}
    assert footer.blobs[0].type == "deletion-vector-v1"
    assert footer.blobs[0].properties == {"referenced-data-file": "file:/data.parquet", "cardinality": "4"}
    # The length and the CRC-32 are big-endian, around magic and roaring bitmap (Puffin spec, "deletion-vector-v1").
    assert struct.unpack_from(">I", vector)[0] == len(vector) - 8
    assert list(BitMap64.deserialize(vector[8:-4])) == [3, 5, 1_000_000, 5_000_000_000]
    assert (footer.blobs[1].compression_codec, text) == ("zstd", b"text " * 100)


def test_compressed_footer_and_positions_of_compressed_blobs_are_read() -> None:
    lz4_frame, zstd_frame = lz4.frame.compress(TEXT.encode()), zstandard.compress(TEXT.encode())
    blobs = [
        {"type": "a", "fields": [1], "snapshot-id": 1, "sequence-number": 1, "offset": offset, "length": size}
        | {"compression-codec": codec}
        for offset, size, codec in ((4, len(lz4_frame), "lz4"), (4 + len(lz4_frame), len(zstd_frame), "zstd"))
    ]
    payload = lz4.frame.compress(json.dumps({"blobs": blobs, "unknown-field": 1}).encode())
    _, contents = read_puffin(build_puffin(lz4_frame + zstd_frame, payload, flags=1))
    assert contents == [TEXT.encode()] * 2


def test_footer_that_inflates_past_the_limit_is_rejected() -> None:
    bomb = lz4.frame.compress(b" " * (FOOTER_LIMIT_BYTES + 1))
    data = build_puffin(b"", bomb, flags=1)
    with pytest.raises(Corrupt, match="inflates to more"):
        read_footer(data, len(data), "a")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PFA1", "a Puffin file cannot have only 4 bytes"),
        (b"x" * 40, "does not end with Puffin's magic bytes"),
        (build_puffin(b"", b"{}", flags=2), "flags 0x2"),
        (build_puffin(b"", b""), "states an invalid size of 0 bytes"),
        (MAGIC * 2 + b"{}" + struct.pack("<iI", -2, 0) + MAGIC, "states an invalid size of -2 bytes"),
        (MAGIC * 2 + b"{}" + struct.pack("<iI", 900, 0) + MAGIC, "does not fit"),
        (b"PFA1PFA2{}" + struct.pack("<iI", 2, 0) + MAGIC, "does not start with Puffin's magic bytes"),
        (build_puffin(b"", b"{}"), "missing required field `blobs`"),
        (build_puffin(b"", b"[" * 100_000), "cannot be read"),
        (build_puffin(b"", b"not lz4", flags=1), "cannot be inflated"),
    ],
)
def test_file_that_is_not_puffin_is_rejected_by_name(data: bytes, message: str) -> None:
    with pytest.raises(Corrupt, match=message) as error:
        read_footer(data, len(data), "s3://b/broken.puffin")
    assert "s3://b/broken.puffin" in error.value.message


@pytest.mark.parametrize(("offset", "length"), [(3, 1), (4, 6), (9, 1), (4, -1), (1 << 62, 1 << 62)])
def test_blob_outside_the_blob_section_is_rejected(offset: int, length: int) -> None:
    blob = {"type": "t", "fields": [], "snapshot-id": 1, "sequence-number": 1, "offset": offset, "length": length}
    data = build_puffin(b"12345", json.dumps({"blobs": [blob]}).encode())
    with pytest.raises(Corrupt, match="states"):
        read_footer(data, len(data), "a")


def test_flipped_and_truncated_files_are_read_or_rejected() -> None:
    """Damaged files raise no other error than Corrupt."""
    data, rng = write_sample(), random.Random(5)
    for _ in range(3_000):
        damaged_bytes = bytearray(data[: rng.choice((len(data), rng.randrange(len(data))))])
        for _ in range(rng.randrange(1, 4)):
            if damaged_bytes:
                damaged_bytes[rng.randrange(len(damaged_bytes))] ^= 1 << rng.randrange(8)
        try:
            read_footer(bytes(damaged_bytes), len(damaged_bytes), "a")
        except Corrupt:
            continue
