"""Tests of `seamark rebuild` on files that a writer of one table, or a crash, has left in the warehouse.

Each case changes a warehouse with two tables of different owners, `ours.t` and `theirs.u`. After the rebuild, the files
of `ours.t` belong to `ours.t`, or the rebuild reports them and they have no name.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.catalog.documents import choose_file_suffix
from tests.faults.rigs.http import HttpClient
from tests.recovery.test_recovery import delete_database, run_rebuild
from tests.services.seamark import Seamark

Json = dict[str, Any]
FORGED_UUID = "00000000-0000-4000-8000-000000000001"


@dataclass
class Warehouse:
    """A stopped server's warehouse with two tables, and ways to write files into it."""

    home: Path
    tables: dict[str, Json] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.home / "warehouse"

    def read_metadata(self, name: str) -> Json:
        return json.loads(self.find_metadata_file(name).read_bytes())

    def find_metadata_file(self, name: str) -> Path:
        """Return the newest metadata file of a table."""
        return Path(self.tables[name]["metadata-location"].removeprefix("file://"))

    def find_folder(self, name: str) -> Path:
        return self.find_metadata_file(name).parent.parent

    def write(self, folder: Path, metadata: Json, number: int, file_id: str = "") -> str:
        """Write a metadata file with a valid digest in its name, and return its location.

        The name begins with the number and `file_id`, by default a random UUID.
        """
        data = json.dumps(metadata).encode()
        path = folder / f"{number:05d}-{file_id or uuid.uuid4()}{choose_file_suffix(data)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return f"file://{path}"

    def run_rebuild(self, *arguments: str) -> Json:
        delete_database(self.home)
        rebuild_report: Json = run_rebuild(self.home, *arguments)
        self.check_claims()
        return rebuild_report

    def check_claims(self) -> None:
        """Check that the folder of each table is claimed by the table, or by an entry without a name.

        A rebuild keeps such an entry for each table that it does not register, so that no other table can name the
        files of this table.
        """
        with closing(sqlite3.connect(self.home / "seamark.db")) as connection:
            claims = connection.execute("SELECT uuid, location FROM claims").fetchall()
            unnamed_uuids = {unnamed_uuid for (unnamed_uuid,) in connection.execute("SELECT uuid FROM retained")}
        for name in self.tables:
            folder, own_uuid = f"file://{self.find_folder(name)}", self.tables[name]["metadata"]["table-uuid"]
            owners = {owner for owner, location in claims if do_overlap(location, folder)}
            assert owners, f"{name} has no claim"
            assert owners <= {own_uuid, *unnamed_uuids}, (name, owners)

    def list_registered_locations(self, rebuild_report: Json) -> dict[str, str]:
        return {table["name"]: table["location"] for table in rebuild_report["registered"]}


def do_overlap(location: str, other_location: str) -> bool:
    return f"{location}/".startswith(f"{other_location}/") or f"{other_location}/".startswith(f"{location}/")


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    new_warehouse = Warehouse(tmp_path / "home")
    with Seamark(new_warehouse.home) as server:
        client = HttpClient(server.base_url)
        for name, namespace in (("t", "ours"), ("u", "theirs")):
            assert client.create_table(name, namespace)[0] == 200
            route = f"/v1/namespaces/{namespace}/tables/{name}"
            for value in ("1", "2"):
                updates = [{"action": "set-properties", "updates": {"p": value}}]
                status, answer = client.call("POST", route, {"requirements": [], "updates": updates})
                assert status == 200
            new_warehouse.tables[f"{namespace}.{name}"] = answer
    return new_warehouse


def list_reasons(rebuild_report: Json, location: str) -> list[str]:
    return [finding["reason"] for finding in rebuild_report["findings"] if finding["location"] == location]


