"""Tests that the campaign covers all published routes, and detects leaks, excessive grants and changed bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import crafted, routes
from tests.attacks.campaign import AttackCampaign
from tests.attacks.crafted import read_table_in_all_ways
from tests.attacks.runs import check_victims_data
from tests.attacks.world import AttackWorld, open_world


def test_each_published_route_is_attacked_or_listed_as_harmless() -> None:
    published_operations = {operation for operation, _, _ in routes.list_routes()}
    assert len(published_operations) > 70
    attacked_operations = routes.OPERATIONS_WITH_BODY | routes.BODILESS
    assert not attacked_operations & set(routes.HARMLESS)
    assert published_operations == attacked_operations | set(routes.HARMLESS)


@pytest.mark.slow
async def test_each_campaign_uses_each_route_that_is_not_harmless(tmp_path: Path) -> None:
    async with open_world(tmp_path, random.Random(2)) as world:
        campaign = AttackCampaign(world, random.Random(2), 2)
        campaign.give_hints(())
        for operation, method, template in routes.list_routes():
            if operation not in routes.HARMLESS:
                await routes.attack_route(campaign, operation, method, template)
        assert campaign.drawn_routes == {operation for operation, _, _ in routes.list_routes()} - set(routes.HARMLESS)
        assert not campaign.findings, campaign.format_verdict()


# Tests that the campaign can fail


async def test_secret_that_is_added_to_an_answer_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test adds the location of a data file of the victim to an answer. The attacker has received no location."""
    async with open_world(tmp_path, random.Random(3)) as world:
        campaign = AttackCampaign(world, random.Random(3), seed=3)
        campaign.give_hints(())
        await campaign.ask("mallory", "GET", "/v1/config")
        assert not campaign.findings
        ask_world = AttackWorld.ask

        async def answer_with_leak(self: AttackWorld, *args: Any, **options: Any) -> Any:
            answer = await ask_world(self, *args, **options)
            answer.raw += f" {self.hints['data file'][0]}".encode()
            return answer

        with monkeypatch.context() as patches:
            patches.setattr(AttackWorld, "ask", answer_with_leak)
            await campaign.ask("mallory", "GET", "/v1/config")
        assert "data file" in campaign.format_verdict()
        assert "seed 3" in campaign.format_verdict()


async def test_writer_who_may_read_the_other_namespace_is_detected(tmp_path: Path) -> None:
    """With an excessive grant, a campaign must report leaks. So the search for secrets in answers works."""
    rng = random.Random(4)
    async with open_world(tmp_path, rng) as world:
        grant = {"principal": "mallory", "role": "reader", "namespace": [world.victim]}
        await world.ask_successfully("root", "PUT", "/api/v1/grants", grant)
        campaign = AttackCampaign(world, rng, seed=4)
        campaign.give_hints(("namespace", "table"))
        for table in world.hints["table"]:
            await campaign.ask("mallory", "GET", f"/api/v1/tables/{world.victim}/{table}/stats/id")
            await campaign.ask("mallory", "GET", f"/v1/namespaces/{world.victim}/tables/{table}")
        assert any("row number" in finding for finding in campaign.findings), campaign.steps
        assert any("column name" in finding for finding in campaign.findings), campaign.steps


async def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with open_world(tmp_path, rng) as world:
        campaign = AttackCampaign(world, rng, 5)
        fingerprint_before = await world.compute_fingerprint()
        world.touched_locations.clear()
        await check_victims_data(campaign, fingerprint_before)
        assert not campaign.findings
        Path(world.hints["data file"][0].removeprefix("file://")).unlink()
        world.write(f"{world.hints['location'][0]}/data/planted", b"x")
        await check_victims_data(campaign, fingerprint_before)
        assert sorted(finding.rpartition(" ")[2] for finding in campaign.findings) == ["gone", "new"]


async def test_file_that_the_server_writes_and_deletes_at_once_is_detected(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with open_world(tmp_path, rng) as world:
        campaign = AttackCampaign(world, rng, 5)
        fingerprint_before = await world.compute_fingerprint()
        world.touched_locations.clear()
        planted_location = f"{world.hints['location'][0]}/metadata/planted"
        await world.server.components.objects.create(planted_location, b"x")
        await world.server.components.objects.delete(planted_location)
        await check_victims_data(campaign, fingerprint_before)
        assert campaign.findings == [f"the server created or deleted the victim's {planted_location}"] * 2


async def test_requests_of_an_honest_client_for_its_own_table_succeed(tmp_path: Path) -> None:
    """A campaign in which the server rejects every request finds no leak, so these requests must succeed."""
    rng = random.Random(6)
    async with open_world(tmp_path, rng) as world:
        campaign = AttackCampaign(world, rng, seed=6)
        campaign.give_hints(())
        name, location = await crafted.create_own_table(campaign, "honest")
        data = crafted.write_own_parquet(campaign, f"{location}/data/0.parquet", [1, 2, 3])
        manifest = crafted.write_manifest(campaign, f"{location}/metadata/m0.avro", [data])
        path = crafted.write_manifest_list(campaign, f"{location}/metadata/snap.avro", [manifest])
        assert (await crafted.commit_snapshot(campaign, name, path)).status < 300
        step_count = len(campaign.steps)
        await read_table_in_all_ways(campaign, name)
        steps = campaign.steps[step_count:]
        assert len(steps) >= 15  # `read_table_in_all_ways` sends at least so many requests for a readable table.
        failed_steps = [step for step in steps if not step.endswith(("200", "204"))]
        assert all("/lookup" in step for step in failed_steps), failed_steps  # The table has no record index.
