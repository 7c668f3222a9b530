"""Tests of Trino's clients in several languages through the proxy: same results as without it, with plans."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from seamark.commands.installation.java import find_java_25_home
from tests.deploy.shop import Shop, post_statement, query_rows, run_both_ways
from tests.services.java import SHORT_LIVED
from tests.services.needs import NEEDS_TRINO
from tests.services.process import ServiceFailed
from tests.services.trino import CATALOG, JARS
from tests.services.trino_lake import TrinoLake, create_self_signed
from tests.services.trino_proxy import run_trino_proxy

pytestmark = NEEDS_TRINO
JDBC = Path(__file__).parents[1] / "services" / "JdbcClient.java"
ONE_ROW_QUERY = "SELECT id, note FROM orders WHERE id = 4711"
MANY_ROWS_QUERY = """SELECT a.id, b.id AS x, rpad(a.note, 300, 'é') AS long FROM orders a, orders b
WHERE a.id = 12 AND b.id < 8000 ORDER BY b.id"""


def find_client_jar(pattern: str) -> str:
    jar_paths = sorted((JARS / "clients").glob(pattern))
    if not jar_paths:
        raise ServiceFailed(f"no {pattern} in {JARS / 'clients'}: run `make trino`")
    return str(jar_paths[-1])


def run_java(*arguments: str) -> str:
    home = find_java_25_home()
    assert home is not None
    argv = [str(home / "bin" / "java"), *SHORT_LIVED, *arguments]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_command_line(url: str, *statements: str) -> list[dict[str, Any]]:
    """Run statements with Trino's command line, and return its output rows."""
    options = ["--server", url, "--user", "tests", "--catalog", CATALOG, "--schema", "shop", "--output-format", "JSON"]
    text = ";".join(statements)
    return [
        json.loads(line)
        for line in run_java("-jar", find_client_jar("trino-cli-*"), *options, "--execute", text).splitlines()
    ]


# This test starts two JVMs. The command line uses the library of the JDBC driver.
@pytest.mark.slow
def test_trino_command_line_gets_equal_results_through_the_proxy(shop: Shop) -> None:
    statements = (
        "USE seamark.shop",
        ONE_ROW_QUERY,
        MANY_ROWS_QUERY,
        "PREPARE p FROM SELECT note FROM orders WHERE id = ?",
        "EXECUTE p USING 77",
    )
    direct_answers = run_command_line(shop.trino.base_url, *statements)
    assert {"id": 4711, "note": "n4711"} in direct_answers
    assert {"note": "n77"} in direct_answers
    count_before = shop.proxy.count_statements("rewritten")
    assert run_command_line(shop.proxy.url, *statements) == direct_answers
    assert shop.proxy.count_statements("rewritten") == count_before + 3


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "?explicitPrepare=false"])
def test_jdbc_driver_gets_equal_results_through_the_proxy(shop: Shop, options: str) -> None:
    """The driver sends the texts of its prepared statements in headers, or in EXECUTE IMMEDIATE."""
    prepared_statement = "SELECT id, note FROM orders WHERE id = ? AND note <> ?"
    join_query = "SELECT count(*), max(note) FROM orders, countries WHERE country = code AND id IN (?, ?) AND name < ?"
    request = [ONE_ROW_QUERY, "0", prepared_statement, "2", "bigint:4712", "varchar:it's", MANY_ROWS_QUERY, "0"]
    request += [
        join_query,
        "3",
        "bigint:5",
        "bigint:8",
        "varchar:Z",
        prepared_statement,
        "2",
        "bigint:4713",
        "varchar:n4713",
    ]
    driver = ["-cp", find_client_jar("trino-jdbc-*"), str(JDBC)]
    count_before = shop.proxy.count_statements("rewritten")
    direct_answer, proxied_answer = (
        run_java(*driver, f"jdbc:trino://127.0.0.1:{port}/{CATALOG}/shop{options}", *request)
        for port in (shop.trino.port, shop.proxy.port)
    )
    assert proxied_answer == direct_answer
    assert shop.proxy.count_statements("rewritten") == count_before + 5  # All five queries were rewritten.
    answers = direct_answer.split("\n\n")
    assert answers[0] == "id bigint\tnote varchar\t\n4711\tn4711\t"
    assert answers[1].splitlines()[1:] == ["4712\tn4712\t"]
    assert len(answers[2].splitlines()) == 8001  # 8,000 rows and a line with the columns
    assert answers[3].splitlines()[1:] == ["2\tn8\t"]
    assert answers[4].splitlines()[1:] == []


