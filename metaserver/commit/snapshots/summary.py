"""The summary of a snapshot (Iceberg spec, "Snapshots", and appendix F, "Optional Snapshot Summary Fields").

The rules are those of Java's `SnapshotSummary`. Zero counts are omitted. A total is the parent's total plus the count
that this snapshot adds, minus the count that it removes. If the parent has no total, or the result is invalid, the
total is omitted, because a wrong total would be carried over to every later snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from seamark.formats.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from seamark.formats.iceberg.types.values import LONG_MAX, compute_partition_key
from seamark.formats.protocol.wire import PRODUCER_KEY, SEQUENCE_KEY
from seamark.metaserver.commit.change_requests.change_body import Producer

_TOTALS = ("data-files", "delete-files", "records", "files-size", "position-deletes", "equality-deletes")
_REMOVED_AS = {"data-files": "deleted-data-files", "records": "deleted-records"}
"""The names of removed counts that begin with `deleted-` instead of `removed-` in Iceberg."""
_DIGITS_MAX = 18
"""The maximum number of digits of a total that surely fits into 64 bits."""


class SummaryCounts(NamedTuple):
    """The counts of added files or of removed files."""

    counts: dict[str, int]
    """The counts by name, without the prefix `added-` or `removed-`."""
    partitions: frozenset[object]
    """The changed partitions, each as a spec id and a key for the values."""


NOTHING = SummaryCounts({}, frozenset())


def count_files(files: Iterable[ContentFile]) -> SummaryCounts:
    """Return the counts of the files for a summary.

    A deletion vector counts as a delete file with position deletes. Its size is the size of the vector, because several
    vectors may share a Puffin file.
    """
    counts: dict[str, int] = {}
    partitions: set[object] = set()

    def add(name: str, amount: int) -> None:
        counts[name] = counts.get(name, 0) + amount

    for file in files:
        partitions.add((file.spec_id, compute_partition_key(file.partition)))
        add("files-size", file.content_size_in_bytes if file.is_deletion_vector else file.file_size_in_bytes)  # type: ignore[arg-type]
        if file.content == DATA:
            add("data-files", 1)
            add("records", file.record_count)
            continue
        is_position_delete = file.content == POSITION_DELETES
        add("delete-files", 1)
        if file.is_deletion_vector:
            add("dvs", 1)
        else:
            add("position-delete-files" if is_position_delete else "equality-delete-files", 1)
        add("position-deletes" if is_position_delete else "equality-deletes", file.record_count)
    return SummaryCounts(counts, frozenset(partitions))


def build_summary(
    operation: str,
    added_counts: SummaryCounts,
    removed_counts: SummaryCounts,
    parent: Mapping[str, str] | None,
    properties: Mapping[str, str],
    producer: Producer | None,
) -> dict[str, str]:
    """Return the summary of a snapshot.

    A total is left out if the parent has no valid total, or if the counts contradict each other.

    Args:
        parent: The summary of the parent snapshot, or None if there is no parent.
        properties: Additional entries that the client sent.
        operation: The operation, such as `append`.
        added_counts: The counts of the added files.
        removed_counts: The counts of the removed files.
        producer: The producer whose sequence number is recorded, or None.
    """
    summary = {"operation": operation, **properties}
    if producer is not None:
        summary |= {PRODUCER_KEY: producer.id, SEQUENCE_KEY: str(producer.sequence)}
    for name, count in added_counts.counts.items():
        if count > 0:
            summary[f"added-{name}"] = str(count)
    for name, count in removed_counts.counts.items():
        if count > 0:
            summary[_REMOVED_AS.get(name, f"removed-{name}")] = str(count)
    summary["changed-partition-count"] = str(len(added_counts.partitions | removed_counts.partitions))
    for name in _TOTALS:
        parent_total = 0 if parent is None else _parse_number(parent.get(f"total-{name}"))
        if parent_total is not None:
            total = parent_total + added_counts.counts.get(name, 0) - removed_counts.counts.get(name, 0)
            if 0 <= total <= LONG_MAX:
                summary[f"total-{name}"] = str(total)
    return summary


def _parse_number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        return None
    return int(text)
