"""Tests of `make up`, which starts the services of compose without containers."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from tests.services.process import REPO, ManagedProcess, is_port_open
from tests.services.s3 import CONFIG, read_env_file

ARGUMENTS = [sys.executable, "-m", "tests.support.up", "--port", "0"]


@pytest.mark.slow
def test_servers_of_the_up_command_run_until_an_interrupt(tmp_path: Path, postgres_url: str) -> None:
    """The test does not use the database of `postgres_url`. The fixture only marks it as a test that needs services."""
    process = ManagedProcess(ARGUMENTS, log=tmp_path / "up.log", cwd=REPO)
    process.start(lambda: "Ready." in process.log.read_text(), timeout_s=120)
    addresses = dict(re.findall(r"^(\w+) +(\S+?),?(?: .*)?$", process.log.read_text(), re.MULTILINE))
    s3_settings = read_env_file(CONFIG)
    catalog = load_catalog(
        "up",
        type="rest",
        uri=addresses["Seamark"],
        **{
            "s3.endpoint": addresses["S3"],
            "s3.access-key-id": s3_settings["ROOT_ACCESS_KEY"],
            "s3.secret-access-key": s3_settings["ROOT_SECRET_KEY"],
        },
    )
    catalog.create_namespace("shop")
    assert catalog.load_namespace_properties("shop")["location"] == "s3://lake/warehouse/shop"
    process.send(signal.SIGINT)
    assert process.wait(60) == 0
    ports = [int(address.rpartition(":")[2].partition("/")[0]) for address in (addresses["S3"], addresses["Seamark"])]
    assert not any(is_port_open(port) for port in ports)
