"""Decides which of the found metadata files are registered, and under which names. The functions are pure.

The rules protect the tables from each other's writers. A writer of one table may have written metadata files with the
UUID, the location or the paths of other tables into its own folders. So a file is used only for the table whose folder
contains it. Each UUID and each location belongs to one table, and a table gets no folder outside its location. The
operator can examine a file that the rules leave out, and choose it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import STREAM_ENABLED
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES
from seamark.metaserver.catalog.ownership.owners import borrows_rights
from seamark.metaserver.catalog.recovery.found_files import Finding, FoundFile
from seamark.metaserver.catalog.recovery.naming import FoundName, find_name_of_location, has_own_folder
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.sql.rows import get_name_space

_SHOWN_LOCATIONS_MAX = 5


class Candidate(NamedTuple):
    """A file to register under a name.

    Attributes:
        is_chosen: Whether the operator has chosen the file.
    """

    file: FoundFile
    name: FoundName
    is_chosen: bool = False


class SelectedCandidates(NamedTuple):
    """The files to register, and the reasons why other files are left out."""

    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]


def select_candidates(
    files: Sequence[FoundFile],
    warehouse: Warehouse,
    choices: Mapping[str, FoundName | None],
    *,
    has_stream_log: bool = True,
) -> SelectedCandidates:
    """Return the files to register, and the reasons why other files are left out.

    There is no reason for a file that the operator leaves out, or whose UUID is that of a chosen file.

    Args:
        files: The newest file of each UUID in each folder.
        warehouse: The warehouse in which the files were found.
        choices: The decisions of the operator, by metadata file: the name for the file, or None to leave the file out.
        has_stream_log: Whether a log with rows of stream tables may exist. The rows may also be in the table's files,
            and would be added twice. So such tables are left out unless the operator chooses them.
    """
    findings: list[Finding] = []
    candidates: list[Candidate] = []
    chosen_uuids = {file.uuid for file in files if choices.get(file.location) is not None}
    for file in files:
        choice = choices.get(file.location)
        if choice is not None:
            candidates.append(Candidate(file, choice, is_chosen=True))
        elif file.location not in choices and file.uuid not in chosen_uuids:
            try:
                if has_stream_log:
                    check_no_stream_rows(file)
                check_folder_and_user(file, warehouse)
                candidates.append(Candidate(file, find_name_of_location(warehouse, file.table_location, file.uuid)))
            except BadRequest as error:
                findings.append(Finding(file.location, error.message))
    for find_conflicts in (_find_shared_uuids, _find_shared_locations, _find_shared_names):
        reasons = find_conflicts(candidates, warehouse, files)
        findings += (
            Finding(candidate.file.location, reasons[number], str(candidate.name))
            for number, candidate in enumerate(candidates)
            if number in reasons
        )
        candidates = [candidate for number, candidate in enumerate(candidates) if number not in reasons]
    return SelectedCandidates(tuple(candidates), tuple(findings))


def check_folder_and_user(file: FoundFile, warehouse: Warehouse) -> None:
    """Check that the file is in the folder of its table, and names no other folders and no user with rights.

    Raises:
        BadRequest: The file is outside this folder, names a folder outside it, or belongs to a view that runs with the
            rights of a user.
    """
    location = warehouse.parse(file.table_location, "The location in the file")
    if parse_location(file.folder) != Location(location.scheme, location.bucket, f"{location.path}/metadata"):
        raise BadRequest(
            f"The file is outside the metadata folder of its location {str(location)!r}, so another writer may have "
            "written it. If it is right, choose this file by its location"
        )
    if file.metadata is not None:
        for name in PATH_PROPERTIES:
            path = file.metadata.properties.get(name)
            if path is not None and not location.holds(_parse_path(path)):
                raise BadRequest(
                    f"The property {name} is {path[:300]!r}, outside the location of the table. Choose the file if "
                    "the table may write there"
                )
    if isinstance(file.metadata, ViewMetadata) and borrows_rights(file.metadata):
        raise BadRequest(
            "The view runs with the rights of a user that the file names, and storage cannot prove who wrote it. "
            "Choose the file if its text is right"
        )


def check_no_stream_rows(file: FoundFile) -> None:
    """Check that no rows in the table's files can also be in a stream log.

    Raises:
        BadRequest: The table takes rows of a stream, and has snapshots.
    """
    metadata = file.metadata
    if not isinstance(metadata, TableMetadata):
        return
    if metadata.snapshots and parse_bool(metadata.properties, STREAM_ENABLED, False):
        raise BadRequest(
            "The table is a stream table, and the lost database had the offsets of the rows in its files. Choose "
            "the file if the log of streams is empty; otherwise rows that are in files would be added again"
        )


def _parse_path(path: str) -> Location:
    try:
        return parse_location(path)
    except BadRequest:
        return Location("", "", "")


def _find_shared_uuids(
    candidates: Sequence[Candidate], warehouse: Warehouse, files: Sequence[FoundFile]
) -> dict[int, str]:
    """Return the reasons to leave out candidates whose UUID is also in files of other folders.

    A candidate is kept if the operator has chosen only this candidate among those with its UUID. The keys are indexes
    of `candidates`.
    """
    locations_by_uuid: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        locations_by_uuid[file.uuid].add(file.location)
    chosen_counts = Counter(candidate.file.uuid for candidate in candidates if candidate.is_chosen)
    return {
        number: (
            f"Several folders have files of {candidate.file.kind.value} {candidate.file.uuid}: "
            f"{_show_locations(locations_by_uuid[candidate.file.uuid])}. Choose one of the files"
        )
        for number, candidate in enumerate(candidates)
        if len(locations_by_uuid[candidate.file.uuid]) > 1
        and (not candidate.is_chosen or chosen_counts[candidate.file.uuid] > 1)
    }


def _find_shared_locations(
    candidates: Sequence[Candidate], warehouse: Warehouse, files: Sequence[FoundFile]
) -> dict[int, str]:
    """Return the reasons to leave out candidates whose locations overlap. The keys are indexes of `candidates`.

    If the name of a folder ends with the UUID of its table, the table keeps the folder. Only the files of other tables
    inside the folder, and of tables whose folders contain it, are left out. A choice of the operator has precedence.
    """
    keys = [warehouse.make_key(parse_location(candidate.file.table_location)) for candidate in candidates]
    reasons: dict[int, str] = {}
    outer_indexes: list[int] = []
    # A slash sorts before every other character of a key, so all keys inside a folder follow the key of the folder.
    for number in sorted(range(len(keys)), key=lambda number: keys[number].replace("/", "\x00")):
        while outer_indexes and not f"{keys[number]}/".startswith(f"{keys[outer_indexes[-1]]}/"):
            outer_indexes.pop()
        for outer in outer_indexes:
            for left_out, other in _find_left_out(candidates, keys, outer, number):
                reasons.setdefault(
                    left_out,
                    f"Its location overlaps that of another table, view or function: "
                    f"{candidates[other].file.location}. Choose one of them",
                )
        outer_indexes.append(number)
    return reasons


def _find_left_out(
    candidates: Sequence[Candidate], keys: Sequence[str], outer: int, inner: int
) -> Iterable[tuple[int, int]]:
    """Return which of two candidates with overlapping locations are left out.

    A candidate that the operator has chosen is kept, then a candidate whose folder ends with its UUID. If no rule
    decides, both are left out.

    Returns:
        Tuples of the index of a candidate that is left out, and the index of the other candidate.
    """

    def rank(number: int) -> int:
        candidate = candidates[number]
        # The choice of the operator has more weight than the folder.
        return 2 * candidate.is_chosen + has_own_folder(candidate.file.table_location, candidate.file.uuid)

    # If both folders end with their UUIDs (rank 1), the outer folder is kept, because a writer of the outer folder can
    # create the inner folder.
    if rank(outer) > rank(inner) or (rank(outer) == rank(inner) == 1 and keys[outer] != keys[inner]):
        return [(inner, outer)]
    if rank(inner) > rank(outer):
        return [(outer, inner)]
    return [(outer, inner), (inner, outer)]


def _find_shared_names(
    candidates: Sequence[Candidate], warehouse: Warehouse, files: Sequence[FoundFile]
) -> dict[int, str]:
    """Return the reasons to leave out candidates with the same name. The keys are indexes of `candidates`.

    For example, a table may have the name of an earlier table that was dropped. A candidate is kept if the operator has
    chosen only this candidate among those with its name.
    """
    numbers_by_name: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, candidate in enumerate(candidates):
        numbers_by_name[get_name_space(candidate.file.kind), *candidate.name.namespace, candidate.name.name].append(
            number
        )
    reasons: dict[int, str] = {}
    for numbers in numbers_by_name.values():
        chosen_numbers = [number for number in numbers if candidates[number].is_chosen]
        for number in numbers:
            if len(numbers) > 1 and (not candidates[number].is_chosen or len(chosen_numbers) > 1):
                other_locations = _show_locations(candidates[other].file.location for other in numbers)
                reasons[number] = (
                    f"Several tables, views or functions have this name; all but one were probably dropped or renamed: "
                    f"{other_locations}. Choose one of the files, or give them different names"
                )
    return reasons


def _show_locations(locations: Iterable[str]) -> str:
    """Return the first locations as text for a message, and the number of the others."""
    sorted_locations = sorted(locations)
    hidden_count = len(sorted_locations) - _SHOWN_LOCATIONS_MAX
    more_text = f" and {hidden_count} more" if hidden_count > 0 else ""
    return f"{', '.join(sorted_locations[:_SHOWN_LOCATIONS_MAX])}{more_text}"
