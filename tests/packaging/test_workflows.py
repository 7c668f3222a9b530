"""Tests that the GitHub workflows install and publish what the repository declares."""

from __future__ import annotations

import re
import tomllib

import yaml

from tests.packaging.test_imports import REPO

WORKFLOWS = REPO / ".github" / "workflows"


def list_commands(workflow: str) -> list[str]:
    """Return the shell commands of all jobs."""
    jobs = yaml.safe_load((WORKFLOWS / workflow).read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_documentation_is_published_with_the_packages_of_its_extra() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {re.split(r"[><=]", requirement)[0] for requirement in extras["docs"]}
    install = next(command for command in list_commands("docs.yml") if command.startswith("pip install "))
    assert install.startswith("pip install --constraint requirements.lock ")
    assert set(install.split()[4:]) == declared


def test_release_has_the_wheels_of_the_clients_and_of_the_server() -> None:
    assert any("deploy/wheels/split.py" in command for command in list_commands("wheels.yml"))
