"""`seamark rebuild`: registers the tables, views and functions whose files are in the warehouse."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from seamark.commands.access import find_account_name
from seamark.commands.options import json_option, settings_flags
from seamark.commands.recovery.running import STORAGE_SETTINGS, run_offline, warehouse_name_option
from seamark.commands.terminal import print_json, print_rows, say, show_count
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.recovery.found_files import (
    FileReader,
    Finding,
    FoundFile,
    list_metadata_files_by_folder,
)
from seamark.metaserver.catalog.recovery.naming import FoundName, parse_found_name
from seamark.metaserver.catalog.recovery.opening import open_context
from seamark.metaserver.catalog.recovery.rebuild import (
    Rebuild,
    RebuiltDatabase,
    describe_registration,
    find_taken_uuids,
    make_result,
)
from seamark.metaserver.catalog.recovery.selection import select_candidates
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.index.files.headers import IndexReader
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.registry_rebuild import RegistryRebuild
from seamark.metaserver.objects.port import ObjectInfo
from seamark.metaserver.runtime.home import find_sqlite_file
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import AssignCatalogToWarehouse

_SHOWN_MAX = 50
"""The maximum number of findings that are printed as text. JSON contains all of them."""


@click.command("rebuild")
@click.option("--dry-run", is_flag=True, help="Show what would be registered, but change nothing.")
@click.option(
    "--names",
    "names_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON file that maps the location of a metadata file to the name of its table, such as shop.orders, or to "
    "null to leave the file out.",
)
@warehouse_name_option
@json_option
@settings_flags(STORAGE_SETTINGS)
def rebuild(dry_run: bool, names_file: Path | None, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Register the tables, views and functions that are in the warehouse, but not in the database.

    Use this command if the database is lost, or after you have restored an old backup. Stop all servers first. The
    names come from the folders of the tables. A dropped table whose files still exist looks like a table, so check the
    list. Grants, tokens, the timeline and properties of namespaces are not in the warehouse.

    Uncertain cases are listed but not registered, for example if either of two files may be the newest of a table.
    Decide these cases with --names.
    """
    choices = _read_choices(names_file)
    is_further = flags.get("warehouse_name") is not None

    async def work(settings: Settings) -> RebuiltDatabase:
        clock = SystemClock()
        async with AsyncExitStack() as stack:
            url, file = settings.make_database_url(), find_sqlite_file(settings)
            if dry_run and file is not None and not file.exists():
                # A dry run does not create the database.
                url = f"sqlite://{stack.enter_context(tempfile.TemporaryDirectory())}/empty.db"
            store = await stack.enter_async_context(open_store(url, clock=clock))
            if is_further:
                # The name of a further warehouse's home folder is its id. Servers open only a database with this id.
                await store.transact([AssignCatalogToWarehouse(settings.home.name)])
            context = await stack.enter_async_context(open_context(settings, store, clock))
            has_stream_log = bool(settings.stream_log) or (settings.home / "streams").exists()
            return await _rebuild(context, choices, dry_run=dry_run, has_stream_log=has_stream_log)

    rebuilt = run_offline(work, flags, config, is_locked=True, creates=not dry_run)
    if as_json:
        print_json(msgspec.to_builtins(rebuilt, str_keys=True))
        return
    _show_rebuilt(rebuilt, dry_run=dry_run)


async def _rebuild(
    context: CatalogContext, choices: dict[str, FoundName | None], *, dry_run: bool, has_stream_log: bool
) -> RebuiltDatabase:
    """Register the tables, views and functions in the warehouse that the database lacks.

    A dry run only lists them. Locations of files that are not registered stay reserved, so that no new table uses them.

    Args:
        context: The catalog.
        choices: The operator's choices of names, by the location of a metadata file. None excludes the file.
        dry_run: Whether nothing is registered.
        has_stream_log: Whether the log with the rows of stream tables still exists.
    """
    caller = Caller(principal_name=f"cli:{find_account_name()}", request_id="rebuild")
    folders = await list_metadata_files_by_folder(context.objects, context.warehouse)
    reader = FileReader(context.documents)
    results = [result async for result in reader.read_folders(folders)]
    newest_files = [file for result in results for file in result.newest]
    uncertain = [file for result in results for file in result.uncertain]
    known_uuids = await find_taken_uuids(context, {file.uuid for file in (*newest_files, *uncertain)})
    findings = [
        finding
        for result in results
        if not known_uuids.issuperset(file.uuid for file in (*result.newest, *result.uncertain))
        for finding in result.findings
        if finding.location not in choices
    ]
    known_count = sum(file.uuid in known_uuids for file in newest_files)
    chosen_files = await _read_chosen(reader, folders, choices, {file.location for file in newest_files}, findings)
    files = [file for file in (*newest_files, *chosen_files) if file.uuid not in known_uuids]
    selection = select_candidates(files, context.warehouse, choices, has_stream_log=has_stream_log)
    findings += selection.findings
    if dry_run:
        return make_result(map(describe_registration, selection.candidates), findings, known_count)
    rebuild_of_catalog = Rebuild(context, caller)
    rebuilt = await rebuild_of_catalog.run(selection.candidates)
    registered_uuids = known_uuids | {registration.uuid for registration in rebuilt.registered}
    await rebuild_of_catalog.keep_locations(
        [file for file in (*files, *uncertain) if file.uuid not in registered_uuids]
    )
    full_result = make_result(rebuilt.registered, (*findings, *rebuilt.findings), known_count)
    return msgspec.structs.replace(full_result, index_files=await _register_index_files(context, newest_files))


