"""Campaigns of a hostile tenant.

It never learns a value, path or name of the other tenant, and never changes its bytes.

`make test` runs two small campaigns that are always the same. The slow campaigns use new seeds. A failure prints the
seed and the steps, and `TEST_SEED=<seed>` repeats it.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import pytest

from seamark.metaserver.gateway import gateway
from tests.attacks.campaign import AttackCampaign
from tests.attacks.crafted import create_table
from tests.attacks.runs import check_victims_data, run_campaign
from tests.attacks.through_gateway import fill_cache, reach_through_gateway
from tests.attacks.world import HINT_KINDS, open_world
from tests.seeds import examples, first_seed, mark_fast
from tests.services.s3 import S3


@pytest.mark.parametrize("hints", mark_fast([HINT_KINDS, ()], 1), ids=["all handles known", "nothing known"])
async def test_short_campaign_finds_no_leak(tmp_path: Path, hints: tuple[str, ...]) -> None:
    campaign = await run_campaign(tmp_path / "home", 1, requests=0, hints=hints)
    assert not campaign.findings, campaign.format_verdict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(8))
async def test_campaigns_over_local_files_find_no_leak(tmp_path: Path, number: int) -> None:
    campaign = await run_campaign(tmp_path / "home", first_seed() + number, requests=300)
    assert not campaign.findings, campaign.format_verdict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
async def test_admin_of_another_warehouse_finds_no_leak(tmp_path: Path, number: int) -> None:
    """The attackers have roles for all of their warehouse, and hints about objects of the victim's warehouse."""
    # The attacker does not get the body of the victim's request. In the attacker's warehouse, the idempotency key of
    # this request is new, so the server would accept the body and return it.
    hints = tuple(kind for kind in HINT_KINDS if kind != "idempotent body")
    campaign = await run_campaign(
        tmp_path / "home", first_seed() + 200 + number, requests=300, hints=hints, attacker_warehouse="evilhouse"
    )
    assert not campaign.findings, campaign.format_verdict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
async def test_campaigns_over_s3_find_no_leak(tmp_path: Path, s3: S3, number: int) -> None:
    campaign = await run_campaign(
        tmp_path / "home", first_seed() + 100 + number, requests=300, s3=s3, with_gateway=number % 2 == 1
    )
    assert not campaign.findings, campaign.format_verdict()


async def test_gateway_neither_reveals_nor_changes_the_victims_objects(tmp_path: Path, s3: S3) -> None:
    """The test first fills the gateway's cache with the victim's objects. Then an attacker requests these objects."""
    rng = random.Random(first_seed())
    async with open_world(tmp_path / "home", rng, s3, with_gateway=True) as world:
        campaign = AttackCampaign(world, rng, seed=1)
        campaign.give_hints(HINT_KINDS)
        await fill_cache(world)
        fingerprint_before = await world.compute_fingerprint()
        world.touched_locations.clear()
        await create_table(campaign, "own")
        for _ in range(examples(25, 6)):
            await reach_through_gateway(campaign, "own")
        await check_victims_data(campaign, fingerprint_before)
    assert not campaign.findings, campaign.format_verdict()


@pytest.mark.slow
async def test_campaign_detects_a_gateway_without_rights(tmp_path: Path, s3: S3) -> None:
    rng = random.Random(first_seed())
    with patch.object(gateway, "check_request", lambda *arguments: None):
        async with open_world(tmp_path / "home", rng, s3, with_gateway=True) as world:
            campaign = AttackCampaign(world, rng, 1)
            campaign.give_hints(HINT_KINDS)
            await fill_cache(world)
            await create_table(campaign, "own")
            for _ in range(12):
                await reach_through_gateway(campaign, "own")
    assert any("gateway" in finding for finding in campaign.findings)
