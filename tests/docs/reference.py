"""Write the reference pages that list parts of the code: `python -m tests.docs.reference` in the checkout.

docs/reference/cli.md comes from the commands, errors.md from the tree of errors, rest-operations.md from Iceberg's
specification and the router, and the list in docs/how-to/table-services.md from the declarations of services. A test
compares them with the committed pages. The dictionaries below have the texts that a person must write; the test fails
if an item has no text there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from aiohttp import web

from seamark.commands.main import cli
from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime import errors
from seamark.formats.services.services import SERVICES
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.http.dispatch import list_served_endpoints
from tests.api.rest.standard import DRAFTS, read_operations
from tests.docs.commands import list_subcommands
from tests.docs.pages import REPO

REFERENCE = REPO / "docs" / "reference"
WIDTH = 100

ADVICE = {
    "RequestError": "The client must change the request; a retry of the same request fails. Base of the errors below.",
    "BadRequest": "Malformed or impossible. The message names the field and its valid values.",
    "InvalidArgument": "As `BadRequest`; Java clients expect it and rethrow it as `IllegalArgumentException`.",
    "Unauthenticated": "No login, or an invalid login. Send `Authorization: Bearer <token>`.",
    "Forbidden": "The principal lacks a right. The message names the role and namespace that it needs.",
    "NotFound": "The named object does not exist. Base of the next nine.",
    "NoSuchNamespace": "Create the namespace, parents first.",
    "NoSuchTable": "No table of this name. Was it dropped? See `GET /api/v1/dropped`.",
    "NoSuchView": "No view of this name.",
    "NoSuchFunction": "No function of this name.",
    "NoSuchWarehouse": "The client requests a warehouse of another server; remove its `warehouse` setting.",
    "NoSuchPlanId": "The plan is of another table, or its snapshot has expired. Plan again.",
    "NoSuchPlanTask": "The plan task is of another table, or its snapshot has expired. Plan again.",
    "StreamRemoved": "The table was dropped and its rows in the log are removed. Load the table again.",
    "OffsetOutOfRange": "The log does not have the row. Begin at a snapshot, or at an offset that the message names.",
    "NotAcceptable": "The answer does not exist in the requested format.",
    "ReadOnlyServer": "This server only reads. Send the request to a server that the message names.",
    "AlreadyExists": "The name is taken by a table or a view: they share a namespace. For a change: a file "
    "is already in the table; keep it.",
    "NamespaceNotEmpty": "Drop or move the tables and views of the namespace first. Dropped entries do not count.",
    "ProducerFenced": "Another writer began a session of the same producer. Stop this writer, or begin a new session.",
    "SequenceGap": "An earlier append of the producer is missing. Send the append that the message names first.",
    "RequestTimeout": "The body took longer than `body_timeout_s` plus a second for each 64 KiB.",
    "TooLarge": "The body exceeds the limit of the operation: `body_limit_bytes`, `medium_…` or `small_…`.",
    "UnsupportedMediaType": "The `Content-Encoding` of the body is not supported: send `gzip`, `deflate` or none.",
    "ClientGone": "The client disconnected before its request was complete. Only in metrics and logs.",
    "Unprocessable": "Well formed, but contradicts itself or an earlier request with the same idempotency key.",
    "CommitConflict": "Another commit was first; nothing was changed. Refresh and retry, as engines do.",
    "CommitUnknown": "The outcome is unknown. Do not retry blindly and do not delete files: load the table and check.",
    "RetryLater": "A limit is reached or a part is unavailable; nothing changed. Retry after `Retry-After` seconds.",
    "TooManyRequests": "A limit of the client's principal or address is reached. Retry after `Retry-After` seconds.",
    "StorageFull": "A disk or the database is full; nothing changed. Only the operator can make room.",
    "LogFull": "The disk of the log is full, and nothing was stored. Make room; the log then accepts rows again.",
    "LogUnavailable": "The log is closed, or its disk failed. Retry; restart the server if the disk failed.",
    "CacheDamaged": "A damaged file of the local cache is removed; nothing changed. Retry after `Retry-After` seconds.",
    "StorageError": "Object storage refused permanently: permissions, a missing bucket.",
    "ObjectMissing": "No object exists at the location.",
    "ObjectExists": "A conditional write found an existing object.",
    "Corrupt": "A stored file is damaged. The message names it.",
    "ConfigError": "The operator must change the settings: the server does not start, exit code 2.",
}

NOTES = {
    "getConfig": "Lists exactly the served operations. `warehouse` is optional: the prefix, or the warehouse's URI.",
    "getToken": "Client credentials and token exchange. Deprecated by the specification; engines still use it.",
    "listNamespaces": "Lists namespaces on which the caller has a role.",
    "createNamespace": "Nested to any depth; the parent must exist.",
    "loadNamespaceMetadata": "Always returns a `location`, which Trino's CTAS needs.",
    "namespaceExists": "",
    "dropNamespace": "The namespace must be empty; dropped entries do not count.",
    "updateProperties": "",
    "listTables": "Paged on request; without `pageToken` the list is complete.",
    "createTable": "Format versions 1, 2 and 3; `stage-create`.",
    "listFunctions": "Read-only, as in the standard; `PUT` of Seamark's API creates functions.",
    "loadFunction": "As above.",
    "planTableScan": "Usually completed immediately, without a plan id; long answers have plan tasks.",
    "fetchPlanningResult": "For plans that must first read more than `plan_async_files` manifest entries.",
    "cancelPlanning": "As above.",
    "fetchScanTasks": "Plan tasks are signed and stateless: any replica answers them while the snapshot exists.",
    "registerTable": "The file must be in the warehouse or an allowed location. `overwrite` is supported, except with "
    "the metadata of a table that is live under another name.",
    "loadTable": "`snapshots=all` and `refs`; ETag and 304; gzip.",
    "updateTable": "All update actions and requirements of the specification.",
    "dropTable": "Can be restored for `drop_retention_s`. `purgeRequested` deletes the files after that time.",
    "tableExists": "",
    "unregisterTable": "Removes the name and keeps all files. Undrop is not possible: register the table again.",
    "loadCredentials": "The server's keys if `s3_client_access` is `static`; else an empty list.",
    "signRequest": "If `s3_client_access` is `signing` or `static`; only inside the table.",
    "renameTable": "Also to another namespace. Files are not moved.",
    "reportMetrics": "Kept for `metrics_retention_s`; `GET /api/v1/tables/{namespace}/{table}/metrics` reads them.",
    "commitTransaction": "All tables or none.",
    "listViews": "Paged like tables.",
    "createView": "Also takes an `Idempotency-Key`, beyond the specification.",
    "loadView": "",
    "replaceView": "",
    "dropView": "Can be restored like tables.",
    "viewExists": "",
    "renameView": "",
    "registerView": "",
}


def format_cli_page() -> str:
    """Return the text of the page about commands: each command with its help, for a terminal with 100 columns."""
    sections = [
        "# Commands\n\n`python -m tests.docs.reference` generates this page. The flags of `seamark serve` are the\n"
        "[settings](settings.md); other commands take the settings that locate the database. With invalid settings a\n"
        "command exits with code 2 and names the setting and its source.\n\n"
    ]
    for path, command in _list_commands(cli, "seamark"):
        if isinstance(command, click.Group) and path != "seamark":
            continue
        help_option_names = cli.context_settings["help_option_names"]
        context = click.Context(
            command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH, help_option_names=help_option_names
        )
        # Forget the help option, because click keeps the one of the first context, which may have other names. An
        # earlier test may have created that context.
        command._help_option = None
        text = command.get_help(context)
        if path == "seamark serve":
            text = text[: text.index("Options:")] + "Options: --config FILE, and a flag for each setting."
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        sections.append(f"## {path}\n\n```text\n{lines}\n```\n\n")
    return "".join(sections).rstrip() + "\n"


def _list_commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, subcommand in list_subcommands(command).items():
        yield from _list_commands(subcommand, f"{path} {name}")


def format_errors_page() -> str:
    """Return the text of the page about errors. Its table has the errors in the order of their tree."""
    lines = [
        "# Errors",
        "",
        "`python -m tests.docs.reference` generates this page from `formats/runtime/errors.py`.",
        "Every error on every route has the format of the Iceberg REST specification:",
        "",
        "```json",
        '{"error": {"message": "Table does not exist: a.b", "type": "NoSuchTableException", "code": 404, "stack": []}}',
        "```",
        "",
        "The message states the problem and the remedy. `X-Request-Id` in the answer identifies the log line.",
        "An invalid request never receives a 5xx. An unexpected 500 (`InternalServerError`) is a bug in Seamark;",
        "its message is the request id.",
        "",
        "| error | status | `type` on the wire | what to do |",
        "|---|--:|---|---|",
    ]
    for error_class in _list_errors(errors.SeamarkError):
        status = "–" if error_class is errors.ConfigError else str(error_class.code)
        lines.append(f"| {error_class.__name__} | {status} | `{error_class.type}` | {ADVICE[error_class.__name__]} |")
    lines += [
        "",
        "`POST /v1/oauth/tokens` answers in OAuth's format (`error`, `error_description`), as clients expect.",
        "[Bad inputs](bad-inputs.md) lists invalid requests for every route with their answers.",
    ]
    return "\n".join(lines) + "\n"


def _list_errors(root: type[errors.SeamarkError]) -> Iterator[type[errors.SeamarkError]]:
    """Yield the errors below `root`, depth first, in order of definition."""
    for error_class in root.__subclasses__():
        if error_class.__module__ == errors.__name__:
            yield error_class
            yield from _list_errors(error_class)


DRAFT_NOTES = {
    "getEvents": "the [events of the catalog](../how-to/webhooks.md#the-events-endpoint-of-the-iceberg-specification).",
}


def list_served_operations() -> set[str]:
    """Return `METHOD template` of each operation of the specification that the router serves."""
    app = web.Application()
    add_routes(app, EXTENSIONS)
    return set(list_served_endpoints(app)) & {operation.endpoint for operation in read_operations()}


def format_operations_page() -> str:
    """Return the text of the page with each operation of Iceberg's specification, and whether it is served."""
    known_operations, served_operations = read_operations(), list_served_operations()
    lines = [
        "# Iceberg REST operations",
        "",
        "`python -m tests.docs.reference` generates this page from Iceberg's specification (`tests/api/rest/spec/`)",
        f"and the router. The server implements {len(served_operations)} of its {len(known_operations)} operations.",
        "Omit `{prefix}` in a URL, unless the server has the setting [`prefix`](settings.md#prefix).",
        "[openapi.json](openapi.json) describes Seamark's own API.",
        "",
        "| operation | method and path | served | key | notes |",
        "|---|---|---|---|---|",
    ]
    for operation in known_operations:
        is_served = "yes" if operation.endpoint in served_operations else "not yet"
        key = "yes" if operation.has_idempotency_key else ""
        lines.append(f"| {operation.id} | `{operation.endpoint}` | {is_served} | {key} | {NOTES[operation.id]} |")
    lines += [
        "",
        "*key*: accepts an `Idempotency-Key` (a UUID of version 7).",
        "If a client sends a request again with the same key, it receives the first response",
        "for [`idempotency_ttl_s`](settings.md#idempotency_ttl_s).",
        "The server answers 422 if the key was used for a different request.",
        "It compares bodies of up to 256 KiB as JSON, so the order of the keys does not matter;",
        "larger bodies must have the same bytes.",
        "Planning operations have no effects. They accept a key, but plan again.",
        "",
        "In paths, `%1F` separates the levels of a namespace.",
        "",
        "## Drafts",
        "",
        *(f"`{operation.endpoint}` ({operation.id}): {DRAFT_NOTES[operation.id]}" for operation in DRAFTS),
    ]
    return "\n".join(lines) + "\n"


