"""Sends the requests that define, list, pause and drop indexes, and the requests of an index builder.

Each request can be repeated. Defining an index, registering index files and finishing a build are idempotent. If a
request to start a build is repeated, two builds start, and the server rolls back the build that no builder continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.client.values import omit_none


@dataclass(frozen=True, slots=True)
class Index:
    """The state of a table's index. If `problem` is set, only the name of the index is known."""

    name: str
    kind: str | None
    state: str | None
    health: str
    """`ok`, `behind`, `damaged`, `paused` or `broken`."""
    problem: str | None
    definition: str
    """The definition in its short form, such as `bloom(user_id, fpp=0.01)`."""
    files: int
    """The number of data files of the current snapshot that the index covers."""
    files_total: int
    """The number of all data files of the current snapshot."""
    lag_files: int
    """The number of data files of the current snapshot that are not yet indexed."""
    lag_files_of_refs: int
    """The number of data files that only other branches and tags contain and that are not yet indexed."""
    size_bytes: int
    audited_ms: int | None
    """The time at which all index files were last verified, in milliseconds since the epoch."""
    json: dict[str, Any]
    """The JSON of the response."""


class IndexClient(SeamarkClient):
    """A `SeamarkClient` that can also change indexes."""

    def indexes(self, table: Name) -> list[Index]:
        """Return all indexes of a table.

        The list ends with the bucket indexes, which the table's partition specs define.
        """
        return [_to_index(index) for index in self._request_json("GET", f"{make_table_path(table)}/indexes")["indexes"]]

    def index(self, table: Name, name: str) -> Index:
        """Return an index, with its index files in `json`.

        Raises:
            NoSuchResource: The index does not exist.
        """
        return _to_index(self._request_json("GET", _make_index_path(table, name)))

    def put_index(
        self,
        table: Name,
        name: str,
        *,
        kind: str | None = None,
        columns: Sequence[str] | None = None,
        state: str | None = None,
        measures: Sequence[str] | None = None,
        replaces: str | None = None,
        **parameters: float | None,
    ) -> Index:
        """Define an index, or change some fields of an index. A field does not change if its argument is None.

        Args:
            measures: The aggregates of a cube, such as `sum(amount)`.
            replaces: The id of the definition that is changed. By default, any definition is changed.
            parameters: The parameters of the index kind, such as `fpp` of bloom.

        Raises:
            InvalidRequest: The definition is invalid.
            Conflict: The index has another definition than `replaces`.
        """
        fields: dict[str, Any] = {
            "kind": kind,
            "columns": None if columns is None else list(columns),
            "state": state,
            "measures": None if measures is None else list(measures),
            "replaces": replaces,
        }
        body = omit_none({**fields, **parameters})
        return _to_index(self._request_json("PUT", _make_index_path(table, name), {}, body))

    def drop_index(self, table: Name, name: str) -> None:
        """Drop an index.

        Raises:
            NoSuchResource: The index does not exist. A repeat after a lost response also raises this error.
        """
        self._request("DELETE", _make_index_path(table, name), {})

    def start_build(self, table: Name, name: str, *, exclusive: bool = False) -> dict[str, Any]:
        """Start a build of an index, and return the build (docs/reference/openapi.json, IndexBuild).

        Args:
            exclusive: Whether the server refuses the request (409) while another build of the index is running.
        """
        return self._request_json("POST", f"{_make_index_path(table, name)}/builds", {}, {"exclusive": exclusive})

    def build(self, table: Name, name: str, build_id: str) -> dict[str, Any]:
        return self._request_json("GET", _make_build_path(table, name, build_id))

    def list_files_to_index(
        self, table: Name, name: str, build_id: str, *, page_files: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield pages of data files that the index does not yet cover. Each page has `snapshot-id` and `files`.

        Empty pages are left out, so there are no pages if the index covers all data files.
        """
        path = f"{_make_build_path(table, name, build_id)}/files"
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
        """Register the index files of a build, and return the build.

        Args:
            files: The location and the size in bytes of each index file.
            replaces: The locations of index files that the new index files replace.

        Raises:
            Conflict: A different build has already replaced these index files.
        """
        body = {
            "index-files": [{"location": location, "size-in-bytes": size} for location, size in files],
            "replaces": list(replaces),
        }
        return self._request_json("POST", f"{_make_build_path(table, name, build_id)}/index-files", {}, body)

    def finish_build(
        self,
        table: Name,
        name: str,
        build_id: str,
        *,
        outcome: str = "completed",
        reason: str | None = None,
        refused_files: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Finish a build. The index files that it has registered remain.

        Args:
            outcome: `completed` or `rolled-back`.
            refused_files: The reasons of data files that no build can index, by path.
        """
        body: dict[str, Any] = {"outcome": outcome, "reason": reason}
        if refused_files:
            body["refused-files"] = [{"file-path": path, "reason": text} for path, text in refused_files.items()]
        return self._request_json("POST", f"{_make_build_path(table, name, build_id)}/finish", {}, body)

    def list_unreferenced_files(self, table: Name, name: str, locations: Sequence[str]) -> dict[str, list[int]]:
        """Return the data files in live index files that no snapshot contains: their ordinals by index file location.

        A merge can leave out the entries of these data files. The result is empty if the server does not know which
        data files the index files contain.

        Raises:
            Conflict: An index file is no longer live.
        """
        answer = self._request_json(
            "POST", f"{_make_index_path(table, name)}/unheld", {}, {"index-files": list(locations)}
        )
        positions: dict[str, list[int]] = answer["unheld"]
        return positions

    def quarantine_index_file(
        self, table: Name, name: str, location: str, reason: str, *, check: bool = False
    ) -> dict[str, Any]:
        """Exclude an index file from plans, so that its data files are indexed again. Return its `state` in an object.

        Args:
            check: Whether to exclude the file only if the server also finds that it is damaged or missing.

        Raises:
            NoSuchResource: The index file is not registered.
        """
        body = {"location": location, "reason": reason, "check": check}
        return self._request_json("POST", f"{_make_index_path(table, name)}/quarantine", {}, body)

    def record_audit(self, table: Name, name: str, *, index_files: int, damaged_files: int, size_bytes: int) -> None:
        """Record that all live index files of an index were verified, and how many are damaged."""
        body = {"index-files": index_files, "damaged": damaged_files, "size-in-bytes": size_bytes}
        self._request_json("POST", f"{_make_index_path(table, name)}/audits", {}, body)

    def rebuild_index_registry(self, table: Name) -> dict[str, Any]:
        """Register index files in the table's folder that the server does not know, for example after a loss of data.

        docs/reference/openapi.json defines the form of the result (rebuildIndexRegistry).
        """
        return self._request_json("POST", f"{make_table_path(table)}/indexes/rebuild-registry")


def _make_index_path(table: Name, name: str) -> str:
    return f"{make_table_path(table)}/indexes/{quote(name, safe='')}"


def _make_build_path(table: Name, name: str, build_id: str) -> str:
    return f"{_make_index_path(table, name)}/builds/{quote(build_id, safe='')}"


def _to_index(json: dict[str, Any]) -> Index:
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
