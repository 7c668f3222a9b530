"""Tests that no snapshot marks a Puffin file as removed while one of its deletion vectors is live.

Iceberg's incremental clean-up deletes the file of each entry with status DELETED of an expired snapshot. The tests read
the manifests with PyIceberg.
"""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table

from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MERGE_ON_READ, delete, upsert
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, count_scanned_rows, create_test_table
from tests.seeds import first_seed, mark_fast


class PuffinFiles:
    """The Puffin files of a table's snapshots.

    Attributes:
        live_vector_counts: The number of live deletion vectors in the current snapshot, by file.
        marked_paths: The files with a deletion vector that any snapshot marks as removed.
        all_paths: The files of all snapshots.
    """

    def __init__(self, table: Table) -> None:
        self.live_vector_counts = Counter[str]()
        self.marked_paths: set[str] = set()
        self.all_paths: set[str] = set()
        for snapshot in table.metadata.snapshots:
            is_current = snapshot.snapshot_id == table.metadata.current_snapshot_id
            for manifest in snapshot.manifests(table.io):
                if manifest.content != ManifestContent.DELETES:
                    continue
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                    assert entry.data_file.content == DataFileContent.POSITION_DELETES
                    path = entry.data_file.file_path
                    self.all_paths.add(path)
                    if entry.status == ManifestEntryStatus.DELETED:
                        self.marked_paths.add(path)
                    elif is_current:
                        self.live_vector_counts[path] += 1


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 4), 2))
def test_puffin_file_is_marked_as_removed_with_its_last_vector(
    client: IndexClient, server: ServerThread, seed: int
) -> None:
    rng = random.Random(seed)
    with open_catalog(server.url) as catalog:
        merge_properties = {"commit.manifest.min-count-to-merge": rng.choice(["2", "4", "100"])}
        create_test_table(catalog, 3, rng.choice([PartitionSpec(), BY_PART]), **merge_properties)
        model: dict[int, str] = {}
        shared_count = 0
        for step in range(14):
            ids = rng.sample(range(60), rng.randint(1, 12))
            action = rng.random()
            if action < 0.3:
                new_ids = list(range(100 * step + 100, 100 * step + 110))
                append(client, "db.t", build_rows(new_ids, f"{step}:"))
                model.update((id_, f"{step}:{id_}") for id_ in new_ids)
            elif action < 0.6:
                upsert(client, "db.t", build_rows(ids, f"{step}:"), keys=["id"], mode=MERGE_ON_READ)
                model.update((id_, f"{step}:{id_}") for id_ in ids)
            elif action < 0.9:
                deleted_ids = [*ids, *rng.sample(sorted(model), min(len(model), 6))]
                delete(client, "db.t", keys=pa.table({"id": sorted(set(deleted_ids))}), mode=MERGE_ON_READ)
                for deleted_id in deleted_ids:
                    model.pop(deleted_id, None)
            else:
                compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
            puffin_files = PuffinFiles(catalog.load_table("db.t"))
            shared_count += sum(vector_count > 1 for vector_count in puffin_files.live_vector_counts.values())
            assert not puffin_files.marked_paths & puffin_files.live_vector_counts.keys(), step
            assert puffin_files.all_paths - puffin_files.live_vector_counts.keys() <= puffin_files.marked_paths, step
        assert count_scanned_rows(client) == Counter((id_, id_ % 3, text) for id_, text in model.items())
        assert shared_count, "no Puffin file had two live vectors"
