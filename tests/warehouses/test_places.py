"""Tests of the places of warehouses whose `s3://` locations are in a cloud (`s3_backend`)."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.warehouses.definitions import check_definition, make_settings
from seamark.metaserver.warehouses.places import check_no_overlap_with_warehouses
from tests.seeds import examples, first_seed
from tests.server.rig import build_settings
from tests.warehouses.test_management import create_and_read_refusal
from tests.warehouses.world import run_server_with_warehouses

HOST = "account.dfs.core.windows.net"
AZURE, GOOGLE = f"abfss://{HOST}", "gs://"
STORE = "http://127.0.0.1:9"


async def test_warehouse_in_the_cloud_needs_a_place_that_the_operator_allows(tmp_path: Path) -> None:
    roots = ("gs://lake/further", f"abfss://lake@{HOST}/further", "s3://store/further")
    roots += ("gs://uploads", f"abfss://uploads@{HOST}")
    async with run_server_with_warehouses(tmp_path, warehouse_roots=roots, s3_endpoint=STORE) as world:
        for location, backend, message in (
            ("s3://store/further/new", GOOGLE, "'gs://store/further/new' with this s3_backend"),
            ("s3://lake/other", GOOGLE, "outside the places"),
            ("s3://lake/further/new", "abfss://other.dfs.core.windows.net", "outside the places"),
            ("s3://lake/further/new", "abfss://evil.example", "s3_backend must be gs://"),
            ("s3://lake/further/new", None, "outside the places"),
            ("gs://lake/further/new", GOOGLE, "a location with s3://"),
        ):
            settings = {} if backend is None else {"s3_backend": backend}
            body = {"name": "new", "location": location, "settings": settings}
            assert message in await create_and_read_refusal(world, body), location
        for location in ("gs://uploads/.seamark-uploads/x", "gs://uploads/%2Eseamark-uploads"):
            body = {"name": "new", "location": location}
            assert "unfinished uploads" in await create_and_read_refusal(world, body), location
        body = {"name": "new", "location": f"abfss://uploads@{HOST}/.seamark-uploads"}
        assert "unfinished uploads" in await create_and_read_refusal(world, body)
        await world.create_warehouse("google", location="s3://lake/further/g", settings={"s3_backend": GOOGLE})
        await world.create_warehouse("azure", location="s3://lake/further/a", settings={"s3_backend": AZURE})
        for location, settings in (
            ("gs://lake/further/g/below", {}),
            ("s3://lake/further/g", {"s3_backend": AZURE}),
            (f"abfss://lake@{HOST}/further/a", {}),
        ):
            body = {"name": "new", "location": location, "settings": settings}
            assert "overlaps" in await create_and_read_refusal(world, body), location
        status, answer = await world.send("PUT", "/api/v1/warehouses/google", {"settings": {"s3_backend": AZURE}})
        assert (status, "cannot change" in answer["error"]["message"]) == (400, True)


async def test_credentials_that_would_move_a_warehouse_are_refused(tmp_path: Path) -> None:
    roots, keys = ("s3://lake/further", "gs://lake/further"), {"s3_access_key_id": "AKIA", "s3_secret_access_key": "s"}
    async with run_server_with_warehouses(tmp_path, warehouse_roots=roots, s3_backend=GOOGLE, gateway_port=0) as world:
        await world.create_warehouse("victim", location="gs://lake/further/v")
        await world.create_warehouse("in_s3", location="s3://lake/further/v", credentials=keys)
        await world.create_warehouse("in_google", location="s3://lake/further/g")
        # The objects of in_s3 are in S3 because of its keys. Without keys, a warehouse at s3:// uses Google Cloud
        # Storage, which is the `s3_backend` of the server. So both changes would move a warehouse.
        for name, credentials in (("in_s3", {}), ("in_google", keys)):
            status, answer = await world.send(
                "PUT", f"/api/v1/warehouses/{name}", {"settings": {}, "credentials": credentials}
            )
            assert (status, "former store" in answer["error"]["message"]) == (400, True), name
        # With keys of S3, the place of a warehouse at gs:// (victim) does not change.
        for name, credentials in (("in_s3", {**keys, "s3_access_key_id": "NEW"}), ("in_google", {}), ("victim", keys)):
            body = {"settings": {}, "credentials": credentials}
            status, answer = await world.send("PUT", f"/api/v1/warehouses/{name}", body)
            assert status == 200, answer


def list_segments(location: str, backend: str) -> set[tuple[str, ...]]:
    """Return the segments of a warehouse's location as clients see it, and of the cloud's folder with its objects.

    Both are the same unless the warehouse has an `s3://` location whose objects are in another cloud.
    """
    scheme, _, path = location.partition("://")
    bucket, *folders = path.split("/")
    visible_segments = (scheme, bucket, *folders)
    if scheme != "s3" or not backend:
        return {visible_segments}
    cloud_bucket = ("gs", bucket) if backend == GOOGLE else ("abfss", f"{bucket}@{HOST}")
    return {visible_segments, (*cloud_bucket, *folders)}


def test_location_that_overlaps_another_warehouse_is_refused(tmp_path: Path) -> None:
    settings = build_settings(tmp_path)
    seed = first_seed()
    for number in range(seed, seed + examples(5000, 500)):
        rng = random.Random(number)
        server = dataclasses.replace(settings, s3_backend=rng.choice(["", GOOGLE, AZURE]))
        location, _, backend = draw_warehouse(rng, server)
        other_location, other_settings, other_backend = draw_warehouse(rng, server)
        other_warehouse = StoredWarehouse(
            "other", "0" * 32, other_location, other_location, other_settings, None, 0, "ann"
        )
        do_overlap = any(
            segments[: len(other_segments)] == other_segments or other_segments[: len(segments)] == segments
            for segments in list_segments(location, backend)
            for other_segments in list_segments(other_location, other_backend)
        )
        try:
            check_no_overlap_with_warehouses(parse_location(location), server, backend, [other_warehouse])
        except BadRequest:
            assert do_overlap, number
        else:
            assert not do_overlap, number


def draw_warehouse(rng: random.Random, server: Settings) -> tuple[str, dict[str, Any], str]:
    """Return (location, own settings, effective `s3_backend`) of a random warehouse."""
    folders = "/".join(rng.choices(["x", "y"], k=rng.randint(1, 2)))
    root = rng.choice(["s3://{}", "s3://{}", "gs://{}", "abfss://{}@" + HOST]).format(rng.choice(["aaa", "bbb"]))
    own_settings = rng.choice([{}, {"s3_backend": GOOGLE}, {"s3_backend": AZURE}, {"s3_backend": ""}])
    return f"{root}/{folders}", own_settings, own_settings.get("s3_backend", server.s3_backend)


def test_keys_of_the_server_reach_only_the_store_of_the_backend(tmp_path: Path) -> None:
    server = dataclasses.replace(
        build_settings(tmp_path),
        s3_endpoint=STORE,
        s3_access_key_id="AKIA-SERVER",
        s3_secret_access_key="secret",
        s3_client_access="signing",
        gateway_port=8182,
    )
    location = "s3://lake/sales"
    warehouse = StoredWarehouse(
        "sales", "0" * 32, location, location, settings={}, credentials=None, created_ms=0, principal_name="ann"
    )

    def read_backend_and_key(
        settings: Settings, own_settings: dict[str, Any], credentials: dict[str, Any]
    ) -> tuple[str, str, str]:
        check_definition(settings, own_settings, credentials)
        warehouse_settings = make_settings(settings, warehouse, own_settings, credentials)
        return (
            warehouse_settings.s3_backend,
            warehouse_settings.s3_secret_access_key,
            warehouse_settings.s3_client_access,
        )

    azure_key = {"azure_account_key": "a2V5"}
    assert read_backend_and_key(server, {"s3_backend": AZURE}, azure_key) == (AZURE, "", "gateway")
    assert read_backend_and_key(server, {"s3_backend": GOOGLE}, {}) == (GOOGLE, "", "gateway")
    assert read_backend_and_key(server, {}, {}) == ("", "secret", "signing")
    with pytest.raises(BadRequest, match="s3_endpoint"):
        read_backend_and_key(server, {"s3_backend": GOOGLE, "s3_endpoint": "http://127.0.0.1:10"}, {})

    cloud_server = dataclasses.replace(build_settings(tmp_path), s3_backend=AZURE)
    # Without keys of an S3 store, the keys of the machine would open the bucket in AWS.
    assert read_backend_and_key(cloud_server, {}, azure_key) == (AZURE, "", "none")
    with pytest.raises(BadRequest, match="s3_secret_access_key"):
        read_backend_and_key(cloud_server, {"s3_backend": ""}, azure_key)
    keys = {"s3_access_key_id": "AKIA-SALES", "s3_secret_access_key": "own"}
    assert read_backend_and_key(cloud_server, {"s3_backend": ""}, keys) == ("", "own", "none")
