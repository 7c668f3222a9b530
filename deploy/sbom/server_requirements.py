"""Prints the locked requirements of the server, for `make sbom`.

requirements.hashed.lock also has the packages of tests and benchmarks. This program keeps the packages that
`pip install seamark[server]` installs: it follows the dependencies in the metadata of the installed packages.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
_EXTRAS = ("server", "otel")
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(?:.+\\\n)+.+$", re.MULTILINE)
"""An entry of the lock: a package and its version, and a line for each hash."""


def list_server_packages() -> set[str]:
    """Return the names of the packages of the server, with their dependencies on this platform."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in _EXTRAS for text in project["optional-dependencies"][extra])]
    waiting = [Requirement(text) for text in texts]
    packages: dict[str, set[str]] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        new_extras = extras - packages.get(name, set())
        if not new_extras:
            continue
        packages[name] = packages.get(name, set()) | extras
        for text in requires(name) or ():
            dependency = Requirement(text)
            marker = dependency.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new_extras):
                waiting.append(dependency)
    return set(packages)


def select_locked_requirements(lock: str, packages: set[str]) -> str:
    """Return the entries of a lock with hashes that belong to `packages`.

    Raises:
        SystemExit: The lock lacks a package.
    """
    entries = {canonicalize_name(entry[1]): entry[0] for entry in _ENTRY.finditer(lock)}
    if missing := sorted(packages - entries.keys()):
        raise SystemExit(f"requirements.hashed.lock lacks {', '.join(missing)}; run make hashes")
    return "".join(f"{entries[name]}\n" for name in sorted(packages))


if __name__ == "__main__":
    sys.stdout.write(
        select_locked_requirements((REPO / "requirements.hashed.lock").read_text(), list_server_packages())
    )
