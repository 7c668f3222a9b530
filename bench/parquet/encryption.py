"""How much faster is a merge of encrypted Parquet files, with new keys, than one that decodes them?

The files are those of `copies.py`, encrypted by pyarrow with a key for each column. The peer is pyarrow, which
decrypts, decodes, encodes and encrypts, on one core like Seamark; the goal is 5 times its speed. There are two lower
bounds. In the first, the cryptography library, which calls OpenSSL, decrypts and encrypts as many bytes in memory, page
by page. The second also writes the bytes to a file and makes it durable, as Seamark does. Times are CPU seconds of the
process. All files are in the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.parquet.copies import FILES, QUICK_FILES, QUICK_ROWS, ROWS, measure_cpu_s, write_data_file
from bench.report import OURS, Report, Row
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.assembly import FileAssembler, Pick
from seamark.connector.parquet.copy.sinks import open_sink
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import ParquetKeys, find_scheme
from seamark.connector.parquet.encryption.kms import MasterKeyFile
from seamark.connector.write.data_files import build_writer_options

COLUMNS = ("id", "city", "price", "payload")
_MASTERS = MasterKeyFile({name: os.urandom(16) for name in ("footer", *COLUMNS)})
_KEYS = ParquetKeys(_MASTERS)
_PAGE_BYTES = 128 << 10


class _Client(pe.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return _MASTERS.wrap_key(key_bytes, master_key_identifier)

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return _MASTERS.unwrap_key(wrapped_key, master_key_identifier)


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report(
        "parquet_encryption",
        "What does it save to merge encrypted files without decoding them?",
        peer="pyarrow, decoding and encoding",
    )
    count, rows = (QUICK_FILES, QUICK_ROWS) if quick else (FILES, ROWS)
    for algorithm in ("AES_GCM_V1", "AES_GCM_CTR_V1"):
        paths = [
            write_data_file(folder / f"{algorithm}-{number}.parquet", number, rows, _build_properties(algorithm))
            for number in range(count)
        ]
        total = sum(path.stat().st_size for path in paths)
        page = os.urandom(_PAGE_BYTES)
        values = measure_cpu_s(
            {
                OURS: lambda out, paths=paths: _copy_rows(paths, out),
                "pyarrow": lambda out, paths=paths, name=algorithm: _decode_and_rewrite(paths, out, name),
                "AES": lambda out, total=total, page=page: _encrypt_in_memory(total, page),
                "AES and writing": lambda out, total=total, page=page: _encrypt_to_file(total, page, out),
            },
            folder / "out.parquet",
            1 if quick else 3,
        )
        speeds = {name: total / 1e6 / seconds for name, seconds in values.items()}
        case = f"merge, {algorithm}"
        report.rows.append(Row(case, "speed of a core", "MB/s", speeds, lower_is_better=False, peer="pyarrow"))
        for bound in ("AES", "AES and writing"):
            row = Row(f"{case}, and {bound}", "speed of a core", "MB/s", speeds, lower_is_better=False, peer=bound)
            report.rows.append(row)
    report.notes.append(f"{count} files, {total / 1e6:,.0f} MB together, four column keys, new keys in the output.")
    return report


def _build_properties(algorithm: str) -> Any:
    config = pe.EncryptionConfiguration(
        footer_key="footer",
        column_keys={name: [name] for name in COLUMNS},
        encryption_algorithm=algorithm,
        cache_lifetime=timedelta(minutes=5),
    )
    factory = pe.CryptoFactory(lambda _: _Client())
    return factory.file_encryption_properties(pe.KmsConnectionConfig(), config)


def _copy_rows(paths: Sequence[Path], out: Path) -> None:
    with ExitStack() as stack:
        sources = [stack.enter_context(SourceFile(str(path), Storage(), keys=_KEYS)) for path in paths]
        first = sources[0]
        assert first.encryption is not None
        columns = range(len(first.leaves))
        scheme = find_scheme(first.encryption, [leaf.path for leaf in first.leaves], columns)
        assembler = FileAssembler(open_sink(str(out), Storage()), first.footer, _KEYS.create_encryption(scheme))
        for source in sources:
            for number in range(len(source.footer.groups)):
                assembler.add([Pick(source, number, columns, columns)])
        assembler.close()


def _decode_and_rewrite(paths: Sequence[Path], out: Path, algorithm: str) -> None:
    decryption = _KEYS.make_decryption_properties()
    schema = pq.read_schema(paths[0], decryption_properties=decryption)
    with pq.ParquetWriter(
        out, schema, encryption_properties=_build_properties(algorithm), **build_writer_options({})
    ) as writer:
        for path in paths:
            with pq.ParquetFile(path, decryption_properties=decryption) as file:
                for number in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(number, use_threads=False))


def _encrypt_in_memory(total: int, page: bytes) -> None:
    """Decrypt and encrypt `page` until `total` bytes are processed."""
    aes, nonce = AESGCM(os.urandom(16)), os.urandom(12)
    sealed_page = aes.encrypt(nonce, page, b"")
    for _ in range(total // len(page)):
        aes.decrypt(nonce, sealed_page, b"")
        aes.encrypt(nonce, page, b"")


def _encrypt_to_file(total: int, page: bytes, out: Path) -> None:
    """Decrypt and encrypt `page` until `total` bytes are processed, and write them to a durable file."""
    aes, nonce = AESGCM(os.urandom(16)), os.urandom(12)
    sealed_page = aes.encrypt(nonce, page, b"")
    with out.open("wb", buffering=0) as sink:
        for _ in range(total // len(page)):
            aes.decrypt(nonce, sealed_page, b"")
            sink.write(aes.encrypt(nonce, page, b""))
        os.fsync(sink.fileno())
