"""Requests for S3 signatures of the victim's objects through the attacker's own tables."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from tests.attacks.campaign import AttackCampaign
from tests.attacks.through_gateway import reach_through_gateway
from tests.attacks.world import EVIL, HOSTILE_PRINCIPALS, NAMES


async def sign_everything(campaign: AttackCampaign, name: str, query: str = "") -> None:
    """Try to reach objects of the victim with the rights on the attacker's table `name`.

    Send requests through the gateway. If the store is an S3 server, also request signatures for the victim's objects,
    and use the granted signatures.
    """
    world, rng = campaign.world, campaign.rng
    await reach_through_gateway(campaign, name)
    if world.s3 is None:
        return
    base = f"{world.s3.endpoint}/{world.bucket}"
    for kind in ("data file", "manifest", "location"):
        foreign_location = campaign.choose_hint(kind, f"s3://{world.bucket}/lake/no")
        key = foreign_location.partition(f"{world.bucket}/")[2]
        loaded_table = await campaign.ask("mallory", "GET", f"{NAMES}/tables/{name}")
        own_location = (
            loaded_table.json["metadata"]["location"]
            if loaded_table.status == 200
            else f"s3://{world.bucket}/lake/{EVIL}/x"
        )
        own_key = own_location.partition(f"{world.bucket}/")[2]
        parent_path = "/".join([".."] * (own_key.count("/") + 1))
        uris = (
            f"{base}/{key}",
            f"{base}/{own_key}/{parent_path}/{key}",
            f"{base}/{own_key}/{parent_path.replace('..', '%2e%2e')}/{key}",
            f"{base}/{own_key}/{parent_path.replace('..', '%252e%252e')}/{key}",
            f"{base}?list-type=2&prefix={quote(key, safe='')}",
            f"{base}?list-type=2&prefix={quote(f'{own_key}/{parent_path}/{key}', safe='')}",
            f"{base}?list-type=2&prefix={quote(own_key, safe='')}&start-after={quote(key, safe='')}",
            f"{base}/?list-type=2&prefix=lake/",
        )
        method = rng.choice(("GET", "GET", "PUT", "DELETE", "HEAD", "POST"))
        uri = rng.choice(uris)
        headers = {"x-amz-copy-source": [f"/{world.bucket}/{key}"]} if method == "PUT" and rng.random() < 0.5 else {}
        if headers:
            uri = f"{base}/{own_key}/data/copied"
        body = {"region": world.s3.region, "uri": uri, "method": method, "headers": headers}
        principal = rng.choice(HOSTILE_PRINCIPALS)
        answer = await campaign.ask(principal, "POST", f"{NAMES}/tables/{name}/sign{query}", body)
        if answer.status == 200:
            await _send_signed_request(campaign, method, answer.json)


async def _send_signed_request(campaign: AttackCampaign, method: str, signed_request: dict[str, Any]) -> None:
    """Send a request with a granted signature to the store, and report secrets of the victim in its answer.

    If the request changes files of the victim, the campaign finds this at its end, when it compares all these files.
    """
    headers = {name: ",".join(values) for name, values in signed_request["headers"].items()}
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            method,
            URL(signed_request["uri"], encoded=True),
            headers=headers,
            data=b"evil" if method in ("PUT", "POST") else None,
        ) as answer,
    ):
        body = await answer.read()
    campaign.steps.append(f"uses the signature for {method} {signed_request['uri']} -> {answer.status}")
    leaks = campaign.world.secrets.find_leaks(body, dict(answer.headers))
    if leaks:
        campaign.report(f"the answer to the signed request contains {', '.join(map(str, leaks))}")
