"""Tests that an expiration of snapshots deletes exactly the files that no remaining snapshot needs.

The tests read the metadata with PyIceberg.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import In
from pyiceberg.table import Table

from seamark.connector.client.errors import InvalidRequest, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs.server_jobs import expire
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.runtime.errors import StorageError
from seamark.formats.storage.locations import normalize_location
from seamark.metaserver.commit.expiration import expiration as expiration_service
from seamark.metaserver.commit.expiration import unused_files
from seamark.metaserver.store.model import InstantState
from seamark.metaserver.store.port import InstantFilter
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, create_test_table
from tests.seeds import examples, list_seeds_by_version

Rows = Counter[tuple[Any, ...]]


AFTER_ALL_SNAPSHOTS_MS = 1 << 60
ROW_CHANGES = 0.7
"""The probability that a step changes rows."""
_CONTENT: dict[Path, frozenset[Path]] = {}
"""A cache of the content files of manifests. Manifests never change, and PyIceberg reads them slowly."""


def to_path(location: str) -> Path:
    return Path(location.removeprefix("file://").removeprefix("file:"))  # Spark writes file:/p.


def list_needed_files(table: Table) -> set[Path]:
    """Return the content files, manifests and manifest lists of all snapshots, as PyIceberg reads them."""
    paths: set[Path] = set()
    for snapshot in table.metadata.snapshots:
        paths.add(to_path(snapshot.manifest_list))
        for manifest in snapshot.manifests(table.io):
            path = to_path(manifest.manifest_path)
            if path not in _CONTENT:
                entries = manifest.fetch_manifest_entry(table.io)
                _CONTENT[path] = frozenset(to_path(entry.data_file.file_path) for entry in entries)
            paths |= {path, *_CONTENT[path]}
    return paths


def list_stored_files(table: Table) -> set[Path]:
    folder = to_path(table.location())
    return {path for path in folder.rglob("*") if path.suffix in (".parquet", ".avro", ".puffin")}


def read_snapshot(client: IndexClient, snapshot_id: int, table: str = "db.t") -> Rows:
    return Counter(tuple(row.values()) for row in scan(client, table, at=At(snapshot_id)).to_arrow().to_pylist())


def list_snapshot_ids(table: Table) -> list[int]:
    return [snapshot.snapshot_id for snapshot in table.metadata.snapshots]


def list_instants(server: ServerThread) -> list[Any]:
    instants = server.run(server.components.store.list_instants(InstantFilter(action=expiration_service.ACTION), 100))
    assert isinstance(instants, list)
    return instants


def change_rows(
    client: IndexClient, table: Table, rng: random.Random, random_number: float, ids: list[int], step: int, version: int
) -> None:
    """Upsert, delete or compact, depending on `random_number`, which is below `ROW_CHANGES`."""
    if random_number < 0.4:
        upsert(client, "db.t", build_rows(ids, f"{step}:"), keys=["id"], mode=rng.choice([*MODES, None]))
    elif random_number < 0.5 and version == 2:  # PyIceberg does not write tables of version 3.
        table.delete(In("id", ids))  # type: ignore[call-arg]
    elif random_number < 0.6:
        delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice([*MODES, None]))
    else:
        compact(client, "db.t", policy=CompactionPolicy(target_bytes=3000, min_files=2))


def create_history(client: IndexClient, catalog: RestCatalog, commits: int = 5) -> Table:
    create_test_table(catalog, 2)
    for number in range(commits):
        upsert(client, "db.t", build_rows([1, number], f"{number}:"), keys=["id"], mode="copy-on-write")
    return catalog.load_table("db.t")


def test_expiration_deletes_the_files_of_removed_snapshots(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        files_before = list_stored_files(table)
        rows_before = read_snapshot(client, list_snapshot_ids(table)[-1])
        dry_report = expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=2, dry_run=True)
        assert list_stored_files(table) == files_before
        totals = expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=2)
        assert totals == dry_report
        assert (totals.snapshots, totals.files_failed) == (3, 0)
        table.refresh()
        assert list_stored_files(table) == list_needed_files(table)
        assert totals.content_files + totals.manifests + totals.other_files == len(files_before) - len(
            list_stored_files(table)
        )
        assert read_snapshot(client, list_snapshot_ids(table)[-1]) == rows_before
        (instant,) = list_instants(server)
        assert instant.state is InstantState.COMPLETED
        assert instant.summary["removed-snapshots"] == 3
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=2).snapshots == 0


def test_age_of_a_snapshot_counts_from_the_commit_that_replaced_it(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 4)
        times = [snapshot.timestamp_ms for snapshot in table.metadata.snapshots]
        assert expire(client, "db.t", older_than_ms=times[2], dry_run=True).snapshots == 1
        assert expire(client, "db.t", older_than_ms=times[2] + 1, dry_run=True).snapshots == 2
        assert expire(client, "db.t", dry_run=True).snapshots == 0, "the default age is five days"


@pytest.mark.parametrize(
    ("seed", "version"),
    [
        *list_seeds_by_version((0, 1), fast=1),
        *(pytest.param(seed, version, marks=pytest.mark.slow) for seed in (2, 3) for version in (2, 3)),
    ],
)
def test_random_histories_with_branches_tags_and_expirations_keep_needed_files(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, version: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {version}")
    monkeypatch.setattr(expiration_service, "SNAPSHOTS_MAX", rng.choice([2, 1000]))
    monkeypatch.setattr(unused_files, "ENTRIES_MAX", rng.choice([5, 1000]))
    rows_by_snapshot: dict[int, Rows] = {}
    seen_paths: set[Path] = set()
    expired_count = 0
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version)
        append(client, "db.t", build_rows([0]))
        table = catalog.load_table("db.t")

        def record_snapshots() -> None:
            table.refresh()
            seen_paths.update(list_needed_files(table))
            for snapshot_id in list_snapshot_ids(table):
                if snapshot_id not in rows_by_snapshot:
                    rows_by_snapshot[snapshot_id] = read_snapshot(client, snapshot_id)

        def run_step(number: int) -> None:
            ids, random_number = rng.sample(range(40), rng.randint(1, 6)), rng.random()
            table.refresh()
            if random_number < ROW_CHANGES:
                change_rows(client, table, rng, random_number, ids, number, version)
            elif random_number < 0.78:
                table.manage_snapshots().create_branch(rng.choice(list_snapshot_ids(table)), f"b{number}").commit()
            elif random_number < 0.86:
                table.manage_snapshots().create_tag(rng.choice(list_snapshot_ids(table)), f"t{number}").commit()
            elif random_number < 0.93:
                other_names = [name for name in table.refs() if name != "main"]
                branches = [name for name in other_names if name.startswith("b")]
                if branches and rng.random() < 0.6:
                    append(client, "db.t", build_rows(ids, f"{number}b"), branch=rng.choice(branches))
                elif other_names:
                    name = rng.choice(other_names)
                    manage = table.manage_snapshots()
                    (manage.remove_branch if name.startswith("b") else manage.remove_tag)(name).commit()
            else:
                ancestors = {entry.snapshot_id for entry in table.history()} & set(list_snapshot_ids(table))
                table.manage_snapshots().set_current_snapshot(rng.choice(sorted(ancestors))).commit()

        for number in range(examples(45, 12)):
            run_step(number)
            record_snapshots()
            if rng.random() < 0.25:
                limit_ms = rng.choice([snapshot.timestamp_ms for snapshot in table.metadata.snapshots]) + rng.randint(
                    0, 1
                )
                referenced_ids = {ref.snapshot_id for ref in table.refs().values()}
                young_ids = {
                    snapshot.snapshot_id for snapshot in table.metadata.snapshots if snapshot.timestamp_ms >= limit_ms
                }
                expired_count += expire(client, "db.t", older_than_ms=limit_ms, retain_last=rng.randint(1, 3)).snapshots
                table.refresh()
                assert referenced_ids | young_ids <= set(list_snapshot_ids(table)), (
                    "Iceberg's own policy keeps these snapshots"
                )
                assert list_stored_files(table) & seen_paths == list_needed_files(table) & seen_paths
                assert list_needed_files(table) <= list_stored_files(table)
                for snapshot_id in list_snapshot_ids(table):
                    assert read_snapshot(client, snapshot_id) == rows_by_snapshot[snapshot_id]
        expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS)
        table.refresh()
        assert list_stored_files(table) & seen_paths == list_needed_files(table)
    assert expired_count > 0


def test_reference_that_is_created_during_an_expiration_keeps_its_snapshot(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        first_id = list_snapshot_ids(table)[0]
        first_rows = read_snapshot(client, first_id)
        commit, calls = expiration_service.Expiration._commit, []

        async def create_tag_and_commit(self: expiration_service.Expiration, *arguments: Any) -> Any:
            if not calls:
                calls.append(1)
                uuid_requirement = {"type": "assert-table-uuid", "uuid": str(table.metadata.table_uuid)}
                update = {"action": "set-snapshot-ref", "ref-name": "kept", "type": "tag", "snapshot-id": first_id}
                await server.components.engine_commits.commit_table(
                    arguments[0], ("db",), "t", [uuid_requirement], [update]
                )
            return await commit(self, *arguments)

        monkeypatch.setattr(expiration_service.Expiration, "_commit", create_tag_and_commit)
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).snapshots == 3
        table.refresh()
        assert table.refs()["kept"].snapshot_id == first_id
        assert read_snapshot(client, first_id) == first_rows
        assert list_stored_files(table) == list_needed_files(table)


def test_housekeeping_continues_an_interrupted_deletion(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion of some files fails.

    Housekeeping finds these files, although the files listed before them are missing.
    """
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 8)
        objects = server.components.objects
        delete_object = type(objects).delete
        for deletions_max in (0, 2, 5, 9):  # The number of deletions that succeed before the storage refuses one.
            for number in range(6):
                upsert(client, "db.t", build_rows([1, number], f"{deletions_max}:"), keys=["id"], mode="copy-on-write")
            deletions_left = [deletions_max]

            async def refuse_deletion(self: Any, location: str, deletions_left: list[int] = deletions_left) -> None:
                deletions_left[0] -= 1
                if deletions_left[0] < 0:
                    raise StorageError("the storage refuses the deletion")
                await delete_object(self, location)

            with monkeypatch.context() as context:
                context.setattr(type(objects), "delete", refuse_deletion)
                assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS, retain_last=1).files_failed > 0
            table.refresh()
            assert list_stored_files(table) > list_needed_files(table)
            upsert(client, "db.t", build_rows([3], f"{deletions_max}"), keys=["id"])
            assert server.run(server.components.expiration.resume()) == 0, (
                "the server that began the deletion may still be running"
            )
            # A negative age makes each unfinished deletion old enough to be continued.
            monkeypatch.setattr(expiration_service, "_RESUMED_AFTER_MS", -1)
            assert server.run(server.components.expiration.resume()) == 1
            monkeypatch.undo()
            table.refresh()
            assert list_stored_files(table) == list_needed_files(table)
        assert {instant.state for instant in list_instants(server)} == {InstantState.COMPLETED}


