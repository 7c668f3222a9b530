"""Tests of the tiers, the order of tests, and the stored durations."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis.internal.conjecture import providers

from seamark.metaserver.store.sql import sqlite
from tests import seeds
from tests.services import fixtures, fork_server
from tests.support.migrated_database import create_empty_databases
from tests.tiers import bytecode, grids, spread
from tests.tiers.durations import Duration, read_durations, write_durations
from tests.tiers.marks import FILES, FOLDERS, ROOT, find_tier


@pytest.mark.parametrize(
    ("path", "fixtures", "markers", "tier"),
    [
        ("cache/test_disk.py", set(), set(), "unit"),
        ("style/test_tidy.py", set(), set(), "unit"),
        ("connector/trino/test_scans.py", set(), set(), "unit"),
        ("connector/test_client.py", set(), set(), "server"),
        ("store/test_postgres.py", {"postgres_url"}, set(), "server"),
        ("planner/test_lake.py", {"java_catalog", "s3"}, set(), "engines"),
        ("planner/test_oracle.py", {"java"}, set(), "engines"),
        ("docs/test_spark_pages.py", set(), {"spark"}, "engines"),
        ("rck/test_compliance.py", set(), set(), "engines"),
        ("iceberg/test_puffin.py", set(), set(), "engines"),
    ],
)
def test_folder_gives_the_least_tier_and_fixtures_and_markers_raise_it(
    path: str, fixtures: set[str], markers: set[str], tier: str
) -> None:
    assert find_tier(ROOT / path, fixtures, markers) == tier


def test_names_in_the_tiers_exist() -> None:
    assert [name for name in (*FOLDERS, *FILES) if not (ROOT / name).exists()] == []
    files = [file.relative_to(ROOT.parent).as_posix() for file in ROOT.rglob("test_*.py")]
    for prefixes in (*spread.UNITS.values(), spread.LONG_UNITS):
        file_names = {prefix.partition("::")[0] for prefix in prefixes}
        assert [name for name in file_names if not any(file.startswith(name) for file in files)] == []


def test_engines_start_first_then_the_longest_files_and_units_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s_by_file = {
        "tests/a.py": 2.0,
        "tests/b.py": 9.0,
        "tests/engines/test_x.py": 5.0,
        "tests/planner/test_lake.py": 7.0,
    }
    durations = {position: Duration(position, 1, wall_s, 0.0) for position, wall_s in wall_s_by_file.items()}
    monkeypatch.setattr(spread, "read_durations", lambda: durations)
    ids = [
        "tests/a.py::1",
        "tests/new.py::1",
        "tests/engines/test_x.py::1",
        "tests/b.py::1",
        "tests/planner/test_lake.py::1",
    ]
    ids += ["tests/a.py::2", "tests/engines/test_x.py::2"]
    ids.append("tests/rck/test_compliance.py::1")
    ordered_ids = [ids[position] for position in spread.compute_order(ids)]
    assert ordered_ids == [ids[4], ids[2], ids[6], ids[7], ids[3], ids[0], ids[5], ids[1]]


def test_units_with_only_some_tests_of_a_file_are_ordered() -> None:
    ids = ["tests/gateway/test_engines.py::test_pyiceberg", "tests/gateway/test_engines.py::test_spark_writes"]
    assert spread.compute_order(ids) == [1, 0]


def test_durations_are_stored_with_the_longest_first(tmp_path: Path) -> None:
    path = tmp_path / "durations.csv"
    assert read_durations(path) == {}
    short_duration, long_duration = Duration("tests/a.py", 3, 0.5, 0.2), Duration("tests/b.py", 1, 8.0, 9.5)
    write_durations([short_duration, long_duration], path)
    assert list(read_durations(path).values()) == [long_duration, short_duration]


def test_exploring_run_uses_one_seed_for_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SEED", "to be restored after the test")
    monkeypatch.delenv("TEST_SEED")
    monkeypatch.setattr(seeds, "IS_EXPLORING", True)
    first_seed = seeds.first_seed()
    assert os.environ["TEST_SEED"] == str(first_seed)
    assert {seeds.first_seed(), seeds.first_seed("SEED_OF_ONE_TEST")} == {first_seed}
    monkeypatch.setenv("SEED_OF_ONE_TEST", "7")
    assert seeds.first_seed("SEED_OF_ONE_TEST") == 7


def test_examples_of_an_ordinary_run_do_not_depend_on_imported_modules() -> None:
    assert (len(providers._get_local_constants()) > 0) == seeds.IS_EXPLORING


def test_servers_are_forked_even_if_an_imported_module_has_set_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "_environment", {})
    monkeypatch.setenv("SET_WHILE_TESTS_ARE_COLLECTED", "1")
    fixtures.pytest_collection_finish()
    assert fork_server._environment == dict(os.environ)


def test_database_of_a_test_equals_a_new_database(tmp_path: Path) -> None:
    def dump_database(path: Path) -> list[str]:
        sqlite._open_for_writing(path).close()
        with closing(sqlite3.connect(path)) as connection:
            return list(connection.iterdump())

    # Outside of `create_empty_databases`, each new database of a test is a copy of a migrated database.
    copied_rows = dump_database(tmp_path / "copy.db")
    with create_empty_databases():
        assert dump_database(tmp_path / "new.db") == copied_rows
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]


def test_processes_begin_to_compile_at_different_modules() -> None:
    files = [Path(f"tests/test_{number}.py") for number in range(10)]
    rotated_files = [bytecode.rotate_files(files, number, 4) for number in range(4)]
    assert [item[0] for item in rotated_files] == [files[0], files[2], files[5], files[7]]
    assert all(sorted(item) == files for item in rotated_files)
    assert bytecode.rotate_files([], 3, 4) == []


def test_module_with_bytecode_from_pytest_counts_as_compiled(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "test_more.cpython-311-pytest-9.2.0.pyc").touch()
    assert bytecode.is_compiled(tmp_path / "test_more.py")
    assert not bytecode.is_compiled(tmp_path / "test_mo.py")


def test_cases_of_a_grid_that_the_fast_tier_runs_have_each_value_or_each_pair_of_values() -> None:
    cases = [{"a": a, "b": b, "c": c} for a in range(2) for b in range(3) for c in range(4)]
    cases_with_all_values = [cases[position] for position in grids.choose_covering_cases(cases, 1)]
    assert {(name, value) for case in cases_with_all_values for name, value in case.items()} == {
        (name, value) for case in cases for name, value in case.items()
    }
    assert len(cases_with_all_values) == 4
    cases_with_all_pairs = [cases[position] for position in grids.choose_covering_cases(cases, 2)]
    assert {(case["b"], case["c"]) for case in cases_with_all_pairs} == {(case["b"], case["c"]) for case in cases}
    assert {(case["a"], case["c"]) for case in cases_with_all_pairs} == {(case["a"], case["c"]) for case in cases}
    assert len(cases_with_all_pairs) < len(cases)
    assert grids.choose_covering_cases([], 1) == set()


def test_few_cases_of_a_grid_have_different_values() -> None:
    cases = [{"a": a, "b": b} for a in range(2) for b in range(3)]
    chosen_cases = [cases[position] for position in grids.choose_covering_cases(cases, 1, 2)]
    assert chosen_cases[0]["a"] != chosen_cases[1]["a"]
    assert chosen_cases[0]["b"] != chosen_cases[1]["b"]
    assert len(chosen_cases) == 2
    assert grids.choose_covering_cases(cases, 1, 1) == {0}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("number", range(5))
def test_cases_beyond_the_maximum_are_slow(number: int, request: pytest.FixtureRequest) -> None:
    grid = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    assert sum(item.get_closest_marker("slow") is None for item in grid) <= 2


@pytest.mark.each_value
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", ["a", "b", "c"])
def test_cases_of_a_grid_that_the_fast_tier_leaves_out_are_slow(
    first: int, second: str, request: pytest.FixtureRequest
) -> None:
    grid = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    assert sum(item.get_closest_marker("slow") is None for item in grid) <= 3