@pytest.mark.slow
def test_sqlalchemy_gets_equal_results_through_the_proxy(shop: Shop) -> None:
    count_before, answers = shop.proxy.count_statements("rewritten"), []
    for port in (shop.trino.port, shop.proxy.port):
        engine = sqlalchemy.create_engine(f"trino://tests@127.0.0.1:{port}/{CATALOG}/shop")
        try:
            tables, inspector = sqlalchemy.MetaData(), sqlalchemy.inspect(engine)
            columns = {name: inspector.get_columns(name) for name in inspector.get_table_names()}
            orders, countries = (
                sqlalchemy.Table(
                    name, tables, *[sqlalchemy.Column(column["name"], column["type"]) for column in columns[name]]
                )
                for name in ("orders", "countries")
            )
            query = sqlalchemy.select(orders.c.id, orders.c.note, countries.c.name).select_from(
                orders.join(countries, orders.c.country == countries.c.code)
            )
            with engine.connect() as connection:
                rows = connection.execute(query.where(orders.c.id.in_([12, 4711])).order_by(orders.c.id)).all()
            answers.append(
                (rows, {name: [(column["name"], str(column["type"])) for column in columns[name]] for name in columns})
            )
        finally:
            engine.dispose()
    direct_result, proxied_result = answers
    assert proxied_result == direct_result
    joined_rows, _ = direct_result
    assert joined_rows == [(12, "n12", "France"), (4711, "n4711", "Germany")]
    assert shop.proxy.count_statements("rewritten") == count_before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoding", ["json+zstd", *(pytest.param(encoding, marks=pytest.mark.slow) for encoding in ("json", "json+lz4"))]
)
def test_spooled_results_are_fetched_through_the_proxy(shop: Shop, encoding: str) -> None:
    count_before = shop.proxy.count_statements("rewritten")
    rows = run_both_ways(shop, MANY_ROWS_QUERY, encoding=encoding)
    assert len(rows) == 8000
    assert shop.proxy.count_statements("rewritten") == count_before + 1
    assert rows == query_rows(shop.trino.port, MANY_ROWS_QUERY)
    assert run_both_ways(shop, ONE_ROW_QUERY, encoding=encoding) == [[4711, "n4711"]]


@pytest.mark.slow
def test_spooled_results_have_addresses_of_the_proxy(shop: Shop, tmp_path: Path) -> None:
    """If the proxy has several coordinators, the addresses contain the path of the coordinator."""
    other_url = shop.trino.base_url.replace("127.0.0.1", "localhost")
    flags = ("--trino", shop.trino.base_url, "--trino", other_url)
    with run_trino_proxy(tmp_path, *flags, seamark=shop.planner.base_url) as two_coordinator_proxy:
        for url in (shop.proxy.url, two_coordinator_proxy.url):
            segments = [segment for segment in read_segments(url, MANY_ROWS_QUERY) if segment["type"] == "spooled"]
            assert segments
            for segment in segments:
                start = f"{url}/seamark/c/" if url == two_coordinator_proxy.url else f"{url}/v1/spooled/"
                assert segment["uri"].startswith(start)
                assert segment["ackUri"].startswith(start)
                with urllib.request.urlopen(segment["uri"], timeout=60) as answer:
                    assert len(answer.read()) == segment["metadata"]["segmentSize"]
                with urllib.request.urlopen(segment["ackUri"], timeout=60) as answer:
                    assert answer.status == 200
        assert len(query_rows(two_coordinator_proxy.port, MANY_ROWS_QUERY, encoding="json+zstd")) == 8000


def read_segments(url: str, sql: str) -> Iterator[dict[str, Any]]:
    headers = {"X-Trino-User": "tests", "X-Trino-Catalog": CATALOG, "X-Trino-Schema": "shop"}
    headers["X-Trino-Query-Data-Encoding"] = "json"
    request = urllib.request.Request(f"{url}/v1/statement", data=sql.encode(), headers=headers)
    while True:
        with urllib.request.urlopen(request, timeout=60) as answer:
            page = json.load(answer)
        assert "error" not in page, page
        yield from page["data"]["segments"] if isinstance(page.get("data"), dict) else []
        if "nextUri" not in page:
            return
        assert page["nextUri"].startswith(url)
        request = urllib.request.Request(page["nextUri"], headers=headers)


# Coordinators with https


def build_https_url(lake: TrinoLake) -> str:
    return f"https://localhost:{lake.trino.https_port}"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("trust_option", ["--trino-ca", "--trino-insecure"])
def test_proxy_connects_to_https_coordinators_with_a_trusted_certificate(
    shop: Shop, trino_lake: TrinoLake, tmp_path: Path, trust_option: str
) -> None:
    flags = [trust_option, str(trino_lake.ca_path)] if trust_option == "--trino-ca" else [trust_option]
    with run_trino_proxy(
        tmp_path, "--trino", build_https_url(trino_lake), "--budget-ms", "30000", *flags, seamark=shop.planner.base_url
    ) as proxy:
        assert query_rows(proxy.port, ONE_ROW_QUERY) == [[4711, "n4711"]]
        plan_header, first_page = post_statement(proxy.port, ONE_ROW_QUERY)
        assert plan_header.startswith("rewritten; scans=1")
        assert first_page["nextUri"].startswith(proxy.url)


def test_proxy_sends_nothing_to_a_coordinator_with_an_untrusted_certificate(
    shop: Shop, trino_lake: TrinoLake, tmp_path: Path
) -> None:
    with run_trino_proxy(tmp_path, "--trino", build_https_url(trino_lake), seamark=shop.planner.base_url) as proxy:
        with pytest.raises(urllib.error.HTTPError) as error:
            post_statement(proxy.port, ONE_ROW_QUERY)
        assert error.value.code == 502
        assert b"certificate" in error.value.read().lower()


@pytest.mark.slow
def test_clients_and_coordinators_may_both_use_https(
    shop: Shop, trino_lake: TrinoLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = create_self_signed(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))  # With this variable, requests trusts nothing else.
    flags = ["--trino-ca", str(trino_lake.ca_path), "--tls-cert", str(certificate), "--tls-key", str(key)]
    with run_trino_proxy(
        tmp_path, "--trino", build_https_url(trino_lake), *flags, "--budget-ms", "30000", seamark=shop.planner.base_url
    ) as proxy:
        rows = query_rows(proxy.port, MANY_ROWS_QUERY, host="localhost", http_scheme="https", encoding="json+zstd")
        assert len(rows) == 8000