def test_unreadable_manifest_of_a_remaining_snapshot_stops_the_expiration(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        (manifest, *_) = table.metadata.snapshots[-1].manifests(table.io)
        to_path(manifest.manifest_path).unlink()
        files_before = list_stored_files(table)
        with pytest.raises(Exception, match="missing in storage"):
            expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS)
        table.refresh()
        assert (list_stored_files(table), len(list_snapshot_ids(table))) == (files_before, 5)


def test_expiration_keeps_files_that_a_second_registered_table_may_need(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        catalog.register_table("db.again", table.metadata_location)
        files_before = list_stored_files(table)
        totals = expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS)
        assert (totals.snapshots, totals.content_files) == (4, 0)
        table.refresh()
        assert (list_stored_files(table), len(list_snapshot_ids(table))) == (files_before, 1)


def test_expiration_keeps_a_snapshot_that_a_plan_reads(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        second_id = list_snapshot_ids(table)[1]
        plan = client.plan_table("db.t", "id >= 0", at=At(second_id))
        assert plan.name is not None
        rows_of_plan = catalog.load_table(("db", plan.name)).scan().to_arrow().num_rows
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).snapshots == 3
        table.refresh()
        assert second_id in list_snapshot_ids(table)
        assert catalog.load_table(("db", plan.name)).scan().to_arrow().num_rows == rows_of_plan


