"""Tests that no answer reveals whether another tenant's name, id or path exists.

Each hostile principal sends each request twice: with a handle of the victim, and with a handle of the same form that
exists nowhere. The two answers must be equal except for the handle itself.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import Answer
from tests.attacks import routes
from tests.attacks.campaign import AttackCampaign
from tests.attacks.world import EVIL, HINT_KINDS, HOSTILE_PRINCIPALS, AttackWorld, open_world
from tests.seeds import examples

_IDENTIFIER = re.compile(r"[0-9a-f]{8,}|[0-9]{8,}")
_LONG_MAX = 2**63 - 1
"""A replaced snapshot id must remain a number of 64 bits."""
_TOKEN_KINDS = ("plan task", "page token", "stage", "idempotent body")
_IDENTIFIER_FORMS = re.compile(rb"[0-9a-f]{3,}|(?:%[0-9a-f]{1,2})+|(?:\xef[\xbc\xbd][\x80-\xbf])+", re.IGNORECASE)
"""Identifiers: plain, in capitals, percent-encoded, and in full-width letters."""
_OWN_STATE = ("putFunction", "dropFunction")
"""Operations whose first request changes the attacker's own namespace, and so the answer to the second request."""


class _FakeIdentifiers:
    """Replaces each identifier in a hint by an identifier of the same form that exists nowhere.

    A UUID has two such identifiers: its first 8 and its last 12 digits. The digits between them, with its version,
    stay. Equal identifiers have equal replacements.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fake_by_real: dict[str, str] = {}

    def replace_identifiers(self, text: str) -> str:
        return _IDENTIFIER.sub(lambda match: self._replace_identifier(match[0]), text)

    def _replace_identifier(self, identifier: str) -> str:
        if identifier not in self.fake_by_real:
            fake_identifier = self._draw_fake(identifier)
            while identifier.isdigit() and int(fake_identifier) > _LONG_MAX >= int(identifier):
                fake_identifier = self._draw_fake(identifier)
            self.fake_by_real[identifier] = fake_identifier
        return self.fake_by_real[identifier]

    def _draw_fake(self, identifier: str) -> str:
        # The first two characters stay, so a decimal number keeps about the same size.
        digits = "123456789" if identifier.isdigit() else "123456789abcdef"
        return identifier[:2] + "".join(self.rng.choice(digits) for _ in identifier[2:])


class _RecordingCampaign(AttackCampaign):
    """A campaign that stores the request of an attack instead of sending it."""

    request: tuple[Any, ...] = ()

    async def ask(
        self, principal: str, method: str, path: str, body: Any = None, headers: Any = None, **options: Any
    ) -> Answer:
        self.request = (principal, method, path, body, headers)
        return Answer(200, {}, b"{}")


def _build_attackers(
    world: AttackWorld, fakes: _FakeIdentifiers, seed: int
) -> tuple[_RecordingCampaign, _RecordingCampaign]:
    """Return two campaigns with the same random choices.

    The hints of the first campaign name the victim's objects. Those of the second name objects that do not exist.
    """
    real_campaign, fake_campaign = (_RecordingCampaign(world, random.Random(seed), seed) for _ in range(2))
    for kind in HINT_KINDS:
        if kind in _TOKEN_KINDS or kind.startswith("moved"):
            continue  # The server rejects a changed token, and a location of a moved table was the attacker's own.
        real_campaign.hints[kind] = [hint for hint in world.hints[kind] if f"/{EVIL}/" not in hint]
        fake_campaign.hints[kind] = [fakes.replace_identifiers(hint) for hint in real_campaign.hints[kind]]
    return real_campaign, fake_campaign


async def _list_differences(world: AttackWorld, seeds: range) -> list[str]:
    """Send each request twice: with hints about the victim's objects, and with names of objects that do not exist.

    Return a text for each request whose two answers differ, so that an attacker learns that an object exists.
    """
    fakes, differences = _FakeIdentifiers(random.Random(1)), []
    campaign = AttackCampaign(world, random.Random(1), seed=1)
    campaign.give_hints(HINT_KINDS)
    for operation, method, template in routes.list_routes():
        if operation in routes.HARMLESS:
            continue
        for seed in seeds:
            real_campaign, fake_campaign = _build_attackers(world, fakes, seed)
            await routes.attack_route(real_campaign, operation, method, template)
            await routes.attack_route(fake_campaign, operation, method, template)
            principal, _, path, body, headers = real_campaign.request
            fake_principal, _, fake_path, fake_body, _ = fake_campaign.request
            if (path, body) == (fake_path, fake_body):
                continue  # The request contains no hint, so both requests are equal.
            # The real request would change the attacker's own namespace, and so the answer to the fake request.
            if operation in _OWN_STATE and f"/{EVIL}/" in path:
                continue
            if headers:
                headers = {name: text for name, text in headers.items() if name != "Idempotency-Key"}
            real_answer = await world.ask(principal, method, path, body, headers=headers or {})
            fake_answer = await world.ask(fake_principal, method, fake_path, fake_body, headers=headers or {})
            real_outcome = real_answer.status, _remove_identifiers(real_answer.raw)
            fake_outcome = fake_answer.status, _remove_identifiers(fake_answer.raw)
            # The requests created two objects of the attacker, which have different ids.
            is_created = real_answer.status < 300 and fake_answer.status < 300
            if real_outcome != fake_outcome and not is_created:
                context = f"{principal or 'stranger'} {operation} {path} {body}"
                differences.append(f"{context}\n  real: {real_outcome}\n  fake: {fake_outcome}")
    return differences


def _remove_identifiers(body: bytes) -> bytes:
    """Return an answer with `#` instead of identifiers and parts of identifiers."""
    return _IDENTIFIER_FORMS.sub(b"#", body)


async def test_foreign_handles_get_the_same_answers_as_nonexistent_handles(tmp_path: Path) -> None:
    async with open_world(tmp_path, random.Random(1)) as world:
        differences = await _list_differences(world, range(examples(8, 4)))
    assert not differences, "\n".join(differences[:6])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_answer_of_many_random_requests_reveals_whether_a_foreign_handle_exists(tmp_path: Path) -> None:
    async with open_world(tmp_path, random.Random(2)) as world:
        differences = await _list_differences(world, range(100, 160))
    assert not differences, "\n".join(differences[:6])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_answer_in_another_warehouse_reveals_whether_a_foreign_handle_exists(tmp_path: Path) -> None:
    async with open_world(tmp_path / "home", random.Random(3), attacker_warehouse="evilhouse") as world:
        differences = await _list_differences(world, range(200, 230))
    assert not differences, "\n".join(differences[:6])


def test_hostile_principals_include_users_with_and_without_rights() -> None:
    assert set(HOSTILE_PRINCIPALS) >= {"mallory", "riley", "nobody", ""}
