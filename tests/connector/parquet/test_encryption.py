"""Copies of encrypted files against reading, concatenating and dropping columns with pyarrow.

The tests also change bytes, use other keys and exceed limits.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy import reencryption
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption import modules
from seamark.connector.parquet.encryption.footers import FileEncryption, FileKey
from seamark.connector.parquet.encryption.keys import (
    EncryptionScheme,
    ParquetKeys,
    find_scheme,
    read_environment_keys,
)
from seamark.connector.parquet.encryption.kms import KeyUnavailable, MasterKeyFile
from seamark.connector.parquet.encryption.modules import Module, ModuleCipher
from seamark.formats.iceberg.files import _footer
from seamark.formats.iceberg.files.parquet import Unreadable
from tests.connector.parquet import encrypted
from tests.connector.parquet.copied import add_field_ids, merge_files
from tests.connector.parquet.test_copies import KINDS, RangeReadStorage, draw_rows, list_leaf_columns, write_randomly
from tests.seeds import first_seed, mark_fast

KEY = b"0123456789abcdef"
SCHEMA = add_field_ids(pa.schema([("long", pa.int64()), ("text", pa.string())]))


class SuppliedKeys:
    """The keys that a caller supplies.

    `columns` has keys by column path. All other columns must be encrypted with the footer's key. The repr contains no
    key.
    """

    def __init__(
        self, footer: bytes, columns: Mapping[str, bytes] | None = None, *, aad_prefix: bytes | None = None
    ) -> None:
        self._footer, self._columns, self.aad_prefix = footer, dict(columns or {}), aad_prefix

    def find_key(self, metadata: bytes | None, column: str | None) -> bytes:
        if column is None:
            return self._footer
        if column not in self._columns:
            raise KeyUnavailable(f"no key was given for the column {column}")
        return self._columns[column]


def draw_configuration(rng: random.Random, schema: pa.Schema) -> pe.EncryptionConfiguration:
    paths = [column.path for column in list_leaf_columns(schema)]
    columns: dict[str, list[str]] = {}
    if rng.random() < 0.7:
        for path in rng.sample(paths, rng.randint(1, len(paths))):
            columns.setdefault(rng.choice(["k1", "k2"]), []).append(path)
    return encrypted.build_configuration(
        columns,
        encryption_algorithm=rng.choice(["AES_GCM_V1", "AES_GCM_CTR_V1"]),
        plaintext_footer=rng.random() < 0.5,
        double_wrapping=rng.random() < 0.5,
        data_key_length_bits=rng.choice([128, 192, 256]),
    )


def read_scheme(path: Path, target: pa.Schema) -> EncryptionScheme:
    with SourceFile(str(path), Storage(), keys=encrypted.build_keys()) as source:
        assert source.encryption is not None
        paths = [leaf.path for leaf in source.leaves]
        columns = [paths.index(column.path) for column in list_leaf_columns(target)]
        return find_scheme(source.encryption, paths, columns)


@pytest.mark.parametrize("number", mark_fast(range(12), 2))
def test_merged_file_has_the_rows_of_its_encrypted_files(tmp_path: Path, number: int) -> None:
    """The new file is encrypted with new keys or different master keys, or is not encrypted.

    Some of the old files are not encrypted, and some columns are left out.
    """
    seed = first_seed() + number
    rng = random.Random(seed)
    names = rng.sample(list(KINDS), rng.randint(1, 6))
    schema = add_field_ids(pa.schema([pa.field(name, KINDS[name][0], rng.random() < 0.8) for name in names]))
    selected_names = rng.sample(names, rng.randint(1, len(names)))
    target = pa.schema([schema.field(name) for name in selected_names])
    parts, paths, schemes = [], [], []
    for part in range(rng.randint(1, 4)):
        parts.append(draw_rows(rng, schema, rng.choice([1, 50, 500])))
        paths.append(tmp_path / f"{part}.parquet")
        is_encrypted = part == 0 or rng.random() < 0.7
        columns = rng.sample(names, len(names))
        properties = encrypted.build_encryption(draw_configuration(rng, schema)) if is_encrypted else None
        write_randomly(rng, paths[-1], parts[-1].select(columns), properties)
        if is_encrypted:
            schemes.append(read_scheme(paths[-1], target))
    out = tmp_path / "out.parquet"
    scheme = rng.choice([*schemes, None])
    keys = encrypted.build_keys({"kf": "other"} if rng.random() < 0.5 else None)
    merge_files(paths, out, target, keys=keys, encryption=None if scheme is None else keys.create_encryption(scheme))
    expected = pa.concat_tables(parts).select(selected_names)
    table = pq.read_table(out) if scheme is None else encrypted.read_decrypted(out)
    assert table.cast(expected.schema).equals(expected), seed
    with SourceFile(str(out), Storage(), keys=keys) as merged_file:
        source_files = [SourceFile(str(path), Storage(), keys=keys) for path in paths]
        try:
            _check_indexes(merged_file, [(source, group) for source in source_files for group in source.footer.groups])
        finally:
            for source in source_files:
                source.close()


def _check_indexes(merged_file: SourceFile, groups: list[tuple[SourceFile, Any]]) -> None:
    """Check the indexes of a merged file.

    Column indexes and Bloom filters equal those of the old files, and offset indexes have the positions of the new
    pages.
    """
    for copied_group, (source, group) in zip(merged_file.footer.groups, groups, strict=True):
        columns = [[leaf.names for leaf in source.leaves].index(leaf.names) for leaf in merged_file.leaves]
        for column, old_column in enumerate(columns):
            assert merged_file.read_column_index(copied_group, column) == source.read_column_index(group, old_column)
            assert merged_file.read_bloom(copied_group, column) == source.read_bloom(group, old_column)
            index = merged_file.read_offset_index(copied_group, column)
            assert (index is None) == (source.read_offset_index(group, old_column) is None)
            if index is None:
                continue

            class _CountingOutput:
                position = 0

                def write(self, data: bytes) -> None:
                    self.position += len(data)

            # The decryption of the column returns the positions of its pages. The offset index must have the same
            # positions, so it does not change if each page is moved to its own position.
            pages = merged_file.reencrypt(copied_group, column, new=None, sink=_CountingOutput()).pages  # type: ignore[arg-type]
            ends = [begin for begin, _, _ in pages[1:]] + [int(copied_group.ends[column])]
            equal_ranges = [(begin, begin, end - begin) for (begin, _, _), end in zip(pages, ends, strict=True)]
            table = reencryption.MovedPages(equal_ranges).to_array()
            assert _footer.move_pages(index, table) == index


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("ctr_pages", [False, True])
def test_file_is_encrypted_with_the_supplied_keys_of_footer_and_columns(
    tmp_path: Path, is_signed: bool, ctr_pages: bool
) -> None:
    """First, all columns have the footer's key, and pyarrow reads the file. Then one column has its own key.

    The second merge reads the file by range requests, as from an object store (`RangeReadStorage`).
    """
    rows = pa.table({"long": range(5000), "text": [f"t{n % 9}" for n in range(5000)]}, schema=SCHEMA)
    first_path, second_path, out = tmp_path / "1.parquet", tmp_path / "2.parquet", tmp_path / "out.parquet"
    algorithm = "AES_GCM_CTR_V1" if ctr_pages else "AES_GCM_V1"
    properties_with_prefix = pe.create_encryption_properties(
        KEY, aad_prefix=b"table", store_aad_prefix=False, encryption_algorithm=algorithm, plaintext_footer=is_signed
    )
    options: dict[str, Any] = {"write_page_index": True, "write_page_checksum": True, "data_page_size": 500}
    pq.write_table(rows, first_path, encryption_properties=properties_with_prefix, **options)
    with pytest.raises(Unreadable, match="the AAD prefix is not stored in the file"):
        merge_files([first_path], out, SCHEMA, keys=SuppliedKeys(KEY))
    footer = FileKey(os.urandom(32), None)
    merge_files(
        [first_path, first_path],
        second_path,
        SCHEMA,
        RangeReadStorage(),
        keys=SuppliedKeys(KEY, aad_prefix=b"table"),
        encryption=FileEncryption(
            footer, [footer, FileKey(KEY, b"m")], signed=is_signed, ctr_pages=ctr_pages, aad_prefix=b"x"
        ),
    )
    caller_keys = SuppliedKeys(footer.key, {"text": KEY})
    same_key = FileKey(KEY, None)
    merge_files(
        [second_path],
        out,
        SCHEMA,
        keys=caller_keys,
        encryption=FileEncryption(same_key, [same_key, same_key], signed=is_signed),
    )
    table = pq.read_table(out, decryption_properties=pe.create_decryption_properties(KEY))
    assert table.equals(pa.concat_tables([rows, rows]))
    with pytest.raises(Unreadable, match="no key was given for the column text"):
        merge_files([second_path], tmp_path / "none.parquet", SCHEMA, keys=SuppliedKeys(footer.key))


def test_duckdb_reads_encrypted_files_of_seamark_and_seamark_those_of_duckdb(tmp_path: Path) -> None:
    source, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    con = duckdb.connect()
    con.sql("SET force_mbedtls_unsafe = 'true'")
    con.sql(f"PRAGMA add_parquet_key('k', '{KEY.decode()}')")
    con.sql(
        "COPY (SELECT range AS long, 'd' || range % 9 AS text FROM range(5000)) TO "
        f"'{source}' (FORMAT parquet, FIELD_IDS {{long: 1, text: 101}}, ENCRYPTION_CONFIG {{footer_key: 'k'}})"
    )
    key = FileKey(KEY, None)
    merge_files([source, source], out, SCHEMA, keys=SuppliedKeys(KEY), encryption=FileEncryption(key, [key, key]))
    text = f"SELECT count(*), sum(long), max(text) FROM read_parquet('{out}', encryption_config = {{footer_key: 'k'}})"
    assert con.sql(text).fetchall() == [(10_000, 24_995_000, "d8")]
    assert pq.read_table(out, decryption_properties=pe.create_decryption_properties(KEY)).num_rows == 10_000


def _write_encrypted_file(path: Path, rows: pa.Table, *, checksum: bool = True, **options: Any) -> None:
    config = encrypted.build_configuration({"k1": ["text"]}, double_wrapping=False, **options)
    pq.write_table(
        rows,
        path,
        encryption_properties=encrypted.build_encryption(config),
        row_group_size=200,
        data_page_size=400,
        compression="none",
        use_dictionary=["text"],
        write_page_index=True,
        write_page_checksum=checksum,
    )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("algorithm", ["AES_GCM_V1", "AES_GCM_CTR_V1"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_changed_byte_is_refused_or_changes_no_row(tmp_path: Path, algorithm: str, is_signed: bool) -> None:
    _check_changed_bytes(tmp_path, algorithm, is_signed=is_signed, module_bytes=1, footer_bytes=14)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["AES_GCM_V1", "AES_GCM_CTR_V1"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_changed_bytes_of_each_module_are_refused_or_change_no_row(
    tmp_path: Path, algorithm: str, is_signed: bool
) -> None:
    _check_changed_bytes(tmp_path, algorithm, is_signed=is_signed, module_bytes=12, footer_bytes=200)


def _choose_positions(rng: random.Random, data: bytes, module_bytes: int, footer_bytes: int) -> list[int]:
    """Return random positions in the encrypted file.

    Each encrypted module before the footer (page headers, pages, indexes) contains `module_bytes` positions, one of
    them in its length. The footer contains `footer_bytes` positions. There is also one position in the footer's length,
    and one in the magic at each end.
    """
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    positions = [rng.randrange(4), len(data) - 1 - rng.randrange(4)]
    positions += rng.sample(range(footer, len(data) - 8), footer_bytes) + rng.sample(
        range(len(data) - 8, len(data) - 4), 1
    )
    begin = 4  # The file begins with a magic of 4 bytes. A module begins with its length, which has 4 bytes.
    while begin < footer:
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "little")
        positions += [begin + rng.randrange(4), *rng.sample(range(begin + 4, end), module_bytes - 1)]
        begin = end
    assert begin == footer
    return positions


def _check_changed_bytes(
    folder: Path, algorithm: str, *, is_signed: bool, module_bytes: int, footer_bytes: int
) -> None:
    """Change single bytes of an encrypted file, and check that each change is refused or changes no row.

    Pages of AES-CTR have no tag; their CRC detects the change.
    """
    rng = random.Random(first_seed())
    rows = pa.table({"long": range(500), "text": [f"secret {n % 9}" for n in range(500)]}, schema=SCHEMA)
    good_path, damaged_path, out = folder / "good.parquet", folder / "broken.parquet", folder / "out.parquet"
    config = encrypted.build_configuration(
        {"k1": ["text"], "k2": ["long"]}, encryption_algorithm=algorithm, plaintext_footer=is_signed
    )
    pq.write_table(
        rows,
        good_path,
        encryption_properties=encrypted.build_encryption(config),
        row_group_size=200,
        write_page_index=True,
        write_page_checksum=True,
    )
    data, keys = good_path.read_bytes(), encrypted.build_keys()
    encryption = read_scheme(good_path, SCHEMA)
    positions = _choose_positions(rng, data, module_bytes, footer_bytes)
    refused_count = 0
    for position in positions:
        changed_data = bytearray(data)
        changed_data[position] ^= 1 << rng.randrange(8)
        damaged_path.write_bytes(changed_data)
        try:
            merge_files([damaged_path], out, SCHEMA, keys=keys, encryption=keys.create_encryption(encryption))
        except (Unreadable, ValueError):
            refused_count += 1
            assert not out.exists(), position
        else:
            assert encrypted.read_decrypted(out).equals(rows), position
            out.unlink()
        assert damaged_path.read_bytes() == changed_data
    assert refused_count > 0.95 * len(positions)  # A few changed bytes do not affect the rows.


def test_swapped_modules_are_refused(tmp_path: Path) -> None:
    """The pages of the two row groups have the same keys and sizes, but their positions are authenticated."""
    rows = pa.table({"long": [*range(200), *range(200)], "text": ["same"] * 400}, schema=SCHEMA)
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    # A checksum of encrypted bytes would be a varint of 3 to 5 bytes, so the modules' sizes would differ.
    _write_encrypted_file(path, rows, checksum=False)
    with SourceFile(str(path), Storage(), keys=encrypted.build_keys()) as source:
        first_range, second_range = ((int(group.begins[1]), int(group.ends[1])) for group in source.footer.groups)
    data = path.read_bytes()
    assert first_range[1] - first_range[0] == second_range[1] - second_range[0]
    swapped_data = (
        data[: first_range[0]]
        + data[slice(*second_range)]
        + data[first_range[1] : second_range[0]]
        + data[slice(*first_range)]
    )
    path.write_bytes(swapped_data + data[second_range[1] :])
    with pytest.raises(Unreadable, match="cannot be decrypted: the key is wrong, or the file was changed"):
        merge_files([path], out, SCHEMA, keys=encrypted.build_keys())
    assert not out.exists()


def test_module_lengths_are_checked_before_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"long": range(200), "text": ["t"] * 200}, schema=SCHEMA)
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    _write_encrypted_file(path, rows)
    with SourceFile(str(path), Storage(), keys=encrypted.build_keys()) as source:
        begin = int(source.footer.groups[0].begins[1])
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, begin, 0xFFFF_FFF0)
    (tmp_path / "long.parquet").write_bytes(data)
    with pytest.raises(Unreadable, match=r"the page header at .* has 4,294,967,284 bytes; its column chunk has"):
        merge_files([tmp_path / "long.parquet"], out, SCHEMA, keys=encrypted.build_keys())
    monkeypatch.setattr(reencryption, "PAGE_BYTES_MAX", 20)
    with pytest.raises(Unreadable, match="the limit is 20"):
        merge_files([path], out, SCHEMA, keys=encrypted.build_keys())
    assert not out.exists()


def test_chunk_with_more_pages_than_page_ordinals_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = add_field_ids(pa.schema([("long", pa.int64())]))
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    pages = {"use_dictionary": False, "data_page_size": 1, "max_rows_per_page": 1, "write_batch_size": 1}
    pq.write_table(pa.table({"long": range(101)}, schema=schema), path, **pages)
    key = FileKey(KEY, None)
    with pytest.raises(ValueError, match=r"the row group 32,768 or the column 0 exceeds 32,767"):
        ModuleCipher(KEY, b"", ctr_pages=False).create_chunk_cipher(32_768, 0)
    monkeypatch.setattr(modules, "ORDINAL_MAX", 99)
    with pytest.raises(Unreadable, match="a column chunk has more than 100 pages, the maximum for encryption"):
        merge_files([path], out, schema, encryption=FileEncryption(key, [key]))
    assert not out.exists()


def test_encrypted_file_contains_no_value_of_an_encrypted_column(tmp_path: Path) -> None:
    """The old file is not encrypted. Pages, statistics, indexes and Bloom filters of the new file contain no value."""
    rows = pa.table({"long": range(400), "text": [f"secret {n:05}" for n in range(400)]}, schema=SCHEMA)
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    blooms = {"text": {"ndv": 400, "fpp": 0.01}}
    pq.write_table(rows, path, compression="none", write_page_index=True, bloom_filter_options=blooms)
    assert b"secret 00000" in path.read_bytes()
    with SourceFile(str(path), Storage()) as source:
        bloom = source.read_bloom(source.footer.groups[0], 1)
    for is_signed in (False, True):
        footer, column = FileKey(KEY, metadata=None), FileKey(os.urandom(16), metadata=b"name")
        encryption = FileEncryption(footer, [None, column], signed=is_signed)
        merge_files([path], out, SCHEMA, encryption=encryption)
        data = out.read_bytes()
        assert b"secret" not in data
        assert bloom is not None
        assert bloom[1] not in data
        assert (b"text" in data) == is_signed
        caller_keys = SuppliedKeys(KEY, {"text": column.key})
        with SourceFile(str(out), Storage(), keys=caller_keys) as copied_file:
            assert copied_file.read_bloom(copied_file.footer.groups[0], 1) == bloom
        merge_files([out], tmp_path / "plain.parquet", SCHEMA, keys=caller_keys)
        assert pq.read_table(tmp_path / "plain.parquet").equals(rows)
        out.unlink()
        (tmp_path / "plain.parquet").unlink()


class _LeakingKms:
    """A key service whose errors contain its arguments and its keys."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        raise RuntimeError(f"{key_bytes!r} {KEY!r}")

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        raise RuntimeError(f"{wrapped_key!r} {KEY!r}")


