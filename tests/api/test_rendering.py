"""Tests of answers with table metadata: ETags, status 304, all snapshots or only referenced ones, compression."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.api.client import SCHEMA, Api, build_append, build_property_commit
from tests.server.rig import run_server

TABLE = "/v1/namespaces/db/tables/t"


async def test_create_load_and_commit_return_the_same_etag_for_the_same_state(api: Api) -> None:
    created_table = await api("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})
    answer = await api("GET", TABLE)
    assert created_table.headers["ETag"] == answer.headers["ETag"]
    commit_answer = await api("POST", TABLE, build_property_commit(x="1"))
    assert commit_answer.headers["ETag"] != answer.headers["ETag"]
    assert commit_answer.headers["ETag"] == (await api("GET", TABLE)).headers["ETag"]


async def test_answer_that_the_client_has_is_not_sent_again(api: Api) -> None:
    await api.create_table()
    etag = (await api("GET", TABLE)).headers["ETag"]
    for value in (etag, etag.removeprefix("W/"), f'"other", {etag}', "*"):
        answer = await api("GET", TABLE, headers={"If-None-Match": value})
        assert (answer.status, answer.raw, answer.headers["ETag"]) == (304, b"", etag)
    await api("POST", TABLE, build_property_commit(x="1"))
    assert (await api("GET", TABLE, headers={"If-None-Match": etag})).status == 200


async def test_etags_differ_between_all_snapshots_and_refs(api: Api) -> None:
    await api.create_table()
    all_snapshots, refs = [await api("GET", f"{TABLE}?snapshots={mode}") for mode in ("all", "refs")]
    assert all_snapshots.headers["ETag"] != refs.headers["ETag"]
    assert all_snapshots.headers["ETag"] == (await api("GET", TABLE)).headers["ETag"]
    crossed_answer = await api(
        "GET", f"{TABLE}?snapshots=refs", headers={"If-None-Match": all_snapshots.headers["ETag"]}
    )
    assert crossed_answer.status == 200


async def test_refs_mode_omits_the_snapshots_without_a_reference(api: Api) -> None:
    await api.create_table()
    for number in range(1, 4):
        assert (await api("POST", TABLE, build_append(number, number - 1 or None, number))).status == 200
    whole_metadata = (await api("GET", f"{TABLE}?snapshots=all")).json["metadata"]
    metadata_of_refs = (await api("GET", f"{TABLE}?snapshots=refs")).json["metadata"]
    assert [snapshot["snapshot-id"] for snapshot in whole_metadata["snapshots"]] == [1, 2, 3]
    assert [snapshot["snapshot-id"] for snapshot in metadata_of_refs["snapshots"]] == [3]
    assert metadata_of_refs["snapshot-log"] == whole_metadata["snapshot-log"]
    assert (await api("GET", f"{TABLE}?snapshots=some")).error[0] == 400


async def test_etag_depends_on_the_requested_access_and_the_name(tmp_path: Path) -> None:
    keys = {"s3_access_key_id": "a", "s3_secret_access_key": "b"}
    async with run_server(tmp_path, s3_client_access="static", **keys) as server:
        api = Api(server)
        await api.create_table()
        plain_etag = (await api("GET", TABLE)).headers["ETag"]
        etag_with_credentials = (
            await api("GET", TABLE, headers={"X-Iceberg-Access-Delegation": "vended-credentials"})
        ).headers["ETag"]
        assert plain_etag != etag_with_credentials
        names = [{"namespace": ["db"], "name": name} for name in ("t", "u")]
        await api("POST", "/v1/tables/rename", {"source": names[0], "destination": names[1]})
        assert (await api("GET", "/v1/namespaces/db/tables/u")).headers["ETag"] != plain_etag


async def test_headers_that_request_the_same_access_share_one_compressed_answer(api: Api) -> None:
    """If each spelling of the header had its own answer, a client could fill the metadata cache."""
    await api.create_table(properties={f"p{number}": "x" * 100 for number in range(200)})
    cache = api.server.components.catalog.documents.cache
    compression_headers = {"Accept-Encoding": "gzip"}
    etags = set()
    for number in range(8):
        request_headers = {**compression_headers, "X-Iceberg-Access-Delegation": f"nothing-{number}, remote-signing"}
        etags.add((await api("GET", TABLE, headers=request_headers)).headers["ETag"])
        if not number:
            entry_count = len(cache)
    assert len(cache) == entry_count
    assert len(etags) == 1


async def test_rotated_storage_keys_are_never_hidden_by_a_304(tmp_path: Path) -> None:
    etags: set[str] = set()
    for secret in ("old", "new"):
        async with run_server(
            tmp_path, s3_client_access="static", s3_access_key_id="a", s3_secret_access_key=secret
        ) as server:
            api = Api(server)
            if not etags:
                await api.create_table()
            etags.add((await api("GET", TABLE)).headers["ETag"])
    assert len(etags) == 2


@pytest.mark.parametrize("mode", ["all", "refs"])
async def test_large_table_is_compressed_once_and_decompresses_to_the_same_metadata(api: Api, mode: str) -> None:
    await api.create_table(properties={f"property-{number}": "x" * 100 for number in range(500)})
    plain_answer = await api("GET", f"{TABLE}?snapshots={mode}")
    assert "Content-Encoding" not in plain_answer.headers
    hits = api.server.components.catalog.documents.cache.read_stats().hits
    for _ in range(2):
        url = f"{api.server.url}{TABLE}?snapshots={mode}"
        async with api.server.http.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert answer.headers["ETag"] == plain_answer.headers["ETag"]
            assert "Accept-Encoding" in answer.headers["Vary"]
            assert int(answer.headers["Content-Length"]) < len(plain_answer.raw) / 4
            assert await answer.read() == plain_answer.raw
    cache = api.server.components.catalog.documents.cache
    assert ("gzip", plain_answer.headers["ETag"]) in cache
    assert cache.read_stats().hits > hits
    cached_answer = cache.get(("gzip", plain_answer.headers["ETag"]))
    assert isinstance(cached_answer, bytes)
    assert json.loads(gzip.decompress(cached_answer)) == plain_answer.json


@pytest.mark.parametrize("accepted_codings", ["identity", "gzip;q=0", "br"])
async def test_client_without_compression_gets_a_plain_answer(api: Api, accepted_codings: str) -> None:
    await api.create_table(properties={"a": "x" * 50_000})
    answer = await api("GET", TABLE, headers={"Accept-Encoding": accepted_codings})
    assert "Content-Encoding" not in answer.headers
    assert answer.json["metadata"]["properties"]["a"] == "x" * 50_000
