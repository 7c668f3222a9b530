"""Tests that `seamark index verify` finds and quarantines wrong index files.

`rebuild-registry` registers index files again after the server has lost its registry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.errors import AccessDenied
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.audits import audit_index
from seamark.connector.index.builds import GroupLimits, InProcessWorkers, build
from seamark.formats.index.index_file import assemble_index_file, open_index_file
from seamark.formats.index.kinds.kinds import KINDS
from tests.connector.lake import append_parts, create_lake_table, spread_ids
from tests.connector.server_thread import ServerThread
from tests.support.commands import invoke_seamark

COLUMNS = {"bloom": "id", "bitmap": "country", "record": "id"}


@pytest.fixture(params=list(COLUMNS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    """Yield a client of a server that has `db.t` with 6 files of 20 rows, and an index of each kind.

    The name of an index is its kind, and each index has 3 index files.
    """
    create_lake_table(server.url)
    append_parts(server.url, "db.t", spread_ids(6))
    with closing(IndexClient(server.url)) as client:
        for name, column in COLUMNS.items():
            client.put_index("db.t", name, kind=name, columns=[column])
            build(client, "db.t", name, InProcessWorkers(), limits=GroupLimits(files=2))
        yield client


def run_index_command(url: str, *arguments: str) -> tuple[int, str]:
    return invoke_seamark("index", *arguments, url=url)


def list_index_paths(client: IndexClient, name: str) -> list[Path]:
    return [
        Path(index_file["location"].removeprefix("file://"))
        for index_file in client.index("db.t", name).json["index-files"]
    ]


def read_states(client: IndexClient, name: str) -> dict[str, str]:
    """Return the state of each index file, by file name."""
    return {
        Path(index_file["location"]).name: index_file["state"]
        for index_file in client.index("db.t", name).json["index-files"]
    }


def swap_blobs(first_file: Path, second_file: Path) -> None:
    """Exchange the blobs of two index files. Both files stay well-formed, but their content is wrong."""
    index_files = [open_index_file(path.read_bytes(), str(path)) for path in (first_file, second_file)]
    for path, index_file, blob in (
        (first_file, index_files[0], index_files[1].blob),
        (second_file, index_files[1], index_files[0].blob),
    ):
        header = index_file.header
        parts = assemble_index_file(
            header.definition,
            header.kind,
            index_file.files,
            [blob],
            table_uuid=header.table_uuid,
            field_ids=header.field_ids,
        )
        path.unlink()
        Storage().write(path.as_uri(), parts)


def test_verify_reports_correct_index_files_as_valid(client: IndexClient) -> None:
    code, text = run_index_command(client.url, "verify", "db.t", "--sample", "9")
    assert code == 0, text
    for name in COLUMNS:
        message = f"Index {name}: 3 index files, 6 of 6 data files, 120 rows counted, 120 in the data files; valid"
        assert message in text
    assert len(re.findall(r"│ valid +│", text)) == 9
    assert [index.health for index in client.indexes("db.t")] == ["ok"] * 3


@pytest.mark.slow
def test_audit_counts_the_rows_that_the_index_covers(client: IndexClient) -> None:
    append_parts(client.url, "db.t", [[1000, 1001, 1002]])
    audit = audit_index(client, "db.t", "record", sample=0)
    assert (audit.rows, audit.covered_rows, audit.problems) == (120, 120, ())
    build(client, "db.t", "record", InProcessWorkers())
    audit = audit_index(client, "db.t", "record", sample=0)
    assert (audit.rows, audit.covered_rows, audit.problems) == (123, 123, ())
    # A data file that two index files describe counts once.
    index_file = list_index_paths(client, "record")[0]
    started_build = client.start_build("db.t", "record")
    copy = f"{started_build['folder']}/copy"
    size = Storage().write(copy, [index_file.read_bytes()])
    client.register_index_files("db.t", "record", started_build["build-id"], [(copy, size)])
    assert audit_index(client, "db.t", "record", sample=0).rows == 123


def test_audit_reports_a_wrong_number_of_rows(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    index = client.index("db.t", "record")
    monkeypatch.setattr(client, "index", lambda *_: index)
    index.json["rows"] = 119
    audit = audit_index(client, "db.t", "record", sample=0)
    assert audit.problems == ("the index files count 120 rows, but the data files have 119",)


@pytest.mark.few_cases(1)
def test_damaged_index_file_is_quarantined_and_built_again(client: IndexClient, kind: str) -> None:
    path = list_index_paths(client, kind)[1]
    whole_file = path.read_bytes()
    header = open_index_file(whole_file, str(path)).header
    damaged_bytes = bytearray(whole_file)
    damaged_bytes[header.offset + 4] ^= 255  # This byte is in the blob of the index.
    path.write_bytes(damaged_bytes)
    states_before = read_states(client, kind)
    code, text = run_index_command(client.url, "verify", "db.t", kind, "--dry-run")
    assert (code, read_states(client, kind)) == (1, states_before), text
    code, text = run_index_command(client.url, "verify", "db.t", kind)
    assert (code, "invalid: quarantined" in text, path.name in text) == (1, True, True), text
    assert "1 of 1 indexes are not correct" in text
    assert read_states(client, kind) == states_before | {path.name: "quarantined"}
    assert client.index("db.t", kind).lag_files == 2
    code, text = run_index_command(client.url, "verify", "db.t", kind)
    assert (code, "quarantined before; 2 data files have to be indexed again" in " ".join(text.split())) == (1, True), (
        text
    )
    build(client, "db.t", kind, InProcessWorkers())
    code, text = run_index_command(client.url, "verify", "db.t", kind)
    assert (code, "120 rows counted" in text) == (0, True), text


@pytest.mark.few_cases(1)
def test_index_file_that_does_not_match_the_data_is_quarantined(client: IndexClient, kind: str) -> None:
    first_file, second_file, _ = list_index_paths(client, kind)
    swap_blobs(first_file, second_file)
    audit = audit_index(client, "db.t", kind, sample=2, seed=7)
    assert audit.problems, "the file is well-formed, but its content is wrong"
    quarantined_names = {Path(location).name for location, state in audit.states.items() if state == "quarantined"}
    assert quarantined_names
    assert quarantined_names <= {first_file.name, second_file.name}
    assert {name for name, state in read_states(client, kind).items() if state == "quarantined"} == quarantined_names


def test_missing_index_file_is_quarantined_if_the_server_confirms_it(client: IndexClient) -> None:
    path = list_index_paths(client, "bitmap")[0]
    path.unlink()
    code, text = run_index_command(client.url, "verify", "db.t")
    assert (code, "1 of 3 indexes are not correct" in text, "rows not counted" in text) == (1, True, True), text
    assert read_states(client, "bitmap")[path.name] == "quarantined"


@pytest.mark.slow
def test_index_file_that_cannot_be_read_is_reported_but_not_quarantined(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Storage, location: str) -> memoryview:
        raise OSError("the network is down")

    monkeypatch.setattr(Storage, "read", fail)
    code, text = run_index_command(client.url, "verify", "db.t", "bloom")
    assert (code, "the network is down" in text, "valid on the" in text and "(live)" in text) == (1, True, True), text
    assert set(read_states(client, "bloom").values()) == {"live"}


@pytest.mark.slow
def test_index_file_of_a_newer_version_is_reported_but_not_quarantined(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = list_index_paths(client, "bloom")[0]
    index_file = open_index_file(path.read_bytes(), str(path))
    header = index_file.header
    with monkeypatch.context() as newer_version:
        newer_version.setattr(KINDS["bloom"], "version", 99)
        parts = list(
            assemble_index_file(
                header.definition,
                "bloom",
                index_file.files,
                [index_file.blob],
                table_uuid=header.table_uuid,
                field_ids=(1,),
            )
        )
    path.unlink()
    Storage().write(path.as_uri(), parts)
    code, text = run_index_command(client.url, "verify", "db.t", "bloom")
    assert (code, "version 99" in text, "newer format version" in text) == (1, True, True), text
    assert read_states(client, "bloom")[path.name] == "live"


@pytest.mark.slow
def test_audit_ignores_an_index_file_that_a_merge_replaces_meanwhile(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_location = client.index("db.t", "bloom").json["index-files"][0]["location"]
    quarantine = client.quarantine_index_file

    def merge_and_report(*arguments: Any, **fields: Any) -> dict[str, Any]:
        started_build = client.start_build("db.t", "bloom")
        size = Storage().write(f"{started_build['folder']}/merged", [whole_file])
        merged_index_files = [(f"{started_build['folder']}/merged", size)]
        client.register_index_files(
            "db.t", "bloom", started_build["build-id"], merged_index_files, replaces=[old_location]
        )
        return quarantine(*arguments, **fields)

    path = Path(old_location.removeprefix("file://"))
    whole_file = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(client, "quarantine_index_file", merge_and_report)
    audit = audit_index(client, "db.t", "bloom", sample=1)
    assert (audit.states, audit.problems) == ({old_location: "superseded"}, ())


@pytest.mark.slow
def test_audits_with_the_same_seed_examine_the_same_sample(client: IndexClient) -> None:
    first_file, second_file, _ = list_index_paths(client, "bitmap")
    swap_blobs(first_file, second_file)
    problems = [audit_index(client, "db.t", "bitmap", sample=1, seed=3, report=False).problems for _ in range(2)]
    assert problems[0] == problems[1] != ()


@pytest.mark.slow
def test_verify_refuses_invalid_arguments_with_an_exit_code(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_lake_table(client.url, "db.empty")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("verify", "db.t", "nope"), 1, "no index 'nope'"),
        (("verify", "db.nope"), 1, "does not exist"),
        (("verify", "db.t", "--sample", "-1"), 2, "--sample"),
        (("verify", "db.empty"), 2, "no index that can be verified"),
        (("rebuild-registry", "db.nope"), 1, "does not exist"),
    ]
    for arguments, code, expected in cases:
        actual, text = run_index_command(client.url, *arguments)
        assert (actual, expected in text) == (code, True), (arguments, text)
        assert "Traceback" not in text, arguments


@pytest.mark.slow
def test_rebuild_registry_registers_index_files_that_the_server_forgot(
    client: IndexClient, server: ServerThread
) -> None:
    # Another server registers the table without the records of its index files: 3 files of each of the 3 indexes.
    # Without these records, its plans keep all 6 data files.
    file_counts = {where: client.explain("db.t", where).files for where in ("id = 13", "country = 'c3' AND id = 24")}
    assert file_counts["id = 13"] == 1
    table = client.load_table("db.t")
    location = server.run(server.api("GET", "/v1/namespaces/db/tables/t")).json["metadata-location"]
    other_server = ServerThread(server.home / "other", warehouse=server.home.as_uri())
    other_server.start()
    try:
        body = {"name": "t", "metadata-location": location}
        assert other_server.run(other_server.api("POST", "/v1/namespaces/db/register", body)).status == 200
        other_client = IndexClient(other_server.url)
        assert {where: other_client.explain("db.t", where).files for where in file_counts} == dict.fromkeys(
            file_counts, 6
        )
        code, text = run_index_command(other_server.url, "rebuild-registry", "db.t")
        assert code == 0, text
        for name in COLUMNS:
            assert f"Index {name}: 3 index files registered, of 6 data files and 120 rows" in text, text
        assert {where: other_client.explain("db.t", where).files for where in file_counts} == file_counts
        assert run_index_command(other_server.url, "verify", "db.t")[0] == 0
        scrap = Path(table.location.removeprefix("file://")) / "_seamark" / "index" / "scrap"
        scrap.write_text("nothing")
        code, text = run_index_command(other_server.url, "rebuild-registry", "db.t")
        assert (code, "9 index files were listed already, 0 describe nothing new, 1 are left out" in text) == (0, True)
        assert str(scrap) in text
        _, text = run_index_command(other_server.url, "rebuild-registry", "db.t", "--json")
        answer = json.loads("{" + text.partition("\n{")[2])  # Log lines precede the JSON text.
        assert answer["known"] == 9
        other_client.close()
    finally:
        other_server.stop()


@pytest.mark.slow
def test_rebuild_registers_tables_with_their_index_files(client: IndexClient, tmp_path: Path) -> None:
    files_before = client.explain("db.t", "id = 13").files
    home, warehouse = tmp_path / "home", client.load_table("db.t").location.rpartition("/db/")[0]
    code, text = invoke_seamark("rebuild", "--home", str(home), "--warehouse", warehouse, "--json")
    assert code == 0, text
    assert json.loads(text)["index-files"] == 9, text
    assert json.loads(invoke_seamark("rebuild", "--home", str(home), "--warehouse", warehouse, "--json")[1]) == {
        "registered": [],
        "findings": [],
        "known": 1,
        "index-files": 0,
    }
    other_server = ServerThread(home, warehouse=warehouse)
    other_server.start()
    try:
        other_client = IndexClient(other_server.url)
        assert other_client.explain("db.t", "id = 13").files == files_before == 1
        assert run_index_command(other_server.url, "verify", "db.t")[0] == 0
        other_client.close()
    finally:
        other_server.stop()


@pytest.mark.slow
def test_user_without_the_right_to_quarantine_can_verify_indexes(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        raise AccessDenied("reader may not quarantineIndexFile", status=403)

    monkeypatch.setattr(IndexClient, "quarantine_index_file", refuse)
    list_index_paths(client, "bloom")[0].unlink()
    assert "may not" in run_index_command(client.url, "verify", "db.t", "bloom")[1]
    code, text = run_index_command(client.url, "verify", "db.t", "bloom", "--dry-run")
    assert (code, "invalid" in text, "may not" in text) == (1, True, False), text
