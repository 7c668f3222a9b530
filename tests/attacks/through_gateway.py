"""S3 requests to the objects gateway for the victim's objects, signed with credentials of the attacker's own table.

The gateway has the victim's objects in its cache, because a cached answer requires the same rights as an answer from
the object store.
"""

from __future__ import annotations

import base64
import time
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from seamark.metaserver.gateway.sigv4 import RequestTarget, sign_headers
from tests.attacks.campaign import AttackCampaign
from tests.attacks.world import HOSTILE_PRINCIPALS, NAMES, AttackWorld

VENDING_HEADER = {"X-Iceberg-Access-Delegation": "vended-credentials"}
OPERATIONS = (
    *(("GET", ""), ("HEAD", ""), ("PUT", ""), ("DELETE", ""), ("POST", "uploads="), ("GET", "tagging=")),
    *(("PUT", "partNumber=1&uploadId=1"), ("GET", "uploadId=1"), ("DELETE", "uploadId=1"), ("PUT", "tagging=")),
    *(("GET", "versionId=null"), ("GET", "x-id=GetObject"), ("GET", "attributes=")),
)
"""(method, query) of the gateway's operations on an object."""
BUCKET_OPERATIONS = ("list", "delete", "copy")


async def read_credentials(world: AttackWorld, principal: str, path: str) -> dict[str, str]:
    """Load the table at `path`, and return the credentials in its config, or an empty dict without access."""
    answer = await world.ask(principal, "GET", path, headers=VENDING_HEADER)
    return answer.json.get("config", {}) if answer.status == 200 else {}


async def fill_cache(world: AttackWorld) -> None:
    """Read each object of the victim's tables twice through the gateway: from the store, and then from its cache."""
    for name in world.hints["table"]:
        path = f"/v1/namespaces/{world.victim}/tables/{name}"
        keys = await read_credentials(world, "viola", path)
        location = (await world.ask_successfully("viola", "GET", path))["metadata"]["location"]
        for location_of_object in world.read_files():
            if location_of_object.startswith(location + "/"):
                for _ in range(2):
                    status, _, _ = await send_signed(
                        world, keys, "GET", "/" + quote(location_of_object.removeprefix("s3://"))
                    )
                    assert status == 200, location_of_object


async def send_signed(
    world: AttackWorld,
    keys: dict[str, str],
    method: str,
    path: str,
    query: str = "",
    data: bytes | None = None,
    **headers: str,
) -> tuple[int, bytes, dict[str, str]]:
    """Send a signed request to the gateway, and return (status, body, headers).

    If a key is missing in `keys`, an invalid key is used.
    """
    signed_headers = sign_headers(
        RequestTarget(method, path, query, {"host": urlsplit(world.gateway).netloc, **headers}),
        access_key_id=keys.get("s3.access-key-id", "SMKAAAAAAAAAAAAAAAAA"),
        secret=keys.get("s3.secret-access-key", "none"),
        token=keys.get("s3.session-token", "none"),
        region=keys.get("s3.region", "us-east-1"),
        payload="UNSIGNED-PAYLOAD",
        now_ms=time.time_ns() // 1_000_000,
    )
    url = URL(f"{world.gateway}{path}{'?' if query else ''}{query}", encoded=True)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.request(method, url, headers=signed_headers, data=data, allow_redirects=False) as answer,
    ):
        return answer.status, await answer.read(), dict(answer.headers)