def test_errors_and_reprs_contain_no_key(tmp_path: Path) -> None:
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    _write_encrypted_file(path, pa.table({"long": [1], "text": ["t"]}, schema=SCHEMA))
    encryption = read_scheme(path, SCHEMA)
    texts = []
    leaking_keys = ParquetKeys(_LeakingKms())
    with pytest.raises(
        Unreadable, match=r"the key is unknown: the key service failed to unwrap a key .*RuntimeError"
    ) as reading_error:
        merge_files([path], out, SCHEMA, keys=leaking_keys)
    texts += [str(reading_error.value), repr(reading_error.value)]
    with pytest.raises(KeyUnavailable) as writing_error:
        leaking_keys.create_encryption(encryption)
    texts += [
        str(writing_error.value),
        repr(writing_error.value),
        repr(writing_error.value.__cause__),
        repr(writing_error.value.__context__),
    ]
    with pytest.raises(Unreadable, match="this process has no key") as reading_error:
        merge_files([path], out, SCHEMA)
    with pytest.raises(Unreadable, match="the key is wrong") as reading_error:
        merge_files([path], out, SCHEMA, keys=SuppliedKeys(KEY, {"text": KEY}))
    texts += [str(reading_error.value)]
    key = FileKey(KEY, None)
    objects = [SuppliedKeys(KEY, {"a": KEY}), ParquetKeys(MasterKeyFile({"a": KEY})), MasterKeyFile({"a": KEY}), key]
    objects += [FileEncryption(key, [key]), ModuleCipher(KEY, b"", ctr_pages=True)]
    texts += [
        repr(item) for item in [*objects, encryption, ModuleCipher(KEY, b"", ctr_pages=True).create_chunk_cipher(0, 0)]
    ]
    for text in texts:
        for secret in (KEY.decode(), KEY.hex(), base64.b64encode(KEY).decode(), repr(KEY)):
            assert secret not in text, text
    assert not out.exists()


