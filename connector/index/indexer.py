"""Builds, merges and audits the indexes of all tables of a catalog, in rounds.

An indexer may stop at any time, and several indexers may run concurrently. In each round, it requests the pending work
from the server. A build or merge starts only if no other build of the same index is running. If two run nevertheless,
the result is still correct. A failure is logged, delays further attempts with exponential backoff, and does not affect
other indexes. Between rounds, the indexer stores only these backoffs and the progress of unfinished audits. The server
stores the time of the last audit of each index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from logging import DEBUG, INFO
from traceback import format_tb

import structlog

from seamark.connector.client.errors import (
    AccessDenied,
    ClientError,
    Conflict,
    LoginRequired,
    NoSuchResource,
    Refused,
    Unavailable,
    Unreachable,
)
from seamark.connector.client.indexes import Index, IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.audits import verify_sample
from seamark.connector.index.builds import (
    DEFAULT_LIMITS,
    BuildSource,
    ClusterFailed,
    GroupLimits,
    TableReplaced,
    Workers,
    build,
    open_build,
)
from seamark.connector.index.lookups import find_current_terms, read_dimensions
from seamark.connector.index.merges import (
    MERGED_FILES_MIN,
    RegisteredFile,
    find_unsupported_files,
    merge_index_files,
    select_merge,
)
from seamark.connector.index.verification import VerificationResult
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import IndexDefinition, list_writable_definitions, read_definitions
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import SeamarkError

PASSES_MAX = 8
"""The maximum number of passes of one build.

