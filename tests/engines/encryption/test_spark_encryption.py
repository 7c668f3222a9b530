"""Tests that Spark reads the merged form of encrypted files.

Spark has written the files, with the key tools of parquet-java.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys, find_scheme
from seamark.connector.parquet.encryption.kms import MasterKeyFile
from tests.connector.parquet.copied import merge_files
from tests.engines.encryption.spark_files import CASES, MASTER_KEY_BYTES, ROWS
from tests.services.java import find_java_17

FOLDER = Path(__file__).parent
KEYS = ParquetKeys(MasterKeyFile({name: bytes([number]) * 16 for name, number in MASTER_KEY_BYTES.items()}))
SCHEMA = pa.schema(
    [
        pa.field("long", pa.int64(), metadata={"PARQUET:field_id": "1"}),
        pa.field("text", pa.string(), metadata={"PARQUET:field_id": "101"}),
        pa.field("tags", pa.list_(pa.field("element", pa.string())), metadata={"PARQUET:field_id": "201"}),
    ]
)
SCHEMES = ("uniform", "columns", "signed", "plain")
EXPECTED = [2 * ROWS, 2 * sum(range(ROWS)), 2 * 97, 2 * sum(n % 3 for n in range(ROWS)), "998", 31, 6, 8]
"""The totals over two files, in the order in which `spark_files` prints them.

They are the rows, the sum of `long`, the distinct texts, the tags, the greatest second tag, the rows with one text, and
the tags and texts of four rows.
"""


def _read_scheme(path: Path) -> EncryptionScheme | None:
    with SourceFile(str(path), Storage(), keys=KEYS) as source:
        if source.encryption is None:
            return None
        assert source.read_bloom(source.footer.groups[0], 1) is not None
        assert source.read_column_index(source.footer.groups[0], 0) is not None
        return find_scheme(source.encryption, [leaf.path for leaf in source.leaves], range(3))


@pytest.mark.slow
def test_spark_reads_the_merged_form_of_its_encrypted_files(tmp_path: Path) -> None:
    find_java_17()
    jars = Path(pyspark.__file__).parent / "jars"
    classes = tmp_path / "classes"
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", str(classes), str(FOLDER / "LocalKms.java")], check=True)
    command = [sys.executable, "-m", "tests.engines.encryption.spark_files", str(tmp_path), str(classes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), env=dict(os.environ)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        files = []
        for name in CASES:
            parts = [next((tmp_path / f"{name}-{file_number}").glob("*.parquet")) for file_number in range(2)]
            scheme = _read_scheme(parts[0])
            assert (scheme is None) == (name == "plain")
            if scheme is None:  # Plain files are merged into an encrypted file too.
                scheme = _read_scheme(next((tmp_path / "columns-0").glob("*.parquet")))
            else:
                decrypted_path = tmp_path / f"ours-{name}-decrypted.parquet"
                merge_files(parts, decrypted_path, SCHEMA, keys=KEYS)
                files.append(decrypted_path)
            assert scheme is not None
            merged_path = tmp_path / f"ours-{name}.parquet"
            merge_files(parts, merged_path, SCHEMA, keys=KEYS, encryption=KEYS.create_encryption(scheme))
            files.append(merged_path)
            if name != "version2":  # Arrow cannot read these pages of parquet-java.
                with pq.ParquetFile(merged_path, decryption_properties=KEYS.make_decryption_properties()) as file:
                    assert file.read().num_rows == 2 * ROWS
        # The merged file replaces Spark's file, so Spark's checksum of the old bytes must be deleted.
        for name in SCHEMES:
            old_file = next((tmp_path / f"{name}-0").glob("*.parquet"))
            folder = tmp_path / f"replaced-{name}"
            shutil.copytree(old_file.parent, folder)
            (folder / old_file.name).unlink()
            shutil.copyfile(tmp_path / f"ours-{name}.parquet", folder / old_file.name)
            assert (folder / f".{old_file.name}.crc").exists()
        process.stdin.write("merged\n")
        process.stdin.flush()
        answers = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    read_answers, replaced_answers = (
        [answer for answer in answers if answer[0].startswith(kind)] for kind in ("ours", "replaced")
    )
    assert sorted(answer[0] for answer in read_answers) == sorted(path.stem for path in files)
    for name, *values in read_answers:
        assert values == EXPECTED, name
    # The sum of `long` can be read only after the checksum is deleted.
    assert replaced_answers == [[f"replaced-{name}", "ChecksumException", EXPECTED[1]] for name in sorted(SCHEMES)]
