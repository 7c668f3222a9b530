"""Plan views: names under which an engine reads a view whose tables are replaced by their plans.

A plan view has the view's owner, columns and defaults, but a different text: `SELECT * FROM (text of the view) WHERE
…`. In the text of the view, plan names replace the names of tables and of other views. An engine therefore treats a
plan view like the view, with the same rights, column types and checks for staleness.

A plan view is built from data that the catalog has stored. The client sends positions in the text, and the text at
these positions must be the name of the planned table or view. The condition ensures that the plan view returns only
rows that the view also returns. Otherwise, the rows that plan tables leave out would affect counts and anti-joins. A
name belongs to one metadata file of the view: after any change of the view, the name no longer resolves, and a query of
a plan view that refers to the name fails. Rows, leases and clean-up work as for plan tables, whose names have the same
form.

A plan view that is created with `X-Seamark-Plans` resolves only for requests with the same value of the
header, until it is withdrawn. The view belongs to one user: for other users, its text fails when it would
return a row. In its text, the tables keep their names, and each name is followed by the version of the table's plan.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.views.view import Representation, ViewLogEntry, ViewMetadata, ViewVersion, encode_view
from seamark.formats.protocol.wire import PLANS_FOLDER, format_path
from seamark.formats.runtime.errors import BadRequest, NoSuchView
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import choose_file_suffix
from seamark.metaserver.catalog.ownership.owners import compute_view_fingerprint
from seamark.metaserver.catalog.plans.plan_tables import Holder, PlanTables, derive_snapshot_id, parse_digest, plan_name
from seamark.metaserver.catalog.values import LoadedView
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath, StoredPlanTable

DIALECT = "trino"
"""The dialect of the text. Trino pushes a condition into a subquery, and quotes names with double quotes."""
TEXT_CHARACTERS_MAX = 1_000_000
_PART = r'(?:"(?:[^"]|"")*"|[A-Za-z_][A-Za-z0-9_]*)'
_REFERENCE = re.compile(rf"(?<![\w.\"'])((?:{_PART}\.){{0,2}})({_PART})(?![\w.\"'])")
"""Matches a qualified name in the text of a view. It does not match a part of a longer name."""
_PARTS = re.compile(_PART)
_HOLDER = "seamark.plan-holder"
"""A key in the summary of a view version. The name of the plan view depends on its value."""


class ReplacedReference(msgspec.Struct, frozen=True):
    """A reference to a table or view in a view's text, and the plan that replaces it.

    Attributes:
        start: The index of the first character of the name.
        end: The index after the last character of the name.
        namespace: The namespace of the table or view that the text must name.
        name: The name of the table or view that the text must name.
        plan: The name of the plan table or plan view that replaces the name.
        version: The id of the plan snapshot to add to the name of a table.
        alias: Whether to add the name as an alias, because the text has no alias.
        columns: The columns that are read from the view itself to check access. They are set only if the plan has an
            audience: a value of the header X-Seamark-Plans that requests must send to load the plan.
    """

    start: int
    end: int
    namespace: NamespacePath
    name: str
    plan: str | None = None
    version: int | None = None
    alias: bool = False
    columns: tuple[str, ...] = ()


class PlanViewReader(NamedTuple):
    """The restrictions of a plan view that only one user may read.

    Attributes:
        holder: The client that holds the plan view. Only requests with its value of X-Seamark-Plans can load the view.
        user: The user of the engine that gets rows of the plan view. Other users get no rows.
    """

    holder: Holder
    user: str


class PlanViews:
    def __init__(self, context: CatalogContext, plans: PlanTables) -> None:
        self._context = context
        self._plans = plans

    async def find(self, namespace: NamespacePath, name: str, audience: str | None = None) -> StoredPlanTable:
        """Return the record of the plan view with this name.

        A plan view replaces a view: its text reads plans instead of tables. With an audience, only requests that send
        this value of X-Seamark-Plans find it.

        Raises:
            NoSuchView: The lease of the plan view has ended, or the original view has changed. The message is the same
                as for a view that does not exist.
        """
        plan, _ = await self._resolve(namespace, name, audience)
        return plan

    async def load(self, namespace: NamespacePath, name: str, audience: str | None = None) -> LoadedView:
        """Return the plan view with this name, as a view that engines can load. See `find` for the audience."""
        _, view = await self._resolve(namespace, name, audience)
        return view

    async def _resolve(
        self, namespace: NamespacePath, name: str, audience: str | None
    ) -> tuple[StoredPlanTable, LoadedView]:
        """Return the record and the metadata of the plan view with this name and audience.

        Raises:
            NoSuchView: There is no such plan view, its lease has ended, or the original view has changed.
        """
        plan = await self._context.store.load_plan_table(namespace, name)
        if plan is not None and plan.audience == audience and plan.expires_ms > self._context.clock.now_ms():
            entry = await self._context.store.load_entry(EntryKind.VIEW, namespace, plan.of_name)
            if entry is not None and entry.uuid == plan.uuid:
                await self._context.documents.ensure_exists(plan.location)
                metadata = await self._context.documents.view(plan.location)
                # Engines run a plan view with its owner's rights, but writers of the view's folder can overwrite it.
                # A plan view that was stored without a fingerprint is not compared.
                is_unchanged = plan.snapshot_or_fingerprint in (None, compute_view_fingerprint(metadata, plan.location))
                if is_unchanged and _make_name(entry, metadata.current_version, audience) == name:
                    located_entry = msgspec.structs.replace(entry, metadata_location=plan.location)
                    return plan, LoadedView(entry=located_entry, metadata=metadata)
        raise NoSuchView(f"View does not exist: {format_path(namespace, name)}")

    async def create(
        self,
        view: LoadedView,
        references: list[ReplacedReference],
        condition: str,
        lease_s: int,
        principal: str,
        reader: PlanViewReader | None = None,
    ) -> StoredPlanTable | None:
        """Create a plan view: a view with the text of `view`, which reads plans instead of the referenced tables.

        With a `reader`, only requests with the reader's X-Seamark-Plans find the name, and only the reader's user gets
        rows.

        Returns:
            The record of the plan view. None if there are too many plans or the view's name is too long.

        Raises:
            BadRequest: The view has no text in Trino's dialect. Or the text at the position of a reference is not the
                name of the table or view whose plan replaces it.
        """
        entry, metadata = view.entry, _build_plan_view_metadata(view, references, condition, reader)
        version = metadata.current_version
        audience = None if reader is None else reader.holder.audience
        name = _make_name(entry, version, audience)
        if name is None:
            return None
        existing_plan = await self._plans.find_and_renew(entry.namespace, name, lease_s, principal, audience)
        if existing_plan is not None or not await self._plans.check_or_count_refusal(principal):
            return existing_plan
        plan_id = str(self._context.clock.uuid7())
        folder = f"{metadata.location.rstrip('/')}/{PLANS_FOLDER}/{parse_digest(name)}"
        document = encode_view(metadata)
        location = f"{folder}/{plan_id}{choose_file_suffix(document)}"
        plan = StoredPlanTable(
            id=plan_id,
            namespace=entry.namespace,
            name=name,
            of_name=entry.name,
            uuid=entry.uuid,
            location=location,
            files=(location,),
            snapshot_id=version.version_id,
            file_count=0,
            size_bytes=0,
            considered_count=0,
            considered_bytes=None,
            expires_ms=0,
            audience=audience,
            plan_snapshot_id=None if reader is None else derive_snapshot_id(plan_id),
            snapshot_or_fingerprint=compute_view_fingerprint(metadata, location),
        )
        return await self._plans.store_and_register(plan, None, [(location, document)], lease_s, principal)


def _make_name(entry: Entry, version: ViewVersion, audience: str | None) -> str | None:
    holder = None if audience is None else Holder(audience, version.summary.get(_HOLDER, ""))
    return plan_name(entry, version.version_id, str(version.representations[0].sql), holder)


def _build_plan_view_metadata(
    view: LoadedView, references: list[ReplacedReference], condition: str, reader: PlanViewReader | None
) -> ViewMetadata:
    """Return the metadata of a plan view: only the current version of the view, with a text that reads the plans.

    The text checks `condition`, and that the user is the reader if there is one.

    Raises:
        BadRequest: The view has no text in Trino's dialect, or the new text is too long.
    """
    metadata, version = view.metadata, view.metadata.current_version
    trino_text = next(
        (
            representation.sql
            for representation in version.representations
            if (representation.dialect or "").lower() == DIALECT
        ),
        None,
    )
    if trino_text is None:
        raise BadRequest(
            f"{format_path(view.entry.namespace, view.entry.name)} has no representation in dialect {DIALECT}"
        )
    replaced_text = _replace_references(trino_text, references, version.default_namespace)
    access_checks = ", ".join(
        _write_access_check(trino_text, reference, number)
        for number, reference in enumerate(references)
        if reference.columns
    )
    text = f"WITH {access_checks} " if access_checks else ""
    # The closing parenthesis is on a separate line, because the text may end with a comment.
    text += f"SELECT * FROM (\n{replaced_text}\n) AS {quote_identifier(view.entry.name)} WHERE "  # noqa: S608
    text += condition if reader is None else f"{_make_reader_condition(reader.user)} AND ({condition}\n)"
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadRequest(
            f"The text of the plan view would have {len(text)} characters; the limit is {TEXT_CHARACTERS_MAX}"
        )
    summary = version.summary if reader is None else {**version.summary, _HOLDER: reader.holder.id}
    plan_version = msgspec.structs.replace(
        version, representations=(Representation("sql", text, DIALECT),), summary=summary
    )
    schema = metadata.schema(version.schema_id)
    return msgspec.structs.replace(
        metadata,
        schemas=() if schema is None else (schema,),
        versions=(plan_version,),
        version_log=(ViewLogEntry(version.timestamp_ms, version.version_id),),
    )


def _write_access_check(text: str, reference: ReplacedReference, number: int) -> str:
    """Return a WITH item that checks access to a view. The engine analyses the item, but never runs it.

    In the analysis, the engine checks the user's access to the view, and applies the view's rules.
    """
    columns = ", ".join(map(quote_identifier, reference.columns))
    return f'"~{number}" AS (SELECT {columns} FROM {text[reference.start : reference.end]} WHERE FALSE)'  # noqa: S608


def _make_reader_condition(user: str) -> str:
    """Return a condition that raises an error when a user other than `user` reads a row.

    A plan view (a view whose text reads only the files of a plan) runs with its owner's rights. But in any view,
    Trino's `current_user` is the user of the statement. CAST raises the error, because its text is not a boolean.
    """
    quoted_user = user.replace("'", "''")
    return f"IF(current_user = '{quoted_user}', TRUE, CAST('this plan belongs to another user' AS BOOLEAN))"


def _replace_references(text: str, references: list[ReplacedReference], default: NamespacePath) -> str:
    """Return the text of a view in which each referenced name is replaced by its plan.

    `default` is the namespace of names without a namespace.

    Raises:
        BadRequest: The text at the position of a reference is not the name of its table or view.
    """
    pieces, position = [], 0
    for reference in sorted(references, key=lambda reference: reference.start):
        match = _REFERENCE.match(text, reference.start) if reference.start >= position else None
        if match is None or match.end() != reference.end or not _names_table(match, reference, default):
            table = format_path(reference.namespace, reference.name)
            raise BadRequest(
                f"Characters {reference.start} to {reference.end} of the view's text are not the name of {table}"
            )
        if reference.version is not None:
            replacement = f"{match[0]} FOR VERSION AS OF {reference.version}"
        else:
            replacement = f"{match[1]}{quote_identifier(str(reference.plan))}"
        pieces += [
            text[position : reference.start],
            replacement,
            f" AS {quote_identifier(_unquote_identifier(match[2]))}" if reference.alias else "",
        ]
        position = reference.end
    return "".join([*pieces, text[position:]])


def _names_table(match: re.Match[str], reference: ReplacedReference, default: NamespacePath) -> bool:
    """Return whether the matched text names the table or view of the reference.

    Names are compared without regard to case, as in Trino. The name of the catalog is not checked.
    """
    namespace_parts = [_unquote_identifier(part) for part in _PARTS.findall(match[1])]
    schema = namespace_parts[-1] if namespace_parts else ".".join(default)
    table_name = (schema.lower(), _unquote_identifier(match[2]).lower())
    return table_name == (".".join(reference.namespace).lower(), reference.name.lower())


def _unquote_identifier(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def quote_identifier(name: str) -> str:
    """Return a name as a quoted identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'
