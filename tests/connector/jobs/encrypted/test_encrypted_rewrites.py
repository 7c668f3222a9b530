"""Tests that clustering, upserts, deletes and indexes keep the rows of encrypted files, and their protection."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.index.builds import GroupLimits, InProcessWorkers, build
from seamark.connector.jobs import clustering
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.jobs import run_clustering
from seamark.connector.parquet.encryption.keys import KEY_FILE, KMS_CLASS
from seamark.connector.read.tables import open_table
from seamark.connector.write.appends import append
from seamark.connector.write.target import WriteTarget
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.snapshot import MAIN
from tests.connector.jobs.encrypted.test_encrypted_merges import (
    ENCRYPTED_IDS,
    ENCRYPTED_VALUES,
    encrypt,
    list_paths,
    read_protections,
    read_rows_by_id,
)
from tests.connector.jobs.test_file_merges import ARROW, BY_PART, PROPERTIES, SCHEMA, build_rows, create_table
from tests.connector.lake import open_catalog
from tests.connector.parquet import encrypted
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed

PROTECTION_OF_VALUES = {("payload", "k1"), ("price", "k2"), ("place.city", "k2")}
"""The encrypted columns of ENCRYPTED_VALUES, with their master keys."""
CONFIGURATIONS_WITH_PLAIN_PART = [None, ENCRYPTED_VALUES, ENCRYPTED_IDS]
"""The configurations that do not encrypt the column of the partition spec."""


def append_by_configuration(
    client: IndexClient, rng: random.Random, configurations: list[Any], rows_per_commit: int
) -> dict[int, Any]:
    """Append rows in one commit for each configuration, and return the protection of each row by id.

    The configuration None leaves the files of its commit unencrypted.
    """
    protections_by_id: dict[int, Any] = {}
    seen_paths: set[str] = set()
    for number, configuration in enumerate(configurations):
        ids = range(number * rows_per_commit, number * rows_per_commit + rows_per_commit)
        append(client, "db.t", build_rows(rng, ids))
        new_paths = [path for path in list_paths(client) if path not in seen_paths]
        seen_paths.update(new_paths)
        for path in new_paths if configuration is not None else []:
            encrypt(path, configuration)
        protections_by_id |= dict.fromkeys(ids, read_protections(new_paths[0]))
    return protections_by_id


def read_row_protections(client: IndexClient) -> dict[int, Any]:
    protections_by_id = {}
    for path in list_paths(client):
        with pq.ParquetFile(path, decryption_properties=encrypted.build_decryption()) as file:
            ids = file.read(["id"])["id"].to_pylist()
        protected_columns = {pair for pair in read_protections(path) if not pair[0].startswith("_")}
        protections_by_id |= dict.fromkeys(ids, protected_columns)
    return protections_by_id


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_clustered_rows_stay_in_files_with_the_same_protection(
    client: IndexClient, server: ServerThread, kms: None, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The test also checks that temporary files contain no plain values."""
    spilled_bytes: list[bytes] = []
    read_ranges = clustering._Spill.read_ranges

    def record_and_read(spill: Any) -> Iterator[Any]:
        spilled_bytes.extend(path.read_bytes() for path in spill._folder.iterdir())
        return read_ranges(spill)

    monkeypatch.setattr(clustering._Spill, "read_ranges", record_and_read)
    monkeypatch.setattr(clustering, "RANGE_ROWS", 300)
    rng = random.Random(first_seed() + version)
    properties = {"format-version": str(version), **PROPERTIES, "seamark.clustering.columns": "fixed, part"}
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.t", SCHEMA, partition_spec=BY_PART, properties=properties)
    configurations = [*CONFIGURATIONS_WITH_PLAIN_PART, *CONFIGURATIONS_WITH_PLAIN_PART]
    rng.shuffle(configurations)
    protections_by_id = append_by_configuration(client, rng, configurations, 700)
    model = read_rows_by_id(client, lineage=version == 3)
    report = cluster_incrementally(client, "db.t")
    assert (report.errors, report.rows) == ([], len(model))
    assert read_rows_by_id(client, lineage=version == 3) == model
    assert read_row_protections(client) == protections_by_id
    assert spilled_bytes
    texts = [row["payload"].encode() for row in model.values() if row["payload"]][::50]  # A sample.
    assert not any(text in data for text in texts for data in spilled_bytes)
    # The job of the table service has the keys in its process. It recognises the layers, which are the groups of files
    # that earlier runs have clustered.
    protections_by_id |= append_unclustered_files(client, rng, protections_by_id)
    run_clustering(client, ("db", "t"))
    assert read_row_protections(client) == protections_by_id
    monkeypatch.delenv(KMS_CLASS)
    paths_before = list_paths(client)
    second_report = cluster_incrementally(client, "db.t", full=True)
    assert second_report.commits == 0
    assert list_paths(client) == paths_before


