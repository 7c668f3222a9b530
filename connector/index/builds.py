"""An index built: what the server says is missing is read in groups of files, and each index file registered at once.

The rule kept: nothing is held that the server does not know. A build that is cut off loses what its workers had in
hand; whoever asks again is told what is missing still, and goes on from there. Files that writers commit meanwhile are
missing, too, so a build asks until it is told of no file that it has not tried: writers wait for nothing.

Who reads the files is a `Workers`: this process, or a cluster (`spark/index_job.py`); each runs the same pure function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from seamark.connector.client.client import Name
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex, index_data_files
from seamark.connector.parquet.columns import Projection
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.index.files.definitions import of_id
from seamark.metaserver.index.keys.hashing import file_ids

PASSES_MAX = 64
"""How often a build asks anew for what was committed meanwhile; then it ends, and the next one goes on."""
SMALL_FILES, SMALL_BYTES = 64, 1 << 30
"""Fewer files and bytes at once are read here rather than by a cluster that would have to be started."""
_GROUP_FILES_MIN = 8
_GROUPS_A_WORKER = 2
"""In one wave, so that a slow group does not leave the other workers idle."""
_TOLD_MAX = 1000


@dataclass(frozen=True)
class GroupLimits:
    """Of one group of data files, which become one index file; a larger file is a group by itself.

    `size_bytes` is of whole files, of which only the indexed columns are read; `rows` bounds a worker's memory.
    """

    files: int = 1000
    size_bytes: int = 512 << 20
    rows: int = 8_000_000


DEFAULT_LIMITS = GroupLimits()


@dataclass(frozen=True)
class Progress:
    """How far a build is. `files_total` grows with what is committed meanwhile; `eta_ms` is since the epoch."""

    files_done: int
    files_total: int
    files_skipped: int
    rows_done: int
    index_files: int
    size_bytes: int
    eta_ms: int | None


@dataclass(frozen=True)
class BuildReport:
    """`left` files are missing still, because they cannot be indexed; `skipped` are the first of them and why."""

    progress: Progress
    left: int
    skipped: tuple[tuple[str, str], ...]
    json: dict[str, Any]
    """The build as it ended."""


class Workers(Protocol):
    """Who runs `index_data_files`."""

    @property
    def parallelism(self) -> int:
        """Groups that are worked on at the same time."""

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterable[WrittenIndex]:
        """One index file of each group, in any order; what is done may be told before all is."""

    def close(self) -> None:
        """Ends what was started."""


class ClusterFailed(Exception):
    """Workers cannot be started, or what they ran failed; says why in a line."""


class InProcess:
    """One group after the other, here."""

    parallelism = 1

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
        return (index_data_files(task, group) for group in groups)

    def close(self) -> None:
        pass


class Adaptive:
    """Here while there is little to do; by `start_cluster`'s workers from the first wave that is not small."""

    def __init__(self, start_cluster: Callable[[], Workers]) -> None:
        self._start_cluster = start_cluster
        self._cluster: Workers | None = None
        self._here = InProcess()

    @property
    def parallelism(self) -> int:
        return self._cluster.parallelism if self._cluster is not None else os.cpu_count() or 1

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterable[WrittenIndex]:
        files = sum(map(len, groups))
        size_bytes = sum(one.size_bytes for group in groups for one in group)
        if files < SMALL_FILES and size_bytes < SMALL_BYTES:
            return self._here.run(task, groups)
        if self._cluster is None:
            self._cluster = self._start_cluster()
        return self._cluster.run(task, groups)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def build(
    client: IndexClient,
    table: Name,
    index: str,
    workers: Workers,
    *,
    exclusive: bool = False,
    limits: GroupLimits = DEFAULT_LIMITS,
    passes_max: int = PASSES_MAX,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> BuildReport:
    """Builds what the index lacks. Files that cannot be indexed are told and left out.

    `exclusive`: Refused while another build of the index is under way. ClientError where the server refuses, OSError or
    ClusterFailed where an index file cannot be written: the build is then rolled back with the reason, as when it is
    interrupted, and what was registered stays. `workers` is the caller's to close.
    """
    with begun_build(client, table, index, exclusive=exclusive) as begun:
        run = _Run(client, table, index, begun, workers, limits, on_progress)
        for _ in range(passes_max):
            if not run.catch_up():
                break
        return run.report(client.finish_build(table, index, begun["build-id"], **run.outcome))


@contextmanager
def begun_build(client: IndexClient, table: Name, index: str, *, exclusive: bool) -> Iterator[dict[str, Any]]:
    """A build, which the block finishes. Whatever the block raises rolls it back, with the reason."""
    begun = client.start_build(table, index, exclusive=exclusive)
    try:
        yield begun
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        with suppress(ClientError):  # the first error is the one to tell
            client.finish_build(table, index, begun["build-id"], outcome="rolled-back", reason=reason[:1000])
        raise


class _Run:
    """One build under way."""

    def __init__(
        self,
        client: IndexClient,
        table: Name,
        index: str,
        begun: dict[str, Any],
        workers: Workers,
        limits: GroupLimits,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._client = client
        self._at = (table, index, str(begun["build-id"]))
        self._workers = workers
        self._limits = limits
        self._on_progress = on_progress
        self._json = begun
        self._tried: set[int] = set()
        """Of every file that was handed out, half of its identity: none is tried twice, done or skipped."""
        self._skipped = 0
        self._why: dict[str, str] = {}
        """Of the first files that were skipped, by path."""
        self._left = 0
        """Files that were missing in the last pass and had been tried before."""
        self._left_why: list[tuple[str, str]] = []

    @property
    def outcome(self) -> dict[str, Any]:
        """A build that could index no file at all is none, and says why."""
        if not self._left_why or self._json["progress"]["index-files"]:
            return {}
        path, why = self._left_why[0]
        return {"outcome": "rolled-back", "reason": f"{self._left:,} files cannot be indexed, as {path}: {why}"[:1000]}

    def report(self, ended: dict[str, Any]) -> BuildReport:
        return BuildReport(self._progress(ended), self._left, tuple(self._left_why), ended)

    def catch_up(self) -> bool:
        """Indexes what is missing now. False when there was nothing that had not been tried before."""
        source = Source.of(self._client, self._at[0], self._json)
        before = len(self._tried)
        self._left, self._left_why = 0, []
        groups = grouped(self._new(source), self._shared())
        while wave := list(islice(groups, self._workers.parallelism * _GROUPS_A_WORKER)):
            for written in self._workers.run(source.task, wave):
                self._take(written)
        return len(self._tried) > before

    def _new(self, source: Source) -> Iterator[DataFile]:
        """Missing files, page by page, but those that were tried before."""
        for page in self._client.build_files(*self._at):
            if not source.knows(page["files"]):
                source = Source.of(self._client, self._at[0], self._json)
            files = [source.file(one) for one in page["files"]]
            ids = file_ids(*zip(*((one.path, one.size_bytes, one.records) for one in files), strict=True))
            for file, number in zip(files, ids[:, 0].tolist(), strict=True):
                if number not in self._tried:
                    self._tried.add(number)
                    yield file
                    continue
                self._left += 1
                if file.path in self._why:
                    self._left_why.append((file.path, self._why[file.path]))

    def _take(self, written: WrittenIndex) -> None:
        self._skipped += len(written.skipped)
        for path, why in written.skipped[: _TOLD_MAX - len(self._why)]:
            self._why[path] = why
        if written.location is not None:
            self._json = self._client.register_index_files(*self._at, [(written.location, written.size_bytes)])
        self._on_progress(self._progress(self._json))

    def _shared(self) -> GroupLimits:
        """Groups small enough for every worker to have some, as far as that leaves them worth an index file."""
        said = self._json["progress"]
        shares = self._workers.parallelism * _GROUPS_A_WORKER
        files = max(_GROUP_FILES_MIN, -(-said["files-total"] // shares))
        return replace(self._limits, files=min(self._limits.files, files))

    def _progress(self, json: dict[str, Any]) -> Progress:
        said = json["progress"]
        return Progress(
            files_done=said["files-done"],
            files_total=max(said["files-total"], said["files-done"] + self._skipped),
            files_skipped=self._skipped,
            rows_done=said["rows-done"],
            index_files=said["index-files"],
            size_bytes=said["size-in-bytes"],
            eta_ms=said["eta-ms"],
        )


@dataclass(frozen=True)
class Source:
    """A table as its builders see it: what is built of which files, and what readers take from their partitions."""

    task: IndexTask
    partitioned: Mapping[int, frozenset[int]]
    """By spec id: columns that stand in the partition by identity."""

    @staticmethod
    def of(client: IndexClient, table: Name, begun: Mapping[str, Any]) -> Source:
        """As the table is now: schema and keys of the storage change under a long build."""
        loaded = client.load_table(table)
        metadata = decode_table(loaded.metadata, loaded.location)
        if metadata.table_uuid != begun["table-uuid"]:
            raise TableReplaced(f"{loaded.location} is another table than the build {begun['build-id']} was begun for")
        task = IndexTask(
            begun["table-uuid"],
            of_id(begun["definition-id"], metadata.current_schema, metadata.schemas),
            Projection(metadata.current_schema),
            begun["folder"],
            Storage(loaded.storage),
        )
        return Source(task, {spec.spec_id: _identities(spec) for spec in metadata.partition_specs})

    def knows(self, listed: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the partition specs of all these files were there when the table was looked at."""
        return all(one["spec-id"] in self.partitioned for one in listed)

    def file(self, listed: Mapping[str, Any]) -> DataFile:
        return DataFile(
            path=listed["file-path"],
            size_bytes=listed["file-size-in-bytes"],
            records=listed["record-count"],
            format=listed["file-format"],
            partitioned=self.partitioned[listed["spec-id"]],
        )


class TableReplaced(Exception):
    """The name leads to another table by now."""


def _identities(spec: PartitionSpec) -> frozenset[int]:
    return frozenset(source for one in spec.fields if one.transform == IDENTITY for source in one.sources)


def grouped(files: Iterable[DataFile], limits: GroupLimits) -> Iterator[tuple[DataFile, ...]]:
    """Files in their order, cut into groups within the limits; each has a file at least."""
    group: list[DataFile] = []
    size_bytes = rows = 0
    for one in files:
        size_bytes, rows = size_bytes + one.size_bytes, rows + one.records
        if group and (len(group) >= limits.files or size_bytes > limits.size_bytes or rows > limits.rows):
            yield tuple(group)
            group, size_bytes, rows = [], one.size_bytes, one.records
        group.append(one)
    if group:
        yield tuple(group)