def test_keys_are_read_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    def build_environment(file: Any) -> dict[str, str]:
        path = tmp_path / "keys.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        return {"SEAMARK_PARQUET_KEY_FILE": str(path)}

    assert read_environment_keys({}) is None
    text = base64.b64encode(KEY).decode()
    keys = read_environment_keys(build_environment({"keys": {"kf": text, "k1": text}, "replaced": {"k1": "kf"}}))
    assert keys is not None
    path, out = tmp_path / "1.parquet", tmp_path / "out.parquet"
    _write_encrypted_file(path, pa.table({"long": [1], "text": ["t"]}, schema=SCHEMA))
    merge_files(
        [path], out, SCHEMA, keys=encrypted.build_keys(), encryption=keys.create_encryption(read_scheme(path, SCHEMA))
    )
    with SourceFile(str(out), Storage(), keys=keys) as source:
        assert source.encryption is not None
        assert [json.loads(metadata)["masterKeyID"] for metadata in source.encryption.keys.values()] == ["kf"]
    file = pq.ParquetFile(out, decryption_properties=keys.make_decryption_properties())
    assert file.read().to_pylist() == [{"long": 1, "text": "t"}]
    file.close()
    named_keys = read_environment_keys({"SEAMARK_PARQUET_KMS": "tests.connector.parquet.encrypted:PyArrowKms"})
    merge_files([path], out := tmp_path / "plain.parquet", SCHEMA, keys=named_keys)
    assert pq.read_table(out).num_rows == 1
    for file, message in (
        ({"keys": {"kf": "!!!"}}, "has a key that is not base64"),
        ({"keys": {"kf": "AAAA"}}, "the master key 'kf' has 3 bytes; AES keys have 16, 24 or 32"),
        ({"kf": text}, "is not a JSON object such as"),
        ("no JSON", "is not a JSON object such as"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(message)) as e:
            read_environment_keys(build_environment(file))
        assert text not in str(e.value)
    for name in ("no.such:Kms", "json:nothing", "json"):
        with pytest.raises(InvalidRequest, match="not module:name of a class"):
            read_environment_keys({"SEAMARK_PARQUET_KMS": name})
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_environment_keys({"SEAMARK_PARQUET_KEY_FILE": str(tmp_path / "none.json")})


def test_key_metadata_in_an_unknown_format_is_refused() -> None:
    keys = encrypted.build_keys()
    for metadata, message in (
        (None, "of 0 bytes was not written by parquet's key tools"),
        (b"kf", "was not written by parquet's key tools"),
        (b'{"x": ' + b"[" * 60_000, "was not written by parquet's key tools"),
        (b'{"keyMaterialType": "PKMT2"}', "has the type 'PKMT2'"),
        (b'{"keyMaterialType": "PKMT1", "internalStorage": false, "keyReference": "footerKey"}', "is not in the file"),
    ):
        with pytest.raises(KeyUnavailable, match=re.escape(message)):
            keys.find_key(metadata, None)


def test_module_is_decrypted_only_at_its_own_position() -> None:
    cipher = ModuleCipher(KEY, b"file", ctr_pages=False)
    sealed_module = memoryview(bytes(cipher.create_chunk_cipher(3, 4).encrypt(Module.DATA_PAGE, b"values", 5)))
    assert cipher.create_chunk_cipher(3, 4).decrypt(Module.DATA_PAGE, sealed_module, 5) == b"values"
    other_cipher = ModuleCipher(KEY, b"other", ctr_pages=False)
    for chunk, module, page in (
        (cipher.create_chunk_cipher(2, 4), Module.DATA_PAGE, 5),
        (cipher.create_chunk_cipher(3, 5), Module.DATA_PAGE, 5),
        (cipher.create_chunk_cipher(3, 4), Module.DATA_PAGE_HEADER, 5),
        (cipher.create_chunk_cipher(3, 4), Module.DATA_PAGE, 6),
        (cipher.create_chunk_cipher(3, 4), Module.COLUMN_INDEX, None),
        (other_cipher.create_chunk_cipher(3, 4), Module.DATA_PAGE, 5),
    ):
        with pytest.raises(ValueError, match="the key is wrong, or the file was changed"):
            chunk.decrypt(module, sealed_module, page)


def test_encrypted_structures_with_trailing_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """parquet-java encrypts the whole buffer of a structure, which may be longer than the structure.

    The test adds 37 bytes to each structure whose exact size is not stored elsewhere.
    """
    rows = pa.table({"long": range(500), "text": [f"t{n % 9}" for n in range(500)]}, schema=SCHEMA)
    path, padded_path, out = tmp_path / "1.parquet", tmp_path / "2.parquet", tmp_path / "out.parquet"
    pq.write_table(
        rows, path, write_page_index=True, data_page_size=200, bloom_filter_options={"text": {"ndv": 9, "fpp": 0.1}}
    )
    footer, text = FileKey(KEY, metadata=None), FileKey(os.urandom(16), metadata=b"text")
    encrypt, encrypt_footer = modules.ChunkCipher.encrypt, ModuleCipher.encrypt_footer

    def encrypt_with_padding(self: Any, module: Module, plain_bytes: bytes, page: int | None = None) -> bytes:
        has_exact_size = module in (Module.DATA_PAGE, Module.DICTIONARY_PAGE, Module.BLOOM_BITSET)
        return encrypt(self, module, plain_bytes if has_exact_size else bytes(plain_bytes) + bytes(37), page)

    with monkeypatch.context() as patch:
        patch.setattr(modules.ChunkCipher, "encrypt", encrypt_with_padding)
        patch.setattr(
            ModuleCipher, "encrypt_footer", lambda self, plain_bytes: encrypt_footer(self, plain_bytes + bytes(37))
        )
        merge_files([path], padded_path, SCHEMA, encryption=FileEncryption(footer, [footer, text]))
    merge_files([padded_path], out, SCHEMA, keys=SuppliedKeys(KEY, {"text": text.key}))
    assert pq.read_table(out).equals(rows)
    with SourceFile(str(out), Storage()) as source_file, SourceFile(str(path), Storage()) as input_source_file:
        _check_indexes(source_file, [(input_source_file, group) for group in input_source_file.footer.groups])
