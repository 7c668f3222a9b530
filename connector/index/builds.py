"""Builds an index: reads uncovered data files in groups, and registers an index file for each group.

All state is on the server. An interrupted build loses only the groups that its workers were reading. The next build
requests the files that are still missing, and continues with them. Files that are committed during a build are missing
as well. Therefore a build repeats the request until the response contains only files that the build has tried before.
Builds do not block writers.

`Workers` read the files, in this process or in a cluster (`spark/index_job.py`). Both run the same pure function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import Name
from seamark.connector.client.progress import add_expected_work
from seamark.connector.client.storage import Storage
from seamark.connector.groups import divide
from seamark.connector.index.entry_copies import FileId, copy_unchanged_entries
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex, index_data_files
from seamark.connector.index.lookups import DimensionRefused, Dimensions, read_dimensions
from seamark.connector.parquet.columns import Projection
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import parse_definition
from seamark.formats.index.keys.hashing import compute_file_ids

PASSES_MAX = 64
"""The maximum number of times that a build requests missing files.

Files that are committed later are left to the next build.
"""
SMALL_FILES, SMALL_BYTES = 64, 1 << 30
"""A wave with fewer files and bytes than this is read in this process, because starting a cluster takes longer."""
_GROUP_FILES_MIN = 8
_GROUPS_PER_WORKER = 2
"""The number of groups for each worker in a wave.

With two groups, a slow group does not leave the other workers idle.
"""
_SKIPPED_FILES_MAX = 1000
"""The maximum number of skipped files for which a build stores the reason."""


@dataclass(frozen=True)
class GroupLimits:
    """The limits of a group of data files. Each group becomes an index file.

    A data file above a limit is its own group.

    Attributes:
        rows: The maximum number of rows, which limits the memory of a worker.
        size_bytes: The maximum size of the whole files, although only the indexed columns are read.
    """

    files: int = 1000
    size_bytes: int = 512 << 20
    rows: int = 8_000_000


DEFAULT_LIMITS = GroupLimits()


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build.

    Attributes:
        files_total: The number of files, including files that are committed during the build.
        eta_ms: The estimated time of the end, in milliseconds since the epoch.
    """

    files_done: int
    files_total: int
    files_skipped: int
    rows_done: int
    index_files: int
    size_bytes: int
    eta_ms: int | None


@dataclass(frozen=True)
class BuildReport:
    """The result of a build.

    Attributes:
        files_not_indexed: The number of files that are still missing, because they cannot be indexed.
        skipped: The paths of the first of these files, each with the reason.
    """

    progress: BuildProgress
    files_not_indexed: int
    skipped: tuple[tuple[str, str], ...]
    json: dict[str, Any]
    """The server's response to the end of the build."""


class Workers(Protocol):
    """Runs `index_data_files`, in this process or elsewhere."""

    @property
    def parallelism(self) -> int:
        """The number of groups that are read concurrently."""

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterable[WrittenIndex]:
        """Write one index file for each group, and yield the results in the order in which groups finish."""

    def close(self) -> None:
        """Stop all workers."""


class ClusterFailed(Exception):
    """Raised if the workers cannot be started, or their work fails. The message has one line."""


class InProcessWorkers:
    """Indexes groups of data files in this process, one group after the other."""

    parallelism = 1

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
        return (index_data_files(task, group) for group in groups)

    def close(self) -> None:
        pass


