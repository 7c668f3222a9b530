"""Keys of which a plan is asked for one by one leave out the files that lie between them."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from connector.indexes import IndexClient
from connector.locating import RANGES_MAX
from connector.upserts import MERGE_ON_READ, delete
from connector.writing import WrittenFiles, destination, write_batches
from tests.connector.served import Served
from tests.connector.test_upserts import create, rows

FILES, ROWS = 120, 4


@pytest.fixture
def client(served: Served) -> Iterator[IndexClient]:
    made = IndexClient(served.url)
    yield made
    made.close()


@pytest.mark.parametrize(("bytes_max", "read"), [(4 << 20, FILES // 2), (100, FILES)])
def test_more_keys_than_ranges_are_named_as_long_as_they_are_not_too_long(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch, bytes_max: int, read: int
) -> None:
    monkeypatch.setattr("connector.locating.FEW_VALUES_MAX", 5)
    monkeypatch.setattr("connector.locating._VALUES_BYTES_MAX", bytes_max)
    create(client)
    into = destination(client, "db.t")
    parts = [range(ROWS * number, ROWS * (number + 1)) for number in range(FILES)]
    written = [write_batches(into.target, rows(*((one, "de", 1, "n") for one in part)).to_batches()) for part in parts]
    into.commit(client, WrittenFiles.joined(written))
    chosen = [ROWS * number + number % ROWS for number in range(0, FILES, 2)]
    assert len(chosen) > RANGES_MAX
    report = delete(client, "db.t", keys=pa.table({"id": chosen}), mode=MERGE_ON_READ)
    assert report.deleted == len(chosen)
    assert read - RANGES_MAX <= report.files_read <= read
