"""The synchronous client: it joins pages, raises errors by type, retries within bounds, and can be pickled."""

from __future__ import annotations

import http.server
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import (
    ClientError,
    InvalidRequest,
    LoginRequired,
    NoSuchResource,
    Refused,
    ServerFailed,
    Unavailable,
    Unreachable,
)
from seamark.connector.client.names import hide_credentials, split_name
from seamark.connector.client.values import At, parse_timestamp
from seamark.connector.sql.session import SqlSession
from tests.api.plans.planned import append_files, build_data_file
from tests.connector.server_thread import ServerThread
from tests.planner.lakes.history import write_random_lake


def build_files_of_ten(count: int, first_number: int = 0) -> list[Any]:
    """Return `count` files. File n contains the ids from 10 n to 10 n + 9."""
    return [
        build_data_file(f"file:///t/{n:03d}.parquet", 10 * n, 10 * n + 9)
        for n in range(first_number, first_number + count)
    ]


@pytest.fixture
def client(server: ServerThread) -> Iterator[SeamarkClient]:
    """Yield a client of a server that has `db.t` with 7 files in 2 manifests."""
    server.run(server.api.create_table())
    server.run(append_files(server.api, "t", build_files_of_ten(7), snapshot_id=1, manifests=2))
    with closing(SeamarkClient(server.url)) as client:
        yield client


def test_files_statistics_and_partitions_are_returned_as_tables(client: SeamarkClient) -> None:
    files = client.files("db.t")
    assert files.column("file_path").to_pylist() == [f"file:///t/{n:03d}.parquet" for n in range(7)]
    assert files.schema.metadata == {b"snapshot-id": b"1"}
    stats = client.stats("db.t", "id", fields=("lower-bound", "upper-bound", "null-value-count"))
    assert stats.column_names == ["lower_bound", "upper_bound", "null_value_count"]
    assert stats.column("upper_bound").to_pylist() == [10 * n + 9 for n in range(7)]
    partitions = client.partitions(("db", "t"))
    assert partitions.to_pylist()[0]["record_count"] == 700


def test_pages_of_a_listing_are_from_one_snapshot(server: ServerThread, client: SeamarkClient) -> None:
    pages = client.iter_files("db.t", page_files=3)
    first_page = next(pages)
    server.run(append_files(server.api, "t", build_files_of_ten(2, 100), snapshot_id=2, parent=1))
    remaining_paths = [page.column("file_path").to_pylist() for page in pages]
    assert [first_page.num_rows, *(len(page) for page in remaining_paths)] == [3, 3, 1]
    all_paths = [*first_page.column("file_path").to_pylist(), *(path for page in remaining_paths for path in page)]
    assert all_paths == [f"file:///t/{n:03d}.parquet" for n in range(7)]
    assert client.files("db.t").num_rows == 9
    assert client.files("db.t", at=At(snapshot_id=1)).num_rows == 7
    assert client.files("db.t", at=At(ref="main")).num_rows == 9


def test_pages_with_different_dictionaries_are_joined_to_one_table(server: ServerThread) -> None:
    lake = write_random_lake(3, server.home / "lake")
    body = {"name": "lake", "metadata-location": lake.metadata_location}
    assert server.run(server.api("POST", "/v1/namespaces/db/register", body)).status == 200
    client = SeamarkClient(server.url)
    all_files = client.files("db.lake")
    pages = list(client.iter_files("db.lake", page_files=1))
    assert len(pages) == all_files.num_rows > 5
    assert [row for page in pages for row in page.to_pylist()] == all_files.to_pylist()
    client.close()


