"""Tests of the selection of metadata files for a rebuild, compared with a loop over all pairs of locations."""

from __future__ import annotations

import random
import uuid

import pytest

from seamark.metaserver.catalog.recovery.found_files import FoundFile
from seamark.metaserver.catalog.recovery.naming import FoundName, find_name_of_location
from seamark.metaserver.catalog.recovery.selection import select_candidates
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.model import EntryKind
from tests.seeds import examples, first_seed

WAREHOUSE = Warehouse("file:///lake")


def make_file(location: str, table_uuid: str) -> FoundFile:
    file = f"{location}/metadata/{table_uuid}.function.json"
    return FoundFile(file, EntryKind.FUNCTION, table_uuid, location, 0, (), None)


def has_folder_of_its_uuid(file: FoundFile) -> bool:
    return file.table_location.endswith(file.uuid.replace("-", ""))


def do_overlap(first_file: FoundFile, second_file: FoundFile) -> bool:
    first_folder, second_folder = f"{first_file.table_location}/", f"{second_file.table_location}/"
    return first_folder.startswith(second_folder) or second_folder.startswith(first_folder)


@pytest.mark.parametrize("case", range(examples(100, 8)))
def test_selected_locations_never_overlap_and_folders_with_their_own_uuid_are_preferred(case: int) -> None:
    rng = random.Random(first_seed() * 1000 + case)
    files = []
    folders = ["file:///lake/a"]
    for number in range(rng.randint(2, 12)):
        table_uuid = str(uuid.UUID(int=rng.getrandbits(128)))
        suffix = f"-{table_uuid.replace('-', '')}" if rng.random() < 0.6 else ""
        location = f"{rng.choice(folders)}/{rng.choice('b-.') if suffix else 'b'}{number}{suffix}"
        if rng.random() < 0.1:
            location = rng.choice(folders[1:] or [location])
        folders.append(location)
        files.append(make_file(location, table_uuid))
    selected_files = [candidate.file for candidate in select_candidates(files, WAREHOUSE, {}).candidates]
    for file in selected_files:
        assert not any(do_overlap(file, other_file) for other_file in selected_files if other_file is not file), (
            file,
            selected_files,
        )
    for file in files:
        overlapping_files = [
            other_file for other_file in files if other_file is not file and do_overlap(file, other_file)
        ]
        if not overlapping_files:
            assert file in selected_files
        if has_folder_of_its_uuid(file) and not any(
            has_folder_of_its_uuid(other_file) and file.table_location.startswith(other_file.table_location)
            for other_file in overlapping_files
        ):
            assert file in selected_files, "the folder with its own UUID is not inside another such folder"


def test_chosen_file_is_selected_although_the_rules_exclude_it() -> None:
    first_file, second_file = (make_file("file:///lake/a/t", str(uuid.UUID(int=number))) for number in (1, 2))
    assert select_candidates([first_file, second_file], WAREHOUSE, {}).candidates == ()
    (candidate,) = select_candidates(
        [first_file, second_file], WAREHOUSE, {second_file.location: FoundName(("b",), "u")}
    ).candidates
    assert (candidate.file, str(candidate.name)) == (second_file, "b.u")


@pytest.mark.parametrize(
    ("location", "expected", "is_certain"),
    [
        ("file:///lake/shop/orders-00000000000000000000000000000001", (("shop",), "orders"), True),
        ("file:///lake/a/b/t-1-00000000000000000000000000000001", (("a", "b"), "t-1"), True),
        ("file:///lake/a/x-0123456789abcdef-00000000000000000000000000000001", (("a",), "x-0123456789abcdef"), False),
        ("file:///lake/shop/orders", (("shop",), "orders"), False),
        ("file:///lake/shop/orders-00000000000000000000000000000002", (("shop",), f"orders-{2:032x}"), False),
    ],
)
def test_name_of_a_found_file_comes_from_its_folder(
    location: str, expected: tuple[tuple[str, ...], str], *, is_certain: bool
) -> None:
    name = find_name_of_location(WAREHOUSE, location, str(uuid.UUID(int=1)))
    assert (name.namespace, name.name) == expected
    assert (name.note == "") is is_certain
