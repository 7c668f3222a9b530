"""Writes the reference pages that are lists of what the code has: `python -m tests.docs.reference` in the checkout.

docs/reference/cli.md comes from the commands, errors.md from the tree of errors, rest-operations.md from Iceberg's
specification and our router. A test compares them with what is committed. What only a person can say about an item
stands in the dictionaries below; an item without a line there fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from aiohttp import web

from metaserver import errors
from metaserver.api.app import add_routes
from metaserver.api.http.endpoints import served_endpoints
from metaserver.api.http.keys import SETTINGS
from metaserver.cli.main import cli
from metaserver.settings import Settings
from tests.api.standard import operations
from tests.docs.pages import REPO

REFERENCE = REPO / "docs" / "reference"
WIDTH = 100

ADVICE = {
    "RequestError": "The client's to mend; never retried unchanged. Base of those below.",
    "BadRequest": "Malformed, or impossible. The message names the field and what it may be.",
    "InvalidArgument": "As `BadRequest`; Java clients rethrow it as `IllegalArgumentException`, which they expect.",
    "Unauthenticated": "No login, or one that is not believed. Send `Authorization: Bearer <token>`.",
    "Forbidden": "Known, but not allowed. The message names the role that would do, and where.",
    "NotFound": "What was named is not there. Base of the next seven.",
    "NoSuchNamespace": "Create the namespace, parents first.",
    "NoSuchTable": "No table of this name. Was it dropped? See `GET /api/v1/dropped`.",
    "NoSuchView": "No view of this name.",
    "NoSuchFunction": "No function of this name.",
    "NoSuchWarehouse": "The client asks for a warehouse that is not this server's; leave its `warehouse` out.",
    "NoSuchPlanId": "The plan is not one of this table's, or its snapshot has expired since. Plan again.",
    "NoSuchPlanTask": "The plan task is not one of this table's, or its snapshot has expired since. Plan again.",
    "NotAcceptable": "The answer does not exist in the form that was asked for.",
    "AlreadyExists": "The name is taken, by a table or by a view: they share one space of names. Or, of a change, "
    "a file is in the table already: keep it.",
    "NamespaceNotEmpty": "Drop or move what lives in the namespace first. What was dropped does not count.",
    "RequestTimeout": "The body took longer than `body_timeout_s` and one second for each 64 KiB of it.",
    "TooLarge": "The body is larger than the operation takes: `body_limit_bytes`, `medium_…` or `small_…`.",
    "UnsupportedMediaType": "The body's `Content-Encoding` is not supported: send `gzip`, `deflate` or none.",
    "ClientGone": "Nobody gets it: the client left before its request had arrived. In metrics and logs only.",
    "Unprocessable": "Well formed, but contradicts itself or an earlier request with the same idempotency key.",
    "CommitConflict": "Somebody else was first; nothing was changed. Refresh and retry: engines do so by themselves.",
    "CommitUnknown": "The outcome could not be learned. Neither retry blindly nor clean up: load the table and look.",
    "RetryLater": "A bound was met, or a part is away; nothing was changed. Wait for `Retry-After` seconds and repeat.",
    "TooManyRequests": "A bound of this client's own was met: its principal's or its address's. Wait likewise.",
    "StorageError": "Object storage refused in a way that a retry does not mend: permissions, a missing bucket.",
    "ObjectMissing": "Nothing is stored at that location.",
    "ObjectExists": "A conditional write found something there.",
    "Corrupt": "Something stored does not read back as what it should be. The message names the file.",
    "ConfigError": "The operator's to mend: the server does not start, exit code 2.",
}

NOTES = {
    "getConfig": "Lists exactly the operations that are served. `warehouse` may be left out.",
    "getToken": "Client credentials and token exchange. Deprecated by the specification; engines still use it.",
    "listNamespaces": "Shows those that the caller has a part in.",
    "createNamespace": "Nested to any depth; the parent must exist.",
    "loadNamespaceMetadata": "Always names a `location`, which Trino's CTAS needs.",
    "namespaceExists": "",
    "dropNamespace": "Only an empty one; what was dropped from it does not count.",
    "updateProperties": "",
    "listTables": "Paged where asked; without `pageToken` and `pageSize`, everything.",
    "createTable": "Format versions 1, 2 and 3; `stage-create`.",
    "listFunctions": "Read only, as in the standard; nothing over HTTP creates functions yet.",
    "loadFunction": "As above.",
    "planTableScan": "Completed at once and without a plan id, as a rule; long answers as plan tasks.",
    "fetchPlanningResult": "For plans that had to read more than `plan_async_files` entries of manifests first.",
    "cancelPlanning": "As above.",
    "fetchScanTasks": "Plan tasks are signed and stateless: any replica answers them, as long as the snapshot lives.",
    "registerTable": "The file must lie below the warehouse or an allowed location. `overwrite` is known.",
    "loadTable": "`snapshots=all` and `refs`; ETag and 304; gzip.",
    "updateTable": "All update actions and requirements of the specification.",
    "dropTable": "Undroppable for `drop_retention_s`. `purgeRequested` deletes the files after it, not at once.",
    "tableExists": "",
    "unregisterTable": "Forgets the name and keeps every file. Not undroppable: register it again.",
    "loadCredentials": "The server's own keys, where `s3_client_access` is `static`; else an empty list.",
    "signRequest": "Where `s3_client_access` is `signing` or `static`; inside the one table only.",
    "renameTable": "Also to another namespace. Files stay where they are.",
    "reportMetrics": "Kept for `metrics_retention_s`; `GET /api/v1/tables/{namespace}/{table}/metrics` reads them.",
    "commitTransaction": "All tables or none.",
    "listViews": "Paged as tables are.",
    "createView": "Takes an `Idempotency-Key`, too, though the specification does not ask for it.",
    "loadView": "",
    "replaceView": "",
    "dropView": "Undroppable, as tables are.",
    "viewExists": "",
    "renameView": "",
    "registerView": "",
}


def cli_page() -> str:
    """Every command with its help, as a terminal of 100 columns shows it."""
    parts = [
        "# Commands\n\nWritten by `python -m tests.docs.reference` from the commands themselves. The flags of "
        "`seamark serve` are the\n[settings](settings.md), one each; other commands take those settings that tell them "
        "where the database is.\nWrong settings end any command with exit code 2 and one paragraph that names the "
        "setting and where it came from.\n\n"
    ]
    for path, command in _commands(cli, "seamark"):
        if isinstance(command, click.Group) and path != "seamark":
            continue
        names = command.context_settings["help_option_names"]
        context = click.Context(
            command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH, help_option_names=names
        )
        text = command.get_help(context)
        if path == "seamark serve":
            text = text[: text.index("Options:")] + "Options: --config FILE, and a flag for each setting."
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## {path}\n\n```text\n{lines}\n```\n\n")
    return "".join(parts).rstrip() + "\n"


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _commands(command.commands[name], f"{path} {name}")


def errors_page() -> str:
    """The tree of errors as a table, in its own order."""
    lines = [
        "# Errors",
        "",
        "Written by `python -m tests.docs.reference` from `metaserver/errors.py`. Every refusal, on every route, has",
        "the shape of the Iceberg REST specification:",
        "",
        "```json",
        '{"error": {"message": "Table does not exist: a.b", "type": "NoSuchTableException", "code": 404, "stack": []}}',
        "```",
        "",
        "The message says what was wrong and what to do. `X-Request-Id` in the answer leads to the log line. A request",
        "that is wrong is never answered with a 5xx. An unexpected 500 (`InternalServerError`) is a bug of ours; its",
        "message is the request id.",
        "",
        "| error | status | `type` on the wire | what to do |",
        "|---|--:|---|---|",
    ]
    for kind in _tree(errors.SeamarkError):
        status = "–" if kind is errors.ConfigError else str(kind.code)
        lines.append(f"| {kind.__name__} | {status} | `{kind.type}` | {ADVICE[kind.__name__]} |")
    lines += [
        "",
        "`POST /v1/oauth/tokens` answers in OAuth's own form (`error`, `error_description`), as clients expect there.",
        "What nonsense was tried on every route, and what came back, is in [bad inputs](bad-inputs.md).",
    ]
    return "\n".join(lines) + "\n"


def _tree(root: type[errors.SeamarkError]) -> Iterator[type[errors.SeamarkError]]:
    """Below `root`, depth first, in order of definition."""
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from _tree(kind)


def served_operations() -> set[str]:
    """`METHOD template` of those operations of the specification that the router has."""
    app = web.Application()
    app[SETTINGS] = Settings()
    add_routes(app)
    return set(served_endpoints(app)) & {one.endpoint for one in operations()}


def operations_page() -> str:
    """Every operation of Iceberg's specification, and whether it is served."""
    known, served = operations(), served_operations()
    lines = [
        "# Iceberg REST operations",
        "",
        "Written by `python -m tests.docs.reference` from Iceberg's specification (the copy in `tests/api/spec/`) and",
        f"the router. Of its {len(known)} operations {len(served)} are served. In a URL, `{{prefix}}` is left out,",
        "unless the server has the setting [`prefix`](settings.md#prefix). What Seamark has besides the standard is in",
        "[openapi.json](openapi.json).",
        "",
        "| operation | method and path | served | key | notes |",
        "|---|---|---|---|---|",
    ]
    for one in known:
        yes = "yes" if one.endpoint in served else "not yet"
        key = "yes" if one.keyed else ""
        lines.append(f"| {one.id} | `{one.endpoint}` | {yes} | {key} | {NOTES[one.id]} |")
    lines += [
        "",
        "*key*: takes an `Idempotency-Key` (a UUID of version 7). A repeat with the same key gets the first answer for",
        "[`idempotency_ttl_s`](settings.md#idempotency_ttl_s); the same key with another request is a 422. Planning",
        "changes nothing: its operations take a key, and answer a repeat anew.",
        "",
        "Namespaces of several levels stand in paths with `%1F` between the levels.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {"cli.md": cli_page, "errors.md": errors_page, "rest-operations.md": operations_page}


def write(folder: Path) -> None:
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    write(REFERENCE)