def append_unclustered_files(
    client: IndexClient, rng: random.Random, protections_by_id: dict[int, Any]
) -> dict[int, Any]:
    """Append six files that are encrypted like the clustered ones, so that the clustering job has work.

    Return the columns and keys of each row: (column, key) by the id of the row.
    """
    first_id, known_paths, added_protections = len(protections_by_id), set(list_paths(client)), dict[int, Any]()
    for number in range(6):
        ids = range(first_id + number * 50, first_id + number * 50 + 50)
        append(client, "db.t", build_rows(rng, ids))
        added_protections |= dict.fromkeys(ids, PROTECTION_OF_VALUES)
    for path in set(list_paths(client)) - known_paths:
        encrypt(path, ENCRYPTED_VALUES)
    return added_protections


def test_encrypted_temporary_files_return_the_rows_that_were_added(tmp_path: Path) -> None:
    """Temporary files contain the text of the rows unless they are encrypted (sealed)."""
    batch = pa.record_batch({"text": [f"plain text {number}" for number in range(5000)]})
    for is_encrypted in (False, True):
        folder = tmp_path / str(is_encrypted)
        folder.mkdir()
        keys = np.arange(5000).astype(">u8").view("S8")
        range_numbers = np.arange(5000) % 3
        with clustering._Spill(folder, 3, sealed=is_encrypted) as spill:
            spill.add(batch, np.arange(5000), keys, range_numbers)
            spill.add(batch, np.arange(5000), keys, range_numbers)
        data = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (b"plain text" in data) is not is_encrypted
        parts = [part for part, _, _ in spill.read_ranges()]
        assert [part.num_rows for part in parts] == [3334, 3334, 3332]  # 5,000 rows in three ranges, twice.
        assert sorted(text for part in parts for text in part.column(0).to_pylist()) == sorted(
            [*batch.column(0).to_pylist()] * 2
        )


