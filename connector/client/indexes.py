"""Requests about indexes: define, list, pause and drop them, and the requests of a builder.

Each request can be repeated: defining, registering and finishing are idempotent, and the server rolls back a second
build that no builder continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path
from seamark.connector.client.values import omit_none


@dataclass(frozen=True, slots=True)
class Index:
    """The state of a table's index.

    With a `problem` only the name is known.
    """

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
    """The JSON of the answer."""


class IndexClient(SeamarkClient):
    """A `SeamarkClient` that changes indexes, too."""

    def indexes(self, table: Name) -> list[Index]:
        """Return all of a table's, those that its partition specs make last."""
        return [_index(one) for one in self._json("GET", f"{table_path(table)}/indexes")["indexes"]]

    def index(self, table: Name, name: str) -> Index:
        """Return an index, with its index files in `json`.

        Raises:
            NotFound: If it does not exist.
        """
        return _index(self._json("GET", _index_path(table, name)))

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
        """Define an index, or changes the given fields; `parameters` are the kind's, such as `fpp` of bloom.

        Raises:
            BadRequest: For an invalid definition.
        """
        fields = {"kind": kind, "columns": None if columns is None else list(columns), "state": state}
        body = omit_none({**fields, **parameters})
        return _index(self._json("PUT", _index_path(table, name), {}, body))

    def drop_index(self, table: Name, name: str) -> None:
        """NotFound if the index does not exist, also in a repeat after a lost answer."""
        self._request("DELETE", _index_path(table, name), {})

    def start_build(self, table: Name, name: str, *, exclusive: bool = False) -> dict[str, Any]:
        """Start a build of an index; return the build (docs/reference/openapi.json, IndexBuild).

        Args:
            exclusive: Refused (409) while another build of the index is under way.
        """
        return self._json("POST", f"{_index_path(table, name)}/builds", {}, {"exclusive": exclusive})

    def build(self, table: Name, name: str, build_id: str) -> dict[str, Any]:
        return self._json("GET", _build_path(table, name, build_id))

    def build_files(
        self, table: Name, name: str, build_id: str, *, page_files: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Pages of data files that the index does not cover yet: `snapshot-id` and `files`; none when it covers all."""
        path = f"{_build_path(table, name, build_id)}/files"
        return (
            page for page in self._list_pages(path, omit_none({"limit": page_files}), "page-token") if page["files"]
        )

    def register_index_files(
        self,
        table: Name,
        name: str,
        build_id: str,
        files: Sequence[tuple[str, int]],
        *,
        replaces: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Register index files of a build: locations and sizes in bytes.

        Returns the build.

        Args:
            replaces: Locations of index files that they replace.

        Raises:
            Conflict: If another build has replaced them.
        """
        body = {
            "index-files": [{"location": location, "size-in-bytes": size} for location, size in files],
            "replaces": list(replaces),
        }
        return self._json("POST", f"{_build_path(table, name, build_id)}/index-files", {}, body)

    def finish_build(
        self, table: Name, name: str, build_id: str, *, outcome: str = "completed", reason: str | None = None
    ) -> dict[str, Any]:
        """`outcome` is completed or rolled-back; registered index files stay."""
        body = {"outcome": outcome, "reason": reason}
        return self._json("POST", f"{_build_path(table, name, build_id)}/finish", {}, body)

    def list_unreferenced_files(self, table: Name, name: str, locations: Sequence[str]) -> dict[str, list[int]]:
        """Return the numbers of data files that no snapshot contains, by location of a live index file: a merge can
        omit them.

        Empty if the server does not know them.

        Raises:
            Conflict: If an index file is no longer live.
        """
        answer = self._json("POST", f"{_index_path(table, name)}/unheld", {}, {"index-files": list(locations)})
        positions: dict[str, list[int]] = answer["unheld"]
        return positions

    def quarantine_index_file(
        self, table: Name, name: str, location: str, reason: str, *, check: bool = False
    ) -> dict[str, Any]:
        """Exclude the index file from plans, so that its data files are indexed again; return its `state`.

        With `check` only if the server also finds it damaged or missing.

        Raises:
            NotFound: If it is not registered.
        """
        body = {"location": location, "reason": reason, "check": check}
        return self._json("POST", f"{_index_path(table, name)}/quarantine", {}, body)

    def record_audit(self, table: Name, name: str, *, index_files: int, damaged: int, size_bytes: int) -> None:
        """Record that all live index files of an index were verified, and how many are damaged."""
        body = {"index-files": index_files, "damaged": damaged, "size-in-bytes": size_bytes}
        self._json("POST", f"{_index_path(table, name)}/audits", {}, body)

    def rebuild_index_registry(self, table: Name) -> dict[str, Any]:
        """Register index files in the table's folder that the server does not list, as after a lost database.

        The result: docs/reference/openapi.json, rebuildIndexRegistry.
        """
        return self._json("POST", f"{table_path(table)}/indexes/rebuild-registry")


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