def test_explanation_has_the_remaining_files_and_the_unused_conditions(client: SeamarkClient) -> None:
    explanation = client.explain("db.t", "id BETWEEN 25 AND 31 AND length(data) = 3", files=True, limit=1)
    assert (explanation.files, explanation.records, explanation.delete_files) == (2, 200, 0)
    assert explanation.stages[0].files_in == 7
    assert explanation.stages[-1].files_left == 2
    assert sum(stage.files_removed for stage in explanation.stages) == 5
    assert explanation.not_used == ("LENGTH(data) = 3",)
    assert [column["name"] for column in explanation.columns] == ["id"]
    assert explanation.kept_files is not None
    assert [file["file-path"] for file in explanation.kept_files] == ["file:///t/002.parquet"]
    equal_explanation = client.explain("db.t", filter={"type": "eq", "term": "id", "value": 5})
    assert (equal_explanation.files, equal_explanation.kept_files) == (1, None)


def test_timeline_is_read_to_its_end(client: SeamarkClient) -> None:
    timeline = list(client.timeline("db.t"))
    assert [instant.action for instant in timeline] == ["create", "commit"]
    assert timeline[1].snapshot_id == 1
    assert [instant.action for instant in client.timeline("db.t", limit=1, newest_first=True)] == ["commit"]
    assert list(client.timeline("db.t", since=timeline[1].position)) == []
    assert {instant.action for instant in client.timeline(action="create")} == {"create"}


def test_errors_are_raised_by_type_with_the_servers_message(client: SeamarkClient) -> None:
    with pytest.raises(NoSuchResource, match="no_such") as error:
        client.files("db.no_such")
    assert (error.value.status, error.value.kind) == (404, "NoSuchTableException")
    assert error.value.request_id
    with pytest.raises(InvalidRequest, match="line 1, column"):
        client.explain("db.t", "id =")
    with pytest.raises(InvalidRequest, match=r"nope.*the table has no partition fields"):
        client.files("db.t", "nope=3")
    with pytest.raises(ValueError, match="namespace"):
        client.files("t")
    unpickled_error = pickle.loads(pickle.dumps(error.value))
    assert (type(unpickled_error), unpickled_error.message, unpickled_error.status) == (
        NoSuchResource,
        error.value.message,
        404,
    )


def test_client_is_pickled_without_its_connections(client: SeamarkClient) -> None:
    client.partitions("db.t")
    unpickled_client = pickle.loads(pickle.dumps(client))
    assert unpickled_client.files("db.t").equals(client.files("db.t"))
    assert "token" not in repr(SeamarkClient("http://h", token="hunter2"))
    unpickled_client.close()


def test_copies_of_a_client_use_its_connections(server: ServerThread, client: SeamarkClient) -> None:
    """`close` of the client closes the connections of its copies."""
    fresh_client = client.with_fresh_rows()
    for any_client in (client, fresh_client, fresh_client.reading_committed_rows()):
        any_client.partitions("db.t")
    pool = client._connections.get().connection_from_url(server.url)
    assert pool.num_connections == 1
    client.close()
    assert fresh_client.files("db.t").num_rows == 7
    assert client._connections.get().connection_from_url(server.url) is not pool


def test_name_with_several_levels_can_contain_dots() -> None:
    assert split_name("a.b.t") == ("a", "b", "t")
    assert split_name(r"a\.b.t") == ("a.b", "t")
    for invalid_value in ("", ".", "a..t", "a.", "a\\"):
        with pytest.raises(ValueError, match="not a name"):
            split_name(invalid_value)


# Servers with busy, invalid or missing answers


