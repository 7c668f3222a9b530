"""A table with any columns for tests of partitions and counts. Its data files have names but are never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.api.client import Answer, Api


@dataclass
class ClaimedTable:
    """The table `db.<name>`."""

    api: Api
    name: str
    location: str

    @staticmethod
    async def create(
        api: Api,
        columns: Mapping[str, str],
        spec: Sequence[tuple[str, str]] = (),
        *,
        name: str = "t",
        version: int = 2,
        **properties: str,
    ) -> ClaimedTable:
        """Create a table.

        Args:
            api: The server.
            columns: The types of the columns by name. The ids of the columns are 1, 2, and so on.
            spec: (column, transform) of each partition field.
            name: The name of the table.
            version: The format version.
            properties: The properties of the table.
        """
        ids = {column: number for number, column in enumerate(columns, 1)}
        body = {
            "name": name,
            "schema": build_struct({ids[column]: (column, kind) for column, kind in columns.items()}),
            "partition-spec": {
                "spec-id": 0,
                "fields": [
                    {"name": f"p{index}", "transform": transform, "source-id": ids[column], "field-id": 1000 + index}
                    for index, (column, transform) in enumerate(spec)
                ],
            },
            "properties": {"format-version": str(version), **properties},
        }
        answer = await api("POST", "/v1/namespaces/db/tables", body)
        assert answer.status == 200, answer.raw
        return ClaimedTable(api, name, answer.json["metadata"]["location"])

    def build_data_file(
        self, name: str, *partition: Any, rows: int = 1, spec_id: int = 0, **fields: Any
    ) -> dict[str, Any]:
        return {
            "content": "data",
            "file-path": f"{self.location}/data/{name}",
            "file-format": "parquet",
            "spec-id": spec_id,
            "partition": list(partition),
            "record-count": rows,
            "file-size-in-bytes": 1000,
            **fields,
        }

    async def send(self, **body: Any) -> Answer:
        """Send a change. In `body`, underscores stand for the hyphens of the keys."""
        change = {key.replace("_", "-"): value for key, value in body.items()}
        return await self.api("POST", f"/api/v1/tables/db/{self.name}/commit", change)

    async def commit(self, **body: Any) -> Any:
        answer = await self.send(**body)
        assert answer.status == 200, answer.raw
        return answer.json

    async def update(self, *updates: Mapping[str, Any]) -> None:
        """Commit updates through the route of the Iceberg REST specification."""
        body = {"requirements": [], "updates": list(updates)}
        answer = await self.api("POST", f"/v1/namespaces/db/tables/{self.name}", body)
        assert answer.status == 200, answer.raw

    async def list_live_files(self) -> list[str]:
        """Return the names of all live files, from a plan of the whole table."""
        answer = await self.api("POST", f"/v1/namespaces/db/tables/{self.name}/plan", {})
        assert answer.status == 200, answer.raw
        return sorted(task["data-file"]["file-path"].rpartition("/")[2] for task in answer.json["file-scan-tasks"])


def build_struct(columns: Mapping[int, tuple[str, str]], schema_id: int = 0) -> dict[str, Any]:
    """Return a schema. `columns` has (name, type) by id."""
    fields = [
        {"id": field_id, "name": name, "required": False, "type": kind} for field_id, (name, kind) in columns.items()
    ]
    return {"type": "struct", "schema-id": schema_id, "fields": fields}
