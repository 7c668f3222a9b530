"""What a snapshot's summary says (Iceberg spec, "Snapshots", and appendix F, "Optional Snapshot Summary Fields").

Written as Java's `SnapshotSummary` writes it: counts that are zero are left out, totals are the parent's and what this
snapshot added and removed. Where the parent has no such total, or one that does not add up, there is none here either:
a wrong total would go on for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from metaserver.commits.change import Producer
from metaserver.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from metaserver.iceberg.types.values import LONG_MAX, partition_key
from metaserver.wire import PRODUCER_KEY, SEQUENCE_KEY

_TOTALS = ("data-files", "delete-files", "records", "files-size", "position-deletes", "equality-deletes")
_REMOVED_AS = {"data-files": "deleted-data-files", "records": "deleted-records"}
"""Of these Iceberg says deleted where it says removed of the others."""
_DIGITS_MAX = 18


class SummaryCounts(NamedTuple):
    """Of files that were added, or removed."""

    said: dict[str, int]
    """Without `added-` or `removed-` before the name."""
    partitions: frozenset[object]


NOTHING = SummaryCounts({}, frozenset())


def counts_of(files: Iterable[ContentFile]) -> SummaryCounts:
    said: dict[str, int] = {}
    partitions: set[object] = set()

    def add(name: str, amount: int) -> None:
        said[name] = said.get(name, 0) + amount

    for file in files:
        partitions.add((file.spec_id, partition_key(file.partition)))
        add("files-size", file.content_size_in_bytes if file.is_deletion_vector else file.file_size_in_bytes)  # type: ignore[arg-type]
        if file.content == DATA:
            add("data-files", 1)
            add("records", file.record_count)
            continue
        positions = file.content == POSITION_DELETES
        add("delete-files", 1)
        if file.is_deletion_vector:
            add("dvs", 1)
        else:
            add("position-delete-files" if positions else "equality-delete-files", 1)
        add("position-deletes" if positions else "equality-deletes", file.record_count)
    return SummaryCounts(said, frozenset(partitions))


def summary_of(
    operation: str,
    added: SummaryCounts,
    removed: SummaryCounts,
    parent: Mapping[str, str] | None,
    given: Mapping[str, str],
    producer: Producer | None,
) -> dict[str, str]:
    """`parent` is its summary, None where there is no parent."""
    summary = {"operation": operation, **given}
    if producer is not None:
        summary |= {PRODUCER_KEY: producer.id, SEQUENCE_KEY: str(producer.sequence)}
    for name, count in added.said.items():
        if count > 0:
            summary[f"added-{name}"] = str(count)
    for name, count in removed.said.items():
        if count > 0:
            summary[_REMOVED_AS.get(name, f"removed-{name}")] = str(count)
    summary["changed-partition-count"] = str(len(added.partitions | removed.partitions))
    for name in _TOTALS:
        before = 0 if parent is None else _number(parent.get(f"total-{name}"))
        if before is not None:
            total = before + added.said.get(name, 0) - removed.said.get(name, 0)
            if 0 <= total <= LONG_MAX:
                summary[f"total-{name}"] = str(total)
    return summary


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        return None
    return int(text)