@pytest.mark.slow
def test_long_values_in_encrypted_files_are_split_into_short_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted temporary files consist of short blocks.

    A cipher processes less than 2 GiB at once, and each read within a block copies the rest of the decrypted block.
    """
    monkeypatch.setattr(clustering, "_SEALED_BYTES", 1000)
    text = random.Random(first_seed()).randbytes(50_000).hex()
    batch = pa.record_batch({"text": [text, text[::-1]]})
    keys = np.arange(2).astype(">u8").view("S8")
    with clustering._Spill(tmp_path, 2, sealed=True) as spill:
        spill.add(batch, np.arange(2), keys, np.arange(2))
    for path in tmp_path.iterdir():
        data, offset, block_count = path.read_bytes(), 0, 0
        # Each block has its size in 4 bytes before it, and a tag of 16 bytes at its end.
        while offset < len(data):
            size = int.from_bytes(data[offset : offset + 4], "little")
            assert size <= 1000 + 16
            offset, block_count = offset + 4 + size, block_count + 1
        assert (offset, block_count > 50) == (len(data), True)
    assert [part.column(0).to_pylist() for part, _, _ in spill.read_ranges()] == [[text], [text[::-1]]]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_changed_rows_are_in_files_with_the_same_protection(
    client: IndexClient, server: ServerThread, version: int, seed: int
) -> None:
    rng = random.Random(first_seed() + 10 * seed + version)
    create_table(server, version)
    append_by_configuration(client, rng, [ENCRYPTED_VALUES] * 3, 60)
    keys, model = encrypted.build_keys(), read_rows_by_id(client)
    id_end = len(model)
    for step in range(8):
        mode = rng.choice(MODES)
        ids = rng.sample(range(id_end + 20), rng.randint(1, 40))
        if step % 4 == 1:
            delete(client, "db.t", keys=pa.table({"id": ids}), mode=mode, file_keys=keys)
            model = {id_: row for id_, row in model.items() if id_ not in ids}
        elif step % 4 == 3:
            first_digit = rng.choice("0123456789abcdef")
            # Payloads are hexadecimal numbers, so "g" is greater than each of their digits.
            where = f"payload >= '{first_digit}' AND payload < '{first_digit}g'"
            delete(client, "db.t", where=where, mode=mode, file_keys=keys)
            model = {id_: row for id_, row in model.items() if (row["payload"] or "")[:1] != first_digit}
        else:
            input_rows = [row for id_ in ids for row in build_rows(rng, range(id_, id_ + 1)).to_pylist()]
            table = pa.Table.from_pylist(input_rows, schema=ARROW)
            upsert(client, "db.t", table, keys=["id"], mode=mode, file_keys=keys)
            model |= {row["id"]: row for row in input_rows}
        id_end = max(id_end, *model) + 1
        assert read_rows_by_id(client) == model, (step, mode)
        assert {frozenset(protection) for protection in read_row_protections(client).values()} <= {
            frozenset(PROTECTION_OF_VALUES)
        }
    new_prices = pa.table({"id": list(model)[:5], "price": [0.5] * 5})
    upsert(client, "db.t", new_prices, keys=["id"], columns=["price"], file_keys=keys)
    for id_ in list(model)[:5]:
        model[id_]["price"] = 0.5
    assert read_rows_by_id(client) == model
    assert {frozenset(protection) for protection in read_row_protections(client).values()} <= {
        frozenset(PROTECTION_OF_VALUES)
    }


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_change_of_rows_from_differently_encrypted_files_is_refused(
    client: IndexClient, server: ServerThread, mode: str
) -> None:
    """A change of rows from files with one kind of encryption is accepted, with or without plain files."""
    create_table(server, 2)
    rng = random.Random(first_seed())
    protections_by_id = append_by_configuration(client, rng, [None, ENCRYPTED_IDS, ENCRYPTED_VALUES], 50)
    # Plain files have the ids below 50, files with encrypted ids those below 100, and the last files the others.
    keys, rows_before = encrypted.build_keys(), read_rows_by_id(client)
    paths_before = sorted(list_paths(client))

    def change_rows(*ids: int, file_keys: Any = keys) -> None:
        new_rows = [{**rows_before[id_], "payload": "new"} for id_ in ids]
        table = pa.Table.from_pylist(new_rows, schema=ARROW)
        upsert(client, "db.t", table, keys=["id"], mode=mode, file_keys=file_keys)

    with pytest.raises(Unwritable, match="encrypted in different ways"):
        change_rows(60, 110)
    with pytest.raises(Unreadable, match="encrypted"):
        change_rows(60, file_keys=None)
    with pytest.raises(ValueError, match="not encrypted"):
        upsert(client, "db.t", build_rows(rng, range(60, 61)), keys=["id"], strategy="equality", file_keys=keys)
    assert sorted(list_paths(client)) == paths_before
    change_rows(60, 61)
    change_rows(2, 110)  # One row is in a plain file, the other in an encrypted one.
    for id_ in (2, 60, 61, 110):
        rows_before[id_]["payload"] = "new"
    protections_by_id[2] = protections_by_id[110]
    assert read_rows_by_id(client) == rows_before
    live_protections = (
        read_row_protections(client) if mode == "copy-on-write" else {2: read_protections(find_changed_file(client, 2))}
    )
    assert live_protections == {id_: protections_by_id[id_] for id_ in live_protections}
    # A table that is sent to another process has no keys.
    opened_table = replace(open_table(client, "db.t", At(ref=MAIN)), keys=keys)
    assert pickle.loads(pickle.dumps(opened_table)) == replace(opened_table, keys=None)


def find_changed_file(client: IndexClient, number: int) -> str:
    """Return the path of the data file that contains the changed row `number`.

    The old file may still contain the old row, with a delete file for it.
    """
    for path in list_paths(client):
        with pq.ParquetFile(path, decryption_properties=encrypted.build_decryption()) as file:
            table = file.read(["id", "payload"])
        if (number, "new") in zip(table["id"].to_pylist(), table["payload"].to_pylist(), strict=True):
            return path
    raise AssertionError(number)


def test_indexes_contain_plain_columns_of_encrypted_files(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both jobs and writers build indexes.

    A build creates one client of the key service for all its files and groups. A task for another machine has no
    client.
    """
    created_clients: list[encrypted.PyArrowKms] = []

    def create_client() -> encrypted.PyArrowKms:
        created_clients.append(encrypted.PyArrowKms())
        return created_clients[-1]

    monkeypatch.setattr(encrypted, "create_client", create_client, raising=False)
    monkeypatch.setenv(KMS_CLASS, "tests.connector.parquet.encrypted:create_client")
    monkeypatch.setenv(KEY_FILE, encrypted.write_key_file(tmp_path, "db"))
    create_table(server, 2)
    rng = random.Random(first_seed())
    append_by_configuration(client, rng, [ENCRYPTED_VALUES, {**ENCRYPTED_VALUES, "plaintext_footer": False}], 80)
    client.put_index("db.t", "ids", columns=["id"], kind="bitmap")
    client.put_index("db.t", "payloads", columns=["payload"], kind="bitmap")
    with closing(InProcessWorkers()) as workers:
        report = build(client, "db.t", "ids", workers, limits=GroupLimits(files=1))
        assert len(created_clients) == 1
        refusal = build(client, "db.t", "payloads", workers)
    assert (report.files_not_indexed, report.progress.files_done, report.progress.index_files) == (0, 4, 4)
    assert (refusal.files_not_indexed, refusal.progress.files_done) == (4, 0)
    assert all("the column payload is encrypted" in reason for _, reason in refusal.skipped)
    upsert(client, "db.t", build_rows(rng, range(10, 20)), keys=["id"], file_keys=encrypted.build_keys())
    indexes_by_name = {index.name: index for index in client.indexes("db.t")}
    target = WriteTarget.from_engine_table(client.load_table("db.t"), "db.t")
    del created_clients[:]
    # All indexes of a target share one client of the key service. An index that is sent to another process makes its
    # own.
    keys = target.indexes[0].file_keys
    assert keys() is keys() is target.indexes[1].file_keys() is not None
    sent_index = pickle.loads(pickle.dumps(target)).indexes[0]
    assert len(created_clients) == 1
    assert sent_index == target.indexes[0]
    assert sent_index.file_keys() is not keys()
    assert indexes_by_name["ids"].lag_files == 0
    assert indexes_by_name["payloads"].lag_files > 0
