"""Tests that plans which name many keys leave out the files between the keys.

The client accepts index answers of any length.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.row_answers import LookupAnswer
from seamark.connector.client.values import CURRENT
from seamark.connector.read.tables import ScanTask, open_table
from seamark.connector.write.appends import append, open_destination
from seamark.connector.write.row_locations import RANGES_MAX, BatchKeys, find_key_fields, locate
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.upserts import MERGE_ON_READ, delete
from tests.connector.write.test_upserts import BY_ID, build_rows, create_upsert_table

FILES, ROWS_PER_FILE = 120, 4


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("bytes_max", "files_read"), [(4 << 20, FILES // 2), (100, FILES)])
def test_plan_names_each_of_many_keys_if_the_keys_are_short_enough(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch, bytes_max: int, files_read: int
) -> None:
    monkeypatch.setattr("seamark.connector.write.row_locations.FEW_VALUES_MAX", 5)
    monkeypatch.setattr("seamark.connector.write.row_locations._VALUES_BYTES_MAX", bytes_max)
    create_upsert_table(client)
    destination = open_destination(client, "db.t")
    keys_of_files = [range(ROWS_PER_FILE * number, ROWS_PER_FILE * (number + 1)) for number in range(FILES)]
    written_files = [
        write_batches(destination.target, build_rows(*((key, "de", 1, "n") for key in keys_of_file)).to_batches())
        for keys_of_file in keys_of_files
    ]
    destination.commit(client, WrittenFiles.join(written_files))
    keys = [ROWS_PER_FILE * number + number % ROWS_PER_FILE for number in range(0, FILES, 2)]
    assert len(keys) > RANGES_MAX
    report = delete(client, "db.t", keys=pa.table({"id": keys}), mode=MERGE_ON_READ)
    assert report.deleted == len(keys)
    # For long keys, the plan has a filter of at most RANGES_MAX ranges. It leaves out the file between two ranges.
    assert files_read - RANGES_MAX <= report.files_read <= files_read


def test_lookup_answers_with_more_path_text_than_a_string_array_holds_are_accepted(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Arrow array of strings holds at most 2 GiB of text.

    The path of 1 MiB occurs 2,100 times, and represents millions of paths of usual length. Each answer has its own
    dictionary of paths.
    """
    create_upsert_table(client, properties=BY_ID)
    append(client, "db.t", build_rows((1, "de")))
    row_count, path, keys_per_request = 2100, "p" * (1 << 20), 700
    request_sizes: list[int] = []

    def build_answer(*_: Any, **__: Any) -> LookupAnswer:
        first_position = sum(request_sizes)
        request_sizes.append(min(keys_per_request, row_count - first_position))
        # The order of the paths differs between answers, so a path has not the same code in all dictionaries.
        paths = ["q", path][:: 1 if len(request_sizes) % 2 else -1]
        codes = pa.array([paths.index(path)] * request_sizes[-1], pa.int32())
        columns = {
            "key": pa.array(range(request_sizes[-1])),
            "file_path": pa.DictionaryArray.from_arrays(codes, pa.array(paths)),
            "position": pa.array(range(first_position, first_position + request_sizes[-1])),
            "undecided": pa.array([False] * request_sizes[-1]),
        }
        return LookupAnswer(
            snapshot_id=1,
            index="ids",
            rows=pa.table(columns),
            missing=0,
            complete=True,
            uncovered_files=0,
            uncovered=(),
            undecided=0,
            problems=(),
        )

    monkeypatch.setattr("seamark.connector.write.row_locations._LOOKUP_KEYS_MAX", keys_per_request)
    monkeypatch.setattr("seamark.connector.client.client.SeamarkClient.lookup", build_answer)
    task = ScanTask({"file-path": path, "record-count": row_count}, ())
    monkeypatch.setattr("seamark.connector.write.row_locations.plan", lambda *_: iter([task]))
    opened_table = open_table(client, "db.t", CURRENT)
    location_result = locate(
        client, opened_table, BatchKeys(find_key_fields(opened_table.schema, ["id"]), [pa.array(range(row_count))])
    )
    (file,) = location_result.files  # The result does not contain the path that no row uses.
    assert file.positions.tolist() == file.keys.tolist() == list(range(row_count))
    assert request_sizes == [keys_per_request] * 3
    assert not location_result.read
