"""A view runs with the rights of the one who wrote it, or of whom a trusted engine names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metaserver.catalog.owners import determines_rights
from metaserver.catalog.values import Caller, CreateView
from metaserver.errors import Forbidden
from tests.catalog.rig import CALLER, SCHEMA, Rig, rig
from tests.catalog.test_confinement import VERSION

RUN_AS = "trino.run-as-owner"
CONFINED = Caller(who="wendy", request_id="r", confined_to=(("db",),), names_owners=False)
ENGINE = Caller(who="trino", request_id="r", confined_to=(("db",),))


def _view(name: str, **properties: str) -> CreateView:
    return CreateView(name=name, schema=SCHEMA, view_version=VERSION, properties=properties)


def _text(sql: str) -> list[dict[str, Any]]:
    version = {**VERSION, "representations": [{"type": "sql", "sql": sql, "dialect": "spark"}]}
    return [
        {"action": "add-view-version", "view-version": version},
        {"action": "set-current-view-version", "view-version-id": -1},
    ]


def _set(**properties: str) -> dict[str, Any]:
    return {"action": "set-properties", "updates": properties}


async def _prepared(it: Rig) -> None:
    await it.catalog.namespaces.create(CALLER, ("db",), {})
    for name in ("v", "w"):
        await it.catalog.views.create(ENGINE, ("db",), _view(name, **{RUN_AS: "admin", "comment": "hers"}))


async def _owner(it: Rig, name: str) -> str | None:
    return (await it.catalog.views.load(("db",), name)).metadata.properties.get(RUN_AS)


@pytest.mark.parametrize("key", [RUN_AS, "Trino.Run-As-Owner", " trino.run-as-owner", "presto.view.owner", "definer"])
def test_properties_that_engines_take_an_identity_from_are_known(key: str) -> None:
    assert determines_rights(key)


@pytest.mark.parametrize("key", ["owner", "comment", "presto_version", "team", "trino_version", "spark.query"])
def test_other_properties_of_views_are_free(key: str) -> None:
    assert not determines_rights(key)


async def test_a_confined_writer_makes_nobody_else_the_owner_of_a_view(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await _prepared(it)
        views = it.catalog.views
        attempts = {
            "create": views.create(CONFINED, ("db",), _view("x", **{RUN_AS: "admin"})),
            "create, spelled otherwise": views.create(
                CONFINED, ("db",), _view("x", **{" Trino.RUN-as-owner": "admin"})
            ),
            "replace": views.replace(CONFINED, ("db",), "v", [], [_set(**{RUN_AS: "root"})]),
            "with a text": views.replace(CONFINED, ("db",), "v", [], [*_text("select 2"), _set(**{RUN_AS: "root"})]),
        }
        for what, attempt in attempts.items():
            with pytest.raises(Forbidden, match="trusted_engines"):
                await attempt
            assert not await views.exists(("db",), "x"), what
        assert await _owner(it, "v") == "admin"
        own = await views.create(CONFINED, ("db",), _view("own", **{RUN_AS: "wendy", "owner": "admin", "a": "b"}))
        assert own.metadata.properties == {RUN_AS: "wendy", "owner": "wendy", "a": "b"}


async def test_who_changes_the_text_of_a_view_becomes_its_owner(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await _prepared(it)
        views = it.catalog.views
        await views.replace(CONFINED, ("db",), "v", [], [_set(comment="ours")])
        assert await _owner(it, "v") == "admin", "nothing that runs has changed"
        await views.replace(CONFINED, ("db",), "v", [], [_set(**{RUN_AS: "admin"})])
        assert await _owner(it, "v") == "admin"
        await views.replace(CONFINED, ("db",), "v", [], _text("select secret from t"))
        assert await _owner(it, "v") == "wendy"
        with pytest.raises(Forbidden):
            await views.replace(CONFINED, ("db",), "v", [], [_set(**{RUN_AS: "admin"})])
        repeated = [*_text("select 3"), _set(**{RUN_AS: "admin"})]
        assert (await views.replace(CONFINED, ("db",), "w", [], repeated)).metadata.properties[RUN_AS] == "wendy"


async def test_a_trusted_engine_names_the_owner_and_keeps_it_over_new_texts(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await _prepared(it)
        for caller in (ENGINE, CALLER):
            await it.catalog.views.replace(caller, ("db",), "v", [], _text(f"select '{caller.who}'"))
            assert await _owner(it, "v") == "admin"
        await it.catalog.views.replace(ENGINE, ("db",), "v", [], [*_text("select 9"), _set(**{RUN_AS: "anna"})])
        assert await _owner(it, "v") == "anna"


async def test_a_view_without_an_owner_stays_without_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.catalog.namespaces.create(CALLER, ("db",), {})
        await it.catalog.views.create(CALLER, ("db",), _view("v"))
        await it.catalog.views.replace(CONFINED, ("db",), "v", [], _text("select 2"))
        assert await _owner(it, "v") is None