@contextmanager
def serve_answers(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a server, and a list of the tokens that it receives.

    The server sends the answers one after another, and then repeats the last answer.
    """
    tokens: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = answers[min(len(tokens), len(answers) - 1)]
            tokens.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", tokens
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


BUSY = (503, {"Retry-After": "0"}, b'{"error":{"message":"busy","type":"ServiceUnavailableException","code":503}}')
EMPTY_TIMELINE = (200, {}, json.dumps({"instants": [], "next-since": None}).encode())


def test_busy_server_is_requested_again_with_the_token() -> None:
    with serve_answers(BUSY, BUSY, EMPTY_TIMELINE) as (url, tokens):
        client = SeamarkClient(url, token="hunter2")
        assert list(client.timeline()) == []
        client.close()
    assert tokens == ["Bearer hunter2"] * 3


def test_empty_token_is_not_sent() -> None:
    """A shell passes an unset variable as an empty text. A server refuses `Bearer` without a token as malformed."""
    with serve_answers(EMPTY_TIMELINE) as (url, tokens):
        client = SeamarkClient(url, token="")
        assert list(client.timeline()) == []
        client.close()
    assert not client.has_token
    assert tokens == [""]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (BUSY, Unavailable),
        ((401, {}, b"{}"), LoginRequired),
        ((409, {}, b'{"error":{"message":"m","type":"T","code":409}}'), Refused),
        ((302, {"Location": "/"}, b""), Refused),
        ((500, {}, b"<html>a proxy</html>"), ServerFailed),
        ((200, {}, b"not json"), ServerFailed),
    ],
)
def test_invalid_answer_raises_the_error_of_its_kind(
    answer: tuple[int, dict[str, str], bytes], expected: type[ClientError]
) -> None:
    with serve_answers(answer) as (url, tokens):
        client = SeamarkClient(url, retries=2)
        with pytest.raises(expected) as error:
            list(client.timeline())
        client.close()
    assert type(error.value) is expected
    assert len(tokens) == (3 if expected is Unavailable else 1)


def test_messages_hide_the_password_of_a_url() -> None:
    client = SeamarkClient("http://ann:hunter2@127.0.0.1:9", retries=0)
    with pytest.raises(Unreachable, match=r"^No answer from http://127\.0\.0\.1:9: "):
        list(client.timeline())
    assert repr(client) == "<SeamarkClient http://127.0.0.1:9>"
    with pytest.raises(ValueError, match=r"^'lake:8181' is not the URL of a server"):
        SeamarkClient("ann:hunter2@lake:8181")
    for plain_url in ("http://lake:8181", "http://lake/a@b", "http://[::1]:8181?x=@"):
        assert hide_credentials(plain_url) == plain_url


def test_as_of_time_is_parsed_to_the_millisecond() -> None:
    """A float of seconds would lose a millisecond of some times, and would therefore select the previous snapshot."""
    for expected in (1_079_337_347_472, 2_165_497_250_429, 2_183_226_373_411):
        expected_time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=expected)
        assert parse_timestamp(expected_time.isoformat()) == expected
        assert parse_timestamp(expected_time.replace(tzinfo=None).isoformat()) == expected
    assert parse_timestamp("1969-12-31T23:59:59.999") == -1
    assert parse_timestamp("2026-10-25T02:30+02:00") == parse_timestamp("2026-10-25T00:30")


def test_answer_of_a_server_without_an_iceberg_catalog_is_reported() -> None:
    page = b"<!DOCTYPE html>\n<html><title>404 Not\nFound</title></html>"
    with serve_answers((404, {}, page)) as (url, _):
        with SqlSession(url) as session, pytest.raises(NoSuchResource) as error:
            session.sql("SELECT 1 FROM a.b")
        client = SeamarkClient(url.replace("http:", "https:"), retries=0)
        with pytest.raises(Unreachable, match="does not answer by TLS; a server without TLS has an http:// URL"):
            list(client.timeline())
        client.close()
    assert error.value.message == "HTTP 404; the response is not from Seamark, but perhaps from a proxy: 404 Not Found"


def test_listing_that_is_not_arrow_is_a_server_failure() -> None:
    with serve_answers((200, {}, b"no arrow")) as (url, _):
        client = SeamarkClient(url)
        with pytest.raises(ServerFailed, match="Arrow"):
            client.files("db.t")
        client.close()


def test_error_of_an_unreachable_server_names_its_address() -> None:
    with serve_answers(EMPTY_TIMELINE) as (url, _):
        pass
    client = SeamarkClient(url, retries=0, timeout_s=2)
    with pytest.raises(Unreachable, match=url):
        client.files("db.t")
    client.close()
    for address in ("ftp://nowhere", "nonsense", ""):
        with pytest.raises(ValueError, match="http://"):
            SeamarkClient(address)
