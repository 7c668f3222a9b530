"""Tests of the wheels in new environments: each extra with its libraries, beside a distribution named `cache`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from deploy.wheels.split import split
from tests.connector.server_thread import ServerThread

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

USES = {
    "": "import seamark; seamark.SeamarkClient; seamark.upsert; seamark.scan",
    "spark": "from seamark.spark import write, sql, register",
    "trino": "import seamark.commands.trino_proxy",
    "server": "import seamark.metaserver.server",
}
"""Statements that must run with each extra. The empty name stands for no extra."""


def run_command(*command: str | Path, cwd: Path, **env: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout


def build_wheel(source: Path, folder: Path, name: str) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run_command(*pip, "-w", folder, source, cwd=folder)
    (wheel_path,) = folder.glob(f"{name}-*.whl")
    return wheel_path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(REPO, folder, "seamark")


@pytest.fixture(scope="module")
def split_wheels(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheels of the clients and of the server."""
    return split(wheel, tmp_path_factory.mktemp("split"))


def create_environment(folder: Path, *wheels: Path) -> Path:
    """Return the Python of a new environment with these wheels. It falls back to the libraries of our environment."""
    venv.create(folder, with_pip=False)
    python_path = folder / "bin" / "python"
    run_command(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python_path,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        *wheels,
        cwd=folder,
    )
    site_packages = Path(
        run_command(python_path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python_path


@pytest.fixture(scope="module")
def other_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of another distribution whose packages have the names of our folders, and return its path."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "cache"\nversion = "1"\n[tool.setuptools]\n'
        'packages = ["cache", "commands", "connector", "formats", "metaserver"]\n'
    )
    for name in ("cache", "commands", "connector", "formats", "metaserver"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"OWNER = 'somebody else, {name}'\n")
    run_command(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        folder,
        cwd=folder,
    )
    (wheel_path,) = folder.glob("cache-*.whl")
    return wheel_path


def test_wheel_has_one_package_and_no_sources_of_kernels(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"seamark", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    assert any(name.startswith("seamark/formats/index/kernels/_scan.") and name.endswith(".so") for name in names)
    console = REPO / "metaserver" / "api" / "console" / "assets"
    assert {f"seamark/{path.relative_to(REPO)}" for path in console.rglob("*") if path.is_file()} <= set(names)
    assert [name for name in names if name.endswith((".pyx", ".pxd", ".c"))] == []


@pytest.mark.parametrize("extra", USES)
def test_each_extra_works_in_a_separate_environment(extra: str, wheel: Path, other_cache: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python_path = tmp_path / "venv" / "bin" / "python"
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    run_command(
        python_path,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        REPO / "requirements.lock",
        requirement,
        other_cache,
        cwd=tmp_path,
    )
    run_command(python_path, "-c", USES[extra], cwd=tmp_path)
    for name in ("cache", "commands", "connector", "formats", "metaserver"):
        assert (
            run_command(python_path, "-c", f"import {name}; print({name}.OWNER)", cwd=tmp_path)
            == f"somebody else, {name}\n"
        )
    seamark = tmp_path / "venv" / "bin" / "seamark"
    assert "trino-proxy" in run_command(seamark, "--help", cwd=tmp_path)
    for command in ("explain", "buckets", "index", "indexer"):
        assert "TABLE" in run_command(seamark, command, "--help", cwd=tmp_path) or command == "indexer"
    if extra != "server":
        rejected_command = subprocess.run([seamark, "serve"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert rejected_command.returncode == 2
        assert "pip install 'seamark[server]'" in rejected_command.stderr


APPENDS_AND_READS = """
import subprocess, sys, pathlib, json, time
import pyarrow as pa
import seamark
from seamark.connector.client.indexes import IndexClient
home = pathlib.Path("home")
server = subprocess.Popen([pathlib.Path(sys.executable).parent / "seamark", "serve", "--home", home, "--port", "0"])
try:
    for _ in range(600):
        if (home / "server.json").exists():
            break
        assert server.poll() is None
        time.sleep(0.1)
    url = json.loads((home / "server.json").read_text())["url"]
    import urllib.request
    def post(path, body):
        data = json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(url + path, data, {"Content-Type": "application/json"})).read()
    post("/v1/namespaces", {"namespace": ["db"]})
    field = {"id": 1, "name": "id", "type": "long", "required": False}
    post("/v1/namespaces/db/tables", {"name": "t", "schema": {"type": "struct", "fields": [field]}})
    client = IndexClient(url)
    for number in range(3):
        seamark.upsert(client, "db.t", pa.table({"id": range(number * 10, number * 10 + 15)}), keys=["id"])
    assert sorted(seamark.scan(client, "db.t", where="id >= 12").to_arrow()["id"].to_pylist()) == list(range(12, 35))
finally:
    server.terminate()
    server.wait(30)
"""


PLANS_AND_READS = """
import sys
import pyarrow as pa
import seamark
from seamark.connector.client.catalog import create_table
from seamark.connector.client.indexes import IndexClient
client = IndexClient(sys.argv[1])
field = {"id": 1, "name": "id", "type": "long", "required": False}
create_table(client, "db.t", {"type": "struct", "fields": [field]}, properties={})
for number in range(3):
    seamark.append(client, "db.t", pa.table({"id": range(number * 10, number * 10 + 10)}))
assert client.explain("db.t", "id >= 25").files == 1
assert seamark.scan(client, "db.t", where="id >= 25").to_arrow()["id"].to_pylist() == list(range(25, 30))
try:
    import seamark.metaserver
except ModuleNotFoundError:
    print(seamark.__file__)
"""


def test_client_wheel_writes_plans_and_reads_without_the_server_wheel(
    split_wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    client_wheel, _ = split_wheels
    python_path = create_environment(tmp_path / "venv", client_wheel)
    assert not (python_path.parent / "seamark").exists()
    server = ServerThread(tmp_path / "home")
    server.start()
    try:
        imported_path = run_command(python_path, "-c", PLANS_AND_READS, server.url, cwd=tmp_path).strip()
    finally:
        server.stop()
    assert Path(imported_path).is_relative_to(tmp_path / "venv")


def test_server_runs_from_the_server_wheel_with_the_client_wheel(
    split_wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    python_path = create_environment(tmp_path / "venv", *split_wheels)
    run_command(python_path, "-c", APPENDS_AND_READS, cwd=tmp_path)


def find_other_python(version: str) -> str | None:
    python_path = shutil.which(f"python{version}")
    if (
        python_path is not None
        and subprocess.run([python_path, "-c", ""], capture_output=True, check=False).returncode == 0
    ):
        return python_path
    pyenv_pythons = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv_pythons[-1]) if pyenv_pythons else None


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_wheel_of_another_python_serves_writes_and_plans(version: str, tmp_path: Path) -> None:
    python_path = find_other_python(version)
    if python_path is None:
        pytest.skip(f"no Python {version} here")
    run_command(python_path, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    venv_python = tmp_path / "venv" / "bin" / "python"
    source = tmp_path / "source"
    run_command("git", "clone", "-q", REPO, source, cwd=tmp_path)
    run_command(venv_python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("seamark-*.whl")
    assert f"cp{version.replace('.', '')}-" in wheel.name
    run_command(
        venv_python, "-m", "pip", "install", "-q", "-c", REPO / "requirements.lock", f"{wheel}[server]", cwd=tmp_path
    )
    run_command(venv_python, "-c", APPENDS_AND_READS, cwd=tmp_path)