@pytest.mark.slow
def test_expiration_is_refused_for_gc_disabled_and_for_invalid_properties(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 2)
        for properties, message in (
            ({"history.expire.max-snapshot-age-ms": "soon"}, "history.expire.max-snapshot-age-ms .* 'soon'"),
            ({"history.expire.min-snapshots-to-keep": "0"}, "is 0; it must be at least 1"),
            ({"gc.enabled": "false"}, "gc.enabled is false"),
        ):
            with table.transaction() as transaction:
                transaction.set_properties(properties)
            with pytest.raises(InvalidRequest, match=message):
                expire(client, "db.t")
            with table.transaction() as transaction:
                transaction.remove_properties(*properties)
        with pytest.raises(NoSuchResource):
            expire(client, "db.none")


@pytest.mark.slow
def test_expiration_above_the_limits_is_refused_before_it_removes_anything(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 6)
        files_before = list_stored_files(table)
        for limit in ("FILES_MAX", "MANIFESTS_MAX"):
            with monkeypatch.context() as context:
                context.setattr(unused_files, limit, 0)
                with pytest.raises(InvalidRequest, match="expire_snapshots"):
                    expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS)
        assert list_stored_files(table.refresh()) == files_before
        assert len(list_snapshot_ids(table)) == 6


@pytest.mark.slow
def test_table_that_is_registered_during_an_expiration_keeps_its_files(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        files_before, location = list_stored_files(table), table.metadata_location
        commit = expiration_service.Expiration._commit

        async def commit_and_register(self: expiration_service.Expiration, *arguments: Any) -> Any:
            instant = await commit(self, *arguments)
            body = {"name": "again", "metadata-location": location}
            path = f"{server.url}/v1/namespaces/db/register"
            async with server.http.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()
            return instant

        monkeypatch.setattr(expiration_service.Expiration, "_commit", commit_and_register)
        expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS)
        assert list_stored_files(table) == files_before
        assert len(list_snapshot_ids(catalog.load_table("db.again"))) == 5


