"""The headers with which a client reads rows of stream tables before a commit adds them.

`X-Seamark-Fresh: true` requests a fresh snapshot, which includes these rows. loadTable returns it as the current
snapshot, and the routes that read a table read it. The header is for engines that plan by themselves, and for Seamark's
own readers.

`X-Seamark-After` contains tokens of rows that the client has written. The answer includes at least these rows, or the
server refuses the request. A token is `UUID/SHARD:END,SHARD:END…`, where END is the offset after the last row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from seamark.formats.protocol.wire import AFTER_HEADER, FRESH_HEADER
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import Parameter

FRESH = Parameter(
    FRESH_HEADER,
    "header",
    "Whether the request reads rows of stream tables that wait for a flush.",
    {"type": "string", "enum": ["true", "false"]},
)
AFTER = Parameter(
    AFTER_HEADER,
    "header",
    "Tokens of appended rows, separated by spaces. The answer includes at least these rows. If this server does not "
    "have the rows yet, the answer is 503 with Retry-After. Tokens of other tables are ignored.",
    {"type": "string"},
)
_TOKENS_CHARACTERS_MAX = 8192
_TOKEN = re.compile(r"([0-9A-Fa-f-]{36})/((?:[0-9]{1,9}:[0-9]{1,18})(?:,[0-9]{1,9}:[0-9]{1,18})*)", re.ASCII)


def reads_fresh(headers: Mapping[str, str]) -> bool:
    """Return whether the request reads fresh snapshots, which contain rows of streams that are not in files yet.

    Raises:
        BadRequest: The header has a value other than true and false.
    """
    value = headers.get(FRESH_HEADER, "false").lower()
    if value not in ("true", "false"):
        raise BadRequest(f"The header {FRESH_HEADER} is {value[:40]!r}; it must be true or false")
    return value == "true"


def encode_rows_token(uuid: str, ends: Mapping[int, int]) -> str:
    """Return a token for appended rows. A reader that sends it gets an answer that includes at least these rows.

    Args:
        uuid: The UUID of the table.
        ends: The offset after the last appended row of each shard, by the number of the shard.
    """
    return f"{uuid}/{','.join(f'{shard}:{end}' for shard, end in sorted(ends.items()))}"


def read_required_offsets(headers: Mapping[str, str], uuid: str) -> dict[int, int]:
    """Return the offsets that an answer must reach for a table, by shard. The result is empty without tokens.

    A token contains the UUID of its table, and the offset after the appended rows of each shard. A request may also
    have tokens of other tables, which are skipped.

    Raises:
        BadRequest: The header is too long, or contains text that is not a token.
    """
    text = headers.get(AFTER_HEADER, "")
    if not text:
        return {}
    if len(text) > _TOKENS_CHARACTERS_MAX:
        raise BadRequest(
            f"The header {AFTER_HEADER} has {len(text):,} characters; the limit is {_TOKENS_CHARACTERS_MAX:,}"
        )
    offsets: dict[int, int] = {}
    for token in text.split():
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise BadRequest(
                f"The header {AFTER_HEADER} has {token[:80]!r}, which is not a token; send the tokens "
                "from the answers to your appends, separated by spaces"
            )
        if match[1].lower() != uuid.lower():
            continue
        for pair in match[2].split(","):
            shard, end = map(int, pair.split(":"))
            offsets[shard] = max(end, offsets.get(shard, 0))
    return offsets
