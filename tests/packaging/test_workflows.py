"""Tests that the GitHub workflows install and publish what the repository declares."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest
import yaml

from tests.packaging.test_imports import REPO

WORKFLOWS = REPO / ".github" / "workflows"
RELEASE_NOTES = REPO / "deploy" / "wheels" / "release_notes.py"


def list_commands(workflow: str) -> list[str]:
    """Return the shell commands of all jobs."""
    jobs = yaml.safe_load((WORKFLOWS / workflow).read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_documentation_is_published_with_the_packages_of_its_extra() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared_names = {re.split(r"[><=]", requirement)[0] for requirement in extras["docs"]}
    install_command = next(command for command in list_commands("docs.yml") if command.startswith("pip install "))
    assert install_command.startswith("pip install --constraint requirements.lock ")
    _pip, _subcommand, _option, _lock, *installed_names = install_command.split()
    assert set(installed_names) == declared_names


def test_release_has_the_wheels_of_the_clients_and_of_the_server() -> None:
    assert any("deploy/wheels/split.py" in command for command in list_commands("wheels.yml"))


def load_release_notes() -> ModuleType:
    """Return the module of the script that prints the notes of a release."""
    spec = importlib.util.spec_from_file_location("release_notes", RELEASE_NOTES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tag_of_the_version_has_the_notes_of_the_changelog() -> None:
    assert any("deploy/wheels/release_notes.py" in command for command in list_commands("wheels.yml"))
    tag = f"v{load_release_notes().read_version()}"
    result = subprocess.run([sys.executable, RELEASE_NOTES, tag], capture_output=True, text=True, check=True)
    assert result.stdout.count("\n- ") > 10
    assert not re.search(r"^## ", result.stdout, re.MULTILINE)


def test_tag_of_another_version_fails_before_the_release() -> None:
    result = subprocess.run([sys.executable, RELEASE_NOTES, "v99"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "The tag is v99" in result.stderr


@pytest.mark.parametrize("changelog", ["## Unreleased\n- x\n", "## 1.0 - 2026-11-28\n\n## 0.9 - 2026-11-27\n- x\n"])
def test_version_without_notes_fails_before_the_release(changelog: str) -> None:
    with pytest.raises(ValueError, match=r"has no section '## 1\.0 - YYYY-MM-DD'"):
        load_release_notes().find_notes(changelog, "1.0")
