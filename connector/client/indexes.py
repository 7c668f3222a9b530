"""The client's part for indexes: define, list, pause and drop them, and what a builder asks and tells the server.

As with every call, each may be sent twice: defining, registering and finishing say what is to be, and a second build
that nobody goes on with is rolled back by the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path


@dataclass(frozen=True, slots=True)
class Index:
    """An index of a table and how it stands; what `problem` is about has no more than a name."""

    name: str
    kind: str | None
    state: str | None
    health: str
    """ok, behind, damaged, paused or broken."""
    problem: str | None
    definition: str
    """As people write it: `bloom(user_id, fpp=0.01)`."""
    files: int
    """Data files of the current snapshot that it covers, of `files_total`."""
    files_total: int
    lag_files: int
    """Data files of it that are to be indexed yet."""
    lag_files_of_refs: int
    """Data files that only other branches and tags have, to be indexed yet."""
    size_bytes: int
    audited_ms: int | None
    """When all its index files were last verified, since the epoch."""
    json: dict[str, Any]
    """The answer as it came."""


class IndexClient(SeamarkClient):
    """A `SeamarkClient` that changes indexes, too."""

    def indexes(self, table: Name) -> list[Index]:
        """All of a table's, those that its partition specs make last."""
        return [_index(one) for one in self._json("GET", f"{table_path(table)}/indexes", {})["indexes"]]

    def index(self, table: Name, name: str) -> Index:
        """One, with its index files in `json`. NotFound."""
        return _index(self._json("GET", _index_path(table, name), {}))

    def put_index(
        self,
        table: Name,
        name: str,
        *,
        kind: str | None = None,
        columns: Sequence[str] | None = None,
        state: str | None = None,
        **parameters: float | None,
    ) -> Index:
        """Defines an index, or changes what is given of one; `parameters` are the kind's, such as `fpp` of bloom.
        BadRequest for a definition that makes no sense."""
        given = {"kind": kind, "columns": None if columns is None else list(columns), "state": state}
        body = {name: value for name, value in (given | parameters).items() if value is not None}
        return _index(self._json("PUT", _index_path(table, name), {}, body))

    def drop_index(self, table: Name, name: str) -> None:
        """NotFound where there is none; also where the answer to a first request was lost."""
        self._request("DELETE", _index_path(table, name), {})

    def start_build(self, table: Name, name: str, *, exclusive: bool = False) -> dict[str, Any]:
        """Begins to build an index; the build as it stands (docs/reference/openapi.json, IndexBuild).

        `exclusive`: Refused (409) while another build of the index is under way.
        """
        return self._object("POST", f"{_index_path(table, name)}/builds", {"exclusive": exclusive})

    def build(self, table: Name, name: str, build_id: str) -> dict[str, Any]:
        return self._object("GET", _build_path(table, name, build_id))

    def build_files(
        self, table: Name, name: str, build_id: str, *, page_files: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Pages of data files that the index does not cover yet: `snapshot-id` and `files`; none when it covers all."""
        query: dict[str, Any] = {} if page_files is None else {"limit": page_files}
        while True:
            page = self._json("GET", f"{_build_path(table, name, build_id)}/files", query)
            if page["files"]:
                yield page
            if page["next-page-token"] is None:
                return
            query["page-token"] = page["next-page-token"]

    def register_index_files(
        self,
        table: Name,
        name: str,
        build_id: str,
        files: Sequence[tuple[str, int]],
        *,
        replaces: Sequence[str] = (),
    ) -> dict[str, Any]:
        """`files` are locations and sizes in bytes of index files that a build has written, `replaces` locations of
        those that they supersede. The build as it stands. Conflict where another was first."""
        body = {
            "index-files": [{"location": location, "size-in-bytes": size} for location, size in files],
            "replaces": list(replaces),
        }
        return self._object("POST", f"{_build_path(table, name, build_id)}/index-files", body)

    def finish_build(
        self, table: Name, name: str, build_id: str, *, outcome: str = "completed", reason: str | None = None
    ) -> dict[str, Any]:
        """`outcome` is completed or rolled-back; what was registered stays either way."""
        body = {"outcome": outcome, "reason": reason}
        return self._object("POST", f"{_build_path(table, name, build_id)}/finish", body)

    def unreferenced_files(self, table: Name, name: str, locations: Sequence[str]) -> dict[str, list[int]]:
        """By location of a live index file, the numbers of its data files that no snapshot holds any more: what a
        merge may leave out. Nothing where the server cannot tell. Conflict where one is not live any more."""
        answer = self._json("POST", f"{_index_path(table, name)}/unheld", {}, {"index-files": list(locations)})
        found: dict[str, list[int]] = answer["unheld"]
        return found

    def quarantine_index_file(
        self, table: Name, name: str, location: str, reason: str, *, check: bool = False
    ) -> dict[str, Any]:
        """Plans use the index file no more, and what it describes is to be indexed again: its `state` now.

        With `check` only if the server finds it damaged or gone, too. NotFound where it is not registered.
        """
        body = {"location": location, "reason": reason, "check": check}
        return self._object("POST", f"{_index_path(table, name)}/quarantine", body)

    def record_audit(self, table: Name, name: str, *, index_files: int, damaged: int, size_bytes: int) -> None:
        """Records that all live index files of an index were verified, and how many of them were not right."""
        body = {"index-files": index_files, "damaged": damaged, "size-in-bytes": size_bytes}
        self._object("POST", f"{_index_path(table, name)}/audits", body)

    def rebuild_index_registry(self, table: Name) -> dict[str, Any]:
        """Registers index files in the table's folder that the server does not list, as after a lost database.

        What was found: docs/reference/openapi.json, rebuildIndexRegistry.
        """
        return self._object("POST", f"{table_path(table)}/indexes/rebuild-registry")

    def _object(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = self._json(method, path, {}, body)
        return found


def _index_path(table: Name, name: str) -> str:
    return f"{table_path(table)}/indexes/{quote(name, safe='')}"


def _build_path(table: Name, name: str, build_id: str) -> str:
    return f"{_index_path(table, name)}/builds/{quote(build_id, safe='')}"


def _index(json: dict[str, Any]) -> Index:
    return Index(
        name=json["name"],
        kind=json["kind"],
        state=json["state"],
        health=json["health"],
        problem=json["problem"],
        definition=json["definition"] or "",
        files=json["files"] or 0,
        files_total=json["files-total"] or 0,
        lag_files=json["lag-files"] or 0,
        lag_files_of_refs=json["lag-files-of-refs"] or 0,
        size_bytes=json["size-in-bytes"] or 0,
        audited_ms=json["audited-ms"],
        json=json,
    )
