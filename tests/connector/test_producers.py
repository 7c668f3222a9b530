"""Who writes, and which of its changes this is, is looked at before anything is written."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from connector.client import SeamarkClient
from connector.commits import producer_named
from connector.upserts import delete, upsert


@pytest.mark.parametrize(
    "producer", ["ab", ("job",), ("job", "1"), ("job", 1.0), ("job", True), ("job", -1), (1, 2), 7]
)
def test_what_is_no_producer_is_refused_by_what_it_is(producer: Any) -> None:
    with pytest.raises(ValueError, match="it must be a name and a whole number from 0"):
        producer_named(producer)


def test_a_producer_is_told_as_commits_have_it() -> None:
    assert producer_named(("job", 0)) == {"id": "job", "sequence": 0}
    assert producer_named(None) is None


def test_nobody_is_asked_for_a_change_of_no_producer_or_by_one_name_for_names() -> None:
    nowhere, rows, wrong = SeamarkClient("http://127.0.0.1:1"), pa.table({"id": [1]}), ("job", "1")
    for change in (
        lambda: upsert(nowhere, "db.t", rows, keys=["id"], producer=wrong),  # type: ignore[arg-type]
        lambda: delete(nowhere, "db.t", keys=rows, producer=wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="producer is"):
            change()
    with pytest.raises(ValueError, match="lists of names"):
        upsert(nowhere, "db.t", rows, keys="id")
