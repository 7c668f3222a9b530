"""Generate reference pages: `python -m seamark.commands.reference` in the checkout.

docs/reference/settings.md and the settings in the Helm chart's values.schema.json are generated from `Settings`, and
docs/reference/openapi.json from the routes. Tests compare them with the committed files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.openapi import build_document
from seamark.metaserver.settings.settings import FIELDS, make_flag_name, make_variable_name

_CHECKOUT = Path(__file__).resolve().parents[1]
REFERENCE = _CHECKOUT / "docs" / "reference"
CHART_SCHEMA = _CHECKOUT / "deploy" / "helm" / "seamark" / "values.schema.json"
_SET_BY_CHART = {
    *("home", "host", "port", "tls_cert", "tls_key", "peer_address"),
    *("stream_log", "stream_log_client_properties", "event_kafka_client_properties"),
}
"""The settings that the templates of the Helm chart set."""
_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (tuple, "array"),
    (str, "string"),
)

_HEAD = """# Settings

Each setting has four sources; the first source with a value wins:

1. a flag of `seamark serve`,
2. an environment variable,
3. a key of the TOML file named by `--config` or `SEAMARK_CONFIG`,
4. the default.

Lists are repeated flags, comma-separated variables, or TOML arrays. With an unknown key or an invalid value the server
does not start: it exits with code 2 and names the setting and its source. *Secret* settings never appear in logs. The
server ignores unknown `SEAMARK_…` variables, because orchestrators set such names.

"""


def write_settings_page() -> str:
    """Return the text of the settings page. The settings are in the order of their declarations."""
    parts = [_HEAD]
    for name, field in FIELDS.items():
        metadata = field.metadata
        secret = " *Secret.*" if metadata["secret"] else ""
        parts.append(f"## {name}\n\n{metadata['description']}{secret}\n\n")
        parts.append(f"- flag `{make_flag_name(name)}`, variable `{make_variable_name(name)}`, key `{name}`\n")
        parts.append(f"- default {_write_default(field.default)}\n")
        if bounds := _write_bounds(metadata):
            parts.append(f"- {bounds}\n")
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def write_chart_schema(text: str) -> str:
    """Return the text of the chart's values.schema.json, updated with the server's settings.

    The schema has no secret settings, because the chart reads them from Kubernetes secrets.
    """
    schema = msgspec.json.decode(text)
    schema["properties"]["settings"]["properties"] = {
        name: _make_json_schema(field.default, field.metadata)
        for name, field in FIELDS.items()
        if not field.metadata["secret"] and name not in _SET_BY_CHART
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def _make_json_schema(default: Any, metadata: Any) -> dict[str, Any]:
    """Return the JSON schema of a setting."""
    schema: dict[str, Any] = {"type": next(name for kind, name in _JSON_TYPES if isinstance(default, kind))}
    if schema["type"] == "array":
        schema["items"] = {"type": "string"}
    if metadata["choices"]:
        schema.get("items", schema)["enum"] = list(metadata["choices"])
    limits = {"minimum": metadata["minimum"], "maximum": metadata["maximum"]}
    return schema | {key: limit for key, limit in limits.items() if limit is not None}


def render_openapi_document() -> str:
    """Return the OpenAPI document of Seamark's API, indented."""
    app = web.Application()
    add_routes(app, EXTENSIONS)
    return msgspec.json.format(msgspec.json.encode(build_document(app)), indent=2).decode() + "\n"


def _write_default(default: Any) -> str:
    if default in ("", ()):
        return "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _write_bounds(metadata: Any) -> str:
    if metadata["choices"]:
        return "one of " + ", ".join(f"`{choice}`" for choice in metadata["choices"])
    if metadata["schemes"]:
        return "starts with " + " or ".join(f"`{scheme}://`" for scheme in metadata["schemes"])
    if metadata["minimum"] is not None:
        limit = f", at most `{metadata['maximum']:g}`" if metadata["maximum"] is not None else ""
        return f"at least `{metadata['minimum']:g}`{limit}"
    return ""


def write_reference_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text(write_settings_page())
    (folder / "openapi.json").write_text(render_openapi_document())


if __name__ == "__main__":
    write_reference_pages(REFERENCE)
    CHART_SCHEMA.write_text(write_chart_schema(CHART_SCHEMA.read_text()))
