"""How commands find the running server, and tell what it or the way to it refuses.

Exit codes: 1 when the server refuses or cannot be reached, 2 when the command makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from connector.client.client import SeamarkClient
from connector.client.errors import BadRequest, ClientError
from metaserver.cli.options import Misconfigured, load_settings
from metaserver.cli.terminal import printable

Client = TypeVar("Client", bound=SeamarkClient)


def served_at(config: Path | None, flags: dict[str, Any]) -> str:
    """The URL of the server that has this home. Misconfigured where none runs."""
    path = load_settings(flags, config).home / "server.json"
    try:
        return str(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["url"])
    except (OSError, KeyError, msgspec.DecodeError):
        raise Misconfigured(f"No server runs from {path.parent}; give its --url, or the --home that it has") from None


@contextmanager
def connected(make: Callable[[], Client]) -> Iterator[Client]:
    """The client, closed with the block. What fails inside is told as commands tell it."""
    try:
        client = make()
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None
    try:
        yield client
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None
    except BadRequest as error:
        raise Misconfigured(printable(error.message)) from None
    except ClientError as error:
        raise click.ClickException(printable(error.message)) from None
    finally:
        client.close()
