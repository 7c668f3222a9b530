"""Generates reference pages: `python -m seamark.commands.reference` in the checkout.

docs/reference/settings.md is generated from `Settings`, docs/reference/openapi.json from the routes. A
test compares both with the committed files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.openapi import build_document
from seamark.metaserver.settings.settings import FIELDS, environment_name, flag_name

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"

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


def settings_page() -> str:
    """Return the page on settings, in the order of their declaration."""
    parts = [_HEAD]
    for name, field in FIELDS.items():
        metadata = field.metadata
        secret = " *Secret.*" if metadata["secret"] else ""
        parts.append(f"## {name}\n\n{metadata['description']}{secret}\n\n")
        parts.append(f"- flag `{flag_name(name)}`, variable `{environment_name(name)}`, key `{name}`\n")
        parts.append(f"- default {_write_default(field.default)}\n")
        if bounds := _write_bounds(metadata):
            parts.append(f"- {bounds}\n")
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def openapi_document() -> str:
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


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text(settings_page())
    (folder / "openapi.json").write_text(openapi_document())


if __name__ == "__main__":
    write(REFERENCE)