async def _read_chosen(
    reader: FileReader,
    folders: Mapping[str, Sequence[ObjectInfo]],
    choices: Mapping[str, FoundName | None],
    read_locations: Collection[str],
    findings: list[Finding],
) -> list[FoundFile]:
    """Read the files that the operator has chosen and that are not the newest of their folders.

    A file that cannot be read adds a finding instead.
    """
    infos_by_location = {info.location: info for files in folders.values() for info in files}
    chosen_files: list[FoundFile] = []
    for location, name in choices.items():
        if name is None or location in read_locations:
            continue
        info = infos_by_location.get(location)
        if info is None:
            findings.append(Finding(location, "The warehouse does not contain this metadata file", str(name)))
            continue
        try:
            chosen_files.append(await reader.read(info))
        except SeamarkError as error:
            findings.append(Finding(location, f"The chosen file cannot be used: {error.message}", str(name)))
    return chosen_files


async def _register_index_files(context: CatalogContext, files: Sequence[FoundFile]) -> int:
    """Register the index files that the registry of a table lacks, and return their number.

    This includes tables that were registered before, because an earlier run may have been killed.
    """
    registry = Registry(context.store, context.clock)
    rebuild = RegistryRebuild(context.objects, IndexReader(context.objects), registry, context.clock)
    count = 0
    uuids_with_indexes = (
        file.uuid
        for file in files
        if isinstance(file.metadata, TableMetadata) and read_definitions(file.metadata).by_name
    )
    for uuid in uuids_with_indexes:
        for entry_name in await context.store.list_entries_by_uuid(uuid):
            entry = await context.store.load_entry(entry_name.kind, entry_name.namespace, entry_name.name)
            if entry is not None and entry.kind is EntryKind.TABLE:
                metadata = await context.documents.peek(entry.metadata_location)
                rebuilt = await rebuild.run(entry.uuid, metadata, await registry.load_files(entry))
                count += sum(len(files) for _, files in rebuilt.registered)
    return count


def _read_choices(path: Path | None) -> dict[str, FoundName | None]:
    """Return the operator's choices: the name of a table, or None, by the location of a metadata file.

    Raises:
        BadParameter: The file is not a JSON object of names and nulls.
    """
    if path is None:
        return {}
    try:
        names = convert_json(path.read_bytes(), dict[str, str | None])
        return {location: None if name is None else parse_found_name(name) for location, name in names.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f"{path} is not a JSON object that maps locations to names: {error}", param_hint="--names"
        ) from None
    except BadRequest as error:
        raise click.BadParameter(f"{path}: {error.message}", param_hint="--names") from None


def _show_rebuilt(rebuilt: RebuiltDatabase, *, dry_run: bool) -> None:
    rows = [
        (registration.name, registration.kind, "; ".join(registration.notes)) for registration in rebuilt.registered
    ]
    if rows:
        print_rows(("NAME", "KIND", "NOTE"), rows)
    for finding in rebuilt.findings[:_SHOWN_MAX]:
        say(f"Not registered: {f'{finding.name}: ' if finding.name else ''}{finding.location}: {finding.reason}")
    if len(rebuilt.findings) > _SHOWN_MAX:
        remaining_text = show_count(len(rebuilt.findings) - _SHOWN_MAX, "more file", "were")
        say(f"{remaining_text} not registered; --json lists them")
    action = "would be registered" if dry_run else "registered"
    counts = f"{rebuilt.registered_before:,} known before, {len(rebuilt.findings):,} not registered"
    say(f"{show_count(len(rows), 'name')} {action}, {counts}; {show_count(rebuilt.index_files, 'index file')}")