class AdaptiveWorkers:
    """Runs small waves in this process, and starts the cluster at the first large wave.

    A wave is the groups of one call of `run`. A small wave takes less time than the start of the cluster.
    """

    def __init__(self, start_cluster: Callable[[], Workers]) -> None:
        self._start_cluster = start_cluster
        self._cluster: Workers | None = None
        self._in_process_workers = InProcessWorkers()

    @property
    def parallelism(self) -> int:
        return self._cluster.parallelism if self._cluster is not None else os.cpu_count() or 1

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterable[WrittenIndex]:
        files = sum(map(len, groups))
        size_bytes = sum(file.size_bytes for group in groups for file in group)
        if files < SMALL_FILES and size_bytes < SMALL_BYTES:
            return self._in_process_workers.run(task, groups)
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
    on_progress: Callable[[BuildProgress], None] = lambda progress: None,
) -> BuildReport:
    """Index the data files that the index does not cover.

    The report lists files that cannot be indexed. After an error or an interrupt, the build is rolled back with the
    reason, and registered index files stay. The caller closes `workers`.

    Args:
        workers: The workers that read the data files.
        exclusive: Whether to refuse the start while another build of the index is running.
        limits: The limits of the groups of data files.
        passes_max: How often the missing files are requested, because writers may add files during the build.
        on_progress: Called with the progress after each index file.

    Raises:
        ClientError: The server refuses a request or cannot be reached.
        OSError: An index file cannot be written.
        ClusterFailed: The workers cannot be started, or their work fails.
    """
    with open_build(client, table, index, exclusive=exclusive) as build_json:
        run = _BuildRun(client, table, index, build_json, workers, limits, on_progress)
        run.copy_unchanged_entries()
        for _ in range(passes_max):
            if not run.catch_up():
                break
        return run.report(
            client.finish_build(table, index, build_json["build-id"], **run.outcome, refused_files=run.refused_files)
        )


@contextmanager
def open_build(client: IndexClient, table: Name, index: str, *, exclusive: bool) -> Iterator[dict[str, Any]]:
    """Start a build. The block has to finish it.

    If the block raises an exception, the build is rolled back with the reason.
    """
    build_json = client.start_build(table, index, exclusive=exclusive)
    try:
        yield build_json
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, DimensionRefused):
            # A user who can read the indexed table can load the reason, but may have no right to the dimension table.
            reason = "A dimension table cannot be used; only the builder reports why"
        with suppress(ClientError):  # The error of the block is raised, and not an error of this request.
            client.finish_build(table, index, build_json["build-id"], outcome="rolled-back", reason=reason[:1000])
        raise


