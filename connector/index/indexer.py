"""The indexer: keeps every index of a catalog built, merged and audited, table by table, round after round.

The rule kept: it may die at any time, and any number of it may run. What is to be done is asked of the server each
time; a build or merge is begun there as the only one of its index, and two that run all the same do no harm. What fails
is told, left alone for a while that doubles, and holds up no other index. From round to round it remembers nothing but
whom to leave alone, and what it has verified of indexes that it did not get through yet. When an index was audited the
server knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from logging import DEBUG, INFO
from traceback import format_tb
from typing import Any

import structlog

from seamark.connector.client.errors import ClientError, NotFound, Refused, Unauthenticated, Unavailable, Unreachable
from seamark.connector.client.indexes import Index, IndexClient
from seamark.connector.index.audits import verify_some
from seamark.connector.index.builds import (
    DEFAULT_LIMITS,
    ClusterFailed,
    GroupLimits,
    Source,
    TableReplaced,
    Workers,
    begun_build,
    build,
)
from seamark.connector.index.merges import FANOUT, Registered, due, merge_index_files
from seamark.connector.index.verification import Verdict
from seamark.metaserver.clock import SystemClock
from seamark.metaserver.errors import SeamarkError
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.index.files.definitions import read_definitions

PASSES_MAX = 8
"""Of one build, so that a table that is written to without a pause keeps no other waiting."""
MERGES_MAX = 64
"""Of one index in one round: enough for eight levels of files that were all due at once."""
PATIENCE_S, PATIENCE_MAX_S = 30.0, 3600.0
"""For how long what failed is left alone: the first time, and at most."""
LEFT_ALONE_MAX = 10_000
_CONFLICT = 409
_EXPECTED = (ClientError, ClusterFailed, OSError, SeamarkError, TableReplaced, ValueError)
_log = structlog.get_logger("seamark.indexer")

Table = tuple[str, ...]
Key = tuple[Table, str, str]
"""A table, the name of an index or nothing, and what was to be done."""


@dataclass(frozen=True)
class AuditLimits:
    """Of the index files that are verified in one round; one is begun after each until one of these is over. An index
    is audited again `every_s` after it was."""

    size_bytes: int = 256 << 20
    seconds: float = 10.0
    every_s: float = 86_400.0
    sample: int = 1
    """Data files of each index file that are read again."""


@dataclass
class Round:
    """What one round did. `left` are data files that cannot be indexed; `verified` are index files, `damaged` those of
    them that were not right."""

    tables: int = 0
    indexes: int = 0
    builds: int = 0
    files: int = 0
    left: int = 0
    merges: int = 0
    verified: int = 0
    verified_bytes: int = 0
    damaged: int = 0
    failed: int = 0


@dataclass(frozen=True)
class _LeftAlone:
    """`lag_files`: with as many missing files it looks as it did; None where that is not the point."""

    until: float
    patience_s: float
    lag_files: int | None


@dataclass(order=True)
class _Due:
    """An index that is to be audited, the one first that was longest ago."""

    audited_ms: int
    table: Table
    name: str


@dataclass
class _Audited:
    """What was verified of an index so far: the locations of its index files, and how many were damaged."""

    locations: set[str] = field(default_factory=set)
    damaged: int = 0
    size_bytes: int = 0


@dataclass
class Indexer:
    """`open_workers` is entered once a round; `now` are seconds that only go forward, `now_ms` since the epoch. Without
    `audit` nothing is audited."""

    client: IndexClient
    open_workers: Callable[[], AbstractContextManager[Workers]]
    limits: GroupLimits = DEFAULT_LIMITS
    now: Callable[[], float] = time.monotonic
    now_ms: Callable[[], int] = SystemClock().now_ms
    audit: AuditLimits | None = None
    _audited: dict[tuple[Table, str], _Audited] = field(default_factory=dict)
    _left_alone: dict[Key, _LeftAlone] = field(default_factory=dict)

    def run(self, interval_s: float) -> None:
        """Round after round, `interval_s` apart, longer while the server cannot be asked. Does not return."""
        patience_s = interval_s
        while True:
            try:
                self.round()
                patience_s = interval_s
            except ClientError as error:
                patience_s = min(max(patience_s, 1.0) * 2, PATIENCE_MAX_S)
                _log.error("round cut off", error=error.message, status=error.status, again_in_s=patience_s)
            time.sleep(patience_s)

    def round(self) -> Round:
        """Every table once. ClientError where the catalog cannot be listed, or the server is gone."""
        done = Round()
        due: list[_Due] = []
        with self.open_workers() as workers:
            for table in self._tables():
                done.tables += 1
                self._try((table, "", "look"), partial(self._keep_table, table, workers, done, due), done)
        self._audit_some(sorted(due), done)
        busy = done.builds or done.merges or done.damaged or done.failed
        _log.log(INFO if busy else DEBUG, "round done", **vars(done))
        return done

    def _tables(self) -> Iterator[Table]:
        for namespace in self.client.namespaces():
            with suppress(NotFound):
                yield from self.client.tables(namespace)

    def _keep_table(self, table: Table, workers: Workers, done: Round, due: list[_Due]) -> None:
        """Builds and merges its indexes; those whose audit is due are added to `due`."""
        loaded = self.client.load_table(table)
        if not read_definitions(decode_table(loaded.metadata, loaded.location)).enabled:
            return  # without asking how its indexes stand, for which the server reads the table's manifests
        for index in self.client.indexes(table):
            if index.state == "enabled" and index.kind != "bucket" and index.health != "broken":
                done.indexes += 1
                lag_files = index.lag_files + index.lag_files_of_refs
                if lag_files:
                    build_it = partial(self._build, table, index, workers, done)
                    self._try((table, index.name, "build"), build_it, done, lag_files=lag_files)
                # Also when nothing was built: of what others built much may be due.
                if lag_files or any(count >= FANOUT for count in index.json["levels"].values()):
                    self._try((table, index.name, "merge"), partial(self._merge, table, index.name, done), done)
                if self._is_due(index):
                    due.append(_Due(index.audited_ms or 0, table, index.name))

    def _is_due(self, index: Index) -> bool:
        if self.audit is None or not index.json["levels"]:
            return False
        return index.audited_ms is None or index.audited_ms < self.now_ms() - 1000 * self.audit.every_s

    def _audit_some(self, due: Sequence[_Due], done: Round) -> None:
        """As many index files as the limits allow; what is damaged is missing then, and built in the next round."""
        if self.audit is None:
            return
        for gone in self._audited.keys() - {(one.table, one.name) for one in due}:
            del self._audited[gone]
        limits, until = self.audit, self.now() + self.audit.seconds

        def is_left() -> bool:
            return self.now() < until and done.verified_bytes < limits.size_bytes

        for one in due:
            if not is_left():
                break
            audit_it = partial(self._audit, one.table, one.name, limits.sample, is_left, done)
            self._try((one.table, one.name, "audit"), audit_it, done)

    def _audit(self, table: Table, name: str, sample: int, is_left: Callable[[], bool], done: Round) -> None:
        so_far = self._audited.setdefault((table, name), _Audited())

        def take(verdict: Verdict, size_bytes: int) -> bool:
            so_far.locations.add(verdict.location)
            so_far.size_bytes += size_bytes
            done.verified += 1
            done.verified_bytes += size_bytes
            if verdict.problems and not verdict.newer:
                so_far.damaged += 1
                done.damaged += 1
                _log.warning(
                    "index file not right", table=_shown(table), index=name, location=verdict.location,
                    problems=list(verdict.problems[:3]),
                )  # fmt: skip
            return is_left()

        options: dict[str, Any] = {"sample": sample, "verified": so_far.locations, "on_verdict": take}
        if verify_some(self.client, table, name, **options):
            self.client.record_audit(
                table,
                name,
                index_files=len(so_far.locations),
                damaged=so_far.damaged,
                size_bytes=so_far.size_bytes,
            )
            del self._audited[table, name]

    def _build(self, table: Table, index: Index, workers: Workers, done: Round) -> None:
        report = build(
            self.client, table, index.name, workers, exclusive=True, limits=self.limits, passes_max=PASSES_MAX
        )
        done.builds += 1
        done.files += report.progress.files_done
        done.left += report.left
        _log.info(
            "index built",
            table=_shown(table),
            index=index.name,
            files=report.progress.files_done,
            rows=report.progress.rows_done,
            index_files=report.progress.index_files,
            size_bytes=report.progress.size_bytes,
        )
        if report.left:
            path, why = report.skipped[0] if report.skipped else ("", "tried before")
            raise _Left(report.left, f"{report.left} data files cannot be indexed, as {path}: {why}")

    def _merge(self, table: Table, name: str, done: Round) -> None:
        for _ in range(MERGES_MAX):
            live = [one for one in self.client.index(table, name).json["index-files"] if one["state"] == "live"]
            chosen = due(map(_registered, live))
            if not chosen:
                return
            merged = [one.location for one in chosen]
            with begun_build(self.client, table, name, exclusive=True) as begun:
                task = Source.of(self.client, table, begun).task
                dropped = self.client.unheld(table, name, merged)
                written = merge_index_files(merged, task.folder, task.storage, dropped=dropped)
                if written.location is None:  # the registry replaces files by another, not by nothing
                    written = merge_index_files(merged, task.folder, task.storage)
                if written.location is not None:
                    new = [(written.location, written.size_bytes)]
                    self.client.register_index_files(table, name, begun["build-id"], new, replaces=merged)
                self.client.finish_build(table, name, begun["build-id"])
            done.merges += 1
            _log.info(
                "index files merged",
                table=_shown(table),
                index=name,
                merged=len(merged),
                files=written.files,
                rows=written.rows,
                size_bytes=written.size_bytes,
            )

    def _try(self, key: Key, act: Callable[[], None], done: Round, *, lag_files: int | None = None) -> None:
        """Unless it is left alone. What fails is told, and nobody else's affair; raises where the server is gone."""
        left = self._left_alone.get(key)
        if left is not None and self.now() < left.until and left.lag_files in (None, lag_files):
            return
        table, index, _ = key
        log = _log.bind(table=_shown(table), index=index)
        try:
            act()
        except (Unreachable, Unavailable, Unauthenticated):
            raise
        except NotFound:
            log.info("gone")  # dropped or renamed meanwhile
        except _Left as error:
            log.warning("data files left", error=str(error), again_in_s=self._leave_alone(key, error.files))
        except Exception as error:  # noqa: BLE001  a bug met in one table is to stop no other's indexes
            if isinstance(error, Refused) and error.status == _CONFLICT:
                log.info("left to another", error=error.message)  # an indexer, a build by hand, who dropped it
                return
            done.failed += 1
            where = {} if isinstance(error, _EXPECTED) else {"where": "".join(format_tb(error.__traceback__))}
            log.error("failed", error=str(error), again_in_s=self._leave_alone(key), **where)
        else:
            self._left_alone.pop(key, None)

    def _leave_alone(self, key: Key, lag_files: int | None = None) -> float:
        """For how long, in seconds: twice as long as the last time."""
        before = self._left_alone.pop(key, None)
        patience_s = PATIENCE_S if before is None else min(before.patience_s * 2, PATIENCE_MAX_S)
        if len(self._left_alone) >= LEFT_ALONE_MAX:
            del self._left_alone[next(iter(self._left_alone))]
        self._left_alone[key] = _LeftAlone(self.now() + patience_s, patience_s, lag_files)
        return patience_s


class _Left(Exception):
    def __init__(self, files: int, message: str) -> None:
        super().__init__(message)
        self.files = files


def _registered(listed: dict[str, Any]) -> Registered:
    return Registered(listed["location"], listed["level"], listed["size-in-bytes"], listed["created-ms"])


def _shown(table: Table) -> str:
    return ".".join(table)
