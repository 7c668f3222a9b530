"""Sending of events to the URLs of `webhook_urls`, by HTTP POST.

The format is CloudEvents 1.0, structured content mode, JSON (cloudevents/spec, http-protocol-binding 3.2). If
`webhook_secret` is set, each request has a signature in the header `Seamark-Signature: t=<unix seconds>,v1=<hex>`, the
HMAC-SHA256 over `<t>.<body>`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import aiohttp

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.settings.settings import redact_url
from seamark.metaserver.timeline.delivery import SEND_TIMEOUT_S, NotDelivered
from seamark.metaserver.timeline.events import CONTENT_TYPE, Event

_URL_DIGEST_DIGITS = 32


def compute_signature(secret: str, at_s: int, body: bytes) -> str:
    """Return the value of the header Seamark-Signature: the time `t` in seconds, and an HMAC `v1` of the time and body.

    A receiver computes v1 again, and refuses an old `t`, because the request may be a replay.
    """
    digest = hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


class Webhook:
    """An `EventTarget` for one URL."""

    kind = "webhook"
    events_max = 1

    def __init__(self, url: str, secret: str, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._secret = secret
        self._clock = clock
        self._session = session
        self.place = redact_url(url)
        # The URL may contain a secret, so it must not be in the database.
        self.name = "webhook:" + hashlib.sha256(url.encode()).hexdigest()[:_URL_DIGEST_DIGITS]

    async def send(self, events: Sequence[Event]) -> None:
        """Post each event.

        Raises:
            NotDelivered: The receiver does not answer 2xx.
        """
        for event in events:
            headers = {"Content-Type": CONTENT_TYPE, "User-Agent": "seamark"}
            if self._secret:
                at_s = self._clock.now_ms() // 1000
                headers["Seamark-Signature"] = compute_signature(self._secret, at_s, event.body)
            await self._post(event.body, headers)

    async def _post(self, body: bytes, headers: dict[str, str]) -> None:
        """Post an event. Raise NotDelivered unless the receiver answers 2xx."""
        try:
            # Do not follow redirects, which would send a signed body to a host that is not configured.
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                if not 200 <= answer.status < 300:
                    raise NotDelivered(f"status {answer.status}")
        except TimeoutError:
            raise NotDelivered(f"no answer within {SEND_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotDelivered(type(error).__name__) from None

    async def close(self) -> None:
        """Do nothing, because the session belongs to all webhooks."""
