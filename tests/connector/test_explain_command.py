"""`seamark explain`: what it shows, where it finds the server, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from seamark.metaserver.cli.main import cli
from tests.api.plans.planned import append, file_of
from tests.connector.served import Served


def seamark(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, everything printed)."""
    done = CliRunner().invoke(cli, ["explain", *arguments], env=env, prog_name="seamark")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def url(served: Served) -> str:
    """Of a server with `db.t`."""
    served.run(served.api.table())
    files = [file_of(f"file:///t/[{n}].parquet", 10 * n, 10 * n + 9) for n in range(4)]
    served.run(append(served.api, "t", files, snapshot_id=1))
    return served.url


def test_the_command_shows_stages_and_what_was_not_used(url: str) -> None:
    code, text = seamark("db.t", "id > 15 AND length(data) = 1", "--url", url)
    assert code == 0
    for part in ("Snapshot 1", "column_stats", "To read: 3 files, 30.0 kB, 300 records", "Not used: LENGTH(data) = 1"):
        assert part in text, text
    assert "parquet" not in text
    _, text = seamark("db.t", "id > 15", "--files", "--limit", "2", "--url", url)
    assert "The first 2 of 3 files" in text
    assert "file:///t/[1].parquet" in text
    assert "[3]" not in text


def test_the_command_gives_the_answer_itself_as_json(url: str) -> None:
    code, text = seamark("db.t", "--json", "--ref", "main", env={"SEAMARK_URL": url})
    assert code == 0
    _, _, answer = text.partition("\n{")  # the server in this process logs to the same output
    assert json.loads("{" + answer)["files"] == 4


def test_the_command_shows_what_joins_leave(url: str) -> None:
    join = {"table": ["db", "t"], "on": {"id": "id"}, "predicate": "id > 15"}
    nested = {"table": ["db", "t"], "on": {"id": "id"}, "joins": [join]}
    code, text = seamark("db.t", "--join", json.dumps(join), "--join", json.dumps(nested), "--url", url)
    assert code == 0, text
    assert text.count("Join with db.t: left out, a data file cannot be read") == 3, text
    assert "To read: 4 files" in text


def test_the_command_finds_the_server_of_a_home(url: str, tmp_path: Path) -> None:
    home = tmp_path / "a-home"
    code, text = seamark("db.t", "--home", str(home))
    assert code == 2
    assert "--url" in text
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": url, "port": 1, "pid": 1}))
    assert seamark("db.t", "--home", str(home))[0] == 0


def test_the_command_fails_with_a_code_that_says_whose_fault_it_is(url: str) -> None:
    for arguments, code, told in (
        (("db.t", "id ="), 2, "line 1, column 4"),
        (("db.t", "nope = 1"), 2, "nope"),
        (("t",), 2, "namespace"),
        (("db.none",), 1, "db.none"),
        (("db.t", "--join", "id = id"), 2, "--join"),
        (("db.t", "--join", "[]"), 2, "joins[0]"),
        (("db.t", "--join", '{"table": ["db", "t"], "on": {"id": "idd"}}'), 2, "idd"),
        (("db.t", "--join", '{"table": ["db", "none"], "on": {"id": "id"}}'), 1, "db.none"),
    ):
        assert seamark(*arguments, "--url", url)[0] == code
        assert told in seamark(*arguments, "--url", url)[1]
    assert seamark("db.t", "--url", "nonsense")[0] == 2