async def reach_through_gateway(campaign: AttackCampaign, name: str) -> None:
    """Send one request for each kind of the victim's objects."""
    world, rng = campaign.world, campaign.rng
    if not world.gateway:
        return
    principal = rng.choice(HOSTILE_PRINCIPALS)
    answer = await campaign.ask(principal, "GET", f"{NAMES}/tables/{name}", headers=VENDING_HEADER)
    keys = dict(answer.json.get("config", {})) if answer.status == 200 else {}
    location = answer.json["metadata"]["location"] if answer.status == 200 else f"s3://{world.bucket}/lake/none"
    own_location = location.removeprefix(f"s3://{world.bucket}/")
    for kind in ("data file", "manifest", "metadata file", "location"):
        foreign_key = campaign.choose_hint(kind, f"s3://{world.bucket}/lake/no").removeprefix(f"s3://{world.bucket}/")
        parent_path = "/".join([".."] * (own_location.count("/") + 1))
        target = rng.choice(
            (
                f"/{world.bucket}/{quote(foreign_key)}",
                f"/{world.bucket}/{quote(foreign_key)}",
                f"/{world.bucket}/{quote(foreign_key)}",
                f"/{world.bucket}/{own_location}/{parent_path}/{quote(foreign_key)}",
                f"/{world.bucket}/{own_location}/{parent_path.replace('..', '%2e%2e')}/{quote(foreign_key)}",
                f"/{world.bucket}//{quote(foreign_key)}",
                f"/{world.bucket.upper()}/{quote(foreign_key)}",
                f"//{world.bucket}/{quote(foreign_key)}",
                f"/{world.bucket}/{quote(foreign_key)}%00",
                f"/{world.bucket}/{quote(foreign_key)}/",
            )
        )
        method, query = rng.choice(OPERATIONS)
        headers = rng.choice(
            (
                {},
                {"range": rng.choice(("bytes=0-9", "bytes=-8", "bytes=0-"))},
                {"if-none-match": "*"},
                {"if-match": '"x"'},
                {"x-amz-checksum-mode": "ENABLED"},
                {"x-forwarded-host": "localhost"},
            )
        )
        operation = rng.choice(("object", "object", "object", *BUCKET_OPERATIONS))
        data = b"evil" if method in ("PUT", "POST") and not query else None
        if operation == "list":
            prefix = rng.choice(
                (
                    quote(foreign_key, safe=""),
                    quote(f"{own_location}/{parent_path}/{foreign_key}", safe=""),
                    "",
                    "lake%2F",
                )
            )
            method, target, query, data = "GET", f"/{world.bucket}", f"list-type=2&prefix={prefix}", None
        elif operation == "delete":
            xml = f"<Delete><Object><Key>{foreign_key}</Key></Object></Delete>"
            method, target, query, data = "POST", f"/{world.bucket}", "delete=", xml.encode()
        elif operation == "copy":
            method, query, data = "PUT", rng.choice(("", "partNumber=1&uploadId=1")), None
            target = f"/{world.bucket}/{own_location}/data/copied"
            headers = {"x-amz-copy-source": f"/{world.bucket}/{quote(foreign_key)}"}
        status, body, response_headers = await send_signed(
            world, _forge_keys(campaign, keys), method, target, query, data, **headers
        )
        campaign.steps.append(
            f"{principal or 'stranger'} through the gateway: {method} {target}?{query} {headers} -> {status}"
        )
        leaks = world.secrets.find_leaks(body, response_headers)
        if leaks:
            campaign.report(f"the gateway's answer has {', '.join(map(str, leaks))}")
        if status < 300:
            campaign.report("the gateway answered a request for the victim's objects")
        if status >= 500 and status != 503:
            campaign.report(f"the gateway failed: {body[:500]!r}")


def _forge_keys(campaign: AttackCampaign, keys: dict[str, str]) -> dict[str, Any]:
    """Return the credentials, sometimes with a forged token.

    A forged token has a flipped bit, or another endpoint and a shorter end.
    """
    token = keys.get("s3.session-token", "")
    if not token or campaign.rng.random() < 0.7:
        return keys
    raw = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    if campaign.rng.random() < 0.5:
        raw[campaign.rng.randrange(len(raw))] ^= 1 << campaign.rng.randrange(8)
    else:
        endpoint = keys.get("s3.endpoint", "x").encode()
        raw = bytearray(bytes(raw).replace(endpoint[:8], b"elsewher"))  # The length stays the same.
        raw = raw[: -campaign.rng.randrange(1, 40)]
    return {**keys, "s3.session-token": base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")}