def write_uuid_of_another_table(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u") | {"table-uuid": warehouse.read_metadata("ours.t")["table-uuid"]}
    return warehouse.write(
        warehouse.find_folder("theirs.u") / "x" / "metadata",
        metadata | {"location": build_location_in_other_folder(warehouse)},
        9,
    )


def build_location_in_other_folder(warehouse: Warehouse) -> str:
    return f"file://{warehouse.find_folder('theirs.u')}/x"


def write_location_of_another_table(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u") | {
        "location": f"file://{warehouse.find_folder('ours.t')}",
        "table-uuid": FORGED_UUID,
    }
    return warehouse.write(warehouse.find_folder("theirs.u") / "metadata", metadata, 99)


def write_location_around_all_tables(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u") | {
        "location": f"file://{warehouse.root}/ours",
        "table-uuid": FORGED_UUID,
    }
    return warehouse.write(warehouse.root / "ours" / "metadata", metadata, 0)


def write_path_of_another_table(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u")
    metadata["properties"] |= {"write.data.path": f"file://{warehouse.find_folder('ours.t')}/data"}
    return warehouse.write(warehouse.find_folder("theirs.u") / "metadata", metadata, 99)


def write_path_of_a_future_table(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u")
    metadata["properties"] |= {"write.metadata.path": f"file://{warehouse.root}/ours/later"}
    return warehouse.write(warehouse.find_folder("theirs.u") / "metadata", metadata, 99)


def write_table_inside_a_table(warehouse: Warehouse) -> str:
    inner_folder = f"{warehouse.find_folder('theirs.u')}/evil-{FORGED_UUID.replace('-', '')}"
    metadata = warehouse.read_metadata("theirs.u") | {"location": f"file://{inner_folder}", "table-uuid": FORGED_UUID}
    return warehouse.write(Path(inner_folder) / "metadata", metadata, 0)


def write_location_outside_the_warehouse(warehouse: Warehouse) -> str:
    metadata = warehouse.read_metadata("theirs.u") | {"location": "file:///etc", "table-uuid": FORGED_UUID}
    return warehouse.write(warehouse.find_folder("theirs.u") / "metadata", metadata, 99)


CASES: tuple[Callable[[Warehouse], str], ...] = (
    write_location_of_another_table,
    write_location_around_all_tables,
    write_path_of_another_table,
    write_path_of_a_future_table,
    write_table_inside_a_table,
    write_location_outside_the_warehouse,
)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("write", CASES)
def test_forged_metadata_file_takes_no_files_of_another_table(
    warehouse: Warehouse, write: Callable[[Warehouse], str]
) -> None:
    location = write(warehouse)
    rebuild_report = warehouse.run_rebuild()
    assert (
        warehouse.list_registered_locations(rebuild_report)["ours.t"] == warehouse.tables["ours.t"]["metadata-location"]
    )
    assert location not in warehouse.list_registered_locations(rebuild_report).values()
    assert list_reasons(rebuild_report, location)


def test_copied_uuid_is_reported_until_the_operator_chooses_a_file(warehouse: Warehouse, tmp_path: Path) -> None:
    location, own_location = write_uuid_of_another_table(warehouse), warehouse.tables["ours.t"]["metadata-location"]
    rebuild_report = warehouse.run_rebuild()
    assert "ours.t" not in warehouse.list_registered_locations(rebuild_report)
    assert "Several folders" in list_reasons(rebuild_report, location)[0]
    assert "Several folders" in list_reasons(rebuild_report, own_location)[0]
    (tmp_path / "names").write_text(json.dumps({own_location: "ours.t", location: None}))
    rebuild_report = run_rebuild(warehouse.home, "--names", str(tmp_path / "names"))
    assert warehouse.list_registered_locations(rebuild_report) == {"ours.t": own_location}
    warehouse.check_claims()


def test_rebuild_reports_two_newest_files_and_registers_neither(warehouse: Warehouse) -> None:
    newest_location = warehouse.tables["ours.t"]["metadata-location"]
    metadata = warehouse.read_metadata("ours.t")
    metadata["properties"]["p"] = "another commit"
    location = warehouse.write(warehouse.find_folder("ours.t") / "metadata", metadata, 2)
    rebuild_report = warehouse.run_rebuild()
    assert "ours.t" not in warehouse.list_registered_locations(rebuild_report)
    assert "Several files may be the newest" in list_reasons(rebuild_report, location)[0]
    assert "Several files may be the newest" in list_reasons(rebuild_report, newest_location)[0]
    names = warehouse.home / "names"
    names.write_text(json.dumps({location: "ours.t", newest_location: None, f"{newest_location}x": "ours.x"}))
    rebuild_report = run_rebuild(warehouse.home, "--names", str(names))
    assert warehouse.list_registered_locations(rebuild_report) == {"ours.t": location}
    assert [finding["location"] for finding in rebuild_report["findings"]] == [f"{newest_location}x"]


def test_rebuild_ignores_an_orphan_with_an_earlier_number(warehouse: Warehouse) -> None:
    metadata = warehouse.read_metadata("ours.t") | {
        "last-updated-ms": warehouse.read_metadata("ours.t")["last-updated-ms"] - 1
    }
    warehouse.write(warehouse.find_folder("ours.t") / "metadata", metadata | {"metadata-log": []}, 1)
    rebuild_report = warehouse.run_rebuild()
    assert (
        warehouse.list_registered_locations(rebuild_report)["ours.t"] == warehouse.tables["ours.t"]["metadata-location"]
    )


def test_rebuild_does_not_register_a_table_whose_latest_commit_has_a_lower_number(warehouse: Warehouse) -> None:
    """The added commit has a lower number than the newest file, but a later time."""
    metadata = warehouse.read_metadata("ours.t") | {
        "last-updated-ms": warehouse.read_metadata("ours.t")["last-updated-ms"] + 1000
    }
    warehouse.write(warehouse.find_folder("ours.t") / "metadata", metadata | {"metadata-log": []}, number=1)
    assert "ours.t" not in warehouse.list_registered_locations(warehouse.run_rebuild())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("content", [b"", b"{", b'{"table-uuid": "x"}', b"\x1f\x8b" + bytes(100), b"[" * 100_000])
def test_damaged_newest_file_is_reported(warehouse: Warehouse, content: bytes) -> None:
    path = warehouse.find_folder("ours.t") / "metadata" / f"00007-{uuid.uuid4()}.metadata.json"
    path.write_bytes(content)
    rebuild_report = warehouse.run_rebuild()
    assert "ours.t" not in warehouse.list_registered_locations(rebuild_report)
    assert list_reasons(rebuild_report, f"file://{path}")
    assert (
        "A later file cannot be used"
        in list_reasons(rebuild_report, warehouse.tables["ours.t"]["metadata-location"])[0]
    )


def test_folder_with_only_damaged_files_stays_claimed(warehouse: Warehouse) -> None:
    for path in (warehouse.find_folder("ours.t") / "metadata").iterdir():
        path.write_bytes(b"{")
    assert set(warehouse.list_registered_locations(warehouse.run_rebuild())) == {"theirs.u"}
    with closing(sqlite3.connect(warehouse.home / "seamark.db")) as connection:
        assert connection.execute("SELECT count(*) FROM retained").fetchone() == (1,)


def test_overwritten_newest_file_is_reported(warehouse: Warehouse) -> None:
    warehouse.find_metadata_file("ours.t").write_text(json.dumps(warehouse.read_metadata("theirs.u")))
    rebuild_report = warehouse.run_rebuild()
    assert "ours.t" not in warehouse.list_registered_locations(rebuild_report)
    assert "was overwritten" in list_reasons(rebuild_report, warehouse.tables["ours.t"]["metadata-location"])[0]


def test_rebuild_follows_no_symbolic_links(warehouse: Warehouse) -> None:
    outside_metadata = warehouse.home / "outside" / "metadata"
    shutil.copytree(warehouse.find_folder("theirs.u") / "metadata", outside_metadata)
    os.symlink(outside_metadata.parent, warehouse.root / "ours" / "linked")
    link = warehouse.find_folder("theirs.u") / "metadata" / "00009-link.metadata.json"
    os.symlink(warehouse.find_metadata_file("ours.t"), link)
    rebuild_report = warehouse.run_rebuild()
    assert set(warehouse.list_registered_locations(rebuild_report)) == {"ours.t", "theirs.u"}
    assert rebuild_report["findings"] == []


def test_two_tables_with_one_name_are_reported(warehouse: Warehouse) -> None:
    with Seamark(warehouse.home) as server:
        client = HttpClient(server.base_url)
        assert client.call("DELETE", "/v1/namespaces/ours/tables/t")[0] == 204
        status, new_table = client.create_table("t", "ours")
        assert status == 200
    rebuild_report = warehouse.run_rebuild()
    assert set(warehouse.list_registered_locations(rebuild_report)) == {"theirs.u"}
    for location in (new_table["metadata-location"], warehouse.tables["ours.t"]["metadata-location"]):
        assert "Several tables, views or functions have this name" in list_reasons(rebuild_report, location)[0]


def test_stream_table_is_registered_only_without_a_log(warehouse: Warehouse) -> None:
    metadata = warehouse.read_metadata("ours.t")
    snapshot = {
        "snapshot-id": 1,
        "sequence-number": 1,
        "timestamp-ms": metadata["last-updated-ms"],
        "manifest-list": f"{metadata['location']}/metadata/snap.avro",
        "summary": {"operation": "append"},
        "schema-id": 0,
    }
    metadata["properties"] |= {"seamark.stream.enabled": "true"}
    metadata |= {"snapshots": [snapshot], "current-snapshot-id": 1, "last-sequence-number": 1}
    metadata["metadata-log"].append(
        {"timestamp-ms": metadata["last-updated-ms"], "metadata-file": warehouse.tables["ours.t"]["metadata-location"]}
    )
    location = warehouse.write(warehouse.find_folder("ours.t") / "metadata", metadata, 3)
    (warehouse.home / "streams").mkdir(exist_ok=True)
    rebuild_report = warehouse.run_rebuild()
    assert "ours.t" not in warehouse.list_registered_locations(rebuild_report)
    assert "stream table" in list_reasons(rebuild_report, location)[0]
    (warehouse.home / "streams").rmdir()
    assert warehouse.list_registered_locations(warehouse.run_rebuild())["ours.t"] == location