With this limit, a table with continuous writes does not block the other tables.
"""
MERGES_MAX = 64
"""The maximum number of merges of one index in a round."""
BACKOFF_S, BACKOFF_MAX_S = 30.0, 3600.0
"""The first backoff after a failure, and the maximum."""
BACKOFFS_MAX = 10_000
"""The maximum number of backoffs that the indexer stores."""
UNSUPPORTED_MAX = 10_000
"""The maximum number of index files of an unknown version that the indexer remembers."""
_CONFLICT_STATUS = 409
_LOGGED_PROBLEMS_MAX = 3
"""The maximum number of problems of an index file in a log message."""
_EXPECTED = (ClientError, ClusterFailed, OSError, SeamarkError, TableReplaced, ValueError)
_log = structlog.get_logger("seamark.indexer")

Table = tuple[str, ...]
Key = tuple[Table, str, str]
"""A table, the name of an index or an empty string, and an action."""


@dataclass(frozen=True)
class AuditLimits:
    """The limits of audits in one round.

    When a limit is reached, no further index file is verified in the round. An index is audited again `every_s` seconds
    after its last audit.
    """

    size_bytes: int = 256 << 20
    seconds: float = 10.0
    every_s: float = 86_400.0
    sample: int = 1
    """The number of data files of each index file that an audit reads again."""


@dataclass
class MaintenanceCounts:
    """The numbers of things that the indexer has done in one round, or for one table.

    Attributes:
        files_not_indexed: The number of data files that cannot be indexed.
        reason: The reason why one of these files cannot be indexed.
        verified: The number of verified index files.
        damaged: The number of verified index files with problems.
        left: The number of actions that were left out because another builder was working on the index.
        redefined: The number of indexes that were defined again because a dimension table had changed.
    """

    tables: int = 0
    indexes: int = 0
    builds: int = 0
    files: int = 0
    files_not_indexed: int = 0
    reason: str = field(default="", compare=False)
    merges: int = 0
    verified: int = 0
    verified_bytes: int = 0
    damaged: int = 0
    failed: int = 0
    left: int = 0
    redefined: int = 0


@dataclass(frozen=True)
class _Backoff:
    """The delay before the next attempt of an action.

    Attributes:
        lag_files: If set, the backoff applies only while the index lacks exactly this number of files. If None,
            it always applies.
    """

    until_s: float
    backoff_s: float
    lag_files: int | None


@dataclass(order=True)
class _DueAudit:
    """An index whose audit is due, ordered by the time of the last audit."""

    audited_ms: int
    table: Table
    name: str


@dataclass
class _AuditProgress:
    """An unfinished audit.

    It has the locations of the verified index files, and the number of damaged files among them.
    """

    locations: set[str] = field(default_factory=set)
    damaged: int = 0
    size_bytes: int = 0


@dataclass
class Indexer:
    """Maintains the indexes of a catalog.

    Attributes:
        open_workers: Opens the workers of a round, as a context manager.
        audit_limits: The limits of audits, or None to audit no index.
        now: Returns a monotonic time in seconds.
        now_ms: Returns the time in milliseconds since the epoch.
    """

    client: IndexClient
    open_workers: Callable[[], AbstractContextManager[Workers]]
    limits: GroupLimits = DEFAULT_LIMITS
    now: Callable[[], float] = time.monotonic
    now_ms: Callable[[], int] = SystemClock().now_ms
    audit_limits: AuditLimits | None = None
    _audit_progress: dict[tuple[Table, str], _AuditProgress] = field(default_factory=dict)
    _backoffs: dict[Key, _Backoff] = field(default_factory=dict)
    _unsupported_locations: set[str] = field(default_factory=set)
    """The locations of index files of an unknown version."""

    def run(self, interval_s: float) -> None:
        """Run a round every `interval_s` seconds, or less often after a round that failed.

        The method does not return.
        """
        backoff_s = interval_s
        while True:
            try:
                self.maintain_all_tables()
                backoff_s = interval_s
            except ClientError as error:
                backoff_s = min(max(backoff_s, 1.0) * 2, BACKOFF_MAX_S)
                _log.error("round ended by an error", error=error.message, status=error.status, again_in_s=backoff_s)
            time.sleep(backoff_s)

    def maintain_all_tables(self) -> MaintenanceCounts:
        """Maintain every table once, in one round.

        Raises:
            ClientError: The catalog cannot be listed, or the server is unreachable.
        """
        counts = MaintenanceCounts()
        due_audits: list[_DueAudit] = []
        with self.open_workers() as workers:
            for table in self._list_tables():
                counts.tables += 1
                self._run_unless_backed_off(
                    _make_table_key(table), partial(self._maintain_table, table, workers, counts, due_audits), counts
                )
        self._run_audits(sorted(due_audits), counts)
        has_activity = counts.builds or counts.merges or counts.damaged or counts.failed
        _log.log(INFO if has_activity else DEBUG, "round done", **vars(counts))
        return counts

    def maintain(self, table: Table) -> MaintenanceCounts:
        """Run the due index jobs of one table, and return their counts.

        Nothing is done while a delay (backoff) after an earlier failure of the table lasts.

        Raises:
            ClientError: The server is unreachable.
        """
        counts, due_audits = MaintenanceCounts(tables=1), list[_DueAudit]()
        with self.open_workers() as workers:
            self._run_unless_backed_off(
                _make_table_key(table), partial(self._maintain_table, table, workers, counts, due_audits), counts
            )
        self._run_audits(sorted(due_audits), counts)
        return counts

    def _list_tables(self) -> Iterator[Table]:
        for namespace in self.client.namespaces():
            with suppress(NoSuchResource):
                yield from self.client.tables(namespace)

    def _maintain_table(
        self, table: Table, workers: Workers, counts: MaintenanceCounts, due_audits: list[_DueAudit]
    ) -> None:
        """Build and merge the indexes of a table. Add those that must be audited again to `due_audits`."""
        definitions, writable_definitions = self._read_definitions(table)
        if not definitions:
            # The state of the indexes is not requested here, because the server would have to read manifests for it.
            return
        redefined_before = counts.redefined
        # A definition with a dropped column stays unchanged, because its name may belong to another column now.
        for definition in writable_definitions:
            if definition.dimension_tables:
                action = partial(self._redefine, table, definition, counts)
                self._run_unless_backed_off((table, definition.name, "redefine"), action, counts)
        if counts.redefined > redefined_before:
            definitions, _ = self._read_definitions(table)
        indexes = self.client.indexes(table)
        self._read_dimensions_ahead(definitions, indexes)
        for index in indexes:
            # The kind `bucket` is a partition field, which has no index files.
            if index.state == "enabled" and index.kind != "bucket" and index.health != "broken":
                counts.indexes += 1
                # The missing files of the current snapshot, and of the snapshots of other branches and of tags.
                lag_files = index.lag_files + index.lag_files_of_refs
                if lag_files:
                    action = partial(self._build, table, index, workers, counts)
                    self._run_unless_backed_off((table, index.name, "build"), action, counts, lag_files=lag_files)
                # Merges may be due even without a build, because other clients also build index files.
                # A merge also moves misplaced files: files in the folder that earlier versions of Seamark used. A level
                # is full if it has enough files for a merge.
                has_full_level = any(count >= MERGED_FILES_MIN for count in index.json["levels"].values())
                if lag_files or has_full_level or index.json.get("misplaced"):
                    self._run_unless_backed_off(
                        (table, index.name, "merge"), partial(self._merge, table, index.name, counts), counts
                    )
                if self._is_due(index):
                    due_audits.append(_DueAudit(index.audited_ms or 0, table, index.name))

    def _read_definitions(self, table: Table) -> tuple[tuple[IndexDefinition, ...], tuple[IndexDefinition, ...]]:
        """Return the enabled indexes, and those of them whose columns the table still has."""
        engine_table = self.client.load_table(table)
        metadata = decode_table(engine_table.metadata, engine_table.location)
        return read_definitions(metadata).enabled, list_writable_definitions(metadata)

    def _read_dimensions_ahead(self, definitions: Sequence[IndexDefinition], indexes: Sequence[Index]) -> None:
        """Read the dimension tables of several builds together, so that each of them is read once.

        The builds report a table that cannot be read.
        """
        lagging_names = {index.name for index in indexes if index.state == "enabled" and index.lag_files}
        lagging_definitions = [
            definition for definition in definitions if definition.dimension_tables and definition.name in lagging_names
        ]
        if len(lagging_definitions) > 1:
            with suppress(ClientError):
                read_dimensions(self.client, [term for definition in lagging_definitions for term in definition.terms])

    def _redefine(self, table: Table, definition: IndexDefinition, counts: MaintenanceCounts) -> None:
        """Define an index again if its dimension tables have changed, so that the build copies the unchanged entries.

        The definition stays if another client changes it at the same time, or if the caller may not read a dimension
        table.
        """
        terms = find_current_terms(self.client, definition.terms)
        if terms is None:
            return
        log = _log.bind(table=_format_table(table), index=definition.name)
        try:
            self.client.put_index(table, definition.name, columns=[term.text for term in terms], replaces=definition.id)
        except (Conflict, AccessDenied) as error:
            log.info("index not defined again", error=error.message)
            return
        counts.redefined += 1
        log.info("index defined again, because a dimension table has changed")

    def _is_due(self, index: Index) -> bool:
        if self.audit_limits is None or not index.json["levels"]:
            return False
        return index.audited_ms is None or index.audited_ms < self.now_ms() - 1000 * self.audit_limits.every_s

    def _run_audits(self, due_audits: Sequence[_DueAudit], counts: MaintenanceCounts) -> None:
        """Audit as many index files as the limits allow.

        Damaged index files are quarantined. The next round builds them again. The progress of indexes whose audit is no
        longer due is dropped.
        """
        if self.audit_limits is None:
            return
        for stale_key in self._audit_progress.keys() - {(due_audit.table, due_audit.name) for due_audit in due_audits}:
            del self._audit_progress[stale_key]
        limits, until_s = self.audit_limits, self.now() + self.audit_limits.seconds

        def has_time() -> bool:
            return self.now() < until_s and counts.verified_bytes < limits.size_bytes

        for due_audit in due_audits:
            if not has_time():
                break
            action = partial(self._audit, due_audit.table, due_audit.name, limits.sample, has_time, counts)
            self._run_unless_backed_off((due_audit.table, due_audit.name, "audit"), action, counts)

    def _audit(
        self, table: Table, name: str, sample: int, has_time: Callable[[], bool], counts: MaintenanceCounts
    ) -> None:
        """Verify index files of an index until all are verified, or until `has_time` returns False.

        An unfinished audit continues in the next round. The end of an audit is recorded by the server.

        Args:
            table: The table.
            name: The name of the index.
            sample: The number of data files of each index file that are read again.
            has_time: Returns whether another index file may be verified.
            counts: The counts, to which the verified and damaged index files are added.
        """
        progress = self._audit_progress.setdefault((table, name), _AuditProgress())

        def on_verdict(verdict: VerificationResult, size_bytes: int) -> bool:
            progress.locations.add(verdict.location)
            progress.size_bytes += size_bytes
            counts.verified += 1
            counts.verified_bytes += size_bytes
            if verdict.problems and not verdict.has_newer_version:
                progress.damaged += 1
                counts.damaged += 1
                _log.warning(
                    "index file has problems", table=_format_table(table), index=name, location=verdict.location,
                    problems=list(verdict.problems[:_LOGGED_PROBLEMS_MAX]),
                )  # fmt: skip
            return has_time()

        if verify_sample(
            self.client, table, name, sample=sample, verified_locations=progress.locations, on_verdict=on_verdict
        ):
            self.client.record_audit(
                table,
                name,
                index_files=len(progress.locations),
                damaged_files=progress.damaged,
                size_bytes=progress.size_bytes,
            )
            del self._audit_progress[table, name]

    def _build(self, table: Table, index: Index, workers: Workers, counts: MaintenanceCounts) -> None:
        report = build(
            self.client, table, index.name, workers, exclusive=True, limits=self.limits, passes_max=PASSES_MAX
        )
        counts.builds += 1
        counts.files += report.progress.files_done
        counts.files_not_indexed += report.files_not_indexed
        _log.info(
            "index built",
            table=_format_table(table),
            index=index.name,
            files=report.progress.files_done,
            rows=report.progress.rows_done,
            index_files=report.progress.index_files,
            size_bytes=report.progress.size_bytes,
        )
        if report.files_not_indexed:
            path, reason = report.skipped[0] if report.skipped else ("", "tried before")
            raise _FilesNotIndexed(
                report.files_not_indexed,
                f"{report.files_not_indexed} data files cannot be indexed; the first is {path}: {reason}",
            )

    def _merge(self, table: Table, name: str, counts: MaintenanceCounts) -> None:
        """Merge index files until no merge is due, at most `MERGES_MAX` times.

        Entries of data files that no snapshot references are dropped. Index files of an unknown version are left out of
        this merge and of later merges.
        """
        for _ in range(MERGES_MAX):
            files_to_merge = select_merge(
                RegisteredFile(
                    file_json["location"], file_json["level"], file_json["size-in-bytes"], file_json["created-ms"]
                )
                for file_json in self.client.index(table, name).json["index-files"]
                if file_json["state"] == "live" and file_json["location"] not in self._unsupported_locations
            )
            if not files_to_merge:
                return
            merged_locations = [file.location for file in files_to_merge]
            engine_table = self.client.load_table(table)
            unsupported_locations = find_unsupported_files(
                merged_locations, Storage.of_table(engine_table.storage, engine_table.location)
            )
            if unsupported_locations:  # Without these files, the merge may not be due.
                self._leave_out(table, name, unsupported_locations)
                continue
            with open_build(self.client, table, name, exclusive=True) as build_json:
                # A merge copies entries. It works also after a dimension table was dropped or its snapshot expired.
                task = BuildSource.from_build(self.client, table, build_json).task
                unreferenced_files = self.client.list_unreferenced_files(table, name, merged_locations)
                merged_index = merge_index_files(
                    merged_locations, task.folder, task.storage, dropped_entries=unreferenced_files
                )
                replaced_locations = [
                    location for location in merged_locations if location not in merged_index.unsupported
                ]
                if merged_index.location is None and replaced_locations:
                    # The registry can replace files only by a new file, so there must be one.
                    merged_index = merge_index_files(merged_locations, task.folder, task.storage)
                if merged_index.location is not None:
                    written_files = [(merged_index.location, merged_index.size_bytes)]
                    self.client.register_index_files(
                        table, name, build_json["build-id"], written_files, replaces=replaced_locations
                    )
                self.client.finish_build(table, name, build_json["build-id"])
            if merged_index.unsupported:
                self._leave_out(table, name, merged_index.unsupported)
            if merged_index.location is None:
                if not merged_index.unsupported:
                    return
                continue
            counts.merges += 1
            _log.info(
                "index files merged",
                table=_format_table(table),
                index=name,
                merged=len(replaced_locations),
                files=merged_index.files,
                rows=merged_index.rows,
                size_bytes=merged_index.size_bytes,
            )

    def _leave_out(self, table: Table, name: str, locations: Sequence[str]) -> None:
        """Exclude index files of an unknown version from later merges.

        The set of excluded locations is cleared when it is full. Later merges then find these files again.
        """
        if len(self._unsupported_locations) + len(locations) > UNSUPPORTED_MAX:
            self._unsupported_locations.clear()
        self._unsupported_locations.update(locations)
        _log.warning("index files of an unknown version not merged", table=_format_table(table), index=name,
                     index_files=len(locations))  # fmt: skip

    def _run_unless_backed_off(
        self, key: Key, action: Callable[[], None], counts: MaintenanceCounts, *, lag_files: int | None = None
    ) -> None:
        """Run an action, unless a backoff applies to it.

        Failures are logged, and set a backoff. An error is raised only if the server is unavailable. A conflict with
        another builder sets no backoff, because the other builder does the work. A failure because the table or the
        index no longer exists is ignored.

        Args:
            key: The table, the index and the name of the action.
            action: The action.
            counts: The totals, to which failures are added.
            lag_files: The number of files that the index lacks. A backoff for another number does not apply.
        """
        backoff = self._backoffs.get(key)
        if backoff is not None and self.now() < backoff.until_s and backoff.lag_files in (None, lag_files):
            return
        table, index, _ = key
        log = _log.bind(table=_format_table(table), index=index)
        try:
            action()
        except (Unreachable, Unavailable, LoginRequired):
            raise
        except NoSuchResource:
            log.info("gone")  # The index or the table was dropped or renamed during the round.
        except _FilesNotIndexed as error:
            counts.reason = counts.reason or str(error)
            log.warning("data files not indexed", error=str(error), again_in_s=self._back_off(key, error.files))
        except Exception as error:  # noqa: BLE001  an error in one table must not stop the others
            if isinstance(error, Refused) and error.status == _CONFLICT_STATUS:
                # Another indexer or build is running, or the index was dropped.
                log.info("action left to another builder", error=error.message)
                counts.left += 1
                return
            counts.failed += 1
            traceback_field = {} if isinstance(error, _EXPECTED) else {"where": "".join(format_tb(error.__traceback__))}
            log.error("failed", error=str(error), again_in_s=self._back_off(key), **traceback_field)
        else:
            self._backoffs.pop(key, None)

    def _back_off(self, key: Key, lag_files: int | None = None) -> float:
        """Set a backoff that is twice as long as the previous backoff, and return its duration in seconds.

        At the maximum number of backoffs, the oldest backoff is dropped.

        Args:
            key: The table, the index and the name of the action.
            lag_files: The number of files that the index lacks, if the backoff ends when this number changes. If it is
                None, the backoff always applies.
        """
        previous = self._backoffs.pop(key, None)
        backoff_s = BACKOFF_S if previous is None else min(previous.backoff_s * 2, BACKOFF_MAX_S)
        if len(self._backoffs) >= BACKOFFS_MAX:
            del self._backoffs[next(iter(self._backoffs))]
        self._backoffs[key] = _Backoff(self.now() + backoff_s, backoff_s, lag_files)
        return backoff_s


class _FilesNotIndexed(Exception):
    """Raised if a build could not index some data files. `files` is their number."""

    def __init__(self, files: int, message: str) -> None:
        super().__init__(message)
        self.files = files


def _make_table_key(table: Table) -> Key:
    """Return the key of the backoff of a whole table, after a failure that affects no single index."""
    return table, "", "maintain"


def _format_table(table: Table) -> str:
    return ".".join(table)
