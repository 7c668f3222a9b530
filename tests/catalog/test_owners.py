"""Tests of owners: a view runs with the rights of its author, or of the user that a trusted engine names."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.views.view import encode_view
from seamark.formats.runtime.errors import Forbidden
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.documents import is_named_by_content
from seamark.metaserver.catalog.ownership.owners import determines_rights
from seamark.metaserver.catalog.values import Caller, CreateView, TableIdentifier
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig, use_metadata_file_without_digest
from tests.catalog.test_confinement import VERSION

RUN_AS_PROPERTY = "trino.run-as-owner"
CONFINED_CALLER = Caller(principal_name="wendy", request_id="r", confined_to=(("db",),), names_owners=False)
ENGINE = Caller(principal_name="trino", request_id="r", confined_to=(("db",),))


def _build_create_view(name: str, **properties: str) -> CreateView:
    return CreateView(name=name, schema=SCHEMA, view_version=VERSION, properties=properties)


def _build_text_updates(sql: str) -> list[dict[str, Any]]:
    version = {**VERSION, "representations": [{"type": "sql", "sql": sql, "dialect": "spark"}]}
    return [
        {"action": "add-view-version", "view-version": version},
        {"action": "set-current-view-version", "view-version-id": -1},
    ]


def _build_set_properties(**properties: str) -> dict[str, Any]:
    return {"action": "set-properties", "updates": properties}


async def _create_view(rig: CatalogRig) -> None:
    await rig.catalog.namespaces.create(CALLER, ("db",), {})
    for name in ("v", "w"):
        await rig.catalog.views.create(
            ENGINE, ("db",), _build_create_view(name, **{RUN_AS_PROPERTY: "admin", "comment": "hers"})
        )


async def _read_owner(rig: CatalogRig, name: str) -> str | None:
    return (await rig.catalog.views.load(("db",), name)).metadata.properties.get(RUN_AS_PROPERTY)


@pytest.mark.parametrize(
    "key", [RUN_AS_PROPERTY, "Trino.Run-As-Owner", " trino.run-as-owner", "presto.view.owner", "definer"]
)
def test_identity_properties_of_engines_are_recognised(key: str) -> None:
    assert determines_rights(key)


@pytest.mark.parametrize("key", ["owner", "comment", "presto_version", "team", "trino_version", "spark.query"])
def test_view_properties_without_effect_on_rights_are_allowed(key: str) -> None:
    assert not determines_rights(key)


async def test_confined_writer_cannot_make_another_user_the_owner_of_a_view(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_view(rig)
        views = rig.catalog.views
        attempts = {
            "create": views.create(CONFINED_CALLER, ("db",), _build_create_view("x", **{RUN_AS_PROPERTY: "admin"})),
            "create, spelled otherwise": views.create(
                CONFINED_CALLER, ("db",), _build_create_view("x", **{" Trino.RUN-as-owner": "admin"})
            ),
            "replace": views.replace(
                CONFINED_CALLER, ("db",), "v", [], [_build_set_properties(**{RUN_AS_PROPERTY: "root"})]
            ),
            "with a text": views.replace(
                CONFINED_CALLER,
                ("db",),
                "v",
                [],
                [*_build_text_updates("select 2"), _build_set_properties(**{RUN_AS_PROPERTY: "root"})],
            ),
        }
        for description, attempt in attempts.items():
            with pytest.raises(Forbidden, match="trusted_engines"):
                await attempt
            assert not await views.exists(("db",), "x"), description
        assert await _read_owner(rig, "v") == "admin"
        own_view = await views.create(
            CONFINED_CALLER,
            ("db",),
            _build_create_view("own", **{RUN_AS_PROPERTY: "wendy", "owner": "admin", "a": "b"}),
        )
        assert own_view.metadata.properties == {RUN_AS_PROPERTY: "wendy", "owner": "wendy", "a": "b"}


async def test_user_who_changes_the_text_of_a_view_becomes_its_owner(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_view(rig)
        views = rig.catalog.views
        await views.replace(CONFINED_CALLER, ("db",), "v", [], [_build_set_properties(comment="ours")])
        assert await _read_owner(rig, "v") == "admin", "the text of the view has not changed"
        await views.replace(CONFINED_CALLER, ("db",), "v", [], [_build_set_properties(**{RUN_AS_PROPERTY: "admin"})])
        assert await _read_owner(rig, "v") == "admin"
        await views.replace(CONFINED_CALLER, ("db",), "v", [], _build_text_updates("select secret from t"))
        assert await _read_owner(rig, "v") == "wendy"
        with pytest.raises(Forbidden):
            await views.replace(
                CONFINED_CALLER, ("db",), "v", [], [_build_set_properties(**{RUN_AS_PROPERTY: "admin"})]
            )
        repeated_updates = [*_build_text_updates("select 3"), _build_set_properties(**{RUN_AS_PROPERTY: "admin"})]
        assert (await views.replace(CONFINED_CALLER, ("db",), "w", [], repeated_updates)).metadata.properties[
            RUN_AS_PROPERTY
        ] == "wendy"


async def test_owner_named_by_a_trusted_engine_stays_after_a_change_of_the_text(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_view(rig)
        for caller in (ENGINE, CALLER):
            await rig.catalog.views.replace(
                caller, ("db",), "v", [], _build_text_updates(f"select '{caller.principal_name}'")
            )
            assert await _read_owner(rig, "v") == "admin"
        await rig.catalog.views.replace(
            ENGINE,
            ("db",),
            "v",
            [],
            [*_build_text_updates("select 9"), _build_set_properties(**{RUN_AS_PROPERTY: "anna"})],
        )
        assert await _read_owner(rig, "v") == "anna"


async def test_view_without_an_owner_stays_without_one(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        await rig.catalog.views.create(CALLER, ("db",), _build_create_view("v"))
        await rig.catalog.views.replace(CONFINED_CALLER, ("db",), "v", [], _build_text_updates("select 2"))
        assert await _read_owner(rig, "v") is None


ROOT_AS_OWNER = {"trino.run-as-owner": "root"}
WRITER = Caller(principal_name="mallory", request_id="r", confined_to=(("db",),), names_owners=False)


async def _overwrite_view_file(rig: CatalogRig, name: str, **changes: Any) -> None:
    """Overwrite the view's metadata file, as a user with access to its folder can.

    If the file's name contains a digest of its content, a copy without a digest in its name is overwritten. The cache
    is cleared, so that the server reads the file.
    """
    entry = await rig.catalog.views.load_entry(("db",), name)
    path = Path(parse_location(entry.metadata_location).file_path)
    if is_named_by_content(entry.metadata_location):
        path = use_metadata_file_without_digest(entry.metadata_location)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    rig.catalog.documents.cache.clear()


@pytest.mark.parametrize("moved", [False, True], ids=["as it was made", "renamed since"])
async def test_overwritten_metadata_file_gives_a_view_no_owner(tmp_path: Path, moved: bool) -> None:
    async with open_rig(tmp_path) as rig:
        views, name = rig.catalog.views, "v"
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        await views.create(WRITER, ("db",), CreateView(name=name, schema=SCHEMA, view_version=VERSION))
        if moved:
            name = "w"
            await views.rename(WRITER, TableIdentifier(("db",), "v"), TableIdentifier(("db",), "w"))
        await _overwrite_view_file(rig, name, properties=ROOT_AS_OWNER)
        with pytest.raises(Forbidden, match="was changed after its commit"):
            await views.load(("db",), name)
        with pytest.raises(Forbidden):
            await views.replace(WRITER, ("db",), name, [], [{"action": "set-properties", "updates": {"a": "b"}}])
        await _overwrite_view_file(rig, name, properties={})
        assert (await views.load(("db",), name)).metadata.properties == {}


async def test_overwritten_metadata_file_does_not_change_the_text_of_an_owned_view(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        views = rig.catalog.views
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        view = CreateView(name="v", schema=SCHEMA, view_version=VERSION, properties=ROOT_AS_OWNER)
        await views.create(ENGINE, ("db",), view)
        await views.replace(WRITER, ("db",), "v", [], [{"action": "set-properties", "updates": {"a": "b"}}])
        metadata = (await views.load(("db",), "v")).metadata
        assert metadata.properties == {**ROOT_AS_OWNER, "a": "b"}
        versions = json.loads(encode_view(metadata))["versions"]
        text = [{"type": "sql", "sql": "SELECT * FROM secret", "dialect": "trino"}]
        await _overwrite_view_file(rig, "v", versions=[{**version, "representations": text} for version in versions])
        with pytest.raises(Forbidden, match="was changed after its commit"):
            await views.load(("db",), "v")
        await _overwrite_view_file(rig, "v", versions=versions)
        assert (await views.load(("db",), "v")).metadata == metadata
        location = (await views.load_entry(("db",), "v")).metadata_location
        await views.drop(CALLER, ("db",), "v")
        await views.register(CALLER, ("db",), "back", location)
        assert (await views.load(("db",), "back")).metadata == metadata


async def test_owned_view_of_an_older_server_without_a_fingerprint_is_served(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        view = CreateView(name="v", schema=SCHEMA, view_version=VERSION, properties=ROOT_AS_OWNER)
        await rig.catalog.views.create(ENGINE, ("db",), view)
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        connection.execute("UPDATE instants SET fingerprint = NULL")
    async with open_rig(tmp_path) as rig:
        assert (await rig.catalog.views.load(("db",), "v")).metadata.properties == ROOT_AS_OWNER
