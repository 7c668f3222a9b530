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

A plan view that is made with `X-Seamark-Plans` resolves for requests with that header's value alone, until it is
withdrawn, and is of one user: its text fails for everybody else who would read a row. Its tables are named as they are
in the view's text, each with the version of its plan.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from metaserver.catalog.commit import metadata_location
from metaserver.catalog.owners import fingerprint_of
from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.plan_tables import Holder, PlanTables, digest_of, plan_name, shown_id_of
from metaserver.catalog.values import LoadedView
from metaserver.errors import BadRequest, NoSuchView
from metaserver.iceberg.views.view import Representation, ViewLogEntry, ViewMetadata, ViewVersion, encode_view
from metaserver.store.port import Entry, EntryKind, NamespacePath, PlanTable
from metaserver.wire import PLANS_FOLDER, show

DIALECT = "trino"
"""Whose text is looked for: that engine takes a condition behind a subquery, and names in double quotes."""
TEXT_CHARACTERS_MAX = 1_000_000
_PART = r'(?:"(?:[^"]|"")*"|[A-Za-z_][A-Za-z0-9_]*)'
_REFERENCE = re.compile(rf"(?<![\w.\"'])((?:{_PART}\.){{0,2}})({_PART})(?![\w.\"'])")
"""Not in the middle of another name."""
_PARTS = re.compile(_PART)
_HOLDER = "seamark.plan-holder"
"""In the version's summary, of which the plan view's name is made."""


class Place(msgspec.Struct, frozen=True):
    """Characters [start, end) of a view's text: the name of a table, or of another view, with schema and catalog where
    it has them. `namespace` and `name` say which one that must be.

    `plan`: the name of a plan table, or of a plan view, of just that; `version`: the id of a plan snapshot of it.
    `alias`: the own name is to be added behind the plan's, as nothing else names it there. `columns`: of a view whose
    plan view stands there for an audience; reading them is tried on the view itself."""

    start: int
    end: int
    namespace: NamespacePath
    name: str
    plan: str | None = None
    version: int | None = None
    alias: bool = False
    columns: tuple[str, ...] = ()


class Reader(NamedTuple):
    """For whom a plan view is made that an audience resolves: one user of the engine."""

    holder: Holder
    user: str


class PlanViews:
    def __init__(self, parts: CatalogContext, plans: PlanTables) -> None:
        self._parts = parts
        self._plans = plans

    async def named(self, namespace: NamespacePath, name: str, audience: str | None = None) -> PlanTable:
        """The plan of this name and audience. NoSuchView, in the words that any view has, for a lease that has ended,
        and where the view has changed."""
        return (await self._found(namespace, name, audience))[0]

    async def load(self, namespace: NamespacePath, name: str, audience: str | None = None) -> LoadedView:
        """As `named`."""
        return (await self._found(namespace, name, audience))[1]

    async def _found(self, namespace: NamespacePath, name: str, audience: str | None) -> tuple[PlanTable, LoadedView]:
        plan = await self._parts.store.plan_table(namespace, name)
        if plan is not None and plan.audience == audience and plan.expires_ms > self._parts.clock.now_ms():
            entry = await self._parts.store.entry(EntryKind.VIEW, namespace, plan.of_name)
            if entry is not None and entry.uuid == plan.uuid:
                await self._parts.documents.ensure_exists(plan.location)
                metadata = await self._parts.documents.view(plan.location)
                # Engines run it by its owner's rights, and who may write the view's folder could write over the file.
                whole = plan.shown in (None, fingerprint_of(metadata, plan.location))
                if whole and _name(entry, metadata.current_version, audience) == name:
                    located = msgspec.structs.replace(entry, metadata_location=plan.location)
                    return plan, LoadedView(entry=located, metadata=metadata)
        raise NoSuchView(f"View does not exist: {show(namespace, name)}")

    async def make(
        self,
        view: LoadedView,
        places: list[Place],
        condition: str,
        lease_s: int,
        who: str,
        reader: Reader | None = None,
    ) -> PlanTable | None:
        """None where there are too many plans, or the view's name is too long. BadRequest for a view without a text in
        Trino's dialect, and for a place where what its plan is of is not named. With a `reader`, the plan view's name
        leads nowhere but for that one's audience, and has rows for that user alone."""
        entry, metadata = view.entry, _over_plans(view, places, condition, reader)
        version = metadata.current_version
        audience = None if reader is None else reader.holder.audience
        name = _name(entry, version, audience)
        if name is None:
            return None
        shared = await self._plans.share(entry.namespace, name, lease_s, who, audience)
        if shared is not None or not await self._plans.has_room(who):
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
            audience=audience,
            shown_id=None if reader is None else shown_id_of(plan_id),
            shown=fingerprint_of(metadata, location),
        )
        return await self._plans.keep(plan, None, [(location, encode_view(metadata))], lease_s, who)