@pytest.mark.slow
def test_plan_that_is_made_during_an_expiration_keeps_its_files(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        first_id = list_snapshot_ids(table)[0]
        commit, plan_names = expiration_service.Expiration._commit, []

        async def create_plan_and_commit(self: expiration_service.Expiration, *arguments: Any) -> Any:
            if not plan_names:
                body = {"predicate": "id >= 0", "snapshot-id": first_id, "case-sensitive": True}
                async with server.http.post(f"{server.url}/api/v1/tables/db/t/plan-tables", json=body) as answer:
                    plan_names.append((await answer.json())["name"])
            return await commit(self, *arguments)

        monkeypatch.setattr(expiration_service.Expiration, "_commit", create_plan_and_commit)
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).snapshots == 3
        assert catalog.load_table(("db", plan_names[0])).scan().to_arrow().num_rows > 0


@pytest.mark.slow
def test_expiration_succeeds_while_writers_keep_committing(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer commits during each attempt of the expiration, until the expiration takes the commit lock."""
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog)
        plan, attempts = expiration_service.Expiration._plan_removal, []

        async def plan_while_a_writer_commits(self: expiration_service.Expiration, *arguments: Any) -> Any:
            removal = await plan(self, *arguments)
            attempts.append(1)
            commits.append(asyncio.create_task(set_property(len(attempts))))
            # After the expiration has taken the lock, the writer's commit waits. Before that, the writer commits
            # first.
            await asyncio.wait(commits[-1:], timeout=0.2 if len(attempts) > expiration_service._LOCKED_FROM else 60)
            return removal

        async def set_property(number: int) -> int:
            update = {"action": "set-properties", "updates": {"n": str(number)}}
            body = {"requirements": [], "updates": [update]}
            async with server.http.post(f"{server.url}/v1/namespaces/db/tables/t", json=body) as answer:
                return int(answer.status)

        async def wait_for_commits() -> list[int]:
            return await asyncio.gather(*commits)

        commits: list[asyncio.Task[int]] = []
        monkeypatch.setattr(expiration_service.Expiration, "_plan_removal", plan_while_a_writer_commits)
        monkeypatch.setattr(expiration_service, "_LOCKED_S", 10.0)
        assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).snapshots == 4
        table.refresh()
        assert list_stored_files(table) == list_needed_files(table)
        assert len(attempts) == expiration_service._LOCKED_FROM + 1
        assert server.run(wait_for_commits()) == [200] * len(attempts)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("obstacle", ["gc.enabled", "entries"])
def test_continued_deletion_obeys_gc_enabled_but_not_the_limit_of_entries(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """The limit of entries applies only to the first attempt, and `gc.enabled` to each attempt."""
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 6)
        files_before = list_stored_files(table)

        async def refuse_deletion(*_: Any) -> None:
            raise StorageError("the storage refuses the deletion")

        monkeypatch.setattr(expiration_service, "SNAPSHOTS_MAX", 2)
        with monkeypatch.context() as context:
            context.setattr(type(server.components.objects), "delete", refuse_deletion)
            assert expire(client, "db.t", older_than_ms=AFTER_ALL_SNAPSHOTS_MS).files_failed > 0
        table.refresh()
        if obstacle == "gc.enabled":
            with table.transaction() as transaction:
                transaction.set_properties({"gc.enabled": "false"})
        monkeypatch.setattr(unused_files, "ENTRIES_MAX", 0)
        monkeypatch.setattr(expiration_service, "_RESUMED_AFTER_MS", -1)
        assert server.run(server.components.housekeeping.run_round())["expirations_resumed"] == 3
        assert {instant.state for instant in list_instants(server)} == {InstantState.COMPLETED}
        assert list_stored_files(table) == (files_before if obstacle == "gc.enabled" else list_needed_files(table))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("years", [1, 30])
def test_expiration_accepts_ages_as_long_as_iceberg_allows(
    client: IndexClient, server: ServerThread, years: int
) -> None:
    with open_catalog(server.url) as catalog:
        table = create_history(client, catalog, 3)
        age = {"history.expire.max-snapshot-age-ms": str(years * 31_536_000_000)}
        with table.transaction() as transaction:
            transaction.set_properties({**age, "history.expire.max-ref-age-ms": str((1 << 63) - 1)})
        assert expire(client, "db.t").snapshots == 0


@pytest.mark.parametrize(
    ("first_spelling", "second_spelling"),
    [
        ("file:///a/b.parquet", "file:/a/b.parquet"),
        ("file:///a/b.parquet", "/a/b.parquet"),
        ("file:///a/b.parquet", "file:///a//b.parquet"),
        ("s3://bucket/a", "s3a://bucket/a"),
        ("s3n://bucket/a", "s3://bucket/a"),
    ],
)
def test_normalized_spellings_of_a_location_are_equal(first_spelling: str, second_spelling: str) -> None:
    assert normalize_location(first_spelling) == normalize_location(second_spelling)
    assert normalize_location(first_spelling) != normalize_location(f"{second_spelling}x")
