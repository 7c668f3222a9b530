"""A complete campaign: all published routes and crafted attacks in random order, and a check of the victim's data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.api.client import VIEW_VERSION
from tests.attacks import routes
from tests.attacks.campaign import AttackCampaign
from tests.attacks.crafted import CRAFTED_ATTACKS, create_table
from tests.attacks.through_gateway import fill_cache
from tests.attacks.world import NAMES, SCHEMA, open_world
from tests.services.s3 import S3


async def run_campaign(
    home: Path,
    seed: int,
    *,
    requests: int,
    s3: S3 | None = None,
    hints: tuple[str, ...] | None = None,
    with_gateway: bool = False,
    attacker_warehouse: str = "",
) -> AttackCampaign:
    """Attack each published route and run each crafted attack, in random order. Return the finished campaign.

    Args:
        home: The folder of the server.
        seed: The seed of all random choices.
        requests: The minimum number of steps. If there are fewer routes and crafted attacks, some are drawn again.
        s3: The store of the warehouse, or None for a folder.
        hints: The kinds of hints for the attacker. If it is None, they are drawn.
        with_gateway: Whether the server has a gateway, through which clients reach objects.
        attacker_warehouse: The name of a second warehouse, in which the attackers have their roles for everything, and
            to which their requests go. If it is empty, they attack from the warehouse of the victim.
    """
    rng = random.Random(seed)
    async with open_world(home, rng, s3, with_gateway=with_gateway, attacker_warehouse=attacker_warehouse) as world:
        campaign = AttackCampaign(world, rng, seed)
        campaign.give_hints(hints)
        if with_gateway:
            await fill_cache(world)
        fingerprint = await world.compute_fingerprint()
        world.touched_locations.clear()
        await _create_attackers_objects(campaign)
        steps: list[Any] = [*routes.list_routes(), *CRAFTED_ATTACKS]
        while len(steps) < requests:
            steps.append(rng.choice(routes.list_routes()) if rng.random() < 0.7 else rng.choice(CRAFTED_ATTACKS))
        rng.shuffle(steps)
        for step in steps:
            if isinstance(step, tuple):
                operation, method, template = step
                if operation not in routes.HARMLESS:
                    await routes.attack_route(campaign, operation, method, template)
            else:
                await step(campaign)
        await check_victims_data(campaign, fingerprint)
    return campaign


async def _create_attackers_objects(campaign: AttackCampaign) -> None:
    await create_table(campaign, "own")
    view = {"name": "own_view", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    await campaign.ask("mallory", "POST", f"{NAMES}/views", view)


async def check_victims_data(campaign: AttackCampaign, fingerprint_before: dict[str, str]) -> None:
    """Check that the victim's data is unchanged byte for byte, and that no file was added, even for a moment."""
    campaign.findings += [
        f"the server created or deleted the victim's {location}" for location in campaign.world.list_touched_of_victim()
    ]
    fingerprint_after = await campaign.world.compute_fingerprint()
    for location in sorted(fingerprint_before.keys() | fingerprint_after.keys()):
        if fingerprint_before.get(location) != fingerprint_after.get(location):
            kind = (
                "gone"
                if location not in fingerprint_after
                else "new"
                if location not in fingerprint_before
                else "changed"
            )
            campaign.findings.append(f"the victim's {location} is {kind}")
