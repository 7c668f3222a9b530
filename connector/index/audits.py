"""An index held against its table: every live index file verified, the rows counted, what is wrong told to the server.

The rule kept: a file is put aside on this machine's word only where it was read whole and says something else than the
data. One that cannot be read here (a network, a key, a disk that is not this machine's) or is damaged is the server's
to check; and what others replaced meanwhile is no problem of anybody's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.connector.client.client import At, LoadedTable, Name
from seamark.connector.client.errors import NotFound
from seamark.connector.client.indexes import Index, IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.files import IndexTask
from seamark.connector.index.verification import Verdict, verify_index_file
from seamark.connector.parquet.columns import Projection
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.index.files.definitions import of_id
from seamark.metaserver.index.keys.hashing import file_ids

_TRIES = 5
"""To see an index and its snapshot at one time while others commit."""
LIVE, QUARANTINED = "live", "quarantined"
_NOT_LIVE = "superseded"


@dataclass(frozen=True)
class Audit:
    """What was found of one index. `rows` are those that its index files count of the snapshot's data files, `covered`
    those that the manifests do; None where they could not be counted, which `uncounted` explains."""

    index: Index
    verdicts: tuple[Verdict, ...]
    states: dict[str, str]
    """By location, what became of index files that were reported."""
    rows: int | None
    uncounted: str | None
    seed: int
    """With which the same data files and keys are looked at again."""

    @property
    def covered(self) -> int:
        return int(self.index.json["rows"])

    @property
    def problems(self) -> tuple[str, ...]:
        """Empty for an index that is right."""
        found = [f"{one.location}: {problem}" for one in self.verdicts for problem in one.problems]
        if self.rows is not None and self.rows != self.covered:
            found.append(f"its index files count {self.rows:,} rows of data files that hold {self.covered:,}")
        if self.index.health == "damaged":
            found.append(
                f"index files were found damaged before and put aside; {self.index.lag_files:,} data files are to be "
                "indexed again: seamark index build"
            )
        return tuple(found)


@dataclass
class _Subject:
    """An index as its audit sees it."""

    client: IndexClient
    table: Name
    index: Index
    task: IndexTask
    report: bool
    rng: random.Random
    states: dict[str, str]

    @property
    def live(self) -> list[dict[str, Any]]:
        return [one for one in self.index.json["index-files"] if one["state"] == LIVE]

    def verify(self, listed: dict[str, Any], sample: int) -> Verdict:
        """Of one of its live index files; what is wrong the server is told."""
        location = listed["location"]
        verdict = _against_listed(verify_index_file(location, self.task, sample=sample, rng=self.rng), listed)
        if verdict.problems and self.report and not verdict.newer:
            self.states[location] = state = _reported(self.client, self.table, self.index.name, verdict)
            if state == _NOT_LIVE:
                return replace(verdict, problems=())
        return verdict


def verify_some(
    client: IndexClient,
    table: Name,
    name: str,
    *,
    sample: int,
    verified: Collection[str],
    on_verdict: Callable[[Verdict, int], bool],
) -> bool:
    """Verifies live index files of one index, but those at the locations `verified`, one by one until `on_verdict`,
    which is told each and its size in bytes, says that it is enough. Whether all are verified now.

    What is wrong is reported, as by `audit_index`, which says what it raises.
    """
    rng = random.SystemRandom()
    found, loaded, metadata, _ = _seen(client, table, name)
    subject = _Subject(client, table, found, _task_of(found, loaded, metadata), True, rng, {})
    left = [one for one in subject.live if one["location"] not in verified]
    for number, one in enumerate(left, 1):
        if not on_verdict(subject.verify(one, sample), one["size-in-bytes"]):
            return number == len(left)
    return True


def audit_index(
    client: IndexClient,
    table: Name,
    name: str,
    *,
    sample: int,
    report: bool = True,
    seed: int | None = None,
    on_verdict: Callable[[Verdict, int], None] = lambda verdict, total: None,
) -> Audit:
    """Verifies the live index files of one index, reading up to `sample` of the data files of each again.

    `on_verdict` is told of each as it comes, and how many there are. With `report` the server is told what is wrong:
    it quarantines, and the next build makes it anew. NotFound; ClientError; metaserver's BadRequest for a definition
    that is none, or a table without a UUID.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    rng = random.Random(seed)  # noqa: S311 - to look at the same again, not to be guessed
    found, loaded, metadata, at_once = _seen(client, table, name)
    subject = _Subject(client, table, found, _task_of(found, loaded, metadata), report, rng, {})
    live = subject.live
    verdicts: list[Verdict] = []
    for one in live:
        verdicts.append(subject.verify(one, sample))
        on_verdict(verdicts[-1], len(live))
    uncounted = _why_uncounted(found, verdicts) if at_once else "others keep committing to the table"
    rows = None if uncounted else _rows(client, table, metadata, verdicts)
    return Audit(found, tuple(verdicts), subject.states, rows, uncounted, seed)


