"""Audits an index: verifies each live index file, counts the indexed rows, and reports problems to the server.

When an audit reports an index file, the server quarantines it only if the audit has read the file completely and its
content differs from the data. If the audit cannot read the file (network, credentials, local disk) or finds it damaged,
the server checks the file itself. An index file that was replaced during the audit is not a problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.connector.client.errors import ClientError, NoSuchResource
from seamark.connector.client.indexes import Index, IndexClient
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At, EngineTable
from seamark.connector.index.files import IndexTask
from seamark.connector.index.lookups import NO_DIMENSIONS, read_dimensions
from seamark.connector.index.verification import VerificationResult, verify_index_file
from seamark.connector.parquet.columns import Projection
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import parse_definition
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.runtime.errors import BadRequest

_ATTEMPTS_MAX = 5
"""The maximum number of attempts to load an index and its table at the same snapshot, while other clients commit."""
LIVE, QUARANTINED = "live", "quarantined"
_NOT_LIVE = "superseded"


@dataclass(frozen=True)
class Audit:
    """The result of the audit of one index.

    Attributes:
        rows: The number of rows in the snapshot's covered data files, according to the index files. It is None if the
            rows could not be counted, and `uncounted` then has the reason.
    """

    index: Index
    verdicts: tuple[VerificationResult, ...]
    states: dict[str, str]
    """The states of the reported index files, by location."""
    rows: int | None
    uncounted: str | None
    seed: int
    """The seed of the samples. An audit with the same seed reads the same data files and keys."""

    @property
    def covered_rows(self) -> int:
        """The number of rows in the covered data files, according to the manifests."""
        return int(self.index.json["rows"])

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the index. Empty if the index is correct."""
        problems = [f"{verdict.location}: {problem}" for verdict in self.verdicts for problem in verdict.problems]
        if self.rows is not None and self.rows != self.covered_rows:
            problems.append(f"the index files count {self.rows:,} rows, but the data files have {self.covered_rows:,}")
        if self.index.health == "damaged":
            problems.append(
                f"damaged index files were quarantined before; {self.index.lag_files:,} data files have to be "
                "indexed again: seamark index build"
            )
        return tuple(problems)


@dataclass
class _AuditedIndex:
    """An index during its audit.

    Attributes:
        task: The task with which the audit builds entries again to compare them.
        reports_problems: Whether to report problems to the server, which quarantines the index files.
        rng: Chooses the data files that the audit reads again.
        states: The states of the reported index files, by location. The audit fills it.
    """

    client: IndexClient
    table: Name
    index: Index
    task: IndexTask
    reports_problems: bool
    rng: random.Random
    states: dict[str, str]

    @property
    def live_files(self) -> list[dict[str, Any]]:
        """The index files that are in use, in the form of the server's answer."""
        return [index_file for index_file in self.index.json["index-files"] if index_file["state"] == LIVE]

    def verify(self, registered_file: dict[str, Any], sample: int) -> VerificationResult:
        """Verify a live index file, and report its problems to the server.

        Args:
            registered_file: The index file in the server's list.
            sample: The number of data files to read again.

        Returns:
            The verdict. It has no problems if the server has replaced or deleted the index file since it was listed.
        """
        location = registered_file["location"]
        verdict = _compare_counts(verify_index_file(location, self.task, sample=sample, rng=self.rng), registered_file)
        if verdict.problems and self.reports_problems and not verdict.has_newer_version:
            self.states[location] = state = _report_problems(self.client, self.table, self.index.name, verdict)
            if state == _NOT_LIVE:
                return replace(verdict, problems=())
        return verdict


def verify_sample(
    client: IndexClient,
    table: Name,
    name: str,
    *,
    sample: int,
    verified_locations: Collection[str],
    on_verdict: Callable[[VerificationResult, int], bool],
) -> bool:
    """Verify the live index files of one index, except the files at the locations in `verified_locations`.

    The function reports problems to the server, which quarantines the index files.

    Args:
        client: The client.
        table: The table.
        name: The name of the index.
        sample: The maximum number of data files of each index file that are read again.
        verified_locations: The locations of index files that are left out.
        on_verdict: Called with each verdict and the size of the index file in bytes. If it returns False, the function
            stops.

    Returns:
        Whether all index files are verified.

    Raises:
        NoSuchResource: The table or the index does not exist.
        ClientError: The server refuses a request or cannot be reached.
        BadRequest: The definition is invalid, or the table has no UUID.
    """
    rng = random.SystemRandom()
    audited_index, engine_table, metadata, _ = _load(client, table, name)
    audit_run = _AuditedIndex(
        client, table, audited_index, _create_task(client, table, audited_index, engine_table, metadata), True, rng, {}
    )
    pending = [index_file for index_file in audit_run.live_files if index_file["location"] not in verified_locations]
    for number, index_file in enumerate(pending, 1):
        if not on_verdict(audit_run.verify(index_file, sample), index_file["size-in-bytes"]):
            return number == len(pending)
    return True