class _BuildRun:
    """The state of a running build."""

    def __init__(
        self,
        client: IndexClient,
        table: Name,
        index: str,
        build_json: dict[str, Any],
        workers: Workers,
        limits: GroupLimits,
        on_progress: Callable[[BuildProgress], None],
    ) -> None:
        self._client = client
        self._build_key = (table, index, str(build_json["build-id"]))
        self._workers = workers
        self._file_keys = EnvironmentKeys(table)
        self._limits = limits
        self._on_progress = on_progress
        self._json = build_json
        self._tried_files: set[int] = set()
        """The high halves of the identities of all files that workers have received. No file is tried twice."""
        self._skipped_count = 0
        self._reasons: dict[str, str] = {}
        """The reasons why the first skipped files were skipped, by path."""
        self.refused_files: dict[str, str] = {}
        """The reasons of the first files that no build can index, by path."""
        self._not_indexed_count = 0
        """The number of files that the last pass listed as missing although they had been tried."""
        self._not_indexed_reasons: list[tuple[str, str]] = []
        self._dimensions: Dimensions | None = None
        """The dimension tables, whose snapshots are part of the definition. They are read for the first new entry."""

    @property
    def outcome(self) -> dict[str, Any]:
        """The keyword arguments for `IndexClient.finish_build`.

        If no file could be indexed, they roll the build back with a reason. If they are empty, the build ends normally.
        """
        if not self._not_indexed_reasons or self._json["progress"]["index-files"]:
            return {}
        path, reason = self._not_indexed_reasons[0]
        return {
            "outcome": "rolled-back",
            "reason": f"{self._not_indexed_count:,} files cannot be indexed; the first is {path}: {reason}"[:1000],
        }

    def report(self, build_json: dict[str, Any]) -> BuildReport:
        return BuildReport(
            self._decode_progress(build_json), self._not_indexed_count, tuple(self._not_indexed_reasons), build_json
        )

    def copy_unchanged_entries(self) -> None:
        """Register entries of an earlier definition for the files whose keys have the same attributes as before.

        The earlier definition differs only by the snapshots of dimension tables. The table is loaded again if a file
        has a partition spec that is newer than the loaded table.
        """
        earlier_files = self._json.get("earlier-index-files")
        if not earlier_files:
            return
        source = self._make_source()
        missing: dict[FileId, DataFile] = {}
        for page in self._client.list_files_to_index(*self._build_key):
            if not source.has_partition_specs_of(page["files"]):
                source = self._make_source()
            files = [source.make_data_file(listed) for listed in page["files"]]
            ids = compute_file_ids(*zip(*((file.path, file.size_bytes, file.records) for file in files), strict=True))
            missing.update(zip(((high, low) for high, low in ids.tolist()), files, strict=True))
        if missing:
            dimensions = self._read_dimensions(source.task)
            for written in copy_unchanged_entries(self._client, source.task, earlier_files, missing, dimensions):
                self._register(written)

    def _read_dimensions(self, task: IndexTask) -> Dimensions:
        if self._dimensions is None:
            self._dimensions = read_dimensions(self._client, task.definition.terms)
        return self._dimensions

    def catch_up(self) -> bool:
        """Index the missing files. Return False if the build has tried all of them before."""
        source = self._make_source()
        tried_before = len(self._tried_files)
        self._not_indexed_count, self._not_indexed_reasons = 0, []
        groups = group_files(self._request_untried_files(source), self._choose_wave_limits())
        while wave := list(islice(groups, self._workers.parallelism * _GROUPS_PER_WORKER)):
            add_expected_work(sum(map(len, wave)), sum(file.size_bytes for group in wave for file in group))
            task = replace(source.task, dimensions=self._read_dimensions(source.task))
            for written_index in self._workers.run(task, wave):
                self._register(written_index)
        return len(self._tried_files) > tried_before

    def _make_source(self) -> BuildSource:
        return BuildSource.from_build(self._client, self._build_key[0], self._json, self._file_keys)

    def _request_untried_files(self, source: BuildSource) -> Iterator[DataFile]:
        """Yield the missing files that the build has not tried before. They are requested page by page.

        Other files are counted as not indexed: files that an earlier build could not index (`refused`), and files that
        this build has tried.
        """
        for page in self._client.list_files_to_index(*self._build_key):
            if not source.has_partition_specs_of(page["files"]):
                source = self._make_source()
            files = [source.make_data_file(file_json) for file_json in page["files"]]
            ids = compute_file_ids(*zip(*((file.path, file.size_bytes, file.records) for file in files), strict=True))
            for file, file_id, file_json in zip(files, ids[:, 0].tolist(), page["files"], strict=True):
                if file_id not in self._tried_files and "refused" in file_json:  # An earlier build has read the file.
                    self._not_indexed_count += 1
                    if len(self._not_indexed_reasons) < _SKIPPED_FILES_MAX:
                        self._not_indexed_reasons.append((file.path, file_json["refused"]))
                    continue
                if file_id not in self._tried_files:
                    self._tried_files.add(file_id)
                    yield file
                    continue
                self._not_indexed_count += 1
                if file.path in self._reasons:
                    self._not_indexed_reasons.append((file.path, self._reasons[file.path]))

    def _register(self, written_index: WrittenIndex) -> None:
        self._skipped_count += len(written_index.skipped)
        refused_paths = set(written_index.refused)
        for path, reason in written_index.skipped[: _SKIPPED_FILES_MAX - len(self._reasons)]:
            self._reasons[path] = reason
            if path in refused_paths:
                self.refused_files[path] = reason
        if written_index.location is not None:
            self._json = self._client.register_index_files(
                *self._build_key, [(written_index.location, written_index.size_bytes)]
            )
        self._on_progress(self._decode_progress(self._json))

    def _choose_wave_limits(self) -> GroupLimits:
        """Return limits of groups with which every worker gets some groups of at least `_GROUP_FILES_MIN` files.

        A wave is the set of groups that the workers index before the next groups are requested.
        """
        progress = self._json["progress"]
        groups_per_wave = self._workers.parallelism * _GROUPS_PER_WORKER
        files = max(_GROUP_FILES_MIN, -(-progress["files-total"] // groups_per_wave))
        return replace(self._limits, files=min(self._limits.files, files))

    def _decode_progress(self, json: dict[str, Any]) -> BuildProgress:
        progress = json["progress"]
        return BuildProgress(
            files_done=progress["files-done"],
            # The total includes at least all files that are done or skipped, so the progress never exceeds 100 %.
            files_total=max(progress["files-total"], progress["files-done"] + self._skipped_count),
            files_skipped=self._skipped_count,
            rows_done=progress["rows-done"],
            index_files=progress["index-files"],
            size_bytes=progress["size-in-bytes"],
            eta_ms=progress["eta-ms"],
        )


@dataclass(frozen=True)
class BuildSource:
    """A table during a build.

    It contains the index task, and the columns whose values readers take from partition values.
    """

    task: IndexTask
    partition_value_columns: Mapping[int, frozenset[int]]
    """The columns with an identity partition field, by spec id."""

    @staticmethod
    def from_build(
        client: IndexClient,
        table: Name,
        build_json: Mapping[str, Any],
        file_keys: EnvironmentKeys | None = None,
    ) -> BuildSource:
        """Load the table. A long build loads it repeatedly, because the schema and the storage credentials may change.

        The task has no dimension tables. The build reads them later, when it computes new index entries.

        Raises:
            TableReplaced: The name now refers to another table.
        """
        engine_table = client.load_table(table)
        metadata = decode_table(engine_table.metadata, engine_table.location)
        if metadata.table_uuid != build_json["table-uuid"]:
            raise TableReplaced(
                f"{engine_table.location} is not the table for which the build {build_json['build-id']} was started"
            )
        definition = parse_definition(build_json["definition-id"], metadata.current_schema, metadata.schemas)
        task = IndexTask(
            build_json["table-uuid"],
            definition,
            Projection(metadata.current_schema),
            build_json["folder"],
            Storage.of_table(engine_table.storage, metadata.location),
            file_keys or EnvironmentKeys(table),
        )
        return BuildSource(task, {spec.spec_id: list_identity_columns(spec) for spec in metadata.partition_specs})

    def has_partition_specs_of(self, files_json: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether the table had the partition specs of all these files when it was loaded."""
        return all(file["spec-id"] in self.partition_value_columns for file in files_json)

    def make_data_file(self, file_json: Mapping[str, Any]) -> DataFile:
        return DataFile(
            path=file_json["file-path"],
            size_bytes=file_json["file-size-in-bytes"],
            records=file_json["record-count"],
            format=file_json["file-format"],
            partition_value_columns=self.partition_value_columns[file_json["spec-id"]],
        )


class TableReplaced(Exception):
    """Raised if the name of the table now refers to another table."""


def list_identity_columns(spec: PartitionSpec) -> frozenset[int]:
    """Return the columns with an identity field in a partition spec."""
    return frozenset(source for field in spec.fields if field.transform == IDENTITY for source in field.sources)


def group_files(files: Iterable[DataFile], limits: GroupLimits) -> Iterator[tuple[DataFile, ...]]:
    """Divide files into groups within the limits, in the order of the files. Each group has at least one file."""
    maxima = (limits.files, limits.size_bytes, limits.rows)
    return map(tuple, divide(files, lambda file: (1, file.size_bytes, file.records), maxima))
