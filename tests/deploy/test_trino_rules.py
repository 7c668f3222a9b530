"""Tests of row filters, column masks, denied tables and columns, and views with owners, in a Trino with access control.

Through the proxy all users get the same rows and refusals as without it.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
import trino.exceptions
from pyiceberg.catalog import load_catalog

from tests.deploy.shop import post_statement, query_rows, wait_for_result
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.trino import PLANS, Trino
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

pytestmark = NEEDS_TRINO
FILES, ROWS = 10, 12
COUNTRIES = ("FR", "DE", "IT")
VIEWS = (
    ("lent", "DEFINER", "SELECT id, customer, country, card FROM orders WHERE id >= 0"),
    ("own", "INVOKER", "SELECT id, customer, country, card FROM orders"),
    ("grouped", "DEFINER", "SELECT customer, count(*) AS n, min(card) AS card FROM orders GROUP BY customer"),
    ("rich", "DEFINER", "SELECT o.id, o.card, c.name FROM orders o JOIN customers c ON o.customer = c.number"),
    ("free", "DEFINER", "SELECT id, customer, country FROM orders"),
    ("outer_lent", "DEFINER", "SELECT id, country FROM lent WHERE country <> 'XX'"),
)


@dataclass
class RulesRig:
    seamark: Seamark
    trino: Trino
    proxy: TrinoProxy


def create_orders(seamark: Seamark) -> None:
    """Create `ruled.orders`, and `ruled.customers` with ten rows. Two files of orders share no id and no card."""
    catalog = load_catalog("seamark", type="rest", uri=seamark.base_url)
    catalog.create_namespace("ruled")
    text, number = pa.string(), pa.int64()
    schema = pa.schema([("id", number), ("customer", number), ("country", text), ("card", text)])
    orders = catalog.create_table("ruled.orders", schema=schema)
    for file_number in range(FILES):
        ids = range(file_number * ROWS, (file_number + 1) * ROWS)
        rows = {
            "id": list(ids),
            "customer": [file_number] * ROWS,
            "country": [COUNTRIES[order_id % 3] for order_id in ids],
        }
        orders.append(pa.table({**rows, "card": [f"c{file_number}-{order_id % 4}" for order_id in ids]}, schema=schema))
    people = {
        "number": list(range(10)),
        "name": [f"name{number}" for number in range(10)],
        "tier": [number % 3 for number in range(10)],
    }
    table = pa.table(people, schema=pa.schema([("number", number), ("name", text), ("tier", number)]))
    catalog.create_table("ruled.customers", schema=table.schema).append(table)
    catalog.close()


@pytest.fixture(scope="module")
def rig(trino_lake: TrinoLake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RulesRig]:
    """Create a table and views, and run a proxy over Trino. It waits up to 20 seconds for a statement's first row."""
    seamark, coordinator = trino_lake.seamark, trino_lake.trino
    create_orders(seamark)
    with run_trino_proxy(
        tmp_path_factory.mktemp("ruled"),
        *(
            "--trino",
            coordinator.base_url,
            "--budget-ms",
            "5000",
            "--hold",
            "20",
            "--plan-header",
            "--maintenance",
            "1",
        ),
        seamark=seamark.base_url,
    ) as proxy:
        for name, security, text in VIEWS:
            query_rows(
                coordinator.port, f"CREATE VIEW {name} SECURITY {security} AS {text}", user="anna", schema="ruled"
            )
        yield RulesRig(seamark, coordinator, proxy)


def answer_query(port: int, sql: str, user: str) -> list[list[Any]] | str:
    """Return the sorted rows, or Trino's error message."""
    try:
        return sorted(query_rows(port, sql, user=user, schema="ruled"), key=repr)
    except trino.exceptions.TrinoQueryError as error:
        return f"{error.error_name}: {error.message}"


def run_both(rig: RulesRig, sql: str, user: str) -> list[list[Any]] | str:
    direct_answer = answer_query(rig.trino.port, sql, user)
    assert answer_query(rig.proxy.port, sql, user) == direct_answer, f"{user}: {sql}"
    return direct_answer


