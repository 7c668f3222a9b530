"""Plan views: names under which a view is read over plan tables, with a condition on its own rows.

A plan view is the view itself, owner, columns and defaults, with another text: `SELECT * FROM (its text) WHERE …`, in
which plans' names stand where those of tables, and of other views, did. So an engine treats it as it treats the view:
whose rights count, which types its columns are cast to, whether it has become stale.

The rules it keeps. What it is made of is what the catalog has stored: who asks says places of the text, and what stands
there must be the name of the table, or the view, that the plan is of. The condition makes sure that nobody reads other
rows through the name than through the view: what the plan tables leave out would otherwise show where rows are counted,
or looked for in vain. A name is of one metadata file of the view: after any change of the view there is no such name
any more, and whoever reads another plan view that has it in its text is told so. Rows, leases and clean-up are those of
plan tables, whose names have the same form.
"""

from __future__ import annotations

import re

import msgspec

from metaserver.catalog.commit import metadata_location
from metaserver.catalog.parts import Parts
from metaserver.catalog.plan_tables import PlanTables, digest_of, plan_name
from metaserver.catalog.values import LoadedView
from metaserver.errors import BadRequest, NoSuchView
from metaserver.iceberg.view import Representation, ViewLogEntry, ViewMetadata, ViewVersion, encode_view
from metaserver.store.port import Entry, EntryKind, NamespacePath, PlanTable
from metaserver.wire import PLANS_FOLDER, show

DIALECT = "trino"
"""Whose text is looked for: that engine takes a condition behind a subquery, and names in double quotes."""
TEXT_CHARACTERS_MAX = 1_000_000
_PART = r'(?:"(?:[^"]|"")*"|[A-Za-z_][A-Za-z0-9_]*)'
_REFERENCE = re.compile(rf"(?<![\w.\"'])((?:{_PART}\.){{0,2}})({_PART})(?![\w.\"'])")
"""Not in the middle of another name."""
_PARTS = re.compile(_PART)


class Place(msgspec.Struct, frozen=True):
    """Characters [start, end) of a view's text: the name of a table, or of another view, with schema and catalog where
    it has them. `plan`: a plan table, or a plan view, of just that.

    `alias`: the own name is to be added behind the plan's, as nothing else names it there."""

    start: int
    end: int
    plan: PlanTable
    alias: bool


class PlanViews:
    def __init__(self, parts: Parts, plans: PlanTables) -> None:
        self._parts = parts
        self._plans = plans

    async def named(self, namespace: NamespacePath, name: str) -> PlanTable:
        """The plan of this name. NoSuchView, in the words that any view has, for a lease that has ended, and where the
        view has changed."""
        return (await self._found(namespace, name))[0]

    async def load(self, namespace: NamespacePath, name: str) -> LoadedView:
        """As `named`."""
        return (await self._found(namespace, name))[1]

    async def _found(self, namespace: NamespacePath, name: str) -> tuple[PlanTable, LoadedView]:
        plan = await self._parts.store.plan_table(namespace, name)
        if plan is not None and plan.expires_ms > self._parts.clock.now_ms():
            entry = await self._parts.store.entry(EntryKind.VIEW, namespace, plan.of_name)
            if entry is not None and entry.uuid == plan.uuid:
                await self._parts.documents.ensure_exists(plan.location)
                metadata = await self._parts.documents.view(plan.location)
                if _name(entry, metadata.current_version) == name:
                    located = msgspec.structs.replace(entry, metadata_location=plan.location)
                    return plan, LoadedView(entry=located, metadata=metadata)
        raise NoSuchView(f"View does not exist: {show(namespace, name)}")

    async def make(self, view: LoadedView, places: list[Place], condition: str, lease_s: int) -> PlanTable | None:
        """None where there are too many plans, or the view's name is too long. BadRequest for a view without a text in
        Trino's dialect, and for a place where what its plan is of is not named."""
        entry, metadata = view.entry, _over_plans(view, places, condition)
        version = metadata.current_version
        name = _name(entry, version)
        if name is None:
            return None
        shared = await self._plans.share(entry.namespace, name, lease_s)
        if shared is not None or not await self._plans.has_room():
            return shared
        plan_id = str(self._parts.clock.uuid7())
        beside = metadata_location(self._parts, metadata.location, metadata.properties, None, ".metadata.json")
        folder = f"{beside.rpartition('/')[0]}/{PLANS_FOLDER}/{digest_of(name)}"
        location = f"{folder}/{plan_id}.metadata.json"
        plan = PlanTable(
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
        )
        return await self._plans.keep(plan, None, [(location, encode_view(metadata))], lease_s)


def _name(entry: Entry, version: ViewVersion) -> str | None:
    return plan_name(entry, version.version_id, str(version.representations[0].sql))


def _over_plans(view: LoadedView, places: list[Place], condition: str) -> ViewMetadata:
    """The view's metadata with one version, one schema, and one text."""
    metadata, version = view.metadata, view.metadata.current_version
    given = next((one.sql for one in version.representations if (one.dialect or "").lower() == DIALECT), None)
    if given is None:
        raise BadRequest(f"{show(view.entry.namespace, view.entry.name)} has no text in the dialect {DIALECT}")
    inner = _spliced(given, places, version.default_namespace)
    # A line of its own, as the text may end in a comment.
    text = f"SELECT * FROM (\n{inner}\n) AS {_quoted(view.entry.name)} WHERE {condition}"  # noqa: S608
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadRequest(
            f"The view's text would have {len(text)} characters; at most {TEXT_CHARACTERS_MAX} are allowed"
        )
    stated = msgspec.structs.replace(version, representations=(Representation("sql", text, DIALECT),))
    schema = metadata.schema(version.schema_id)
    return msgspec.structs.replace(
        metadata,
        schemas=() if schema is None else (schema,),
        versions=(stated,),
        version_log=(ViewLogEntry(version.timestamp_ms, version.version_id),),
    )


def _spliced(text: str, places: list[Place], default: NamespacePath) -> str:
    pieces, at = [], 0
    for place in sorted(places, key=lambda one: one.start):
        match = _REFERENCE.match(text, place.start) if place.start >= at else None
        if match is None or match.end() != place.end or not _names(match, place.plan, default):
            table = show(place.plan.namespace, place.plan.of_name)
            raise BadRequest(f"The view's text does not name {table} from {place.start} to {place.end}")
        new = f"{match[1]}{_quoted(str(place.plan.name))}"
        pieces += [text[at : place.start], new, f" AS {_quoted(_plain(match[2]))}" if place.alias else ""]
        at = place.end
    return "".join([*pieces, text[at:]])


def _names(reference: re.Match[str], plan: PlanTable, default: NamespacePath) -> bool:
    """Whether it is the name of what the plan is of, as Trino compares names. What catalogs are called is not known."""
    before = [_plain(one) for one in _PARTS.findall(reference[1])]
    schema = before[-1] if before else ".".join(default)
    named, table = (schema.lower(), _plain(reference[2]).lower()), (".".join(plan.namespace).lower(), plan.of_name)
    return named == (table[0], table[1].lower())


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
