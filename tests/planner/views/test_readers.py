"""Tests that the planner recognises equality deletes which DuckDB applies to too many rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seamark.formats.iceberg.manifests.content_file import EQUALITY_DELETES, POSITION_DELETES
from seamark.metaserver.planner.plan.reader_quirks import explain_misread_deletes


def build_block(spec_id: int, content: int, ids: list[int] | None) -> Any:
    return SimpleNamespace(spec_id=spec_id, read_longs=lambda _: np.array([content]), read_lists=lambda _: [ids])


@pytest.mark.parametrize(
    ("spec_id", "content", "ids", "reason"),
    [
        (0, EQUALITY_DELETES, [1], ""),
        (1, EQUALITY_DELETES, [1, 2], ""),
        (1, EQUALITY_DELETES, [1], "all partitions"),
        (1, EQUALITY_DELETES, None, "all partitions"),
        (1, POSITION_DELETES, None, ""),
        (0, EQUALITY_DELETES, [1, 3], "dropped"),
    ],
)
def test_equality_deletes_that_duckdb_misapplies_are_recognised(
    spec_id: int, content: int, ids: list[int] | None, reason: str
) -> None:
    """The table has the columns 1 and 2. Spec 1 partitions by column 2, and column 3 was dropped."""
    field = SimpleNamespace(sources=(2,))
    specs = [SimpleNamespace(spec_id=0, fields=()), SimpleNamespace(spec_id=1, fields=(field,))]
    schema = SimpleNamespace(column=lambda column: column if column in (1, 2) else None)
    metadata: Any = SimpleNamespace(partition_specs=specs, current_schema=schema)
    view: Any = SimpleNamespace(delete_blocks=[build_block(spec_id, content, ids)])
    explanation = explain_misread_deletes(view, metadata)
    assert reason in explanation
    assert bool(explanation) == bool(reason)