def read_outcome(rig: RulesRig, sql: str, user: str) -> str:
    """Return the outcome in the proxy's header.

    A reason with "recently" is temporary: the proxy makes no plans for some time after a failure. The statement is then
    sent again.
    """

    def read_outcome_if_final() -> str:
        outcome = post_statement(rig.proxy.port, sql, **{"X-Trino-User": user, "X-Trino-Schema": "ruled"})[0]
        return "" if "recently" in outcome else outcome.partition("; ms=")[0]

    return str(wait_for_result(read_outcome_if_final))


def count_rewritten_statements(rig: RulesRig, sql: str, user: str) -> tuple[int, int]:
    """Run a statement, and count the rewritten and the restarted statements.

    A statement is restarted if its rewritten text fails; then its original text runs.
    """
    counts_before = [rig.proxy.count_statements(kind) for kind in ("rewritten", "original")]
    run_both(rig, sql, user)
    return tuple(  # type: ignore[return-value]
        rig.proxy.count_statements(kind) - count_before
        for kind, count_before in zip(("rewritten", "original"), counts_before, strict=True)
    )


def load_table(rig: RulesRig, name: str, header: str | None = PLANS) -> dict[str, Any] | int:
    headers = {} if header is None else {"X-Seamark-Plans": header}
    request = urllib.request.Request(f"{rig.seamark.base_url}/v1/namespaces/ruled/tables/{name}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            loaded_table: dict[str, Any] = json.load(response)
            return loaded_table
    except urllib.error.HTTPError as error:
        return error.code


def list_snapshot_ids(rig: RulesRig, header: str | None = PLANS) -> list[int]:
    """Return the snapshots of `orders` that a catalog with this header loads."""
    loaded_table = load_table(rig, "orders", header)
    assert isinstance(loaded_table, dict)
    return [snapshot["snapshot-id"] for snapshot in loaded_table["metadata"]["snapshots"]]


def plan_name(rig: RulesRig, predicate: str) -> str:
    """Plan a scan of `orders` with this predicate, and return the name of the plan table.

    The request names no user. A plan table is a table name under which Trino reads only the files of the plan.
    """
    request = urllib.request.Request(
        f"{rig.seamark.base_url}/api/v1/tables/ruled/orders/plan-tables",
        data=json.dumps({"predicate": predicate}).encode(),
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["name"])


def test_rows_are_filtered_and_masked_equally_with_and_without_the_proxy(rig: RulesRig) -> None:
    sql = "SELECT id, country, card FROM orders WHERE id BETWEEN 3 AND 8"
    assert count_rewritten_statements(rig, sql, "anna") == (1, 0)
    assert count_rewritten_statements(rig, sql, "rita") == (1, 0)
    assert run_both(rig, sql, "rita") == [[3, "FR", "XXXX"], [6, "FR", "XXXX"]]
    assert len(run_both(rig, sql, "anna")) == 6


@pytest.mark.slow
def test_condition_on_a_masked_column_uses_the_mask(rig: RulesRig) -> None:
    for sql in (
        "SELECT id FROM orders WHERE card = 'XXXX'",
        "SELECT id FROM (SELECT id, card AS c FROM orders) WHERE c = 'XXXX'",
        "SELECT count(*) FROM orders o WHERE o.card IN ('XXXX', 'c3-1')",
        "SELECT a.id FROM orders a JOIN customers b ON a.customer = b.number AND a.card = 'XXXX' WHERE b.tier = 1",
    ):
        actual = run_both(rig, sql, "rita")
        assert actual
        assert actual != [[0]]
    assert count_rewritten_statements(rig, "SELECT id FROM orders WHERE card = 'c3-1'", "anna") == (1, 0)
    assert run_both(rig, "SELECT id FROM orders WHERE card = 'c3-1'", "rita") == []


def test_denied_tables_and_columns_are_refused_with_the_original_message(rig: RulesRig) -> None:
    for user, sql in (
        ("dan", "SELECT card FROM orders WHERE id = 5"),
        ("dan", "SELECT id FROM orders WHERE card = 'c0-1'"),
        ("dan", "SELECT * FROM orders WHERE id = 5"),
        ("dan", "SELECT o.id FROM orders o JOIN customers c ON o.customer = c.number WHERE c.tier = 1"),
        ("sue", "SELECT id FROM orders WHERE id = 5"),
        ("sue", "SELECT id FROM own WHERE id = 5"),
        ("sue", "SELECT id FROM rich WHERE id = 5"),
        ("dan", "SELECT n FROM grouped WHERE customer = 5"),
    ):
        error = run_both(rig, sql, user)
        assert "Access Denied" in error
        assert not any(str(snapshot_id) in error for snapshot_id in list_snapshot_ids(rig))


def test_header_shows_no_counts_to_users_with_row_filters_or_masks(rig: RulesRig) -> None:
    sql = "SELECT id FROM orders WHERE id = 5"
    assert read_outcome(rig, sql, "anna") == f"rewritten; scans=1; files=1/{FILES}; ruled.orders=1/{FILES}"
    assert read_outcome(rig, sql, "rita") == "planned"
    assert read_outcome(rig, "SELECT id FROM orders WHERE card = 'c0-1'", "rita") == "planned"
    assert read_outcome(rig, sql, "sue") == "planned"
    assert read_outcome(rig, sql, "dan") == f"rewritten; scans=1; files=1/{FILES}; ruled.orders=1/{FILES}"


def test_files_are_not_pruned_by_hidden_rows_of_another_table(rig: RulesRig) -> None:
    sql = "SELECT o.id FROM orders o JOIN customers c ON o.customer = c.number WHERE c.name = 'name8'"
    assert count_rewritten_statements(rig, sql, "anna") == (1, 0)
    assert run_both(rig, sql, "rita") == []
    assert read_outcome(rig, sql, "rita") == "planned"
    wait_for_result(lambda: count_rewritten_statements(rig, sql, "rita") == (0, 1))


def test_plan_name_of_one_user_is_unknown_to_another_user(rig: RulesRig) -> None:
    name = plan_name(rig, "id = 5")
    assert load_table(rig, name) == 404
    assert isinstance(load_table(rig, name, None), dict)
    for user in ("rita", "dan", "sue"):
        actual = run_both(rig, f'SELECT * FROM "{name}"', user)
        assert "TABLE_NOT_FOUND" in actual


def test_plan_view_of_one_user_returns_no_rows_to_another_user(rig: RulesRig) -> None:
    """The proxy makes a plan view, which reads the files of a plan, for one user, and withdraws it later.

    The test reads such a view as other users before it is withdrawn.
    """
    response = urllib.request.urlopen(f"{rig.seamark.base_url}/v1/namespaces/ruled/views/lent", timeout=60)
    view = json.load(response)
    text = view["metadata"]["versions"][-1]["representations"][0]["sql"]
    plan = post_json(rig, "tables/ruled/orders/plan-tables", {"predicate": "id = 5"})["plan-snapshot-id"]
    position = text.index("orders")
    table_position = {
        "start": position,
        "end": position + len("orders"),
        "table": ["ruled", "orders"],
        "plan-snapshot-id": plan,
    }
    body = {
        "metadata-location": view["metadata-location"],
        "predicate": "id BETWEEN 3 AND 8",
        "tables": [table_position],
    }
    name = post_json(rig, "views/ruled/lent/plan-views", {**body, "reader": "anna"})["name"]
    sql = f'SELECT id FROM "{name}"'
    assert len(answer_query(rig.trino.port, sql, "anna")) == 6
    for user in ("rita", "dan", "sue"):
        error = answer_query(rig.trino.port, sql, user)
        assert "another user" in error
    # A lease of 0 s ends the plan.
    post_json(rig, "tables/ruled/orders/plan-snapshots", {"snapshot-ids": [plan], "lease-s": 0})


def post_json(rig: RulesRig, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{rig.seamark.base_url}/api/v1/{path}", data=json.dumps(body).encode(), headers={"X-Seamark-Plans": PLANS}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_plans_are_shown_only_to_their_catalog_and_disappear_soon(rig: RulesRig) -> None:
    wait_for_result(lambda: len(list_snapshot_ids(rig)) == FILES)
    post_statement(
        rig.proxy.port, "SELECT id FROM orders WHERE id = 77", **{"X-Trino-User": "anna", "X-Trino-Schema": "ruled"}
    )
    assert len(list_snapshot_ids(rig)) == FILES + 1
    assert len(list_snapshot_ids(rig, None)) == len(list_snapshot_ids(rig, "another")) == FILES
    wait_for_result(lambda: len(list_snapshot_ids(rig)) == FILES)


@pytest.mark.slow
def test_snapshots_can_be_expired_through_the_catalog_that_sees_plans(rig: RulesRig) -> None:
    """Trino's catalog reads stored plans, which the server shows to it as snapshots of the table.

    Trino deletes the files of expired snapshots. If one of these is a plan, the plan is dropped, and nothing uses its
    files afterwards.
    """
    query_rows(rig.trino.port, "CREATE TABLE kept AS SELECT * FROM orders", user="anna", schema="ruled")
    for number in range(3):
        query_rows(
            rig.trino.port, f"INSERT INTO kept VALUES ({1000 + number}, 1, 'FR', 'c')", user="anna", schema="ruled"
        )
    plans = [
        post_json(rig, "tables/ruled/kept/plan-tables", {"predicate": f"id = {order_id}"}) for order_id in (1000, 1001)
    ]
    session = {
        "seamark.expire_snapshots_min_retention": "0s",
        "seamark.remove_orphan_files_min_retention": "0s",
    }
    for _ in range(2):
        for procedure in ("expire_snapshots", "remove_orphan_files"):
            query_rows(
                rig.trino.port,
                f"ALTER TABLE kept EXECUTE {procedure}(retention_threshold => '0s')",
                user="anna",
                schema="ruled",
                session_properties=session,
            )
    loaded_table = load_table(rig, "kept")
    assert isinstance(loaded_table, dict)
    assert len(loaded_table["metadata"]["snapshots"]) == 1
    assert plans[0]["plan-snapshot-id"] not in [
        snapshot["snapshot-id"] for snapshot in loaded_table["metadata"]["snapshots"]
    ]
    for number in (1000, 1001, 5):
        actual = run_both(rig, f"SELECT id FROM kept WHERE id = {number}", "anna")
        assert actual == [[number]]
    query_rows(rig.trino.port, "DROP TABLE kept", user="anna", schema="ruled")


@pytest.mark.slow
def test_statement_runs_unchanged_when_trino_requires_partition_filters(rig: RulesRig) -> None:
    session = {"seamark.query_partition_filter_required": "true"}
    count_before = rig.proxy.count_statements("rewritten")
    query_rows(
        rig.proxy.port, "SELECT id FROM orders WHERE id = 5", user="anna", schema="ruled", session_properties=session
    )
    assert rig.proxy.count_statements("rewritten") == count_before


# Random statements of users with different rules


class RuleStatements:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw_condition(self, prefix: str, columns: tuple[str, ...]) -> str:
        rng, parts = self.rng, []
        for _ in range(rng.choice([1, 1, 2])):
            column = rng.choice(columns)
            parts.append(
                {
                    "id": lambda: f"{prefix}id {rng.choice(['=', '<', '>'])} {rng.randrange(FILES * ROWS)}",
                    "customer": lambda: f"{prefix}customer IN ({rng.randrange(10)}, {rng.randrange(10)})",
                    "number": lambda: f"{prefix}number = {rng.randrange(10)}",
                    "n": lambda: f"{prefix}n > {rng.randrange(20)}",
                    "tier": lambda: f"{prefix}tier = {rng.randrange(3)}",
                    "country": lambda: f"{prefix}country = '{rng.choice(COUNTRIES)}'",
                    "name": lambda: f"{prefix}name = 'name{rng.randrange(10)}'",
                    "card": lambda: (
                        f"{prefix}card = '{rng.choice(['XXXX', f'c{rng.randrange(10)}-{rng.randrange(4)}'])}'"
                    ),
                }[column]()
            )
        return rng.choice([" AND ", " AND ", " OR "]).join(parts)

    def draw_table(self) -> tuple[str, tuple[str, ...]]:
        """Return the name and the columns of a table or view. A column that is listed twice is drawn more often."""
        orders = ("id", "id", "customer", "country", "card")
        return self.rng.choice(
            [
                ("orders", orders),
                ("orders", orders),
                ("ruled.orders", orders),
                ("customers", ("number", "name", "tier")),
                ("lent", orders),
                ("own", orders),
                ("grouped", ("customer", "n", "card")),
                ("rich", ("id", "card", "name")),
                ("outer_lent", ("id", "country")),
                ("free", ("id", "id", "customer")),
            ]
        )

    def draw_query(self, user: str) -> str:
        """Return a random query. For users who may read no table, most queries read views."""
        rng = self.rng
        name, columns = self.draw_table()
        kind = rng.randrange(6)
        if user == "sue" and rng.random() < 0.6:
            name, columns, kind = "free", ("id", "id", "customer"), rng.choice([0, 1, 4, 5])
        projection = ", ".join(sorted(rng.sample(sorted(set(columns)), rng.randrange(1, len(set(columns)) + 1))))
        match kind:
            case 0:
                return f"SELECT {rng.choice(['*', projection])} FROM {name} WHERE {self.draw_condition('', columns)}"
            case 1:
                return f"SELECT count(*), min({columns[0]}) FROM {name} x WHERE {self.draw_condition('x.', columns)}"
            case 2:
                condition = self.draw_condition("c.", ("number", "name", "tier"))
                left_table = rng.choice(["orders", "orders", "lent", "own"])
                extra_condition = rng.choice(["", f" AND {self.draw_condition('o.', ('id', 'country', 'card'))}"])
                join = f"{left_table} o JOIN customers c ON o.customer = c.number"
                return f"SELECT o.id, c.name FROM {join} WHERE {condition}{extra_condition}"
            case 3:
                inner = f"SELECT customer FROM orders WHERE {self.draw_condition('', ('id', 'country', 'card'))}"
                return (
                    f"SELECT id FROM orders WHERE customer IN ({inner}) AND {self.draw_condition('', ('id', 'card'))}"
                )
            case 4:
                condition = self.draw_condition("", columns)
                return f"WITH q AS (SELECT {projection} FROM {name} WHERE {condition}) SELECT * FROM q"
            case _:
                text = f"SELECT {projection} FROM {name} WHERE {self.draw_condition('', columns)}".replace("'", "''")
                return f"EXECUTE IMMEDIATE '{text}'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "queries"), [(45, 12), (45, 45), pytest.param(500, 500, marks=pytest.mark.timeout(3600))]
)
def test_random_statements_of_three_users_are_equal_through_the_proxy(rig: RulesRig, seed: int, queries: int) -> None:
    statements = RuleStatements(random.Random(seed))
    counts: Counter[str] = Counter()
    counts_before = {outcome: rig.proxy.count_statements(outcome) for outcome in ("rewritten", "original", "unchanged")}
    rewritten: Counter[str] = Counter()
    for number in range(queries):
        user = ("rita", "dan", "sue")[number % 3]
        rewritten_before = rig.proxy.count_statements("rewritten")
        result = run_both(rig, statements.draw_query(user), user)
        rewritten[user] += rig.proxy.count_statements("rewritten") - rewritten_before
        if isinstance(result, str):
            counts["refused" if "Access Denied" in result else "failed"] += 1
        else:
            counts["rows" if result else "empty"] += 1
    new_counts = {
        outcome: rig.proxy.count_statements(outcome) - count_before for outcome, count_before in counts_before.items()
    }
    print(dict(counts), new_counts, dict(rewritten))
    assert counts["failed"] == 0
    assert counts["rows"] > 0.25 * queries
    assert counts["refused"] > 0.1 * queries
    assert new_counts["rewritten"] > 0.2 * queries
    assert set(rewritten) == {"rita", "dan", "sue"}
    assert min(rewritten.values()) > 0


@pytest.mark.slow
def test_users_who_may_update_all_rows_can_merge_files_and_drop_columns(rig: RulesRig) -> None:
    for user in ("rita", "dan", "sue"):
        for sql in ("ALTER TABLE customers MERGE FILES", "ALTER TABLE customers PARTITION (TRUE) DROP COLUMNS (tier)"):
            error = str(answer_query(rig.proxy.port, sql, user))
            assert "PERMISSION_DENIED" in error or "row filter" in error, (user, sql, error)
    catalog = load_catalog("seamark", type="rest", uri=rig.seamark.base_url)
    schema = pa.schema([("id", pa.int64()), ("part", pa.int64()), ("payload", pa.string())])
    target_table = catalog.create_table("ruled.kept", schema=schema)
    with target_table.update_spec() as spec:
        spec.add_identity("part")
    for file_number in range(4):
        target_table.append(
            pa.table({"id": [file_number], "part": [file_number % 2], "payload": [f"p{file_number}"]}, schema=schema)
        )
    catalog.close()
    for sql, file_counts in (  # The files before and after the statement
        ("ALTER TABLE kept PARTITION (part = 0) DROP COLUMNS (Payload)", [2, 1]),
        ("ALTER TABLE seamark.ruled.kept MERGE FILES TARGET SIZE '1GB'", [2, 1]),
    ):
        assert answer_query(rig.trino.port, sql, "anna")[:12] == "SYNTAX_ERROR"
        assert answer_query(rig.proxy.port, sql, "anna")[0][:2] == file_counts  # type: ignore[index]
    expected = [[0, 0, None], [1, 1, "p1"], [2, 0, None], [3, 1, "p3"]]
    assert run_both(rig, "SELECT id, part, payload FROM kept", "anna") == expected
    assert run_both(rig, 'SELECT count(*) FROM "kept$files"', "anna") == [[2]]
    error = answer_query(rig.proxy.port, "ALTER TABLE kept PARTITION (id = 0) DROP COLUMNS (payload)", "anna")
    assert "part of the partition" in error


def list_reported_columns(rig: RulesRig) -> list[list[str]]:
    """Return the sorted columns of `orders` in the reports of the proxy."""
    url, token = f"{rig.seamark.base_url}/api/v1/tables/ruled/orders/metrics", ""
    reports: list[dict[str, Any]] = []
    while token is not None:
        with urllib.request.urlopen(f"{url}?pageToken={token}" if token else url, timeout=60) as response:
            page = json.load(response)
        reports += [report["report"] for report in page["reports"]]
        token = page["next-page-token"]
    proxy_reports = [
        report for report in reports if report.get("metadata", {}).get("engine-name") == "seamark-trino-proxy"
    ]
    return sorted(sorted(report["projected-field-names"]) for report in proxy_reports)


@pytest.mark.slow
def test_columns_that_trino_resolves_through_stars_and_views_are_reported(rig: RulesRig) -> None:
    count_before = len(list_reported_columns(rig))
    for sql in (
        "SELECT * FROM (SELECT id, country FROM orders) WHERE id = 17",
        "SELECT count(*) FROM orders WHERE customer = 3",
        "SELECT id FROM own WHERE id = 29",
    ):
        assert count_rewritten_statements(rig, sql, "anna") == (1, 0)
    expected = [["customer"], ["card", "country", "customer", "id"], ["country", "id"]]
    assert wait_for_result(lambda: len(list_reported_columns(rig)) >= count_before + 3)
    assert all(columns in list_reported_columns(rig) for columns in expected), list_reported_columns(rig)
