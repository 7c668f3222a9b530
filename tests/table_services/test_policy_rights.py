"""Tests that a policy's job runs only while the users who set the policy may change the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.catalog.values import Caller, CreateTable
from seamark.metaserver.services.proposers import Indexing
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import RemoveGrant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.timeline.instants import MAINTENANCE
from tests.catalog.rig import SCHEMA
from tests.server.rig import run_server
from tests.table_services.test_scheduler import ScriptedLauncher, run_scheduler
from tests.waits import until

WENDY = Grant("wendy", "writer", ("db",))


@pytest.mark.parametrize("on_namespace", [False, True])
async def test_job_does_not_run_after_the_rights_of_its_policys_author_were_withdrawn(
    tmp_path: Path, on_namespace: bool
) -> None:
    """The run is recorded as failed, with the name of the policy's author.

    Policies of other users are not affected.
    """
    async with run_server(tmp_path) as server:
        components = server.components
        for name in ("wendy", "otto"):
            await create_token(components.store, components.clock, name, None, [Grant(name, "writer", ("db",))])
        namespace_properties = {"seamark.services.priority": "high"} if on_namespace else {}
        wendy, otto = (Caller(principal_name=name, request_id="r") for name in ("wendy", "otto"))
        await components.catalog.namespaces.create(wendy, ("db", "hers"), namespace_properties)
        await components.catalog.namespaces.create(otto, ("db", "his"), {})
        index_properties = {"seamark.index.i": "bloom(id)"}
        for caller, namespace in ((otto if on_namespace else wendy, "hers"), (otto, "his")):
            request = CreateTable(name=f"of_{namespace}", schema=SCHEMA, properties=index_properties)
            await components.catalog.tables.create(caller, ("db", namespace), request)
        services: Any = [Indexing(components.settings, components.clock)]
        recorder = ScriptedLauncher()
        rights = StandingRights(components.store, components.clock, replace(components.settings, auth="token"))
        async with run_scheduler(server, recorder, services=services, rights=rights):
            await until(lambda: len(recorder.started_tables) >= 2)
        assert sorted(recorder.started_tables) == ["of_hers", "of_his"]
        await components.store.transact([RemoveGrant(WENDY)])
        recorder = ScriptedLauncher()
        async with run_scheduler(server, recorder, services=services, rights=rights):
            await until(lambda: "failed" in recorder.outcomes and recorder.started_tables)
        assert set(recorder.started_tables) == {"of_his"}
        runs = await components.store.list_instants(InstantFilter(action=MAINTENANCE), limit=10)
        errors = [str(run.summary["error"]) for run in runs]
        assert all(run.name == "of_hers" for run in runs)
        assert "wendy set seamark." in errors[0]
        assert "the rights were withdrawn; remove the property and set it again" in errors[0]
