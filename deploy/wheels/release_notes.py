"""Prints the section of a release in CHANGELOG.md, as the notes of the release on GitHub.

    python deploy/wheels/release_notes.py v0.1.0

It fails if the tag is not `v` and the version of pyproject.toml, or if the changelog has no dated section for it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read_version() -> str:
    """Return the version of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def find_notes(changelog: str, version: str) -> str:
    """Return the text below the heading of a version, without the heading.

    Raises:
        ValueError: The changelog has no heading with the version and a date, or no text below it.
    """
    heading = rf"^## {re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}\n"
    section = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD' with the changes of this version.")
    return section[1].strip() + "\n"


def main(tag: str) -> None:
    version = read_version()
    if tag != f"v{version}":
        raise ValueError(f"The tag is {tag}, but pyproject.toml has the version {version}: the tag must be v{version}.")
    sys.stdout.write(find_notes((ROOT / "CHANGELOG.md").read_text(), version))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