SERVICES_PAGE = REPO / "docs" / "how-to" / "table-services.md"
BEGIN, END = "<!-- services: begin (python -m tests.docs.reference) -->", "<!-- services: end -->"


def format_services_table() -> str:
    """Return the declared table services as a table."""
    lines = ["| service | command | what it does | when |", "|---|---|---|---|"]
    for service in SERVICES.values():
        name = f"[`{service.name}`]({service.page})" if service.page else f"`{service.name}`"
        lines.append(f"| {name} | `seamark run {service.command}` | {service.summary} | {service.condition} |")
    return "\n".join(lines) + "\n"


def format_services_page() -> str:
    """Return the page on table services with the generated table."""
    text_before, table_and_text_after = SERVICES_PAGE.read_text().split(BEGIN)
    _, text_after = table_and_text_after.split(END)
    return f"{text_before}{BEGIN}\n{format_services_table()}{END}{text_after}"


PAGES = {"cli.md": format_cli_page, "errors.md": format_errors_page, "rest-operations.md": format_operations_page}


def write_pages(folder: Path) -> None:
    for name, format_page in PAGES.items():
        (folder / name).write_text(format_page())
    SERVICES_PAGE.write_text(format_services_page())


if __name__ == "__main__":
    write_pages(REFERENCE)
