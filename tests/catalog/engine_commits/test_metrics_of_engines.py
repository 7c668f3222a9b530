"""Tests of engine commits with unusable metrics: the server corrects them and changes nothing else."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.own_files import find_foreign_paths
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.engine_commits import commit_manifests, engine_commits
from seamark.metaserver.objects.port import ObjectStore
from tests.catalog.appender import DELETED, EngineAppender, Row, _read_rows, read_list, read_snapshot
from tests.catalog.appends import (
    DB,
    append_files,
    commit_table,
    create_rebasing_table,
    find_head_snapshot,
    load_metadata,
)
from tests.catalog.rig import CatalogRig, open_rig
from tests.seeds import first_seed
from tests.waits import until

ID, TEXT = 1, 2
TRUNCATED_TEXT = "El cliente llamó".encode()[:-1]  # Its last character has only one of its two bytes.
VERSIONS = [2, 3]


class CountingObjects:
    """Storage that counts the reads of each file."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.reads: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        self.reads[location] += 1
        return await self._objects.read(location, limit_bytes=limit_bytes)


def build_metrics(**values_by_name: dict[int, Any]) -> Row:
    """Return metrics fields of a data file as fastavro writes them."""
    return {
        name: [{"key": key, "value": value} for key, value in values.items()] for name, values in values_by_name.items()
    }


def encode_long(number: int) -> bytes:
    return struct.pack("<q", number)


WRONG_METRICS: list[tuple[Row, Row]] = [
    # A text is truncated within a character, as DuckDB 1.5.5 does.
    (
        build_metrics(lower_bounds={TEXT: TRUNCATED_TEXT}, upper_bounds={TEXT: b"El cliente llamp"}),
        build_metrics(lower_bounds={TEXT: TRUNCATED_TEXT[:-1]}, upper_bounds={TEXT: b"El cliente llamp"}),
    ),
    (build_metrics(lower_bounds={TEXT: b"\xc3"}), build_metrics(lower_bounds={})),
    (build_metrics(upper_bounds={TEXT: TRUNCATED_TEXT}), build_metrics(upper_bounds={})),
    (build_metrics(lower_bounds={TEXT: b"a\xed\xa0\x80"}), build_metrics(lower_bounds={TEXT: b"a"})),
    # The length of a bound differs from the length of its type.
    (build_metrics(lower_bounds={ID: b"\0" * 3, TEXT: b"a"}), build_metrics(lower_bounds={TEXT: b"a"})),
    # The lower bound is above the upper bound.
    (
        build_metrics(lower_bounds={ID: encode_long(5)}, upper_bounds={ID: encode_long(4)}),
        build_metrics(lower_bounds={}, upper_bounds={}),
    ),
    (
        build_metrics(lower_bounds={TEXT: b"b"}, upper_bounds={TEXT: b"a"}),
        build_metrics(lower_bounds={}, upper_bounds={}),
    ),
    # There are more nulls than values, and counts below zero.
    (
        build_metrics(value_counts={ID: 3}, null_value_counts={ID: 4, TEXT: 1}),
        build_metrics(value_counts={ID: 3}, null_value_counts={TEXT: 1}),
    ),
    (build_metrics(value_counts={ID: -1}), build_metrics(value_counts={})),
]
"""Metrics that an engine writes, and the metrics to which the server corrects them."""
RIGHT_METRICS = build_metrics(
    value_counts={ID: 3, TEXT: 3},
    null_value_counts={ID: 0, TEXT: 3},
    lower_bounds={ID: encode_long(-4), TEXT: "llamó".encode(), 99: b"of a column that no schema has"},
    upper_bounds={ID: encode_long(7), TEXT: "llamó".encode()},
)


def index_metrics_by_name(fields: Row) -> dict[str, dict[int, Any]]:
    return {
        name: {item["key"]: item["value"] for item in fields.get(name) or ()}
        for name in ("value_counts", "null_value_counts", "lower_bounds", "upper_bounds")
    }


async def read_metrics(rig: CatalogRig) -> dict[str, dict[str, dict[int, Any]]]:
    """Return the metrics of each live file by its path."""
    rows = [
        row
        for listing in read_list(find_head_snapshot(await load_metadata(rig)))
        for row in _read_rows(listing["manifest_path"])
    ]
    return {
        row["data_file"]["file_path"]: index_metrics_by_name(row["data_file"])
        for row in rows
        if row["status"] != DELETED
    }


@pytest.mark.parametrize("version", VERSIONS)
async def test_unusable_metrics_are_corrected(tmp_path: Path, version: int) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version)
        for number, (wrong_metrics, corrected_metrics) in enumerate(WRONG_METRICS):
            path = f"file:///data/{number}.parquet"
            client = await append_files(rig, {path: 3}, file=wrong_metrics)
            assert (await read_metrics(rig))[path] == index_metrics_by_name(corrected_metrics), number
            manifests = [row["manifest_path"] for row in read_list(find_head_snapshot(await load_metadata(rig)))]
            assert client.manifests[0] not in manifests
            snapshot = read_snapshot(find_head_snapshot(await load_metadata(rig)))
            assert len(snapshot) == number + 1
            file = snapshot[path]
            assert (file.snapshot_id, file.sequence_number) == (client.snapshot_id, client.sequence)
            if version > 2:
                # Each file has three rows.
                assert sorted(added.first_row_id for added in snapshot.values()) == [3 * n for n in range(number + 1)]