def _name(entry: Entry, version: ViewVersion, audience: str | None) -> str | None:
    holder = None if audience is None else Holder(audience, version.summary.get(_HOLDER, ""))
    return plan_name(entry, version.version_id, str(version.representations[0].sql), holder)


def _over_plans(view: LoadedView, places: list[Place], condition: str, reader: Reader | None) -> ViewMetadata:
    """The view's metadata with one version, one schema, and one text."""
    metadata, version = view.metadata, view.metadata.current_version
    given = next((one.sql for one in version.representations if (one.dialect or "").lower() == DIALECT), None)
    if given is None:
        raise BadRequest(f"{show(view.entry.namespace, view.entry.name)} has no text in the dialect {DIALECT}")
    inner = _spliced(given, places, version.default_namespace)
    tried = ", ".join(_tried(given, place, number) for number, place in enumerate(places) if place.columns)
    text = f"WITH {tried} " if tried else ""
    # A line of its own, as the text may end in a comment.
    text += f"SELECT * FROM (\n{inner}\n) AS {_quoted(view.entry.name)} WHERE "  # noqa: S608
    text += condition if reader is None else f"{_only_for(reader.user)} AND ({condition}\n)"
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadRequest(
            f"The view's text would have {len(text)} characters; at most {TEXT_CHARACTERS_MAX} are allowed"
        )
    summary = version.summary if reader is None else {**version.summary, _HOLDER: reader.holder.id}
    stated = msgspec.structs.replace(version, representations=(Representation("sql", text, DIALECT),), summary=summary)
    schema = metadata.schema(version.schema_id)
    return msgspec.structs.replace(
        metadata,
        schemas=() if schema is None else (schema,),
        versions=(stated,),
        version_log=(ViewLogEntry(version.timestamp_ms, version.version_id),),
    )


def _tried(text: str, place: Place, number: int) -> str:
    """A query that is never run: the engine checks its rights, and applies its rules, to the view that it names."""
    columns = ", ".join(map(_quoted, place.columns))
    return f'"~{number}" AS (SELECT {columns} FROM {text[place.start : place.end]} WHERE FALSE)'  # noqa: S608


def _only_for(user: str) -> str:
    """An error for everybody else who reads a row. A plan view runs by its owner's rights, and nothing else says who
    asks: Trino's `current_user` is who runs the statement, in any view."""
    quoted = user.replace("'", "''")
    return f"IF(current_user = '{quoted}', TRUE, CAST('this plan is another user''s' AS BOOLEAN))"


def _spliced(text: str, places: list[Place], default: NamespacePath) -> str:
    pieces, at = [], 0
    for place in sorted(places, key=lambda one: one.start):
        match = _REFERENCE.match(text, place.start) if place.start >= at else None
        if match is None or match.end() != place.end or not _names(match, place, default):
            table = show(place.namespace, place.name)
            raise BadRequest(f"The view's text does not name {table} from {place.start} to {place.end}")
        if place.version is not None:
            new = f"{match[0]} FOR VERSION AS OF {place.version}"
        else:
            new = f"{match[1]}{_quoted(str(place.plan))}"
        pieces += [text[at : place.start], new, f" AS {_quoted(_plain(match[2]))}" if place.alias else ""]
        at = place.end
    return "".join([*pieces, text[at:]])


def _names(reference: re.Match[str], place: Place, default: NamespacePath) -> bool:
    """Whether it is the name of what the plan is of, as Trino compares names. What catalogs are called is not known."""
    before = [_plain(one) for one in _PARTS.findall(reference[1])]
    schema = before[-1] if before else ".".join(default)
    named = (schema.lower(), _plain(reference[2]).lower())
    return named == (".".join(place.namespace).lower(), place.name.lower())


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
