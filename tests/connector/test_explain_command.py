"""`seamark explain`: its output, how it finds the server, and its exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from seamark.commands.catalog.expression_text import format_expression
from seamark.commands.explain import suggest_improvements
from tests.api.plans.planned import append_files, build_data_file
from tests.connector.server_thread import ServerThread
from tests.support.commands import invoke_seamark


def run_explain(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    return invoke_seamark("explain", *arguments, env=env)


@pytest.fixture
def url(server: ServerThread) -> str:
    """Return the URL of a server that has the table `db.t` of 4 files.

    The paths have brackets, which the library Rich would interpret as markup.
    """
    server.run(server.api.create_table())
    files = [build_data_file(f"file:///t/[{n}].parquet", 10 * n, 10 * n + 9) for n in range(4)]
    server.run(append_files(server.api, "t", files, snapshot_id=1))
    return server.url


def test_explain_shows_stages_and_unused_conditions(url: str) -> None:
    code, text = run_explain("db.t", "id > 15 AND length(data) = 1", "--url", url)
    assert code == 0
    for part in (
        "Snapshot 1",
        "column_stats",
        "To read: 3 files, 29.3 KiB, 300 records",
        "Not used: LENGTH(data) = 1: length() is not a transform",
        ", and by what is not used",
    ):
        assert part in text, text
    assert "parquet" not in text
    _, text = run_explain("db.t", "id > 15", "--files", "--limit", "2", "--url", url)
    assert "The first 2 of 3 files" in text
    assert "file:///t/[1].parquet" in text
    assert "[3]" not in text


def test_explain_states_why_a_condition_did_not_prune_and_proposes_a_remedy(url: str) -> None:
    _, text = run_explain("db.t", "id >= 1 AND data = 'x' AND id <> 'abc'", "--url", url)
    for part in (
        "id did not prune: by the bounds of id, 4 of 4 files may contain a matching row",
        "The number of files that an index would keep is unknown (the values are not sampled): "
        "seamark index create db.t --kind bitmap --columns id",
        "The effect of a layout by data is unknown: a data file cannot be read: ",
        "data did not prune: by the bounds of data, 4 of 4 files may contain a matching row",
        ": seamark index create db.t --kind bloom --columns data",
        "Not used: id <> 'abc': 'abc' is not a literal of id, which is long; write a number",
        "Readers check the rows of 4 files by: ",
    ):
        assert part in " ".join(text.split()), text
    _, text = run_explain("db.t", "id > 15", "--url", url)
    assert "id prunes little: by the bounds of id, 3 of 4 files may contain a matching row" in text
    _, text = run_explain("db.t", "id <> 15", "--url", url)
    assert text.count("id did not prune") == 1
    _, text = run_explain("db.t", "id = 15", "--url", url)
    assert "prune" not in text
    assert "check the rows of 1 file by" in text


def test_explain_reports_a_column_without_bounds(server: ServerThread) -> None:
    server.run(server.api.create_table())
    files = [build_data_file(f"file:///t/{n}.parquet", n, n) for n in range(4)]
    for file in files:
        del file.metrics[2]
    server.run(append_files(server.api, "t", files, snapshot_id=1))
    _, text = run_explain("db.t", "data = 'x'", "--url", server.url)
    assert "data did not prune: no file has bounds of data" in text
    assert "Sorted by" not in text


def test_suggested_command_quotes_the_names_that_writers_chose() -> None:
    term = {"column": "a; rm -rf ~", "files-in": 4, "files-left": 4, "has-bounds": True, "index": None}
    layout = {"columns": ["a; rm -rf ~"], "files-in": 4, "files": 1}
    terms = (term | {"index-kind": "bitmap", "index-files": 0, "index-note": None},)
    explanation = SimpleNamespace(files=4, indexes=(), terms=terms, layouts=(layout,), unknown_layouts=())
    for line in list(suggest_improvements("db.t", explanation))[1:]:
        command_words = shlex.split(line.rpartition(": ")[2])
        assert command_words[0] == "seamark"
        assert command_words[-1] in ("`a; rm -rf ~`", "seamark.clustering.columns=a; rm -rf ~")


def test_predicate_without_a_usable_part_has_exit_code_3(url: str) -> None:
    for flags in ((), ("--json",)):
        code, text = run_explain("db.t", "id = 'abc'", *flags, "--url", url)
        assert code == 3
    code, text = run_explain("db.t", "id = 'abc'", "--url", url)
    assert "Readers check the rows of 4 files by what is not used" in text
    assert "Not used: id = 'abc': 'abc' is not a literal of id" in text


def test_explain_prints_the_servers_answer_as_json(url: str) -> None:
    code, text = run_explain("db.t", "--json", "--ref", "main", env={"SEAMARK_URL": url})
    assert code == 0
    _, _, answer = text.partition("\n{")  # The server in this process logs to the same output.
    assert json.loads("{" + answer)["files"] == 4


def test_explain_shows_the_results_of_joins(url: str) -> None:
    join = {"table": ["db", "t"], "on": {"id": "id"}, "predicate": "id > 15"}
    nested_join = {"table": ["db", "t"], "on": {"id": "id"}, "joins": [join]}
    code, text = run_explain("db.t", "--join", json.dumps(join), "--join", json.dumps(nested_join), "--url", url)
    assert code == 0, text
    assert text.count("Join with db.t: left out, a data file cannot be read") == 3, text
    assert "To read: 4 files" in text


def test_query_is_explained_table_by_table(url: str) -> None:
    query = "SELECT count(*) FROM db.t a JOIN db.t b ON a.data = b.data WHERE a.id > 15 AND a.id + 1 > b.id"
    code, text = run_explain("--sql", query, "--url", url)
    assert code == 0, text
    assert text.count("Snapshot 1") == 2
    assert 'Condition: "id" > 15' in text
    assert "Condition: none on its own columns that could leave files out" in text
    assert "Files to read: db.t 3 of 4, db.t 4 of 4." in text
    code, text = run_explain(
        "--sql", "SELECT 1 FROM t WHERE id > 15", "--namespace", "db", "--dialect", "duckdb", "--json", "--url", url
    )
    assert code == 0, text
    assert json.loads("{" + text.partition("\n{")[2])["tables"][0]["plan"]["files"] == 3


def test_explain_does_not_claim_that_unused_conditions_match_all_rows(url: str) -> None:
    for where, expected in (
        ("id = 'abc'", "Not used: \"id\" = 'abc': 'abc' is not a literal of id, which is long; write a number"),
        ("id > 15 AND idd = 1", "Not used: idd: no table of the query has this column; did you mean id."),
        ("length(data) = 1", "Condition: none on its own columns that could leave files out"),
    ):
        code, text = run_explain("--sql", f"SELECT 1 FROM db.t WHERE {where}", "--url", url)
        assert code == 0, text
        assert expected in text
        assert "all rows match" not in text


def test_refused_query_is_reported_with_the_reason(url: str) -> None:
    for arguments, code, expected in (
        ((), 2, "There is nothing to explain: name a TABLE, or set --sql to a query"),
        (
            ("db.t", "--sql", "SELECT 1 FROM db.t"),
            2,
            "There is nothing to explain: name a TABLE, or set --sql to a query",
        ),
        (("--sql", "SELECT 1 FROM db.t", "--files"), 2, "cannot be set with --sql"),
        (("--sql", "SELECT 1 FRM db.t"), 2, "The query is not"),
        (("--sql", "SELECT 1 FROM t"), 2, "has no namespace"),
        (("--sql", "SELECT 1 FROM db.tt"), 1, "Did you mean db.t?"),
        (("db.t", "SELECT 1 FROM db.t WHERE id = 1"), 2, "use --sql QUERY, without a TABLE"),
        (("db.t", "WHERE id = 1"), 2, "Send the predicate alone, without SELECT or WHERE"),
    ):
        exit_code, text = run_explain(*arguments, "--url", url)
        assert exit_code == code, text
        assert expected in text, text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        ({"type": "eq", "term": "a", "value": "it's"}, "a = 'it''s'"),
        ({"type": "in", "term": "a", "values": [1, 2, 3, 4, 5, 6]}, "a IN (1, 2, 3, 4, 5, … 6 values)"),
        ({"type": "not", "child": {"type": "is-null", "term": "a"}}, "NOT (a IS NULL)"),
        ({"type": "starts-with", "term": "a", "value": "x"}, "a LIKE 'x%'"),
        ({"type": "lt", "term": {"type": "transform", "transform": "day", "term": "ts"}, "value": 5}, "day(ts) < 5"),
        (
            {
                "type": "and",
                "left": {"type": "not-nan", "term": "a"},
                "right": {
                    "type": "or",
                    "left": {"type": "gt-eq", "term": "b", "value": False},
                    "right": {"type": "not-eq", "term": "b", "value": 1.5},
                },
            },
            "a IS NOT NaN AND (b >= false OR b <> 1.5)",
        ),
    ],
)
def test_expression_is_shown_as_sql(value: object, text: str) -> None:
    assert format_expression(value) == text


def test_explain_finds_the_server_of_a_home_folder(url: str, tmp_path: Path) -> None:
    home = tmp_path / "a-home"
    code, text = run_explain("db.t", "--home", str(home))
    assert code == 2
    assert "--url" in text
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": url, "port": 1, "pid": 1}))
    assert run_explain("db.t", "--home", str(home))[0] == 0


def test_exit_code_of_explain_distinguishes_the_causes_of_failure(url: str) -> None:
    for arguments, code, expected in (
        (("db.t", "id ="), 2, "line 1, column 4"),
        (("db.t", "nope = 1"), 2, "nope"),
        (("t",), 2, "namespace"),
        (("db.none",), 1, "db.none"),
        (("db.t", "--join", "id = id"), 2, "--join"),
        (("db.t", "--join", "[]"), 2, "joins[0]"),
        (("db.t", "--join", '{"table": ["db", "t"], "on": {"id": "idd"}}'), 2, "idd"),
        (("db.t", "--join", '{"table": ["db", "none"], "on": {"id": "id"}}'), 1, "db.none"),
    ):
        assert run_explain(*arguments, "--url", url)[0] == code
        assert expected in run_explain(*arguments, "--url", url)[1]
    assert run_explain("db.t", "--url", "nonsense")[0] == 2
