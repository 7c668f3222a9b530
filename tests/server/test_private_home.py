"""Tests that the home is private to the server's account. Other accounts of the host can read nothing in it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.runtime.home import prepare_home
from seamark.metaserver.settings.settings import Settings
from tests.seeds import mark_fast
from tests.services.command import run_seamark
from tests.services.seamark import Seamark

Start = Callable[..., Seamark]
SCHEMA = {"type": "struct", "fields": [{"id": 1, "name": "id", "type": "long", "required": True}]}


def list_accessible_files(folder: Path) -> list[str]:
    """Return the path and mode of each file or folder on which an account except the owner has a permission."""
    paths = (folder, *folder.rglob("*"))
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths if not path.is_symlink()}
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & 0o077]


@pytest.fixture
def permissive_umask() -> Iterator[None]:
    old_umask = os.umask(0)
    yield
    os.umask(old_umask)


def make_table(server: Seamark) -> str:
    """Create a table, and return the path of its metadata file."""
    requests.post(f"{server.base_url}/v1/namespaces", json={"namespace": ["db"]}, timeout=30).raise_for_status()
    answer = requests.post(
        f"{server.base_url}/v1/namespaces/db/tables", json={"name": "t", "schema": SCHEMA}, timeout=30
    )
    answer.raise_for_status()
    return str(answer.json()["metadata-location"]).removeprefix("file://")


@pytest.mark.parametrize("workers", mark_fast(["2", "1"], fast_count=1))
def test_new_home_is_private_under_the_most_permissive_umask(
    permissive_umask: None, start_seamark: Start, workers: str
) -> None:
    server = start_seamark(flags=("--workers", workers), env={"SEAMARK_ENCRYPTION_KEY": ""})
    make_table(server)
    assert (server.home / "seamark.db-wal").exists()
    assert (server.home / "encryption.key").exists()
    # The test created the folder and opened the log with a permissive umask. The start has corrected both modes.
    assert list_accessible_files(server.home) == []


def test_home_that_other_accounts_can_read_is_made_private_at_the_next_start(start_seamark: Start) -> None:
    server = start_seamark()
    make_table(server)
    server.terminate()
    (server.home / "cache" / "blocks").mkdir(parents=True, exist_ok=True)
    (server.home / "cache" / "blocks" / "old").write_bytes(b"values of rows")
    for path in (server.home, *server.home.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    log_before = server.log.stat().st_size
    server.restart()
    assert [file for file in list_accessible_files(server.home) if "/warehouse/" not in file] == []
    log_text = server.log.read_bytes()[log_before:].decode()
    assert "files were open to other accounts" in log_text
    assert str(server.home / "seamark.db") in log_text


def test_token_commands_make_the_database_private(permissive_umask: None, tmp_path: Path) -> None:
    home = tmp_path / "home"
    seamark = run_seamark("token", "create", "ann", "--role", "admin", "--home", str(home))
    assert seamark.returncode == 0, seamark.stderr
    assert list_accessible_files(home) == []
    (home / "seamark.db").chmod(0o644)
    second_token = run_seamark("token", "create", "bob", "--home", str(home))
    assert second_token.stdout.strip().startswith("smk_")
    assert "seamark.db could be read by other accounts" in second_token.stderr
    assert list_accessible_files(home) == []


def test_database_outside_the_home_is_private(permissive_umask: None, tmp_path: Path) -> None:
    database = tmp_path / "elsewhere" / "catalog.db"
    database.parent.mkdir()
    location_options = ("--home", str(tmp_path / "home"), "--database", f"sqlite:///{database}")
    list_command = ("token", "list", *location_options)
    assert run_seamark("token", "create", "ann", *location_options).returncode == 0
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    database.chmod(0o664)
    assert run_seamark(*list_command).returncode == 0
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("umask", "mode"), [(None, 0o640), ("022", 0o644)])
def test_tables_outside_the_home_stay_readable_for_engines_of_other_accounts(
    start_seamark: Start, tmp_path: Path, umask: str | None, mode: int
) -> None:
    umask_before = os.umask(0o027)
    try:
        flags = () if umask is None else ("--warehouse-umask", umask)
        server = start_seamark(warehouse=f"file://{tmp_path / 'lake'}", flags=flags)
    finally:
        os.umask(umask_before)
    metadata = Path(make_table(server))
    assert stat.S_IMODE(metadata.stat().st_mode) == mode
    for folder in (metadata.parent, tmp_path / "lake"):
        # A folder is also executable for the accounts that the umask allows.
        assert stat.S_IMODE(folder.stat().st_mode) == mode | (0o111 & ~int(umask or "027", 8))


def build_settings(home: Path) -> Settings:
    return Settings(home=home)


def test_home_that_is_a_symbolic_link_is_rejected_with_the_folder_to_use(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=f"symbolic link.*--home {tmp_path / 'real'}"):
        prepare_home(build_settings(tmp_path / "home"))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["seamark.db", "seamark.db-wal", "server.json", "server.lock", "encryption.key"])
def test_symbolic_link_in_place_of_a_server_file_is_rejected(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "target").write_bytes(b"")
    (home / name).symlink_to(tmp_path / "target")
    refusal = run_seamark("serve", "--home", str(home), "--port", "0")
    assert refusal.returncode == 2
    assert f"{home / name}" in refusal.stderr
    assert "symbolic link" in refusal.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another account")
@pytest.mark.parametrize("name", ["", "seamark.db"])
def test_home_or_database_of_another_account_is_rejected(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "seamark.db").write_bytes(b"")
    os.chown(home / name, 12345, -1)
    refusal = run_seamark("serve", "--home", str(home), "--port", "0")
    assert refusal.returncode == 2
    assert "belongs to uid 12345" in refusal.stderr
    assert "chown" in refusal.stderr


def test_shared_folder_is_rejected_as_home(tmp_path: Path) -> None:
    shared_folder = tmp_path / "tmp"
    shared_folder.mkdir()
    shared_folder.chmod(0o1777)
    with pytest.raises(ConfigError, match="shared with other programs"):
        prepare_home(build_settings(shared_folder))
    assert stat.S_IMODE(shared_folder.stat().st_mode) == 0o1777


def test_foreign_files_in_adjacent_folders_keep_their_modes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = home / "tools" / "backup.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    prepare_home(build_settings(home))
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert stat.S_IMODE(script.parent.stat().st_mode) == 0o700


def test_world_readable_configuration_file_with_secrets_causes_a_warning(tmp_path: Path) -> None:
    config = tmp_path / "seamark.toml"
    config.write_text('s3_access_key_id = "a"\ns3_secret_access_key = "very-secret"\n')
    config.chmod(0o644)
    grant_command = ("grant", "add", "oidc:ann", "reader", "--home", str(tmp_path / "home"), "--config", str(config))
    result = run_seamark(*grant_command)
    assert result.returncode == 0
    assert f"every account can read {config}" in result.stderr
    assert "s3_secret_access_key" in result.stderr
    assert "very-secret" not in result.stderr
    config.chmod(0o600)
    assert "every account" not in run_seamark(*grant_command).stderr


# Tests that only one server may run on a home at a time.


@pytest.mark.parametrize("workers", mark_fast(["2", "1"], 1))
def test_second_server_on_a_home_is_rejected_and_does_not_change_the_file_of_the_first(
    start_seamark: Start, workers: str
) -> None:
    first_server = start_seamark(flags=("--workers", workers))
    state_before = (first_server.home / "server.json").read_bytes()
    refusal = run_seamark("serve", "--home", str(first_server.home), "--port", "0")
    assert refusal.returncode == 2
    assert f"process {json.loads(state_before)['pid']}" in refusal.stderr
    assert first_server.base_url in refusal.stderr
    assert (first_server.home / "server.json").read_bytes() == state_before
    assert requests.get(f"{first_server.base_url}/readyz", timeout=30).ok


def test_killed_server_leaves_no_lock(start_seamark: Start) -> None:
    server = start_seamark()
    server.kill9()
    assert (server.home / "server.json").exists()
    server.start()
    assert json.loads((server.home / "server.json").read_bytes())["pid"] == server.pid


def test_server_deletes_its_server_json_when_it_ends(start_seamark: Start) -> None:
    server = start_seamark()
    assert server.terminate() == 0
    assert not (server.home / "server.json").exists()
