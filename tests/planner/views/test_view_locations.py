"""Tests of the check that a view's files are in the table's locations.

A view that reuses folders of a neighbouring snapshot's view must be rejected exactly when a check of each path, by the
claims at that time, rejects it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest
from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.formats.storage.locations import make_location_key, parse_location
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.planner.plan.location_checks import LocationChecker
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Claim
from tests.iceberg.samples import build_table
from tests.planner.lakes.lake import DATA, POSITION_DELETES, DataFile
from tests.planner.lakes.manifests import ADDED, Entry, build_manifest_bytes
from tests.planner.views.test_view_base import STYLE
from tests.seeds import examples, first_seed

OWN, OTHER = "own", "other"
"""The UUIDs of two tables. The claims of their locations are drawn from FOLDERS, which contain the files."""
SNAPSHOTS = 10
TABLE = "file:///w/t"
LIST = f"{TABLE}/metadata/snap.avro"
FOLDERS = ["w/t", "w/t/data", "w/t/data/a", "w/t2", "w/t2/b", "w/s", "w/s/c", "elsewhere", "w/t/metadata"]
UNUSUAL_FOLDERS = [
    "file:///w/t/../t2",
    "file:///w/t/..b",
    "file:///w/t/x%2e%2e",
    "gs://bucket/w",
    "s3://bkt/w/é",
    "file:///w/t/data/é",
    "file:///w/t/data/è",
]


class ClaimStore:
    """A store of claims (the locations that belong to tables), with the methods that the check calls."""

    def __init__(self) -> None:
        self.all_claims: list[Claim] = []

    async def claims(self, uuid: str) -> list[Claim]:
        return [claim for claim in self.all_claims if claim.uuid == uuid]

    async def find_overlapping_claims(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        (key,) = keys
        claims = [claim for claim in self.all_claims if claim.uuid != uuid]
        claims_below = [claim for claim in claims if claim.location.startswith(key + "/")]
        return [claim for claim in claims if holds(claim.location, key)] + claims_below[:limit]


def holds(location: str, key: str) -> bool:
    return key == location or key.startswith(location + "/")


def is_rejected(claims: ClaimStore, paths: Sequence[str]) -> bool:
    """Return whether the check must reject one of the paths of the table `OWN`.

    The folder of such a path is in a location of another table and in no location of `OWN`, or it has `..` or an
    encoded character.
    """
    for path in paths:
        folder = path.rpartition("/")[0]
        try:
            key = make_location_key(parse_location(folder))
        except BadRequest:
            if "/.." in folder or "%2" in folder:
                return True
            continue
        is_own, is_other = (
            any(holds(claim.location, key) for claim in claims.all_claims if claim.uuid == uuid)
            for uuid in (OWN, OTHER)
        )
        if is_other and not is_own:
            return True
    return False


def draw_folder(rng: random.Random, unusual_share: float) -> str:
    return rng.choice(UNUSUAL_FOLDERS) if rng.random() < unusual_share else f"file:///{rng.choice(FOLDERS)}"


def make_manifest(
    name: str, rng: random.Random, content: int, unusual_share: float
) -> tuple[ManifestFile, Block, list[str]]:
    """Return a manifest of up to four files, its decoded files, and the paths of the manifest and the files.

    Args:
        content: 1 for a manifest of delete files, 0 for data files.
        unusual_share: The fraction of folders that are written in an unusual form.
    """
    location_folder = draw_folder(rng, unusual_share)
    folders = [
        location_folder if rng.random() < 0.8 else draw_folder(rng, unusual_share) for _ in range(rng.randrange(1, 5))
    ]
    paths = [f"{folder}/{rng.choice(['f', '..f', 'é'])}{row}.parquet" for row, folder in enumerate(folders)]
    kind = POSITION_DELETES if content else DATA
    files = [
        DataFile(path, kind, "PARQUET", spec_id=0, partition=(), record_count=10, size=100, metrics={})
        for path in paths
    ]
    entries = [Entry(ADDED, snapshot_id=1, sequence=None, file_sequence=None, file=file) for file in files]
    schema = {"type": "struct", "schema-id": 0, "fields": []}
    data = build_manifest_bytes(
        entries, version=2, content=content, style=STYLE, spec_id=0, fields=(), kinds={}, schema=schema
    )
    path = f"{draw_folder(rng, unusual_share)}/{rng.choice(['m', '..m'])}-{name}.avro"
    block = Block(b"".join(encode_block(decode_manifest(data, path))))
    manifest = ManifestFile(
        path, len(data), partition_spec_id=0, content=content, sequence_number=1, min_sequence_number=1
    )
    return manifest, block, [path, *paths]


def draw_claims(rng: random.Random) -> list[Claim]:
    claims = [Claim(make_location_key(parse_location(TABLE)), OWN, False)]
    for folder in rng.sample(FOLDERS, rng.randrange(1, 4)):
        uuid = rng.choice([OWN, OTHER, OTHER])
        claims.append(Claim(make_location_key(parse_location(f"file:///{folder}")), uuid, False, uuid == OWN))
    return claims


def split_parts(manifest_parts: list[tuple[ManifestFile, Block, list[str]]]) -> tuple[list[ManifestFile], list[Block]]:
    return [manifest for manifest, _, _ in manifest_parts], [block for _, block, _ in manifest_parts]


async def test_view_with_a_base_is_rejected_exactly_when_a_check_of_each_path_rejects_it() -> None:
    outcomes = set()
    for round_number in range(examples(40, 6)):
        outcomes |= await compare_histories(first_seed() * 1000 + round_number)
    assert outcomes == {True, False}


async def compare_histories(seed: int) -> set[bool]:
    """Check the locations of the files of several snapshots, and compare the results with a check of each path.

    Each snapshot is checked with two random sets of claims. Checks of later snapshots reuse earlier results.

    Returns:
        The results that occurred: True if a snapshot was rejected, False if it was accepted.
    """
    rng = random.Random(seed)
    unusual_share = rng.choice([0.0, 0.0, 0.1])
    claims: Any = ClaimStore()
    checker = LocationChecker(claims, Warehouse("file:///"))
    metadata = build_table(location=TABLE)
    pool = [make_manifest(f"{number}", rng, 0, unusual_share) for number in range(5)]
    base: TableView | None = None
    outcomes = set()
    for snapshot in range(SNAPSHOTS):
        pool.append(make_manifest(f"n{snapshot}", rng, 0, unusual_share))
        listed_pool = rng.sample(pool, rng.randrange(1, len(pool) + 1))
        deletes = [make_manifest("d", rng, 1, unusual_share)] if rng.random() < 0.2 else []
        view = TableView(*split_parts(listed_pool), *split_parts(deletes), base=base)
        paths = [LIST, *(path for _, _, part_paths in (*listed_pool, *deletes) for path in part_paths)]
        for _ in range(2):
            claims.all_claims = draw_claims(rng)
            try:
                await checker.check(OWN, metadata, [LIST], view)
            except Forbidden:
                is_forbidden = True
            else:
                is_forbidden = False
            assert is_forbidden == is_rejected(claims, paths), f"seed {seed}"
            outcomes.add(is_forbidden)
        base = view if rng.random() < 0.8 else base
    return outcomes
