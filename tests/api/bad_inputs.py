"""Invalid inputs and the expected answers.

`docs/reference/bad-inputs.md` is generated from this table:

    python -m tests.api.bad_inputs

The command sends the inputs to a real server and writes the page from its answers. A test compares the answers with
this table. The inputs are in `tests/api/inputs/`.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.api.client import Answer, Api
from tests.api.inputs.bad_input import BODY_LIMIT_BYTES, BadInput
from tests.api.inputs.metadata import list_bad_commits, list_bad_schemas, list_other_inputs
from tests.api.inputs.requests import (
    list_bad_bodies,
    list_bad_headers,
    list_bad_locations,
    list_bad_names,
    list_bad_queries,
)
from tests.api.inputs.tables_api import list_bad_changes, list_bad_indexes, list_bad_joins, list_bad_row_queries
from tests.server.rig import run_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "bad-inputs.md"
_GROUPS = (
    list_bad_bodies,
    list_bad_names,
    list_bad_locations,
    list_bad_queries,
    list_bad_headers,
    list_bad_schemas,
    list_bad_commits,
    list_bad_changes,
    list_bad_indexes,
    list_bad_row_queries,
    list_bad_joins,
    list_other_inputs,
)
BAD_INPUTS = tuple(bad_input for group in _GROUPS for bad_input in group())


@dataclass(frozen=True)
class PreparedServer:
    """A server with the table `db.t` and the view `db.v`, and the values of the placeholders in bodies."""

    api: Api
    values_by_placeholder: dict[str, str]

    async def send(self, bad_input: BadInput) -> Answer:
        body = self._fill_placeholders(bad_input.body)
        return await self.api(bad_input.method, bad_input.path, body, headers=dict(bad_input.headers))

    def _fill_placeholders(self, value: Any) -> Any:
        if isinstance(value, str):
            for name, replacement in self.values_by_placeholder.items():
                value = value.replace(f"{{{name}}}", replacement)
            return value
        if isinstance(value, dict):
            return {key: self._fill_placeholders(item) for key, item in value.items()}
        return [self._fill_placeholders(item) for item in value] if isinstance(value, list) else value


async def prepare_server(api: Api) -> PreparedServer:
    location = (await api.create_table())["metadata-location"]
    view = (await api.view())["metadata-location"]
    warehouse = api.server.components.settings.make_warehouse_uri()
    return PreparedServer(api, {"location": location, "view": view, "warehouse": warehouse})


def format_page(answers: list[tuple[BadInput, Answer]], warehouse: str) -> str:
    """Return the reference page.

    Values that differ between runs are replaced by their names.
    """
    lines = [
        "# Bad inputs and their answers",
        "",
        "`python -m tests.api.bad_inputs` generates this page from the answers of a server; a test compares them.",
        "The tests also fuzz all routes from the Iceberg REST specification and Seamark's OpenAPI document. No input",
        "receives a 5xx (`tests/api/test_fuzz.py`).",
    ]
    group = ""
    for bad_input, answer in answers:
        if bad_input.group != group:
            group = bad_input.group
            lines += [
                "",
                f"## {group}",
                "",
                "| request | what is wrong | answer | type | message |",
                "|---|---|---|---|---|",
            ]
        path = bad_input.path if len(bad_input.path) <= 70 else bad_input.path[:67] + "…"
        message = shorten_message(answer.json["error"]["message"], warehouse)
        cells = (
            f"`{bad_input.method} {path}`",
            bad_input.case,
            str(answer.status),
            answer.json["error"]["type"],
            message,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def shorten_message(message: str, warehouse: str) -> str:
    """Return the message without values that differ between runs. It has at most 240 characters."""
    message = message.replace(warehouse, "<warehouse>").replace(warehouse.removeprefix("file://"), "<warehouse>")
    message = re.sub(r"\.[0-9a-f]{40}\.metadata", ".<digest>.metadata", message)
    message = re.sub(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", "<uuid>", message)
    message = re.sub(r"\b1[789]\d{11}\b", "<time>", message)
    # The count includes the path of the warehouse.
    message = re.sub(r"has 5\d{3} characters", "has 5… characters", message)
    message = message.encode("unicode_escape").decode() if any(ch < " " for ch in message) else message
    return message if len(message) <= 240 else message[:237] + "…"


async def collect_answers(home: Path) -> tuple[list[tuple[BadInput, Answer]], str]:
    """Send all inputs of the table to one server. Return the answers and the URI of its warehouse."""
    async with run_server(home, body_limit_bytes=BODY_LIMIT_BYTES) as server:
        prepared_server = await prepare_server(Api(server))
        answers = [(bad_input, await prepared_server.send(bad_input)) for bad_input in BAD_INPUTS]
    return answers, prepared_server.values_by_placeholder["warehouse"]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        answers, warehouse = asyncio.run(collect_answers(Path(home)))
    PAGE.write_text(format_page(answers, warehouse))


if __name__ == "__main__":
    main()
