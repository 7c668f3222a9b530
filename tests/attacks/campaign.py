"""A campaign is a seeded sequence of attacks. Each answer is searched for the victim's secrets.

Attacks use the server only through `Campaign.ask`, which records the request and searches the answer. It also records
answers with status 500, except for a table with damaged files, where such an answer is expected.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.api.client import Answer
from tests.attacks.oracle import merge_texts
from tests.attacks.world import HINT_KINDS, AttackWorld


@dataclass
class AttackCampaign:
    """One sequence of requests by attackers, with the leaks and server faults that it found."""

    world: AttackWorld
    rng: random.Random
    seed: int
    steps: list[str] = field(default_factory=list)
    """The requests so far, with which the campaign can be repeated."""
    findings: list[str] = field(default_factory=list)
    drawn_routes: set[str] = field(default_factory=set)
    """The ids of the operations that the campaign has drawn."""
    hints: dict[str, list[str]] = field(default_factory=dict)
    """The hints that the attacker has received, by kind."""
    name_count: int = 0

    def give_hints(self, kinds: tuple[str, ...] | None = None) -> None:
        """Give the attacker hints, which are names, ids and locations of the victim's objects.

        Args:
            kinds: The kinds of hints, as in `HINT_KINDS`. If it is None, the kinds are drawn.
        """
        if kinds is None:
            # An attacker in four receives no hint, and another all hints.
            share = self.rng.choice((0.0, 0.3, 0.7, 1.0))
            kinds = tuple(kind for kind in HINT_KINDS if self.rng.random() < share)
        # The attacker always knows objects that it created, even after they were moved to another namespace.
        for kind in (*kinds, "moved location", "moved uuid"):
            self.hints[kind] = [*self.world.hints[kind]]
            # This body contains a secret value, which the server's answers must not repeat.
            if kind != "idempotent body":
                self.world.secrets.tell(*self.hints[kind])
        self.steps.append(f"hints: {', '.join(kinds) or 'none'}")

    def choose_hint(self, kind: str, otherwise: str = "") -> str:
        """Return a random hint of this kind.

        If the attacker has none, return `otherwise`, or a random text that exists nowhere.
        """
        known_hint = self.hints.get(kind)
        return self.rng.choice(known_hint) if known_hint else otherwise or f"guess{self.rng.getrandbits(40):010x}"

    def create_name(self, prefix: str) -> str:
        self.name_count += 1
        return f"{prefix}{self.name_count}"

    async def ask(
        self,
        principal: str,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Answer:
        answer = await self.world.ask(principal, method, path, body, headers=headers or {}, **options)
        shown_body = body if isinstance(body, bytes) else json.dumps(body)
        step = (
            f"{principal or 'stranger'} {method} {path} {shown_body[:2000]!r} {dict(headers or {})} -> {answer.status}"
        )
        self.steps.append(step)
        leaks = self.world.secrets.find_leaks(answer.raw, dict(answer.headers))
        if leaks:
            self.findings.append(f"leak of {merge_texts(leaks)}\n  by {step}\n  in {answer.raw[:1500]!r}")
        if answer.status >= 500 and answer.status != 503 and b"CorruptMetadataException" not in answer.raw:
            self.findings.append(f"a fault of the server\n  by {step}\n  in {answer.raw[:1500]!r}")
        return answer

    def report(self, label: str) -> None:
        self.findings.append(f"{label}\n  by {self.steps[-1]}")

    def format_verdict(self) -> str:
        """Return all that is needed to repeat the campaign, or an empty text if it found nothing."""
        if not self.findings:
            return ""
        # The message contains the beginning of long texts, and the last steps.
        steps = "\n".join(f"  {number:4} {step[:600]}" for number, step in enumerate(self.steps))
        return f"seed {self.seed}\n" + "\n".join(self.findings[:8]) + f"\nall steps:\n{steps[-30_000:]}"