def audit_index(
    client: IndexClient,
    table: Name,
    name: str,
    *,
    sample: int,
    report: bool = True,
    seed: int | None = None,
    on_verdict: Callable[[VerificationResult, int], None] = lambda verdict, total: None,
) -> Audit:
    """Verify the live index files of one index, and read up to `sample` data files of each index file again.

    Args:
        report: Whether to report problems to the server, which quarantines the index files. The next build
            replaces them.
        on_verdict: Called with each verdict and the number of index files.

    Raises:
        NoSuchResource: The table or the index does not exist.
        ClientError: The server refuses a request or cannot be reached.
        BadRequest: The definition is invalid, or the table has no UUID.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    rng = random.Random(seed)  # noqa: S311 - reproducible samples, not secrets
    audited_index, engine_table, metadata, is_consistent = _load(client, table, name)
    audit_run = _AuditedIndex(
        client,
        table,
        audited_index,
        _create_task(client, table, audited_index, engine_table, metadata),
        report,
        rng,
        {},
    )
    live_files = audit_run.live_files
    verdicts: list[VerificationResult] = []
    for index_file in live_files:
        verdicts.append(audit_run.verify(index_file, sample))
        on_verdict(verdicts[-1], len(live_files))
    uncounted_reason = (
        _explain_missing_count(audited_index, verdicts)
        if is_consistent
        else "other clients commit to the table all the time"
    )
    rows = None if uncounted_reason else _count_rows(client, table, metadata, verdicts)
    return Audit(audited_index, tuple(verdicts), audit_run.states, rows, uncounted_reason, seed)


def _create_task(
    client: IndexClient, table: Name, index: Index, engine_table: EngineTable, metadata: TableMetadata
) -> IndexTask:
    """Return the task with which an audit builds entries again. It has no folder, because an audit writes no files.

    Raises:
        BadRequest: The definition is invalid, or the table has no UUID.
    """
    definition = parse_definition(index.json["definition-id"], metadata.current_schema, metadata.schemas)
    if metadata.table_uuid is None:
        raise BadRequest(f"The table at {engine_table.location} has no table-uuid; an audit requires one")
    projection = Projection(metadata.current_schema)
    storage = Storage.of_table(engine_table.storage, metadata.location)
    try:
        dimensions = read_dimensions(client, definition.terms)
    except ClientError:  # Without the dimension tables, entries are not compared with rows.
        dimensions = NO_DIMENSIONS
    return IndexTask(metadata.table_uuid, definition, projection, "", storage, EnvironmentKeys(table), dimensions)


def _load(client: IndexClient, table: Name, name: str) -> tuple[Index, EngineTable, TableMetadata, bool]:
    """Return the index, the table and its metadata, and whether all of them belong to the same snapshot.

    If other clients commit meanwhile, loading is repeated.
    """
    engine_table = client.load_table(table)
    metadata = decode_table(engine_table.metadata, engine_table.location)
    for _ in range(_ATTEMPTS_MAX):
        previous_snapshot_id = metadata.current_snapshot_id
        index = client.index(table, name)
        engine_table = client.load_table(table)
        metadata = decode_table(engine_table.metadata, engine_table.location)
        if metadata.current_snapshot_id == previous_snapshot_id:
            return index, engine_table, metadata, True
    return index, engine_table, metadata, False


def _compare_counts(verdict: VerificationResult, registered_file: dict[str, Any]) -> VerificationResult:
    """Return the verdict, with a further problem if the server's counts differ from the counts in the index file.

    Nothing is compared if the index file could not be read.
    """
    files, rows = registered_file["files"], registered_file["rows"]
    if verdict.listed is None or (files, rows) == (verdict.files, verdict.rows):
        return verdict
    problem = (
        f"the server lists {files} data files and {rows} rows; the index file has {verdict.files} and {verdict.rows}"
    )
    return replace(verdict, problems=(*verdict.problems, problem))


def _report_problems(client: IndexClient, table: Name, name: str, verdict: VerificationResult) -> str:
    """Report the problems to the server, and return the state of the index file.

    If this process could not read the file, the server checks the file itself before it quarantines it.
    """
    reason = "; ".join(verdict.problems)
    try:
        answer = client.quarantine_index_file(table, name, verdict.location, reason, check=verdict.is_unreadable)
    except NoSuchResource:
        return _NOT_LIVE  # The index file has been deleted since it was listed.
    return str(answer["state"])


def _explain_missing_count(index: Index, verdicts: Sequence[VerificationResult]) -> str | None:
    """Return the reason why the rows cannot be counted, or None if they can be counted."""
    unlisted_count = sum(index.json["levels"].values()) - len(verdicts)
    if unlisted_count:
        return f"there are {unlisted_count:,} more index files than the server lists at once"
    unread_count = sum(verdict.listed is None for verdict in verdicts)
    return f"{unread_count:,} index files could not be read" if unread_count else None


def _count_rows(
    client: IndexClient, table: Name, metadata: TableMetadata, verdicts: Iterable[VerificationResult]
) -> int:
    """Count the rows in the data files of the current snapshot, according to the index files.

    A data file that is in several index files is counted once.
    """
    tables = [verdict.listed for verdict in verdicts if verdict.listed is not None]
    no_ids = np.empty(0, dtype=np.uint64)
    ids, first_positions = np.unique(
        np.concatenate([no_ids, *(files_table.ids[:, 0] for files_table in tables)]), return_index=True
    )
    records = np.concatenate([no_ids, *(files_table.records for files_table in tables)])[first_positions]
    if metadata.current_snapshot_id is None:
        return 0
    is_live = np.zeros(len(ids), dtype=np.bool_)
    for page in client.iter_files(table, content="data", at=At(metadata.current_snapshot_id)):
        is_live |= np.isin(ids, _collect_file_ids(page.to_pydict()))
    return int(records[is_live].sum())


def _collect_file_ids(page: dict[str, list[Any]]) -> npt.NDArray[np.uint64]:
    """Return the high halves of the identities of data files. They are sufficient to match data files.

    A file with an invalid, negative number of rows has no identity, and is left out.
    """
    rows = [
        (path, size_bytes, records)
        for path, size_bytes, records in zip(
            page["file_path"], page["file_size_in_bytes"], page["record_count"], strict=True
        )
        if records >= 0
    ]
    return compute_file_ids(*zip(*rows, strict=True))[:, 0] if rows else np.empty(0, dtype=np.uint64)
