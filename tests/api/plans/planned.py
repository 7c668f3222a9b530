"""Tables for planning over HTTP. Their manifests list files that do not exist, and are committed as an engine does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.api.client import Answer, Api
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    Style,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.planner.lakes.metrics import ColumnMetrics

T = "/v1/namespaces/db/tables/t"
EQ_5 = {"type": "eq", "term": "id", "value": 5}
PYICEBERG = {"User-Agent": "PyIceberg/0.12.0"}
JAVA_HEADERS = {"User-Agent": "Apache-HttpClient/5.6.4 (Java/17.0.15)", "X-Client-Version": "Apache Iceberg 1.12.0"}
KINDS = {1: "long", 2: "string"}
"""The types of the columns, by field id."""
STYLE = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=False, seed=0)


def build_data_file(path: str, low: int, high: int, *, rows: int = 100, text: tuple[str, str] = ("a", "z")) -> DataFile:
    """Return a data file of `db.<table>` with `id` from `low` to `high` and `data` in the range `text`."""
    metrics = {
        1: ColumnMetrics(rows, nulls=0, nans=None, lower=to_bytes("long", low), upper=to_bytes("long", high)),
        2: ColumnMetrics(
            rows, nulls=0, nans=None, lower=to_bytes("string", text[0]), upper=to_bytes("string", text[1])
        ),
    }
    return DataFile(
        path,
        content=0,
        format="PARQUET",
        spec_id=0,
        partition=(),
        record_count=rows,
        size=10_000,
        metrics=metrics,
        split_offsets=[4],
    )


def build_ten_id_files(count: int) -> list[Any]:
    """Return `count` data files. File n has the ids from 10 n to 10 n + 9."""
    return [build_data_file(f"file:///t/data/{n:06d}.parquet", 10 * n, 10 * n + 9) for n in range(count)]


async def append_files(
    api: Api,
    table: str,
    files: Sequence[DataFile],
    *,
    snapshot_id: int,
    manifests: int = 1,
    parent: int | None = None,
    branch: str = "main",
    kinds: Mapping[int, str] = KINDS,
) -> None:
    """Commit a snapshot to `branch` that adds `files` to the files of the snapshot `parent`.

    The new files are in `manifests` manifests of about equal length. `kinds` are the types of the columns by id.
    """
    metadata = (await api("GET", f"/v1/namespaces/db/tables/{table}")).json["metadata"]
    sequence = metadata["last-sequence-number"] + 1
    folder = Path(metadata["location"].removeprefix("file://")) / "metadata"
    parent_lists = [item["manifest-list"] for item in metadata["snapshots"] if item["snapshot-id"] == parent]
    listed_manifests: list[tuple[Manifest, int | None]] = (
        [(manifest, None) for manifest in _MANIFESTS_BY_LIST.get(parent_lists[0], [])] if parent_lists else []
    )
    files_per_manifest = -(-len(files) // manifests)  # Rounded up.
    for number in range(manifests):
        part = files[number * files_per_manifest : (number + 1) * files_per_manifest]
        listed_manifests.append(
            (_write_manifest(folder, f"{snapshot_id}-{number}", part, snapshot_id, sequence, metadata, kinds), None)
        )
    path = folder / f"snap-{snapshot_id}.avro"
    path.write_bytes(encode_manifest_list(listed_manifests, version=2, style=STYLE, header={"format-version": "2"}))
    _MANIFESTS_BY_LIST[f"file://{path}"] = [manifest for manifest, _ in listed_manifests]
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": max(metadata["last-updated-ms"], 1_700_000_000_000) + 1,
        "manifest-list": f"file://{path}",
        "summary": {"operation": "append"},
        "schema-id": metadata["current-schema-id"],
        **({} if parent is None else {"parent-snapshot-id": parent}),
    }
    ref = {"action": "set-snapshot-ref", "ref-name": branch, "type": "branch", "snapshot-id": snapshot_id}
    body = {"requirements": [], "updates": [{"action": "add-snapshot", "snapshot": snapshot}, ref]}
    answer = await api("POST", f"/v1/namespaces/db/tables/{table}", body)
    assert answer.status == 200, answer.raw


def list_paths(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.raw
    return [task["data-file"]["file-path"] for task in answer.json.get("file-scan-tasks", [])]


def list_planned_numbers(answer: Answer) -> list[int]:
    return [int(path.rpartition("/")[2].removesuffix(".parquet")) for path in list_paths(answer)]


async def read_all_pages(api: Api, answer: Answer, **options: Any) -> list[int]:
    """Read the pages of a plan, and return the numbers of its files.

    The files are in the answer itself and in the answers to its plan tasks.
    """
    file_numbers = list_planned_numbers(answer)
    for token in answer.json.get("plan-tasks", []):
        page = await api("POST", f"{T}/tasks", {"plan-task": token}, **options)
        assert "status" not in page.json
        file_numbers += list_planned_numbers(page)
    return file_numbers


_MANIFESTS_BY_LIST: dict[str, list[Manifest]] = {}
"""The manifests of each manifest list that this module has written.

A commit lists the manifests of its parent again.
"""


def _write_manifest(
    folder: Path,
    name: str,
    files: Sequence[DataFile],
    snapshot_id: int,
    sequence: int,
    metadata: dict[str, Any],
    kinds: Mapping[int, str],
) -> Manifest:
    """Write a manifest that adds the files, and return its row of the manifest list."""
    entries = [Entry(ADDED, snapshot_id, None, None, file) for file in files]
    data = build_manifest_bytes(
        entries,
        version=2,
        content=0,
        style=STYLE,
        spec_id=0,
        fields=(),
        kinds=dict(kinds),
        schema=metadata["schemas"][0],
    )
    path = folder / f"{name}.avro"
    path.write_bytes(data)
    rows = sum(file.record_count for file in files)
    counts = {ADDED: (len(files), rows), EXISTING: (0, 0), DELETED: (0, 0)}
    return Manifest(
        f"file://{path}",
        len(data),
        content=0,
        spec_id=0,
        sequence=sequence,
        min_sequence=sequence,
        snapshot_id=snapshot_id,
        entries=entries,
        partitions=None,
        counts=counts,
    )
