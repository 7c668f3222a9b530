"""Tests that a scan's reads are counted from the text of its tasks if it has each location, else from the tasks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from bench.ssb.spark import FilesRead, _count_files


@dataclass
class ScanTaskStub:
    """A scan task of Iceberg's Java library, with the methods that `_count_files` calls."""

    location: str
    bytes: int
    residual: str = "true"

    def file(self) -> Any:
        return SimpleNamespace(location=lambda: self.location)

    def __str__(self) -> str:
        return f"BaseFileScanTask{{file={self.location}, partition_data=PartitionData{{}}, residual={self.residual}}}"


class Group:
    """A group of scan tasks, with the Java methods that `_count_files` calls."""

    def __init__(self, *tasks: ScanTaskStub, text: str | None = None) -> None:
        self._tasks, self._text = tasks, text

    def taskGroup(self) -> Group:  # noqa: N802
        return self

    def tasks(self) -> Group:
        return self

    def size(self) -> int:
        return len(self._tasks)

    def sizeBytes(self) -> int:  # noqa: N802
        return sum(task.bytes for task in self._tasks)

    def toArray(self) -> tuple[ScanTaskStub, ...]:  # noqa: N802
        return self._tasks

    def toString(self) -> str:  # noqa: N802
        return f"[{', '.join(map(str, self._tasks))}]" if self._text is None else self._text


def build_node(*groups: Group) -> Any:
    return SimpleNamespace(inputPartitions=lambda: SimpleNamespace(size=lambda: len(groups), apply=groups.__getitem__))


RESIDUAL_LIKE_A_LOCATION = 'ref(name="c") == "file=x, partition_data=y"'


@pytest.mark.parametrize(
    "groups",
    [
        (Group(ScanTaskStub("a", 1), ScanTaskStub("b", 2)), Group(ScanTaskStub("c", 4))),
        (Group(ScanTaskStub("a", 1), ScanTaskStub("b", 2)), Group(ScanTaskStub("c", 3)), Group(ScanTaskStub("c", 1))),
        (Group(ScanTaskStub("a", 1, RESIDUAL_LIKE_A_LOCATION), ScanTaskStub("b", 2)), Group(ScanTaskStub("c", 4))),
        (Group(ScanTaskStub("a", 1), ScanTaskStub("b", 2), text="[…]"), Group(ScanTaskStub("c", 4))),
    ],
    ids=["files", "a split file", "a literal like a location", "another text"],
)
def test_files_and_bytes_of_a_scan_are_counted(groups: tuple[Group, ...]) -> None:
    assert _count_files(build_node(*groups)) == FilesRead(3, 7)
