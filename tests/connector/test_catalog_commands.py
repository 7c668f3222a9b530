"""`seamark namespace`, `table`, `snapshot`, `timeline` and `undrop` against a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from seamark.commands.main import cli
from seamark.connector.client.catalog import purge_dropped
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.policies import change_table_properties
from seamark.connector.write.appends import append
from tests.api.client import VIEW_VERSION


def invoke_command(client: IndexClient, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--url", client.url], input=answer)


def run_command(client: IndexClient, *arguments: str, answer: str | None = None) -> str:
    result = invoke_command(client, *arguments, answer=answer)
    assert result.exit_code == 0, result.output
    # The server writes its log to the same output.
    return "\n".join(line for line in result.stdout.splitlines() if "[info" not in line)


def run_json(client: IndexClient, *arguments: str) -> Any:
    text = run_command(client, *arguments, "--json")
    # Log lines can precede the JSON text.
    starts = [text.index(mark) for mark in ("[\n", "[]", "{\n") if mark in text]
    return json.JSONDecoder().raw_decode(text[min(starts) :])[0]


@pytest.fixture
def shop(client: IndexClient) -> IndexClient:
    """Return a client of a server that has `shop.orders` with two snapshots."""
    run_command(client, "namespace", "create", "shop", "--property", "owner=ann")
    columns = ["id:long!", "price:decimal(9,2)", "at:timestamptz"]
    options = [text for column in columns for text in ("--column", column)]
    run_command(
        client, "table", "create", "shop.orders", *options, "--partition", "bucket[4](id)", "--property", "a=b=c"
    )
    for number in range(2):
        append(client, "shop.orders", pa.table({"id": [number]}, schema=pa.schema([pa.field("id", pa.int64(), False)])))
    return client


def test_namespace_is_created_shown_changed_and_dropped(client: IndexClient) -> None:
    assert "created" in run_command(client, "namespace", "create", "a")
    run_command(client, "namespace", "create", "a.b\\.c", "--property", "k=v")
    assert ["a", "b.c"] in run_json(client, "namespace", "list")
    assert "a.b\\.c" in run_command(client, "namespace", "list")
    output = run_json(client, "namespace", "show", "a.b\\.c")
    assert (output["properties"]["k"], output["tables"]) == ("v", [])
    run_command(client, "namespace", "set", "a.b\\.c", "k=w", "x=y")
    run_command(client, "namespace", "set", "a.b\\.c", "--unset", "x")
    assert run_json(client, "namespace", "show", "a.b\\.c")["properties"]["k"] == "w"
    assert invoke_command(client, "namespace", "drop", "a").exit_code == 1
    run_command(client, "namespace", "drop", "a.b\\.c")
    run_command(client, "namespace", "drop", "a")
    assert ["a"] not in run_json(client, "namespace", "list")


def test_each_change_command_prints_json(client: IndexClient) -> None:
    assert run_json(client, "namespace", "create", "a", "--property", "k=v")["properties"]["k"] == "v"
    assert run_json(client, "namespace", "set", "a", "k=w")["properties"]["k"] == "w"
    created_table = run_json(client, "table", "create", "a.t", "--column", "id:long")
    assert [field["name"] for field in created_table["schemas"][0]["fields"]] == ["id"]
    assert run_json(client, "table", "set", "a.t", "x=y")["properties"]["x"] == "y"
    assert run_json(client, "table", "rename", "a.t", "a.u")["table-uuid"] == created_table["table-uuid"]
    assert run_json(client, "index", "create", "a.u", "--kind", "bloom", "--columns", "id")["name"] == "id_bloom"
    assert run_json(client, "index", "pause", "a.u", "id_bloom")["state"] == "paused"
    assert run_json(client, "index", "resume", "a.u", "id_bloom")["state"] == "enabled"
    assert run_json(client, "run", "compact", "a.u")["files-before"] == 0
    assert run_json(client, "run", "manifests", "a.u")["manifests-before"] == 0
    assert run_json(client, "run", "expire", "a.u")["snapshots"] == 0
    assert run_json(client, "index", "drop", "a.u", "id_bloom") == {"table": ["a", "u"], "dropped": "id_bloom"}
    dropped_answer = run_json(client, "table", "drop", "a.u", "--yes")
    assert (dropped_answer["dropped"], dropped_answer["entry"]["name"]) == (["a", "u"], "u")
    assert run_json(client, "namespace", "drop", "a") == {"dropped": ["a"]}


def test_views_are_listed_shown_renamed_and_dropped(shop: IndexClient) -> None:
    assert "There are no views." in run_command(shop, "view", "list")
    schema = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "id", "type": "long", "required": False}]}
    body = {"name": "totals", "schema": schema, "view-version": VIEW_VERSION, "properties": {"k": "v"}}
    shop._request("POST", "/v1/namespaces/shop/views", {}, json.dumps(body).encode())
    assert run_json(shop, "view", "list") == run_json(shop, "view", "list", "shop") == [["shop", "totals"]]
    text = run_command(shop, "view", "show", "shop.totals")
    for part in ("version 1", "SELECT 1", "spark", "long"):
        assert part in text
    assert run_json(shop, "view", "show", "shop.totals")["properties"]["k"] == "v"
    assert "Did you mean shop.totals?" in invoke_command(shop, "view", "show", "shop.total").output
    for command_words in (("table", "show"), ("explain",), ("health",), ("index", "list")):
        assert (
            "shop.totals is a view: seamark view show shop.totals"
            in invoke_command(shop, *command_words, "shop.totals").output
        )
    assert (
        "shop.orders is a table: seamark table show shop.orders"
        in invoke_command(shop, "view", "show", "shop.orders").output
    )
    identity = run_json(shop, "view", "show", "shop.totals")["view-uuid"]
    assert run_json(shop, "view", "rename", "shop.totals", "shop.sums")["view-uuid"] == identity
    assert invoke_command(shop, "view", "drop", "shop.sums", answer="n\n").exit_code == 1
    assert "seamark undrop shop.sums" in run_command(shop, "view", "drop", "shop.sums", "--yes")
    assert "restored" in run_command(shop, "undrop", "shop.sums")
    assert run_json(shop, "view", "list") == [["shop", "sums"]]


def test_misspelled_namespace_gets_a_suggestion(shop: IndexClient) -> None:
    for command_words in (("namespace", "show", "shp"), ("table", "list", "shp"), ("view", "list", "shp")):
        result = invoke_command(shop, *command_words)
        assert result.exit_code == 1
        assert "Did you mean shop?" in result.output, command_words


def test_table_is_listed_and_shown(shop: IndexClient) -> None:
    assert run_json(shop, "table", "list") == run_json(shop, "table", "list", "shop") == [["shop", "orders"]]
    text = run_command(shop, "table", "show", "shop.orders")
    assert "partitioned by bucket[4](id)" in text
    assert "2 rows, 2 data files" in text
    assert "decimal(9, 2)" in text
    metadata = run_json(shop, "table", "show", "shop.orders")
    assert metadata["properties"]["a"] == "b=c"
    assert [field["required"] for field in metadata["schemas"][0]["fields"]] == [True, False, False]
    run_command(shop, "table", "set", "shop.orders", "a=d")
    assert run_json(shop, "table", "show", "shop.orders")["properties"]["a"] == "d"


def test_policy_command_shows_an_invalid_value_that_an_engine_wrote(shop: IndexClient) -> None:
    change_table_properties(shop, "shop.orders", {"seamark.compaction.enabled": "maybe"}, ())
    assert "maybe (it must be true or false)" in run_command(shop, "policy", "shop.orders")


def test_dropped_table_is_restored(shop: IndexClient) -> None:
    run_command(shop, "table", "rename", "shop.orders", "shop.sales")
    assert invoke_command(shop, "table", "drop", "shop.sales", answer="n\n").exit_code == 1
    assert run_json(shop, "table", "list") == [["shop", "sales"]]
    text = run_command(shop, "table", "drop", "shop.sales", answer="y\n")
    assert "seamark undrop shop.sales restores it until 20" in text
    assert run_json(shop, "table", "list") == []
    (entry,) = run_json(shop, "undrop")
    assert (entry["namespace"], entry["name"], entry["purge"]) == (["shop"], "sales", False)
    assert "shop.sales" in run_command(shop, "undrop")
    refusal = invoke_command(shop, "table", "show", "shop.sales")
    assert "Table does not exist: shop.sales; seamark undrop shop.sales restores what was dropped" in refusal.output
    assert "shop.orders is restored" in run_command(shop, "undrop", "shop.sales", "--to", "shop.orders")
    assert run_command(shop, "undrop").strip() == "There are no dropped tables or views that can be restored."
    assert "2 rows" in run_command(shop, "table", "show", "shop.orders")
    assert "can be restored" in invoke_command(shop, "undrop", "shop.sales").output
    run_command(shop, "table", "drop", "shop.orders", answer="y\n")
    run_command(shop, "table", "create", "shop.orders", "--column", "id:long")
    refusal = invoke_command(shop, "undrop", "shop.orders")
    assert refusal.exit_code == 1
    assert "Table already exists: shop.orders; --to NAME restores it under another name" in refusal.output


def _purge_with_foreign_file(client: IndexClient, name: str, *, is_view: bool = False) -> Path:
    """Drop and purge a table or view whose location contains a foreign file, and return the path of that file.

    The catalog keeps the entry and its location, because of the foreign file.
    """
    kind = "view" if is_view else "table"
    metadata = run_json(client, kind, "show", name)
    foreign_file = Path(urlsplit(metadata["location"]).path, "foreign.parquet")
    foreign_file.parent.mkdir(parents=True, exist_ok=True)
    foreign_file.write_text("a")
    dropped_answer = run_json(client, kind, "drop", name, "--yes")
    purge_dropped(client, dropped_answer["entry"]["id"])
    return foreign_file


def test_retained_entries_are_listed_and_released(shop: IndexClient) -> None:
    assert run_command(shop, "retained", "list").strip() == "No dropped table or view still reserves its location."
    foreign_file = _purge_with_foreign_file(shop, "shop.orders")
    (entry,) = run_json(shop, "retained", "list")
    assert (entry["namespace"], entry["name"], entry["kind"]) == (["shop"], "orders", "table")
    assert entry["id"] in run_command(shop, "retained", "list", "shop")
    assert "seamark retained release shop.orders releases it" in run_command(
        shop, "retained", "purge", "shop.orders", "--yes"
    )
    assert invoke_command(shop, "retained", "release", "shop.orders", answer="n\n").exit_code == 1
    assert [item["id"] for item in run_json(shop, "retained", "list")] == [entry["id"]]
    assert run_json(shop, "retained", "release", "shop.orders", "--yes")["released"]["id"] == entry["id"]
    assert foreign_file.exists()
    assert run_json(shop, "retained", "list") == []
    refusal = invoke_command(shop, "retained", "release", "shop.orders")
    assert refusal.exit_code == 1
    assert (
        "No dropped table or view shop.orders reserves its location; seamark retained list shows those that do"
        in refusal.output
    )


def test_retained_entry_is_chosen_by_id_if_several_have_the_name(shop: IndexClient) -> None:
    _purge_with_foreign_file(shop, "shop.orders")
    run_command(shop, "table", "create", "shop.orders", "--column", "id:long")
    foreign_file = _purge_with_foreign_file(shop, "shop.orders")
    first_entry, second_entry = entries = run_json(shop, "retained", "list")
    refusal = invoke_command(shop, "retained", "release", "shop.orders", "--yes")
    ids = f"{first_entry['id']}, {second_entry['id']}"
    assert f"2 dropped entries had the name shop.orders: choose one of them with --id: {ids}" in refusal.output
    unknown_result = invoke_command(shop, "retained", "purge", "shop.orders", "--id", "none", "--yes")
    assert "No dropped table or view shop.orders with the id none reserves its location" in unknown_result.output
    folder = str(foreign_file.parent)
    (latest_entry,) = (entry for entry in entries if urlsplit(entry["metadata-location"]).path.startswith(f"{folder}/"))
    (older_entry,) = (entry for entry in entries if entry is not latest_entry)
    run_command(shop, "retained", "release", "shop.orders", "--id", older_entry["id"], "--yes")
    foreign_file.unlink()
    purged_answer = run_json(shop, "retained", "purge", "shop.orders", "--yes")
    assert purged_answer == {"purged": latest_entry, "retained": False}
    assert run_json(shop, "retained", "list") == []


def test_dropped_view_that_keeps_its_location_is_purged(shop: IndexClient) -> None:
    body = {"name": "v", "schema": {"type": "struct", "fields": []}, "properties": {}, "view-version": VIEW_VERSION}
    shop._request("POST", "/v1/namespaces/shop/views", {}, json.dumps(body).encode())
    _purge_with_foreign_file(shop, "shop.v", is_view=True)
    (entry,) = run_json(shop, "retained", "list", "shop")
    assert (entry["name"], entry["kind"]) == ("v", "view")
    assert run_json(shop, "retained", "purge", "shop.v", "--yes") == {"purged": entry, "retained": False}
    assert run_json(shop, "retained", "list") == []


def test_snapshots_and_instants_are_listed(shop: IndexClient) -> None:
    listed_snapshots = run_json(shop, "snapshot", "list", "shop.orders")
    assert [(snapshot["summary"]["total-records"], snapshot["refs"]) for snapshot in listed_snapshots] == [
        ("2", ["main"]),
        ("1", []),
    ]
    assert "1 older snapshot is not shown" in run_command(shop, "snapshot", "list", "shop.orders", "--limit", "1")
    assert "append" in run_command(shop, "snapshot", "list", "shop.orders")
    snapshot_by_name = run_json(shop, "snapshot", "show", "shop.orders", "main")
    assert (
        snapshot_by_name
        == run_json(shop, "snapshot", "show", "shop.orders", str(listed_snapshots[0]["snapshot-id"]))
        == listed_snapshots[0]
    )
    assert "no snapshot, branch or tag 5" in invoke_command(shop, "snapshot", "show", "shop.orders", "5").output
    text = run_command(shop, "timeline", "shop.orders", "--json")
    actions = [json.loads(line)["action"] for line in text.splitlines() if line.startswith("{")]
    assert actions == ["create", "commit", "commit"]
    run_command(shop, "table", "set", "shop.orders", "owner=ann")
    text = run_command(shop, "timeline", "--action", "commit")
    assert len([line for line in text.splitlines() if "shop.orders" in line]) == 3
    assert "added-records" in text
    assert "set-properties" in text
    assert "request-id" not in text
    assert "No instant has the action nap." in run_command(shop, "timeline", "--action", "nap")


def test_invalid_command_is_reported_without_a_traceback(shop: IndexClient) -> None:
    cases: list[tuple[list[str], int, str]] = [
        (["table", "show", "shop.order"], 1, "Did you mean shop.orders?"),
        (["snapshot", "list", "shpo.orders"], 1, "Did you mean shop.orders?"),
        (["index", "list", "shop.odrers"], 1, "Did you mean shop.orders?"),
        (["sql", "SELECT id FROM shop.odrers"], 1, "Did you mean shop.orders?"),
        (["sql", "SELECT idd FROM shop.orders"], 2, "did you mean id?"),
        (["table", "show", "shop.something"], 1, "shop.something"),
        (["explain", "shop.orders", "id = 1", "--as-of", "now"], 2, "write 2026-01-31T12:00 or milliseconds"),
        (["explain", "shop.orders", "id = 1", "--as-of", "2020-01-31T12:00"], 2, "no snapshot at as-of=1580472000000"),
        (["table", "show", "orders"], 2, "add the namespace"),
        (["table", "drop", "shop.order", "--yes"], 1, "Did you mean shop.orders?"),
        (["table", "create", "shop.t", "--column", "id"], 2, "write NAME:TYPE"),
        (["table", "create", "shop.t", "--column", "id:number"], 2, "the types are boolean, int, long"),
        (["table", "create", "shop.t", "--column", "id:BIGINT!"], 2, "write long"),
        (["table", "create", "shop.t", "--column", "id:strin"], 2, "write string"),
        (["table", "create", "nowhere.t", "--column", "id:long"], 1, "; seamark namespace create nowhere creates it"),
        (
            ["table", "create", "shop.t", "--column", "id:long", "--partition", "day(at)"],
            2,
            "the table has no column at",
        ),
        (["table", "create", "shop.t", "--column", "id:long", "--property", "x"], 2, "write NAME=VALUE"),
        (["table", "create", "shop.orders", "--column", "id:long"], 1, "already exists"),
        (["table", "set", "shop.orders"], 2, "There is nothing to change: write PROPERTY=VALUE"),
        (
            ["table", "set", "shop.orders", "seamark.compaction.enabld=true"],
            2,
            "did you mean seamark.compaction.enabled",
        ),
        (["table", "set", "shop.orders", "seamark.compaction.enabled=yes"], 2, "it must be true or false"),
        (["namespace", "set", "shop", "history.expire.max-snapshot-age-ms=5d"], 2, "a whole number"),
        (["policy", "shop.orders", "--set", "seamark.cache.preload=files"], 2, "seamark table set"),
        (["namespace", "show", "nowhere"], 1, "nowhere"),
        (["namespace", "create", "x.y"], 1, "x"),
    ]
    for arguments, code, message in cases:
        result = invoke_command(shop, *arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert message in result.output, arguments
        assert "Traceback" not in result.output, arguments


@pytest.mark.slow
def test_unreachable_server_is_reported_in_one_line() -> None:
    result = CliRunner().invoke(cli, ["table", "list", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "No answer from http://127.0.0.1:1" in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("levels", [("a",), ("a.b", "c"), ("a\\", "b.", "\\.")])
def test_joined_names_are_split_into_the_same_levels(levels: tuple[str, ...]) -> None:
    assert split_name(join_name(levels)) == levels


def test_jobs_find_a_table_whose_namespace_has_a_dot(client: IndexClient) -> None:
    """A job without work prints that there is nothing to do."""
    run_command(client, "namespace", "create", r"shop\.eu")
    run_command(client, "table", "create", r"shop\.eu.orders", "--column", "id:long")
    assert "are complete" in run_command(client, "run", "index", r"shop\.eu.orders")
    run_command(client, "namespace", "create", "shop")
    run_command(client, "table", "create", "shop.orders", "--column", "id:long")
    assert "No file needs a change." in run_command(client, "run", "statement", "ALTER TABLE shop.orders MERGE FILES")


def test_policy_is_set_listed_shown_and_dropped(shop: IndexClient) -> None:
    columns = ("--column", "id:long")
    run_command(shop, "table", "create", "shop.returns", *columns)
    property_name, inherited_property = "seamark.compaction.enabled", "seamark.statistics.enabled"
    assert "No table" in run_command(shop, "policy", "list")
    assert run_json(shop, "policy", "list", "shop") == []
    run_command(shop, "policy", "set", "shop.orders", f"{property_name}=true")
    assert "follow the new policy" in run_command(
        shop, "policy", "set", "shop", "--namespace", f"{inherited_property}=true"
    )
    properties_by_table = {tuple(policy["table"]): policy["properties"] for policy in run_json(shop, "policy", "list")}
    sources = {
        table: {entry["name"]: entry["source"] for entry in entries} for table, entries in properties_by_table.items()
    }
    assert sources == {
        ("shop", "orders"): {property_name: "table", inherited_property: "namespace"},
        ("shop", "returns"): {inherited_property: "namespace"},
    }
    text = run_command(shop, "policy", "list", "shop")
    assert "shop.returns" in text
    assert "namespace shop" in text
    properties = run_json(shop, "policy", "show", "shop.orders")["properties"]
    assert next(item["value"] for item in properties if item["name"] == property_name) == "true"
    run_command(shop, "policy", "drop", "shop.orders")
    assert [policy["table"] for policy in run_json(shop, "policy", "list")] == [["shop", "orders"], ["shop", "returns"]]
    run_command(shop, "policy", "drop", "shop", inherited_property, "--namespace")
    assert run_json(shop, "policy", "list") == []
    assert run_json(shop, "namespace", "show", "shop")["properties"]["owner"] == "ann", (
        "other properties stay unchanged"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "shop.orders"), "Missing argument"),
        (("set", "shop.orders", "seamark.compaction.enabled"), "write NAME=VALUE"),
        (("set", "shop.orders", "owner=ann"), "A policy has no property"),
        (("drop", "shop.orders", "owner"), "A policy has no property"),
    ],
)
def test_invalid_policy_is_refused_before_a_request(
    client: IndexClient, arguments: tuple[str, ...], message: str
) -> None:
    result = invoke_command(client, "policy", *arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_policy_commands_of_earlier_versions_are_accepted(shop: IndexClient) -> None:
    property_name = "seamark.compaction.enabled"
    run_command(shop, "policy", "shop.orders", "--set", f"{property_name}=true")
    run_command(shop, "policy", "--namespace", "shop", "--set", f"{property_name}=false")
    assert property_name in run_command(shop, "policy", "shop.orders")
    run_command(shop, "policy", "shop.orders", "--unset", property_name)
    (entry,) = (item for item in run_json(shop, "policy", "shop.orders")["properties"] if item["name"] == property_name)
    assert (entry["value"], entry["source"]) == ("false", "namespace")