@pytest.mark.parametrize("version", VERSIONS)
async def test_commit_with_correct_metrics_stays_as_the_engine_wrote_it(tmp_path: Path, version: int) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version)
        client = await append_files(rig, {"file:///data/a": 3}, file=RIGHT_METRICS)
        snapshot = find_head_snapshot(await load_metadata(rig))
        assert snapshot["manifest-list"] == client.manifest_list
        assert [row["manifest_path"] for row in read_list(snapshot)] == client.manifests


@pytest.mark.parametrize(
    ("confined_namespaces", "is_locked", "is_full"),
    [(None, True, False), ((DB,), True, False), (None, True, True), (None, False, False)],
)
async def test_new_manifests_are_read_once_before_the_lock_unless_many_commits_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    confined_namespaces: tuple[tuple[str, ...], ...] | None,
    is_locked: bool,
    is_full: bool,
) -> None:
    """Several checks use the read manifests. For a writer that is confined to a namespace, there is one more check.

    If many commits wait, they do not read their manifests before they have the lock, because they would hold much
    memory.
    """
    if is_full:
        monkeypatch.setattr(engine_commits, "_PRELOADING_COMMITS_MAX", 0)
    caller = Caller(principal_name="ann", request_id="r", confined_to=confined_namespaces)
    async with open_rig(tmp_path, wrap_objects=CountingObjects) as rig:
        await create_rebasing_table(rig, version=3)
        await append_files(rig, {f"{(await load_metadata(rig))['location']}/data/a": 1})
        client = EngineAppender(await load_metadata(rig), file=RIGHT_METRICS)
        commit_of_engine = client.commit({f"{client.metadata['location']}/data/b": 3})
        locations = [client.manifest_list, *client.manifests]
        objects = rig.catalog.context.objects
        assert isinstance(objects, CountingObjects)
        checked_names: list[set[str]] = []

        async def find_and_record(context: CatalogContext, uuid: str, paths: Iterable[str]) -> set[str]:
            checked_names.append({path.rpartition("/")[0] for path in paths})
            return await find_foreign_paths(context, uuid, paths)

        monkeypatch.setattr(commit_manifests, "find_foreign_paths", find_and_record)
        objects.reads.clear()
        async with AsyncExitStack() as other_commit:
            if is_locked:
                await other_commit.enter_async_context(rig.publisher.lock(DB, "t"))
            commit_task = asyncio.create_task(rig.commits.commit_table(caller, DB, "t", *commit_of_engine))
            if is_locked:
                if is_full:
                    await asyncio.sleep(0.2)
                else:
                    await until(lambda: objects.reads[client.manifests[0]])
                assert [objects.reads[location] for location in locations] == [0 if is_full else 1] * 2
        await commit_task
        assert [objects.reads[location] for location in locations] == [1, 1]
        assert checked_names == [{client.folder}], "the database is queried once for each folder"


async def test_repeat_of_a_corrected_commit_gets_the_first_answer(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version=2)
        wrong_metrics, _ = WRONG_METRICS[0]
        client = EngineAppender(await load_metadata(rig), file=wrong_metrics)
        request = client.commit({"file:///data/a": 3})
        first_answer = await commit_table(rig, request)
        second_answer = await commit_table(rig, request)
        assert (
            first_answer.metadata.current_snapshot_id
            == second_answer.metadata.current_snapshot_id
            == client.snapshot_id
        )
        assert len((await load_metadata(rig))["snapshots"]) == 1


async def test_metrics_of_late_and_merged_appends_are_corrected(tmp_path: Path) -> None:
    """The server rewrites the manifest list of a commit that is based on an old snapshot.

    If this commit has merged manifests, the server may write these manifests again too.
    """
    rng = random.Random(f"metrics {first_seed()}")
    for version in (2, 3):
        async with open_rig(tmp_path / str(version)) as rig:
            await create_rebasing_table(rig, version)
            await append_files(rig, {"file:///data/first": 1}, file=RIGHT_METRICS)
            paths = {"file:///data/first"}
            for step in range(12):
                # In merged manifests, the appender writes the entries of the old files without metrics.
                (wrong_metrics, corrected_metrics), merge = rng.choice(WRONG_METRICS), rng.choice((0, 1, 2))
                late_appender = EngineAppender(await load_metadata(rig), file=wrong_metrics, merge=merge)
                if rng.random() < 0.5:
                    await append_files(
                        rig, {f"file:///data/{step}-other": 1}, file=RIGHT_METRICS, merge=rng.choice((0, 1))
                    )
                    paths.add(f"file:///data/{step}-other")
                await commit_table(rig, late_appender.commit({f"file:///data/{step}": 2}))
                paths.add(f"file:///data/{step}")
                metrics = await read_metrics(rig)
                assert metrics.keys() == paths
                assert metrics[f"file:///data/{step}"] == index_metrics_by_name(corrected_metrics), (
                    f"seed {first_seed()}, {version}, {step}"
                )
                read_snapshot(find_head_snapshot(await load_metadata(rig)))


async def test_commit_with_an_unreadable_manifest_is_not_changed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version=2)
        wrong_metrics, _ = WRONG_METRICS[0]
        client = EngineAppender(await load_metadata(rig), file=wrong_metrics, manifest_row={"manifest_length": 7})
        await commit_table(rig, client.commit({"file:///data/a": 3}))
        assert find_head_snapshot(await load_metadata(rig))["manifest-list"] == client.manifest_list
