"""Find the running server for commands, and report its refusals and connection errors.

Exit codes: 1 if the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from seamark.commands.options import Misconfigured, address_options, json_option, load_settings, settings_flags
from seamark.commands.terminal import escape_for_terminal
from seamark.connector.client.catalog import list_dropped_entries, list_views
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, InvalidRequest, LoginRequired, NoSuchResource, Unreachable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_table
from seamark.connector.client.warehouses import make_warehouse_url
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.runtime.decoding import convert_json

_NAMES_MAX = 10_000
"""The maximum number of existing names that are compared with a missing name, to suggest a similar one."""

_REFUSED = re.compile(r"No answer from [^ ]+: Connection refused")

Client = TypeVar("Client", bound=SeamarkClient)


def find_server_url(config: Path | None, flags: dict[str, Any]) -> str:
    """Return the URL of the running server whose home folder is in the settings.

    Raises:
        Misconfigured: No server is running.
    """
    path = load_settings(flags, config).home / "server.json"
    try:
        return str(convert_json(path.read_bytes(), dict[str, Any])["url"])
    except (OSError, KeyError, msgspec.DecodeError):
        home = escape_for_terminal(shlex.quote(str(path.parent)))
        raise Misconfigured(
            f"No server runs in {home}; start a server with seamark serve --home {home}, set --url, or set --home to "
            "the home of the server"
        ) from None


def to_command_error(error: ClientError, *, has_token: bool) -> click.ClickException:
    """Convert an error of the client to an error of the command, with advice if possible."""
    hint = ""
    if isinstance(error, LoginRequired) and not has_token:
        hint = "; set --token or the variable SEAMARK_TOKEN"
    elif isinstance(error, Unreachable) and _REFUSED.fullmatch(error.message):
        hint = "; start the server, or set --url to the address that it printed"
    return click.ClickException(escape_for_terminal(f"{error.message}{hint}"))


@contextmanager
def open_client(make_client: Callable[[], Client]) -> Iterator[Client]:
    """Yield the client, and close it when the context ends.

    Errors within the context become error messages of the command.
    """
    try:
        client = make_client()
    except ValueError as error:
        raise click.UsageError(escape_for_terminal(str(error))) from None
    try:
        yield client
    except ValueError as error:
        raise click.UsageError(escape_for_terminal(str(error))) from None
    except InvalidRequest as error:
        raise Misconfigured(escape_for_terminal(error.message)) from None
    except ClientError as error:
        raise to_command_error(error, has_token=client.has_token) from None
    finally:
        client.close()


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add options for the server, the login and the warehouse to a command, and pass it a client as `client`."""

    @settings_flags(("home",))
    @click.option(
        "--warehouse", metavar="NAME", help="Further warehouse of the server. Default: the server's own warehouse."
    )
    @address_options
    @wraps(command)
    def run(
        url: str | None, token: str | None, warehouse: str | None, config: Path | None, home: Any, **options: Any
    ) -> None:
        def make() -> IndexClient:
            server_url = url or find_server_url(config, {"home": home})
            return IndexClient(make_warehouse_url(server_url, warehouse), token=token)

        with open_client(make) as client, add_suggestions(client, options.get("table")):
            command(client=client, **options)

    return run


def server_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `server_options` and `--json`, which the command receives as `as_json`."""
    return json_option(server_options(command))


@contextmanager
def add_suggestions(client: SeamarkClient, table: Any = None) -> Iterator[None]:
    """Add advice to a NoSuchResource error that the context raises.

    The advice is the command that restores or creates the missing entry, or a similar name. If a view has the name of
    the missing table, or a table has the name of the missing view, the advice is the command that shows it. The similar
    name resembles `table` or, if `table` is None, the name in the error.
    """
    try:
        yield
    except NoSuchResource as error:
        kind, _, missing = error.message.partition(" does not exist: ")
        if _is_other_kind(client, kind, missing):
            actual_kind = "view" if kind == "Table" else "table"
            message = f"{missing} is a {actual_kind}: seamark {actual_kind} show {shlex.quote(missing)}"
            raise NoSuchResource(message, status=error.status) from None
        if kind in ("Table", "View") and _was_dropped(client, missing):
            advice = f"seamark undrop {shlex.quote(missing)} restores what was dropped"
            raise NoSuchResource(f"{error.message}; {advice}", status=error.status) from None
        similar = find_similar_name(client, missing if table is None else table)
        if similar is None and kind in ("Namespace", "View"):
            similar = _find_similar_name(missing, _list_names(client, view=kind == "View"))
        if similar is None and kind == "Namespace":
            advice = f"seamark namespace create {shlex.quote(missing)} creates it"
            raise NoSuchResource(f"{error.message}; {advice}", status=error.status) from None
        if similar is None:
            raise
        raise NoSuchResource(f"{error.message.rstrip('.')}. Did you mean {similar}?", status=error.status) from None


def _is_other_kind(client: SeamarkClient, kind: str, name: str) -> bool:
    """Return whether a missing table is a view, or a missing view is a table. Errors are ignored."""
    if kind not in ("Table", "View"):
        return False
    try:
        levels = split_table(name)
        names = list_views(client, levels[:-1]) if kind == "Table" else client.tables(levels[:-1])
        return levels in islice(names, _NAMES_MAX)
    except (ClientError, ValueError):
        return False


def _was_dropped(client: SeamarkClient, name: str) -> bool:
    """Return whether a dropped table or view with this name can be restored. Errors are ignored."""
    try:
        *namespace, dropped_name = split_table(name)
        entries = islice(list_dropped_entries(client, tuple(namespace)), _NAMES_MAX)
        return any(entry["name"] == dropped_name for entry in entries)
    except (ClientError, ValueError):
        return False


def _list_names(client: SeamarkClient, *, view: bool) -> Iterator[str]:
    for levels in client.namespaces():
        yield from map(join_name, list_views(client, levels) if view else [levels])


def _find_similar_name(name: str, names: Iterator[str]) -> str | None:
    """Return the name in `names` that is most similar to `name`, or None. Errors are ignored."""
    try:
        return next(iter(find_near_names(name, islice(names, _NAMES_MAX), maximum=1)), None)
    except (ClientError, ValueError):
        return None


def find_similar_name(client: SeamarkClient, table: Any) -> str | None:
    """Return the existing table whose name is most similar to the name of a missing table, or None.

    Errors are ignored.
    """
    if not isinstance(table, str):
        return None
    try:
        missing = split_table(table)
        namespace, name = missing[:-1], missing[-1]
        namespaces = list(islice(client.namespaces(), _NAMES_MAX))
        if namespace not in namespaces:
            near_names = find_near_names(join_name(namespace), map(join_name, namespaces), maximum=1)
            namespace = next((levels for levels in namespaces if [join_name(levels)] == near_names), ())
        if not namespace:
            return None
        tables = {levels[-1]: levels for levels in islice(client.tables(namespace), _NAMES_MAX)}
        near_names = find_near_names(name, tables, maximum=1)
        return None if not near_names or tables[near_names[0]] == missing else join_name(tables[near_names[0]])
    except (ClientError, ValueError):
        return None