def _task_of(found: Index, loaded: LoadedTable, metadata: TableMetadata) -> IndexTask:
    """Without a folder: nothing is written."""
    definition = of_id(found.json["definition-id"], metadata.current_schema, metadata.schemas)
    if metadata.table_uuid is None:
        raise BadRequest(f"The table at {loaded.location} has no table-uuid, so its indexes are nobody's")
    projection = Projection(metadata.current_schema)
    return IndexTask(metadata.table_uuid, definition, projection, "", Storage(loaded.storage))


def _seen(client: IndexClient, table: Name, name: str) -> tuple[Index, LoadedTable, TableMetadata, bool]:
    """The index and the table, and whether at the same snapshot, which takes some tries where others commit."""
    loaded = client.load_table(table)
    metadata = decode_table(loaded.metadata, loaded.location)
    for _ in range(_TRIES):
        before = metadata.current_snapshot_id
        found = client.index(table, name)
        loaded = client.load_table(table)
        metadata = decode_table(loaded.metadata, loaded.location)
        if metadata.current_snapshot_id == before:
            return found, loaded, metadata, True
    return found, loaded, metadata, False


def _against_listed(verdict: Verdict, listed: dict[str, Any]) -> Verdict:
    """With a problem more where the server lists other counts than the index file has."""
    said = (listed["files"], listed["rows"])
    if verdict.listed is None or said == (verdict.files, verdict.rows):
        return verdict
    told = f"the server lists {said[0]} data files and {said[1]} rows; it has {verdict.files} and {verdict.rows}"
    return replace(verdict, problems=(*verdict.problems, told))


def _reported(client: IndexClient, table: Name, name: str, verdict: Verdict) -> str:
    """The state of the index file once the server knows."""
    reason = "; ".join(verdict.problems)
    try:
        answer = client.quarantine_index_file(table, name, verdict.location, reason, check=verdict.unread)
    except NotFound:
        return _NOT_LIVE  # and cleaned away by now
    return str(answer["state"])


def _why_uncounted(found: Index, verdicts: Sequence[Verdict]) -> str | None:
    """Why the rows cannot be counted; None where they can."""
    unlisted = sum(found.json["levels"].values()) - len(verdicts)
    if unlisted:
        return f"{unlisted:,} index files more than the server lists at once"
    unread = sum(one.listed is None for one in verdicts)
    return f"{unread:,} index files could not be read" if unread else None


def _rows(client: IndexClient, table: Name, metadata: TableMetadata, verdicts: Iterable[Verdict]) -> int:
    """Rows of the current snapshot's data files as the index files count them, each data file once."""
    tables = [one.listed for one in verdicts if one.listed is not None]
    none = np.empty(0, dtype=np.uint64)
    ids, first = np.unique(np.concatenate([none, *(one.ids[:, 0] for one in tables)]), return_index=True)
    records = np.concatenate([none, *(one.records for one in tables)])[first]
    if metadata.current_snapshot_id is None:
        return 0
    here = np.zeros(len(ids), dtype=np.bool_)
    for page in client.iter_files(table, content="data", at=At(metadata.current_snapshot_id)):
        here |= np.isin(ids, _ids(page.to_pydict()))
    return int(records[here].sum())


def _ids(page: dict[str, list[Any]]) -> npt.NDArray[np.uint64]:
    """Halves of identities, as good as the whole to find a file again."""
    known = [
        one
        for one in zip(page["file_path"], page["file_size_in_bytes"], page["record_count"], strict=True)
        if one[2] >= 0
    ]
    return file_ids(*zip(*known, strict=True))[:, 0] if known else np.empty(0, dtype=np.uint64)
