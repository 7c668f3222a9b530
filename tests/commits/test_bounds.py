"""What one change may make the server hold and compare."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.commit.changes.change import Remove
from seamark.metaserver.commit.native import change_application
from seamark.metaserver.commit.snapshots import manifest_filter, manifests
from seamark.metaserver.iceberg.manifests.content_file import ContentFile
from tests.api.client import Api
from tests.commits.claims import Claims
from tests.commits.lake import Lake
from tests.commits.reader import live_files, snapshot_of
from tests.server.rig import running


@pytest.mark.parametrize("needs", ["the history", "the files to remove"])
async def test_a_change_holds_no_more_decoded_manifests_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str
) -> None:
    async with running(tmp_path) as server:
        table = await Claims.create(Api(server), {"a": "long"})
        first = await table.commit(add=[table.data("first")])
        for number in range(4):
            await table.commit(add=[table.data(f"f{number}")])
        scope = {"filter": {"type": "eq", "term": "a", "value": 5}}
        body: dict[str, Any] = {"add": [table.data("new")], "read_snapshot_id": first["snapshot-id"], "scope": scope}
        if needs == "the files to remove":
            removed = [{"file-path": table.data(name)["file-path"]} for name in ("first", "f0")]
            body = {"read_snapshot_id": first["snapshot-id"], "remove": removed}
        assert (await table.send(**body)).status == 409
        monkeypatch.setattr(change_application, "DECODED_BYTES_MAX", 1000)
        refused = await table.send(**body)
        assert refused.error[:2] == (400, "BadRequestException")
        assert "decoded manifests" in refused.error[2]


async def test_a_scope_has_no_more_partitions_than_a_change_has_files(tmp_path: Path) -> None:
    async with running(tmp_path, commit_files_limit=2) as server:
        table = await Claims.create(Api(server), {"a": "long"}, [("a", "identity")])
        for count, status in ((2, 200), (3, 400)):
            partitions = [{"spec-id": 0, "values": [number]} for number in range(count)]
            body: dict[str, Any] = {"add": [table.data(f"f{count}", 9)], "read_snapshot_id": None}
            assert (await table.send(**body, scope={"partitions": partitions})).status == status


async def test_entries_of_large_manifests_are_compared_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change may remove a hundred thousand files. Here every manifest is a large one."""
    threads, real = [], manifest_filter.key_of

    def key_of(file: ContentFile) -> Remove:
        threads.append(threading.get_ident())
        return real(file)

    monkeypatch.setattr(manifest_filter, "key_of", key_of)
    monkeypatch.setattr(manifests, "_IN_LOOP_ENTRIES", 0)
    async with running(tmp_path) as server:
        lake = await Lake.create(Api(server))
        files = [lake.data([(number, 0, "a")]) for number in range(3)]
        first = await lake.commit({"add": files})
        body = {"read-snapshot-id": first["snapshot-id"], "remove": [{"file-path": files[1]["file-path"]}]}
        assert (await lake.commit(body))["summary"]["total-data-files"] == "2"
        paths = {one.path for one in live_files(snapshot_of(await lake.metadata()))}
        assert paths == {files[0]["file-path"], files[2]["file-path"]}
        assert threads
        assert threading.get_ident() not in threads
