"""Tests that an index kind made of a module and an entry of `KINDS` is defined, built, merged, used, audited
and cleaned.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.audits import audit_index
from seamark.connector.index.builds import GroupLimits, InProcessWorkers
from seamark.connector.index.indexer import Indexer
from seamark.formats.index.index_file import assemble_index_file, open_index_file
from seamark.formats.index.kinds.kinds import KINDS
from tests.connector.lake import append_parts, create_lake_table, open_catalog, spread_ids
from tests.connector.server_thread import ServerThread
from tests.index.kinds.signature_kind import SIGNATURE

FILES, ROWS = 9, 20
INDEX = "id_signature"


@pytest.fixture(params=[1 << 24, 0], ids=["read whole", "by range where a kind can"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """Run a server with `db.t`, which has 9 files of 20 rows without useful bounds, and no index.

    The server has an additional kind of index, `signature`. It reads index files as a whole or by ranges.
    """
    monkeypatch.setitem(KINDS, SIGNATURE.name, SIGNATURE)
    with ServerThread(
        tmp_path, warehouse=tmp_path.as_uri(), index_whole_bytes=request.param, index_retention_s=0, index_wait_s=30
    ) as server:
        create_lake_table(server.url)
        append_parts(server.url, "db.t", spread_ids(FILES, ROWS))
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    with closing(IndexClient(server.url)) as client:
        client.put_index("db.t", INDEX, kind=SIGNATURE.name, columns=["id"], width=1024)
        yield client


def build_index(client: IndexClient) -> None:
    round_report = Indexer(
        client, lambda: closing(InProcessWorkers()), limits=GroupLimits(files=1)
    ).maintain_all_tables()
    assert (round_report.builds, round_report.merges, round_report.failed) == (1, 1, 0)


def list_live_paths(client: IndexClient) -> list[Path]:
    index_files = client.index("db.t", INDEX).json["index-files"]
    return [
        Path(index_file["location"].removeprefix("file://"))
        for index_file in index_files
        if index_file["state"] == "live"
    ]


@pytest.mark.few_cases(1)
def test_index_of_an_added_kind_is_built_merged_listed_and_prunes_files(client: IndexClient) -> None:
    assert client.explain("db.t", "id = 40").files == FILES
    assert client.index("db.t", INDEX).health == "behind"
    build_index(client)
    index_report = client.index("db.t", INDEX)
    assert (index_report.health, index_report.files, index_report.json["kind"], index_report.json["levels"]) == (
        "ok",
        FILES,
        "signature",
        {"1": 1},
    )
    assert (index_report.json["width"], index_report.definition) == (1024, "signature(id, width=1024)")
    plan = client.explain("db.t", "id = 40")
    assert plan.files < FILES / 2
    assert [stage.name for stage in plan.stages][-1] == SIGNATURE.name
    assert client.explain("db.t", "id > 40 AND id < 43").files == FILES, "a signature must not prune by ranges"
    use_counts = client.index("db.t", INDEX).json["used"]
    assert use_counts["files-in"] == FILES
    assert use_counts["files-removed"] == FILES - plan.files


@pytest.mark.few_cases(1)
def test_plan_with_an_index_of_an_added_kind_keeps_every_matching_row(client: IndexClient) -> None:
    build_index(client)
    with open_catalog(client.url) as catalog:
        for expected in (0, 40, FILES * ROWS - 1, FILES * ROWS):
            rows = catalog.load_table("db.t").scan(row_filter=f"id = {expected}").to_arrow()
            assert rows["id"].to_pylist() == [expected] * (expected < FILES * ROWS)


@pytest.mark.few_cases(1)
def test_server_checks_the_parameters_and_columns_of_an_added_kind(client: IndexClient) -> None:
    for kind, parameters in (
        (SIGNATURE.name, {"width": 4.0}),
        (SIGNATURE.name, {"fpp": 0.1}),
        ("bloom", {"width": 64.0}),
    ):
        with pytest.raises(Refused, match=r"between 8 and 65536|accepts"):
            client.put_index("db.t", "other", kind=kind, columns=["id"], **parameters)
    with pytest.raises(Refused, match="is on one column"):
        client.put_index("db.t", "other", kind=SIGNATURE.name, columns=["id", "country"])


@pytest.mark.slow
def test_audit_finds_a_signature_of_another_file(client: IndexClient) -> None:
    build_index(client)
    assert audit_index(client, "db.t", INDEX, sample=FILES).problems == ()
    (path,) = list_live_paths(client)
    index_file = open_index_file(path.read_bytes(), path.as_uri())
    rotated_blob = SIGNATURE.encode(
        [*SIGNATURE.open(index_file.blob).rows[1:], SIGNATURE.open(index_file.blob).rows[0]]
    )
    header = index_file.header
    parts = list(
        assemble_index_file(
            header.definition,
            header.kind,
            index_file.files,
            rotated_blob,
            table_uuid=header.table_uuid,
            field_ids=header.field_ids,
            level=header.level,
        )
    )
    path.unlink()
    Storage().write(path.as_uri(), parts)
    audit = audit_index(client, "db.t", INDEX, sample=FILES)
    assert any("the signature does not know the value of row" in problem for problem in audit.problems)
    assert client.index("db.t", INDEX).health == "damaged"


@pytest.mark.few_cases(1)
def test_damaged_index_of_an_added_kind_is_quarantined_and_plans_keep_all_files(client: IndexClient) -> None:
    build_index(client)
    (path,) = list_live_paths(client)
    data = bytearray(path.read_bytes())
    offset = open_index_file(bytes(data), path.as_uri()).header.offset
    data[offset + 40] ^= 1  # Any byte of the index data will do.
    path.unlink()
    path.write_bytes(data)
    assert client.explain("db.t", "id = 40").files == FILES
    assert client.index("db.t", INDEX).health == "damaged"


@pytest.mark.slow
def test_files_of_the_example_index_kind_are_deleted_with_their_definition(
    client: IndexClient, server: ServerThread
) -> None:
    build_index(client)
    paths = list_live_paths(client)
    client.drop_index("db.t", INDEX)
    for _ in range(3):  # The first rounds delete superseded files, the later rounds unused files.
        server.run(server.components.housekeeping.run_round())
    assert len(paths) == 1
    assert not any(path.exists() for path in paths)


@pytest.mark.slow
def test_command_and_http_schema_include_an_added_kind() -> None:
    """The test uses a separate process, because the command and the schema are built when their modules are loaded."""
    script = """
from seamark.formats.index.kinds.kinds import KINDS
from tests.index.kinds.signature_kind import SIGNATURE
KINDS[SIGNATURE.name] = SIGNATURE
from seamark.metaserver.api.indexes.indexes import INDEX_SCHEMA
from seamark.commands.index import create
options = {option.name: option for option in create.params}
print("signature" in options["kind"].type.choices, options["width"].help)
print(INDEX_SCHEMA["properties"]["kind"]["enum"], INDEX_SCHEMA["properties"]["width"])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert "True Of signature: the bits of a signature. Default: 256." in result.stdout
    assert "['bloom', 'bitmap', 'record', 'cube', 'signature', 'bucket', None]" in result.stdout
    assert "For signature: the bits of a signature." in result.stdout.splitlines()[1]
