"""`seamark index`: define, list, show, pause, resume and drop indexes, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, Refused
from seamark.connector.client.indexes import IndexClient
from tests.api.indexes.indexed import build_index_file, write_index_file
from tests.api.plans.planned import append_files, build_data_file
from tests.connector.server_thread import ServerThread
from tests.support.commands import invoke_seamark

FILES = [build_data_file(f"file:///t/{n}.parquet", n, n, rows=10 * n) for n in range(1, 7)]


@pytest.fixture
def url(server: ServerThread) -> str:
    """Return the URL of a server that has `db.t` with 6 files."""
    server.run(server.api.create_table())
    server.run(append_files(server.api, "t", FILES, snapshot_id=1, manifests=2))
    return server.url


def run_seamark(url: str, *arguments: str) -> tuple[int, str]:
    return invoke_seamark("index", *arguments, url=url)


def register_half_of_the_files(url: str, name: str) -> dict[str, Any]:
    """Start a build, register an index file for 3 of the 6 files, and return the build."""
    client = IndexClient(url)
    build = client.start_build("db.t", name)
    pages = list(client.list_files_to_index("db.t", name, build["build-id"], page_files=4))
    assert [len(page["files"]) for page in pages] == [4, 2]
    registration = write_index_file(build, "a", build_index_file(build, FILES[:3]))
    file = (registration["location"], registration["size-in-bytes"])
    assert client.register_index_files("db.t", name, build["build-id"], [file])["progress"]["files-done"] == 3
    client.close()
    return build


def test_index_commands_create_list_pause_resume_and_drop_an_index(url: str) -> None:
    code, text = run_seamark(url, "create", "db.t", "--kind", "bitmap", "--columns", "data")
    assert (code, "Index data_bitmap: bitmap(data), 6 data files to index" in text) == (0, True)
    assert "Otherwise: seamark index build db.t" in text
    assert "Otherwise: seamark index build db.t" in run_seamark(url, "list", "db.t")[1]
    code, text = run_seamark(
        url, "create", "db.t", "--name", "k", "--kind", "record", "--columns", "id, truncate[2](data)"
    )
    assert (code, "record(id, truncate[2](data))" in text) == (0, True)
    register_half_of_the_files(url, "k")
    code, text = run_seamark(url, "list", "db.t")
    assert code == 0
    for part in ("data_bitmap", "bitmap(data)", "record(id, truncate[2](data))", "3 of 6", "behind"):
        assert part in text, text
    code, text = run_seamark(url, "show", "db.t", "k")
    titles = [line.strip() for line in text.splitlines()]
    assert (code, "1 index file" in titles, "live" in text) == (0, True, True)
    assert run_seamark(url, "pause", "db.t", "k")[0] == 0
    assert "paused" in run_seamark(url, "list", "db.t")[1]
    assert "3 data files to index" in run_seamark(url, "resume", "db.t", "k")[1]
    code, text = run_seamark(url, "show", "db.t", "data")
    assert (code, "no index 'data'; did you mean data_bitmap?" in text) == (1, True)
    code, text = run_seamark(url, "pause", "db.t", "data")
    assert (code, "no index 'data'; to define it" in text) == (2, True)
    assert run_seamark(url, "drop", "db.t", "k")[0] == 0
    # The output begins with the server's log, whose last field is `who`.
    assert "record" not in run_seamark(url, "list", "db.t")[1].rpartition("who=")[2]


def test_index_commands_print_json(url: str) -> None:
    assert "no indexes" in run_seamark(url, "list", "db.t")[1]
    run_seamark(url, "create", "db.t", "--name", "i", "--kind", "bloom", "--columns", "lower(data)", "--fpp", "0.25")
    _, _, output = run_seamark(url, "show", "db.t", "i", "--json")[1].partition("\n{")  # Logs are part of the output.
    assert json.loads("{" + output)["fpp"] == 0.25
    listed_indexes = run_seamark(url, "list", "db.t", "--json")[1]
    assert json.loads(listed_indexes[listed_indexes.index("\n[\n") :])[0]["columns"] == ["lower(data)"]


def test_index_command_reports_each_error_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.connector.client.connections._BACKOFF_S", 0)
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("create", "db.t", "--kind", "bitmap", "--columns", "nope"), 2, "no such column"),
        (("create", "db.t", "--kind", "bitmap", "--columns", "`id"), 2, "close its backticks"),
        (("create", "db.t", "--kind", "btree", "--columns", "id"), 2, "btree"),
        (("create", "db.t", "--kind", "bloom"), 2, "--columns"),
        (("create", "t", "--kind", "bloom", "--columns", "id"), 2, "not the name of a table"),
        (("list", "db.nope"), 1, "does not exist"),
        (("show", "db.t", "nope"), 1, "no index 'nope'"),
        (("drop", "db.t", "nope"), 1, "no index 'nope'"),
        (("pause", "db.t", "nope"), 2, "no index 'nope'"),
        (("list", "db.t", "--url", "ftp://x"), 2, "not the URL"),
        (("list", "db.t", "--url", "http://127.0.0.1:9"), 1, "No answer"),
    ]
    for arguments, code, expected in cases:
        actual, text = run_seamark(url, *arguments)
        assert (actual, expected in text) == (code, True), (arguments, text)
        assert "Traceback" not in text, arguments


def test_index_command_finds_the_server_of_a_home_folder(url: str, tmp_path: Path) -> None:
    home = tmp_path / "a-home"
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": url, "port": 1, "pid": 1}))
    result = CliRunner().invoke(cli, ["index", "list", "db.t", "--home", str(home)], env={"SEAMARK_URL": ""})
    assert result.exit_code == 0, result.output


def test_client_defines_an_index_and_builds_it(url: str) -> None:
    client = IndexClient(url)
    created_index = client.put_index("db.t", "i", kind="bitmap", columns=["data"])
    assert (created_index.state, created_index.files, created_index.files_total, created_index.lag_files) == (
        "enabled",
        0,
        6,
        6,
    )
    with pytest.raises(InvalidRequest, match="no such column"):
        client.put_index("db.t", "j", kind="bitmap", columns=["nope"])
    build = register_half_of_the_files(url, "i")
    assert [len(page["files"]) for page in client.list_files_to_index("db.t", "i", build["build-id"])] == [3]
    old_location = client.index("db.t", "i").json["index-files"][0]["location"]
    registration = write_index_file(build, "b", build_index_file(build, FILES, level=1))
    file = (registration["location"], registration["size-in-bytes"])
    client.register_index_files("db.t", "i", build["build-id"], [file], replaces=[old_location])
    assert list(client.list_files_to_index("db.t", "i", build["build-id"])) == []
    assert client.build("db.t", "i", build["build-id"])["state"] == "inflight"
    assert client.finish_build("db.t", "i", build["build-id"])["state"] == "completed"
    with pytest.raises(Refused, match="start another build"):
        client.finish_build("db.t", "i", build["build-id"], outcome="rolled-back")
    (index,) = client.indexes("db.t")
    assert (index.health, index.size_bytes) == ("ok", registration["size-in-bytes"])
    client.drop_index("db.t", "i")
    with pytest.raises(NoSuchResource):
        client.index("db.t", "i")
    client.close()
