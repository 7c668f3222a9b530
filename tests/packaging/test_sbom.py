"""Tests of the list of packages from which `make sbom` writes the bill of materials of the server."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.packaging.test_lock import REPO, read_pins

PROGRAM: dict[str, Any] = runpy.run_path(str(REPO / "deploy" / "sbom" / "server_requirements.py"))


def test_bill_of_materials_has_the_packages_that_the_resolver_installs_for_the_server() -> None:
    packages = PROGRAM["list_server_packages"]()
    # The demo needs PyIceberg in addition to the server, and has no tracing.
    resolved_names = read_pins("requirements.demo.lock").keys()
    assert {"aiohttp", "confluent-kafka", "nats-py", "pyarrow", "click", "multidict"} <= packages & resolved_names
    assert {name.partition("-")[0] for name in packages - resolved_names} <= {"opentelemetry", "protobuf", "googleapis"}
    assert not packages & {"pytest", "pyspark", "mypy", "pyiceberg"}


def test_each_package_of_the_bill_has_its_version_and_hashes() -> None:
    packages = PROGRAM["list_server_packages"]()
    text = PROGRAM["select_locked_requirements"]((REPO / "requirements.hashed.lock").read_text(), packages)
    assert text.count("==") == len(packages)
    for entry in text.replace("\\\n", "").splitlines():
        assert "--hash=sha256:" in entry


def test_package_that_is_missing_in_the_lock_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="lacks absent; run make hashes"):
        PROGRAM["select_locked_requirements"]("", {"absent"})
