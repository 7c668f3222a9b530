"""Tests of the proposals for a table of small files whose index already leaves most files out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_table_properties, load_advice
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from seamark.metaserver.planner.advice.read_shares import compute_hit_share
from seamark.metaserver.planner.advice.replay import DrawnCondition
from seamark.metaserver.planner.advice.row_samples import RowSample, SampledColumn
from tests.connector.advice.workloads import TABLE, create_table, run_statements
from tests.seeds import first_seed


def test_no_proposal_undoes_the_index_that_was_applied_before(client: IndexClient) -> None:
    rng = np.random.default_rng(first_seed())
    ids = rng.permutation(60_000).reshape(20, -1)
    create_table(client, [pa.table({"id": part, "note": rng.integers(0, 1 << 60, len(part))}) for part in ids])
    change_table_properties(client, TABLE, {TARGET_FILE_BYTES: str(512 << 20)}, ())
    run_statements(client, [f"id = {number}" for number in rng.choice(60_000, 40, replace=False)])
    proposals = load_advice(client, TABLE)["proposals"]
    saved_seconds = [proposal["before"]["seconds"] - proposal["predicted"]["seconds"] for proposal in proposals]
    assert saved_seconds[0] == max(saved_seconds)
    index = next(proposal for proposal in proposals if proposal["kind"] == "index")
    result = CliRunner().invoke(cli, ["advise", "apply", TABLE, index["id"], "--url", client.url])
    assert result.exit_code == 0, result.output
    assert "index built" not in result.output
    advice = load_advice(client, TABLE)
    assert advice["before"]["files"] < 3
    kinds = [proposal["kind"] for proposal in advice["proposals"]]
    assert not {"file-size", "cluster", "sort-order"} & set(kinds), kinds


def test_index_share_of_merged_files_equals_the_share_of_files_with_the_value() -> None:
    """With an index, a scan opens only files with the value. Their predicted and counted shares are equal after merges.

    Files with random values are merged in random groups, and the test counts the groups that have each value.
    """
    rng = np.random.default_rng(first_seed())
    files, value_count = 24, 400
    contents = [rng.choice(value_count, rng.integers(5, 60), replace=False) for _ in range(files)]
    counts = np.bincount(np.concatenate(contents), minlength=value_count)
    column = SampledColumn(1, "long", np.arange(value_count), np.concatenate(contents).astype(np.int32) + 1, counts)
    sample = RowSample({1: column}, files, int(counts.sum()))
    for new_files in (1, 3, 8, 24):
        predicted_shares, counted_shares = [], []
        for value in np.flatnonzero(counts):
            condition = DrawnCondition(column_id=1, matching=np.arange(value_count) == value, named_values=1)
            predicted_shares.append(compute_hit_share([condition], sample, files, new_files))
            merged_groups = rng.permutation(files).reshape(new_files, -1)
            counted_shares.append(np.mean([any(value in contents[file] for file in group) for group in merged_groups]))
        # The random groups of files may differ from the expected groups by 10 %.
        assert np.mean(predicted_shares) == pytest.approx(np.mean(counted_shares), rel=0.1), new_files
