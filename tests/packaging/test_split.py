"""Tests that the project's wheel is split into two without a common file: the clients, and the server that
requires them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from deploy.wheels.split import SERVER_PACKAGES, is_of_server, split
from tests.packaging.test_imports import REPO

SUMMARY = "A summary that no program may fold, because it is longer than a line of mail may be, by far"
METADATA = f"""Metadata-Version: 2.4
Name: seamark
Version: 1.2
Requires-Dist: numpy>=2
Summary: {SUMMARY}
Provides-Extra: server
Requires-Dist: aiohttp>=3; extra == "server"
Provides-Extra: spark
Requires-Dist: pyspark>=4; extra == "spark"

The description → ä.
"""
FILES = {
    "seamark/__init__.py": "",
    "seamark/py.typed": "",
    "seamark/formats/index/kernels/_scan.so": "a kernel",
    "seamark/connector/metaserver.py": "of the client",
    "seamark/metaserver/server.py": "",
    "seamark/commands/main.py": "",
    "seamark-1.2.dist-info/METADATA": METADATA,
    "seamark-1.2.dist-info/WHEEL": "Wheel-Version: 1.0",
    "seamark-1.2.dist-info/entry_points.txt": "[console_scripts]",
    "seamark-1.2.dist-info/licenses/LICENSE": "a licence",
    "seamark-1.2.dist-info/RECORD": "",
}


@pytest.fixture
def wheels(tmp_path: Path) -> tuple[Path, Path]:
    """Return the wheel of the clients and the wheel of the server, which are split from a wheel with FILES."""
    wheel_path = tmp_path / "seamark-1.2-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel_path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    (tmp_path / "dist").mkdir()
    return split(wheel_path, tmp_path / "dist")


def list_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_each_file_is_in_one_of_the_wheels(wheels: tuple[Path, Path]) -> None:
    client_names, server_names = (list_names(wheel) for wheel in wheels)
    assert not client_names & server_names
    assert {name for name in client_names | server_names if ".dist-info/" not in name} == {
        name for name in FILES if ".dist-info/" not in name
    }
    assert {name for name in server_names if ".dist-info/" not in name} == {
        "seamark/metaserver/server.py",
        "seamark/commands/main.py",
    }
    assert [wheel.name for wheel in wheels] == [
        "seamark_client-1.2-cp311-cp311-manylinux_2_34_x86_64.whl",
        "seamark-1.2-cp311-cp311-manylinux_2_34_x86_64.whl",
    ]


def test_server_wheel_requires_the_client_and_has_the_commands(wheels: tuple[Path, Path]) -> None:
    client_metadata, server_metadata = (
        Parser().parsestr(zipfile.ZipFile(wheel).read(f"{stem}-1.2.dist-info/METADATA").decode())
        for wheel, stem in zip(wheels, ("seamark_client", "seamark"), strict=True)
    )
    assert (client_metadata["Name"], server_metadata["Name"]) == ("seamark-client", "seamark")
    assert client_metadata.get_all("Requires-Dist") == ["numpy>=2", 'pyspark>=4; extra == "spark"']
    assert client_metadata.get_all("Provides-Extra") == ["spark"]
    assert server_metadata.get_all("Requires-Dist") == [
        "seamark-client==1.2",
        'aiohttp>=3; extra == "server"',
        'pyspark>=4; extra == "spark"',
    ]
    assert client_metadata["Summary"] == server_metadata["Summary"] == SUMMARY
    assert client_metadata.get_payload() == server_metadata.get_payload() == "The description → ä.\n"
    client_wheel, server_wheel = wheels
    assert "seamark_client-1.2.dist-info/entry_points.txt" not in list_names(client_wheel)
    assert "seamark-1.2.dist-info/entry_points.txt" in list_names(server_wheel)


def test_records_have_the_hash_of_each_file(wheels: tuple[Path, Path]) -> None:
    for wheel, stem in zip(wheels, ("seamark_client", "seamark"), strict=True):
        archive = zipfile.ZipFile(wheel)
        rows = list(csv.reader(archive.read(f"{stem}-1.2.dist-info/RECORD").decode().splitlines()))
        assert {name for name, _, _ in rows} == list_names(wheel)
        for name, digest, size in rows[:-1]:  # The last row is the RECORD itself, which has no hash.
            data = archive.read(name)
            assert int(size) == len(data)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def test_packages_of_the_server_wheel_equal_the_server_packages_of_the_project() -> None:
    """A new package above the connector must be added to one of the wheels explicitly."""
    packages = {path.name for path in (REPO / "seamark").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert packages - set(SERVER_PACKAGES) == {"cache", "connector", "formats"}
    assert not is_of_server("seamark/connector/metaserver.py")
